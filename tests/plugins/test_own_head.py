"""A head of an outside plugin in Hugging Face layout: written if it is what such a file describes, else refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forge_train import ConfigError, Job, Plugin, hookimpl
from forge_train_kit.heads import HeadSpec
from forge_train_kit.model import Linear
from forge_train_plugins.models._lm_head import LMHead
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.testing import RunForge

pytestmark = pytest.mark.unit


class Tripled(Plugin):
    """Logits times three, from a head of the usual shape."""

    api = (1, 0)

    @hookimpl
    def head(self, spec: HeadSpec) -> torch.nn.Module:
        class Head(Linear):
            divisor, soft_cap = spec.divisor, spec.soft_cap

            def forward(self, hidden: torch.Tensor) -> torch.Tensor:
                return 3 * super().forward(hidden)

        return Head(spec.dim, spec.vocabulary, std=spec.std)


class Renamed(Plugin):
    """The usual head, by another plugin."""

    api = (1, 0)

    @hookimpl
    def head(self, spec: HeadSpec, job: Job) -> torch.nn.Module:
        return LMHead(spec)


@pytest.mark.slow
def test_a_head_that_computes_something_else_is_not_written(run_forge: RunForge, tmp_path: Path) -> None:
    """A file in Hugging Face layout describes one product, so a reader would compute other logits."""
    capped = {"decoder.logit_soft_cap": 5.0, "decoder.logit_divisor": 2.0, "decoder.architecture": ""}
    with pytest.raises(ConfigError, match="head of plugin 'tripled' computes other logits than the one product"):
        export_checkpoint(run_forge(["test_own_head:Tripled"], steps=1).run, tmp_path / "tripled")
    assert not (tmp_path / "tripled").exists()
    export_checkpoint(run_forge(["test_own_head:Renamed"], steps=1).run, tmp_path / "renamed")
    with pytest.raises(ConfigError, match="tripled"):
        export_checkpoint(run_forge(["test_own_head:Tripled"], capped, steps=1).run, tmp_path / "capped")
