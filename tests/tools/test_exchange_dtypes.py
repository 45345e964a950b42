"""Dtypes of imports and exports, and tensors that are allowed to be missing, misshapen or too many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import warm
from forge_train import ConfigError
from forge_train.checkpoint.checkpoint import shapes
from forge_train.compose.initialise import declared_init, fill
from forge_train_cli.app import run as forge
from forge_train_tools.offline.hf_files import TensorFiles
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.huggingface import export_checkpoint
from forge_train_tools.offline.opening import open_model

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=None,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change(folder: Path, **changes: Tensor | None) -> None:
    tensors = {**stored(folder), **{name.replace("__", "."): one for name, one in changes.items()}}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")


def dtypes(path: Path) -> set[torch.dtype]:
    return {dtype for _, dtype in shapes(path).values()}


def test_kept_both_ways_or_as_asked(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_checkpoint(hf, tmp_path / "kept")
    assert dtypes(tmp_path / "kept") == {torch.bfloat16}
    weights = open_model(tmp_path / "kept", text=False).model.state_dict()
    assert {one.dtype for one in weights.values()} == {torch.float32}, "a model's own"
    assert torch.equal(weights["embedding.weight"], stored(hf)["model.embed_tokens.weight"].float())
    export_checkpoint(tmp_path / "kept", tmp_path / "back")
    assert all(torch.equal(one, stored(hf)[name]) for name, one in stored(tmp_path / "back").items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"

    assert forge(["checkpoint", "import", str(hf), str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    assert dtypes(tmp_path / "wide") == {torch.float32}
    assert forge(["checkpoint", "export", str(tmp_path / "wide"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert {one.dtype for one in stored(tmp_path / "out").values()} == {torch.float16}
    assert forge(["checkpoint", "export", str(tmp_path / "wide"), str(tmp_path / "no"), "--dtype", "int8"]) == 2
    assert "'int8' is not one of keep, fp32, bf16, fp16" in capsys.readouterr().err


def test_what_may_be_missing_starts_as_in_a_new_model(hf: Path, tmp_path: Path) -> None:
    change(hf, lm_head__weight=None, model__norm__weight=torch.zeros(7))
    said = r"model\.norm\.weight: 7 in model\.safetensors, 32 in config\.json\s+lm_head\.weight: missing \(61 × 32\)"
    with pytest.raises(ConfigError, match=said):
        import_checkpoint(hf, tmp_path / "no")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight: 7 in"):
        import_checkpoint(hf, tmp_path / "no", allow_missing=["lm_head.*"])
    with pytest.raises(ConfigError, match=r"--allow-missing: 'lm_haed\.\*' fits nothing that .* lacks"):
        import_checkpoint(hf, tmp_path / "no", allow_missing=["lm_head.*", "model.norm.*", "lm_haed.*"])
    done = import_checkpoint(hf, tmp_path / "start", allow_missing=["lm_head.*", "model.norm.*"])
    assert "norm.weight, head.weight start as in a new model." in done.notes
    opened = open_model(tmp_path / "start", text=False)
    weights, part = opened.model.state_dict(), opened.model.parts[0]
    assert torch.equal(weights["norm.weight"], torch.ones(32))
    fill(expected := torch.empty(61, 32), "head.weight", declared_init(part, "head.weight"), opened.job.seed)
    assert torch.equal(weights["head.weight"], expected)
    assert torch.equal(weights["embedding.weight"], stored(hf)["model.embed_tokens.weight"].float())


def test_what_may_be_too_much_is_left_out(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(hf, model__critic__weight=torch.zeros(3))
    with pytest.raises(ConfigError, match=r"model\.critic\.weight: no parameter takes it"):
        import_checkpoint(hf, tmp_path / "no")
    command = ["checkpoint", "import", str(hf), str(tmp_path / "start"), "--allow-extra"]
    assert forge([*command, "*.other"]) == 2
    assert "model.critic.weight: no parameter takes it" in capsys.readouterr().err
    assert forge([*command, "*.critic.*"]) == 0
    said = capsys.readouterr()
    assert "model.critic.weight: left out." in said.out + said.err
    assert not [name for name in shapes(tmp_path / "start") if "critic" in name]


def test_a_tied_flag_that_contradicts_the_files_is_told(hf: Path, tmp_path: Path) -> None:
    file = hf / "config.json"
    tied = json.loads(file.read_text()) | {"tie_word_embeddings": True}
    file.write_text(json.dumps(tied))
    with pytest.raises(ConfigError, match=r"lm_head\.weight: .* it is not a copy of model\.embed_tokens\.weight"):
        import_checkpoint(hf, tmp_path / "no")
    file.write_text(json.dumps(tied | {"tie_word_embeddings": False}))
    change(hf, lm_head__weight=None)
    with pytest.raises(ConfigError, match=r"has no weights for the head \(head\.weight\)"):
        import_checkpoint(hf, tmp_path / "no")


@pytest.mark.slow
def test_several_processes_write_their_shares_of_the_same_files(hf: Path, tmp_path: Path) -> None:
    import_checkpoint(hf, tmp_path / "start")
    alone = export_checkpoint(tmp_path / "start", tmp_path / "alone", shard_bytes=20_000)
    asked = ["checkpoint", "export", str(tmp_path / "start"), str(tmp_path / "two"), "--shard-size", "20KB"]
    with warm.ranks():
        assert forge([*asked, "--nproc", "2"]) == 0
    assert len(alone.files) > 2
    names = sorted(file.name for file in (tmp_path / "alone").iterdir())
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == names
    assert all((tmp_path / "two" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes() for name in names)


def test_shares_are_about_as_large_and_all_of_it(tmp_path: Path) -> None:
    tensors = {str(n): ((size, 3), torch.float32) for n, size in enumerate((1, 9, 2, 30, 5, 5, 7, 1, 0))}
    files = TensorFiles.of(tensors, 200)
    for world in (1, 2, 3, 20):
        folder = tmp_path / str(world)
        folder.mkdir()
        files.create(folder)
        asked: list[list[str]] = []
        for rank in range(world):
            asked.append([])

            def read(name: str, own: list[str] = asked[-1]) -> Tensor:
                own.append(name)
                return torch.full(tensors[name][0], float(name))

            files.write(folder, read, rank=rank, world=world)
        assert sorted(name for own in asked for name in own) == sorted(tensors)
        found = {name: one for file in files.files for name, one in load_file(folder / file).items()}
        assert all(torch.equal(one, torch.full_like(one, float(name))) for name, one in found.items())
        shares = [sum(tensors[name][0][0] for name in own) for own in asked]
        assert max(shares) <= 60 / world + 30, "one more tensor than its share at most"
