"""`forge debug look`: its numbers are those that one finds by hand, and its page is whole and safe."""

from __future__ import annotations

import base64
import errno
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from capture_cases import SHAPES
from forge_cli import forge, one_message
from forge_train import ConfigError
from forge_train_kit.activations import attention_weights
from forge_train_kit.layers import AttentionOptions
from forge_train_plugins.attention._eager import Kernel
from forge_train_tools import open_model
from forge_train_tools.looking.look import Looking, look
from forge_train_tools.testing import run_forge

TEXT = "if a<b: é\n\treturn '&'"


def trained(folder: Path, model: str) -> Path:
    plugins, settings = SHAPES[model]
    more = {"checkpoint.every": 2, "adamw.lr": 0.01, "train.sequence": 32}
    return run_forge(list(plugins), {**settings, **more}, steps=2, folder=folder).run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("look"), "decoder")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 3, "scale": 0.7},
        {"soft_cap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
        {"document_ids": torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]])},
    ],
)
@pytest.mark.parametrize("queries", [7, 3])
def test_weights_are_those_of_a_kernel(options: dict[str, Any], queries: int) -> None:
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, queries, 4, 8, generator=generator)
    key, value = torch.randn(2, 2, 7, 2, 8, generator=generator)
    asked = AttentionOptions(**options)
    weights = attention_weights(query, key, asked, [3, 0])
    mixed = torch.einsum("bhqk,bkhd->bqhd", weights, value[:, :, [1, 0]])
    torch.testing.assert_close(mixed, Kernel()(query, key, value, asked)[:, :, [3, 0]])


@pytest.mark.parametrize("model", ["decoder", "mla", "moe", "arcee", "gpt_neox"])
def test_numbers_by_hand(model: str, tmp_path: Path) -> None:
    if model in ("arcee", "gpt_neox"):
        pytest.importorskip("transformers")
    found = look(Looking(path=trained(tmp_path, model), text=TEXT, heads=("1.*",)))
    opened = open_model(found.checkpoint)
    ids = [*opened.tokenizer.begin, *opened.tokenizer.encode(TEXT)]
    assert found.ids == ids
    assert "".join(found.texts) == TEXT
    layers: Any = opened.module.units
    assert found.states == ["embedding", *layers]
    states: list[torch.Tensor] = []
    for name in layers:
        keep = lambda _, __, out: states.append((out[0] if isinstance(out, tuple) else out)[0])  # noqa: E731
        opened.module.get_submodule(name).register_forward_hook(keep)
    logits = opened.logits(ids)
    torch.testing.assert_close(found.norms[1:], torch.stack(states).norm(dim=-1))
    assert found.lens is not None
    best = logits.softmax(-1).max(-1)
    assert found.lens.top[-1].equal(best.indices)
    torch.testing.assert_close(found.lens.probability[-1], best.values)
    ranks = [int((row > row[after]).sum()) + 1 for row, after in zip(logits, ids[1:], strict=False)]
    assert found.lens.rank[-1].tolist() == ranks
    assert [*found.attention] == [f"1.{head}" for head in range(4)]
    for weights in found.attention.values():
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(ids)))
        assert weights.equal(weights.tril())
    assert not found.without


def test_layers_without_attention_weights_say_so(tmp_path: Path) -> None:
    run = trained(tmp_path, "delta_net")
    found = look(Looking(path=run, text=TEXT))
    assert not found.attention
    says = "GatedDeltaNet carries a state along the text, and has no attention weights"
    assert found.without == {"layers.0": says, "layers.1": says}
    with pytest.raises(ConfigError, match=f"--heads: 1.0: {says}"):
        look(Looking(path=run, text=TEXT, heads=("1.0",)))


