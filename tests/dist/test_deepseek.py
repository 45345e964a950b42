"""A tiny DeepSeek-V3 on real text, on four and eight ranks: every part of the model and axis it was published with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepseek_cases import trained
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import Pool

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.dist]

PLUGINS = ("mla", "moe", "mtp", "tp", "ep", "pp", "fsdp2", "deepseek_fp8")
MODEL: dict[str, Any] = {
    "decoder": {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "head_dim": 64, "hidden": 256, "tied": False},
    "mla": {"kv_rank": 16, "q_rank": 24, "rope_dim": 64, "v_dim": 64},
    "moe": {
        "experts": 8,
        "top_k": 3,
        "hidden": 16,
        "shared": 1,
        "dense_first": 1,
        "router": "sigmoid",
        "groups": 4,
        "top_groups": 2,
        "scaling": 2.5,
        "bias_speed": 0.001,
        "balance": 0.0001,
    },
}
RUN: dict[str, Any] = {
    "parallel": {"pp": 2, "ep": 2, "tp": 2},
    "train": {"global_batch": 8, "micro_batch": 2, "evaluate_batches": 1},
    "adamw": {"lr": 1e-2},
    "cosine": {"warmup": 2},
    "deepseek_fp8": {"scales": "e8m0"},
    "alltoall": {"payload": "fp8"},
    "checkpoint": {"every": 3},
}
STEPS = 6


@pytest.mark.extended
@pytest.mark.parametrize("world", [4, 8])
def test_a_deepseek_v3_trains_resumes_and_is_what_transformers_reads(ranks: Pool, tmp_path: Path, world: int) -> None:
    """On four ranks, experts are spread over the ranks of tp."""
    text = tmp_path / "text"
    text.mkdir()
    for page in sorted((Path(__file__).parents[2] / "docs" / "how-to").glob("*.md")):
        (text / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    config = {**MODEL, **RUN, "text": {"path": str(text), "cache": str(tmp_path / "cache")}}

    def run(name: str, stop_at: int | None = None) -> dict[str, Any]:
        folder = str(tmp_path / "runs")
        replies = ranks.run(
            trained, world, folder=folder, plugins=PLUGINS, config=config, steps=STEPS, name=name, stop_at=stop_at
        )
        return replies[0]  # type: ignore[no-any-return]

    whole = run("whole")
    losses = [line["loss"] for line in whole["numbers"]]
    assert losses[-1] < losses[0] - 0.5
    run("cut", stop_at=3)
    assert run("cut")["numbers"][-2:] == whole["numbers"][-2:]

    export_checkpoint(Path(whole["run"]), tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(theirs).__name__ == "DeepseekV3ForCausalLM"
    biases = [one for name, one in theirs.named_buffers() if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3
    assert all(one.any() for one in biases)
    ids = torch.randint(0, 250, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = theirs(ids).logits
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert (logits(tmp_path / "again", ids) - expected).abs().max() <= 1e-5
    rounded = logits(Path(whole["run"]), ids)  # as it was trained, in fp8
    # of most positions: rounding makes a few choose other experts
    assert 1e-5 < ((rounded - expected).norm(dim=-1) / expected.norm(dim=-1)).median() < 0.1


@torch.no_grad()
def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    (part,) = open_model(path, text=False).model.parts
    found: torch.Tensor = part.get_submodule("head")(part(ids))
    return found
