"""`forge infer` with a Hugging Face folder: a model is its files' contents."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import heads_data
from forge_cli import forge, one_message

pytest.importorskip("transformers")

import chat_model


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in `hf`."""
    folder = tmp_path_factory.mktemp("infer-hf")
    chat_model.write_model(folder / "hf")
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("FORGE_SET", "run.device=cpu")


def infer(model: object, out: Path, *more: object, data: object) -> list[dict[str, Any]]:
    ended = forge("infer", model, "--data", data, "--out", out, *more)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


class TestContinued:
    """After half of the records."""

    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        return heads_data.write(tmp_path / "texts.jsonl", ({"text": f"say {at}"} for at in range(40)))

    @staticmethod
    def begin(monkeypatch: pytest.MonkeyPatch, model: object, out: Path, data: Path) -> None:
        from forge_train_tools.inference import infer as job
        from forge_train_tools.inference.output_file import OutputFile

        add = OutputFile.add

        def once(self: OutputFile, found: Any) -> None:
            if self.done:
                raise KeyboardInterrupt
            add(self, found)

        with monkeypatch.context() as patch:
            patch.setattr(job, "CHUNK", 2)
            patch.setattr(OutputFile, "add", once)
            assert forge("infer", model, "--data", data, "--out", out).code != 0
        assert json.loads((out.with_name(f"{out.name}.partial") / "job.json").read_text())["records"] == 16

    def test_with_a_copy_of_the_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
        shutil.copytree("hf", tmp_path / "first")
        self.begin(monkeypatch, tmp_path / "first", tmp_path / "out.jsonl", data)
        (tmp_path / "first").rename(tmp_path / "second")
        for file in (tmp_path / "second").iterdir():
            os.utime(file, (1, 1))
        assert infer(tmp_path / "second", tmp_path / "out.jsonl", data=data) == infer(
            "hf", tmp_path / "whole.jsonl", data=data
        )

    def test_not_with_weights_that_were_edited(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path
    ) -> None:
        shutil.copytree("hf", tmp_path / "hf")
        self.begin(monkeypatch, tmp_path / "hf", tmp_path / "out.jsonl", data)
        file = tmp_path / "hf" / "model.safetensors"
        content, stat = bytearray(file.read_bytes()), file.stat()
        content[-1] ^= 1
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        ended = forge("infer", tmp_path / "hf", "--data", data, "--out", tmp_path / "out.jsonl")
        assert "was begun with another model" in one_message(ended, 2)


@pytest.mark.parametrize("plugins", [(), ("-p", "hf")])
def test_hidden_states_of_layers_are_those_of_transformers(tmp_path: Path, plugins: tuple[str, ...]) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    texts = ["say one", "say two and then say three", "now"]
    data = heads_data.write(tmp_path / "texts.jsonl", ({"text": text} for text in texts))
    asked = "layers.0.*,layers.1.hidden,hidden"
    after: dict[int, torch.Tensor] = {}
    for at, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda module, given, out, at=at: after.update({at: out[0][0] if isinstance(out, tuple) else out[0]})
        )
    for one, text in zip(infer("hf", tmp_path / "out", "--outputs", asked, *plugins, data=data), texts, strict=True):
        with torch.no_grad():
            last = model.model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, -1]
        assert one["layers.0.hidden"] == pytest.approx(after[0][-1].tolist(), rel=1e-5, abs=1e-6)
        assert one["layers.0.hidden_mean"] == pytest.approx(after[0].mean(0).tolist(), rel=1e-5, abs=1e-6)
        assert one["layers.1.hidden"] == pytest.approx(after[1][-1].tolist(), rel=1e-5, abs=1e-6)
        assert one["hidden"] == pytest.approx(last.tolist(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("words", [("infer", "hf", "--data", "t.jsonl", "--out", "o.jsonl"), ("generate", "hf")])
def test_forge_set_counts(words: tuple[str, ...], tmp_path: Path) -> None:
    heads_data.write(Path("t.jsonl"), [{"text": "say one"}])
    wrong = {"FORGE_SET": "run.device=nowhere"}
    assert one_message(forge(*words, environment=wrong), 2).startswith("FORGE_SET: run.device: ")
    ended = forge(*words, "-s", "run.device=cpu", environment=wrong)
    assert ended.code == 0, "--set is stronger"
