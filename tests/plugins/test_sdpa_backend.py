"""`sdpa.backend`: torch takes that implementation, or the run is refused in one sentence."""

from __future__ import annotations

import pytest
import torch

from forge_train import ConfigError
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._sdpa import Kernel, missing
from forge_train_plugins.attention.sdpa import SDPA
from forge_train_tools.testing import RunForge

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("backend", "operator"), [("flash", "_flash_attention_for_cpu"), ("math", "_attention_math"), ("auto", "_flash")]
)
def test_torch_takes_the_backend(backend: str, operator: str) -> None:
    query = torch.randn(2, 12, 4, 8)
    options = AttentionOptions(document_ids=(torch.arange(12) >= 5).long().expand(2, -1))
    with torch.profiler.profile() as recorded:
        found = Kernel(backend)(query, query, query, options)
    torch.testing.assert_close(found, Eager()(query, query, query, options))
    assert any(operator in event.name for event in recorded.events())


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_what_runs_on_cuda_only_is_refused_at_start_up(backend: str, run_forge: RunForge) -> None:
    with pytest.raises(ConfigError) as error:
        run_forge([SDPA], {"sdpa.backend": backend})
    assert str(error.value) == (
        f"sdpa.backend = {backend!r}: it runs on CUDA only, and the run is on cpu; use 'auto', 'flash' or 'math'."
    )


def test_a_run_with_a_backend_ends_where_the_default_does(run_forge: RunForge) -> None:
    default, math = run_forge(), run_forge([SDPA], {"sdpa.backend": "math"})
    assert math.losses == pytest.approx(default.losses, rel=1e-5)
    assert math.finished.outcome == "done"


@pytest.mark.parametrize(
    ("backend", "precision", "masked", "says"),
    [
        ("flash", "fp32", False, "computes in bf16 or fp16 only, and train.precision is 'fp32'"),
        ("flash", "bf16", True, "takes no mask, but the run needs one for documents or windows; use the kernel"),
        ("cudnn", "bf16", True, "this torch has no cuDNN"),
        ("flash", "bf16", False, ""),
        ("efficient", "fp32", True, ""),
        ("math", "fp32", True, ""),
    ],
)
def test_what_is_missing_on_cuda(
    backend: str, precision: str, masked: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    found = missing(backend, torch.device("cuda"), precision, masked=masked)
    assert says in found
    assert bool(says) == bool(found)


def test_what_only_a_call_shows_is_one_sentence_too() -> None:
    query = torch.randn(1, 8, 2, 8)
    with pytest.raises(ConfigError) as error:
        Kernel("efficient")(query, query, query, AttentionOptions(window=3))
    assert str(error.value) == (
        "sdpa.backend = 'efficient': torch can't compute torch.float32 on cpu, heads of 8 features, a mask with it."
    )
