"""Import and export through a state map that does more than rename: bit for bit, in little memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import exchange_family as family
from forge_train import ConfigError
from forge_train_kit.hf.folder import Folder
from forge_train_kit.weights import fill
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model
from forge_train_tools.planning.ledger import Ledger

pytestmark = [pytest.mark.unit]
PLUGINS = ("exchange_family:OutsideFamily", "toys:ToyData")


def published(layers: int = 2) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    qkv = 4 * family.KV_HEADS * family.HEAD_DIM
    found = {"wte": random(family.VOCABULARY, family.DIM), "lm_head": random(family.VOCABULARY, family.DIM)}
    for i in range(layers):
        found |= {f"h.{i}.ln.weight": random(family.DIM), f"h.{i}.qkv.weight": random(qkv, family.DIM)}
        found |= {f"h.{i}.mlp.{e}.up": random(family.DIM, family.HIDDEN) for e in range(family.EXPERTS)}
    return found


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    write(tmp_path / "hf", published())
    return tmp_path / "hf"


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["OutsideForCausalLM"], "n_layer": 2}))
    save_file(tensors, folder / "model.safetensors")


def test_a_family_with_fused_and_stacked_weights_comes_and_goes_bit_for_bit(hf: Path, tmp_path: Path) -> None:
    import_checkpoint(hf, tmp_path / "start", plugins=PLUGINS)
    weights, theirs = open_model(tmp_path / "start", text=False).model.state_dict(), published()
    experts = torch.stack([theirs[f"h.1.mlp.{e}.up"].t() for e in range(family.EXPERTS)])
    assert torch.equal(weights["layers.1.experts.up"], experts)
    q, k, v = theirs["h.0.qkv.weight"].unflatten(0, (family.KV_HEADS, -1)).split([4, 2, 2], 1)
    for name, part in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(weights[f"layers.0.{name}.weight"], part.flatten(0, 1))

    files = export_checkpoint(tmp_path / "start", tmp_path / "back", shard_bytes=1000).files
    assert len(files) > 2
    back = {name: one for file in files for name, one in load_file(tmp_path / "back" / file).items()}
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)
    import_checkpoint(tmp_path / "back", tmp_path / "again", plugins=PLUGINS)
    again = open_model(tmp_path / "again", text=False).model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())


def test_an_import_reads_each_byte_once(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, bytes_read = Folder.read, []

    def counted(self: Folder, *arguments: Any) -> Tensor:
        bytes_read.append((part := read(self, *arguments)).nbytes)
        return part

    monkeypatch.setattr(Folder, "read", counted)
    import_checkpoint(hf, tmp_path / "start", plugins=PLUGINS)
    assert sum(bytes_read) == sum(tensor.nbytes for tensor in published().values())


SPOILED: dict[str, tuple[dict[str, Tensor | None], tuple[str, ...]]] = {
    "an expert is missing": ({"h.0.mlp.2.up": None}, ("h.0.mlp.2.up: missing (8 × 12)",)),
    "the last expert is missing": ({"h.1.mlp.4.up": None}, ("h.1.mlp.4.up: missing (8 × 12)",)),
    "one expert more": ({"h.1.mlp.5.up": torch.zeros(8, 12)}, ("h.1.mlp.5.up: no parameter takes it",)),
    "a layer more": ({"h.2.ln.weight": torch.zeros(8)}, ("h.2.ln.weight: no parameter takes it",)),
    "an expert of another shape": (
        {"h.0.mlp.0.up": torch.zeros(8, 11)},
        ("h.0.mlp.0.up: 8 × 11 in model.safetensors, 8 × 12 in config.json",),
    ),
    "a fused tensor of another shape": (
        {"h.0.qkv.weight": torch.zeros(15, 8)},
        ("h.0.qkv.weight: 15 × 8 in model.safetensors, 16 × 8 in config.json",),
    ),
    "a tensor of integers": ({"wte": torch.zeros(23, 8, dtype=torch.int64)}, ("wte: stored as I64; expected one of",)),
    "a tensor of bytes": ({"wte": torch.zeros(23, 8, dtype=torch.uint8)}, ("wte: stored as U8; expected one of",)),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_what_differs_is_told_by_the_names_in_the_files(
    mistake: str, hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, told = SPOILED[mistake]
    write(hf, {name: one for name, one in (published() | changes).items() if one is not None})
    monkeypatch.setattr(Folder, "read", None)  # nothing is read
    with pytest.raises(ConfigError) as caught:
        import_checkpoint(hf, tmp_path / "start", plugins=PLUGINS)
    for text in told:
        assert text in str(caught.value)
    assert not (tmp_path / "start").exists()


def test_filling_weights_holds_at_most_twice_the_largest_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("DIM", 64), ("HIDDEN", 96), ("EXPERTS", 16), ("KV_HEADS", 4), ("HEAD_DIM", 8)):
        monkeypatch.setattr(family, name, value)
    write(tmp_path / "hf", published())
    folder = Folder.open(tmp_path / "hf")
    plan = family.state_map().plan(folder.described())
    weights = {name: torch.empty(view.shape) for name, view in plan.targets.items()}
    largest = max(sum(plan.targets[name].bytes for name in group.targets) for group in plan.groups)
    assert largest == 16 * 96 * 64 * 4

    class Copying(Folder):
        """A file's memory is not torch's: what is read is booked when it is copied."""

        def read(self, *arguments: Any) -> Tensor:
            return super().read(*arguments).clone()

    copying = Copying(folder.path, folder.config, folder.tensors)
    with Ledger() as ledger:
        destination = ledger.numbers(weights.values())
        fill(weights, plan, copying)
    assert 0 < ledger.peak(but=destination) <= 2 * largest
    with Ledger() as ledger:
        for group in plan.groups:
            for name in group.targets:
                plan.read(name, copying.read)
    assert largest < ledger.peak() <= 2 * largest
    assert torch.equal(weights["layers.0.experts.up"][3], published()["h.0.mlp.3.up"].t())