def pixels(page: str) -> list[list[bytes]]:
    """The lines of pixels of a page's first picture."""
    data = base64.b64decode(re.findall(r"data:image/png;base64,([^\"]+)", page)[0])
    wide, high = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    at = data.index(b"IDAT")
    lines = zlib.decompress(data[at + 4 : at + 4 + int.from_bytes(data[at - 4 : at], "big")])
    assert len(lines) == high * (1 + 3 * wide)
    cut = [lines[row * (1 + 3 * wide) + 1 :][: 3 * wide] for row in range(high)]
    return [[line[3 * column : 3 * column + 3] for column in range(wide)] for line in cut]


def test_page_numbers_and_json(run: Path, tmp_path: Path) -> None:
    page, numbers = tmp_path / "look.html", tmp_path / "look.safetensors"
    ended = forge("debug", "look", run, "--text", TEXT, "--out", page, "--out", numbers, "--json")
    assert ended.code == 0, ended.err
    written, stored, found = page.read_text(encoding="utf-8"), load_file(numbers), ended.json
    assert "if␣a&lt;b:␣é↵⇥return␣&#x27;&amp;&#x27;" in written
    assert "http" not in re.sub(r"Content-Security-Policy|http-equiv", "", written)
    assert "<script" not in written
    assert torch.tensor(found["norms"]).equal(stored["norms"])
    assert torch.tensor(found["attention"]["0.1"]).equal(stored["attention.0.1"])
    assert found["lens"]["rank"] == stored["lens.rank"].tolist()
    assert "".join(one["text"] for one in found["tokens"]) == TEXT
    lines = pixels(written)
    assert (len(lines), len(lines[0])) == (3, len(found["tokens"]))
    for line, norms in zip(lines, found["norms"], strict=True):
        assert line[norms.index(max(norms))] == bytes((24, 83, 148)), "the greatest of a line is dark"
    assert forge("debug", "look", run, "--text", "x", "--out", page).code == 0, "a page of forge is overwritten"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "", "--json"), "--text: has no token"),
        (("--text", "x" * 200, "--json"), "--text: has 200 tokens, and the model reads 64 at once"),
        (("--text", "x"), "--out: name a file to write, such as look.html, or ask for --json"),
        (("--text", "x", "--out", "look.png"), "look.png: expected a file that ends with .html or .safetensors"),
        (("--text", "x", "--out", "gone/look.html"), "--out gone/look.html: there is no folder gone; make it first"),
        (("--text", "x", "--json", "--heads", "0.4"), "--heads: 0.4: the heads of layer 0 are 0 to 3"),
        (("--text", "x", "--json", "--heads", "2.0"), "--heads: 2.0: the model's layers are 0 to 1"),
        (("--text", "x", "--json", "--heads", "first"), "--heads: expected L.H"),
    ],
)
def test_mistakes(run: Path, arguments: tuple[str, ...], says: str) -> None:
    assert says in one_message(forge("debug", "look", run, *arguments), 2)


def test_somebody_elses_file_stays(run: Path, tmp_path: Path) -> None:
    for name in ("mine.html", "mine.safetensors"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
        one_message(forge("debug", "look", run, "--text", "x", "--out", tmp_path / name), 2)
        assert (tmp_path / name).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["look.html", "look.safetensors"])
def test_what_a_full_disk_left(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The page of before, and no half of a file."""
    file, write = tmp_path / name, Path.write_bytes
    asked = ("debug", "look", run, "--text", "x", "--out", file)
    before = b""
    if name.endswith("html"):
        forge(*asked)
        before = file.read_bytes()

    def full(self: Path, data: bytes) -> int:
        write(self, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert f"{file}: can't be written: No space left on device" in one_message(forge(*asked), 1)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == ({name: before} if before else {})


def test_a_steered_look(run: Path) -> None:
    heads = json.dumps([f"0.{head}" for head in range(4)])
    asked = Looking(path=run, text=TEXT, plugins=("steer",), set=(f"steer.zero_heads={heads}",))
    opened = open_model(run)
    with torch.no_grad():
        opened.module.get_submodule("layers.0.attention.o").weight.zero_()  # type: ignore[operator]
    lens = look(asked).lens
    assert lens is not None
    torch.testing.assert_close(lens.probability[-1], opened.logits(TEXT).softmax(-1).amax(-1))
