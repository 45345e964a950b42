"""`forge infer`: the outputs of a model for each record, in order, exactly once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import forge_cli
import full_disk
import heads_data
from forge_cli import forge, one_message
from forge_train_tools import open_model

RUN = ("--name", "first", "--quiet")
SETTINGS = forge_cli.DECODER.replace("layers = 1", "layers = 2")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a language model, and texts of many lengths."""
    folder = tmp_path_factory.mktemp("infer")
    (folder / "mine.toml").write_text(SETTINGS + '[text]\npath = "texts.jsonl"\n', encoding="utf-8")
    texts = [passage[: 3 + 7 * at % 50] for at, passage in enumerate(heads_data.passages("json", 40))]
    heads_data.write(folder / "texts.jsonl", ({"id": f"t{at}", "text": text} for at, text in enumerate(texts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ended = forge("train", "mine.toml", *RUN)
        assert ended.code == 0, ended.err
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


def infer(out: Path, *more: object, data: object = "texts.jsonl") -> list[dict[str, Any]]:
    ended = forge("infer", "runs/first", "--data", data, "--out", out, *more)
    assert ended.code == 0, ended.err
    return lines(out)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def refusal(out: Path, *more: object, data: object = "texts.jsonl", code: int = 2) -> str:
    return one_message(forge("infer", "runs/first", "--data", data, "--out", out, *more), code)


def expected(texts: Sequence[tuple[str | None, str]]) -> list[float]:
    """Log-likelihoods of completions by the logits of each record alone."""
    model = open_model("runs/first")
    found = []
    for prompt, completion in texts:
        end = [] if prompt is None or prompt else [model.tokenizer.end or 0]  # before a completion of nothing
        given = [*model.tokenizer.begin, *end, *model.tokenizer.encode(prompt or "")]
        ids = [*given, *model.tokenizer.encode(completion)]
        each = model.logits(ids).double().log_softmax(-1)
        found.append(sum(float(each[at - 1, ids[at]]) for at in range(max(len(given), 1), len(ids))))
    return found


def test_log_likelihoods_are_those_of_each_text_alone(tmp_path: Path) -> None:
    found = infer(tmp_path / "out.jsonl")
    texts = [record["text"] for record in lines(Path("texts.jsonl"))]
    assert [one["record"] for one in found] == [*range(40)]
    assert [one["id"] for one in found] == [f"t{at}" for at in range(40)]
    assert [one["tokens"] for one in found] == [len(text.encode()) - 1 for text in texts], "there is no BOS"
    assert [one["log_likelihood"] for one in found] == pytest.approx(expected([(None, t) for t in texts]), rel=1e-6)


def test_completions_are_asked_for_and_their_prompts_are_not(tmp_path: Path) -> None:
    pairs = [("def f(", "x):"), ("a b ", "c"), ("", "return"), ("class\n", " A")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    found = infer(tmp_path / "out.jsonl", data=heads_data.write(tmp_path / "pairs.jsonl", records))
    apart = [
        ("def f(", "x):"),
        ("a b", " c"),
        ("", "return"),
        ("class", "\n A"),
    ]  # white space belongs to the completion
    assert [one["log_likelihood"] for one in found] == pytest.approx(expected(apart), rel=1e-6)
    assert [one["tokens"] for one in found] == [3, 2, 6, 3]


@pytest.mark.parametrize("size", [1, 3, 32])
def test_no_batch_changes_an_answer(tmp_path: Path, size: int) -> None:
    one, other = infer(tmp_path / "8.jsonl"), infer(tmp_path / "other.jsonl", "--batch", size)
    for mine, theirs in zip(one, other, strict=True):
        assert mine == {**theirs, "log_likelihood": pytest.approx(theirs["log_likelihood"], rel=1e-6)}


def test_padding_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tokens and however many are behind a record."""
    from forge_train_tools.inference import batches

    asked = ("--outputs", "log_likelihood", "--outputs", "hidden,layers.0.hidden_mean")
    one = infer(tmp_path / "one.jsonl", *asked)
    monkeypatch.setattr(batches, "UNIT", 8)
    other = infer(tmp_path / "other.jsonl", *asked)
    for mine, theirs in zip(one, other, strict=True):
        assert mine["layers.0.hidden_mean"] == pytest.approx(theirs["layers.0.hidden_mean"], rel=1e-5, abs=1e-6)
        assert mine["log_likelihood"] == pytest.approx(theirs["log_likelihood"], rel=1e-6)
        assert mine["hidden"] == pytest.approx(theirs["hidden"], rel=1e-5, abs=1e-6)


def test_hidden_states_are_those_of_the_last_token(tmp_path: Path) -> None:
    found = infer(tmp_path / "out.jsonl", "--outputs", "hidden")
    model = open_model("runs/first")
    for one, record in zip(found[:5], lines(Path("texts.jsonl")), strict=False):
        ids = [*model.tokenizer.begin, *model.tokenizer.encode(record["text"])]
        with torch.no_grad():
            states = model.module(torch.tensor([ids]))
        assert one["hidden"] == pytest.approx(states[0, -1].tolist(), rel=1e-5, abs=1e-6)
        assert one.keys() == {"record", "id", "hidden"}


def test_hidden_states_of_layers_are_those_that_hooks_see(tmp_path: Path) -> None:
    found = infer(tmp_path / "out.jsonl", "--outputs", "hidden_mean,layers.*.hidden*,hidden")
    names = [f"layers.{at}.{kind}" for kind in ("hidden", "hidden_mean") for at in range(2)]
    assert [*found[0]] == ["record", "id", "hidden_mean", *names, "hidden"]
    model = open_model("runs/first")
    seen: dict[str, torch.Tensor] = {}
    for at in range(2):
        layer = model.module.get_submodule(f"layers.{at}")
        layer.register_forward_hook(lambda module, given, out, at=at: seen.update({f"layers.{at}.": out[0]}))
    for one, record in zip(found, lines(Path("texts.jsonl")), strict=True):
        ids = [*model.tokenizer.begin, *model.tokenizer.encode(record["text"])]
        with torch.no_grad():
            seen[""] = model.module(torch.tensor([ids]))[0]
        for name, states in seen.items():
            assert one[f"{name}hidden"] == pytest.approx(states[-1].tolist(), rel=1e-5, abs=1e-6)
            assert one[f"{name}hidden_mean"] == pytest.approx(states.mean(0).tolist(), rel=1e-5, abs=1e-6)


HEADS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "classify": ("text_labels", {"classify.classes": ["json", "xml"], "text_labels.path": "labels.jsonl"}, "class"),
    "embed": (
        "text_pairs",
        {"text_pairs.kind": "embedding", "text_pairs.path": "embed.jsonl", "train.micro_batch": 4},
        "embedding",
    ),
    "reward": ("text_pairs", {"text_pairs.template": "plain", "text_pairs.path": "reward.jsonl"}, "reward"),
}


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_other_heads_give_their_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str) -> None:
    data, settings, name = HEADS[head]
    monkeypatch.chdir(tmp_path)
    texts = [(package, text[:30]) for package in ("json", "xml") for text in heads_data.passages(package, 12)]
    heads_data.write_tasks(tmp_path, texts)
    (tmp_path / "classify.jsonl").rename(tmp_path / "labels.jsonl")
    (tmp_path / "mine.toml").write_text(SETTINGS.replace("sequence = 16", "sequence = 48"), encoding="utf-8")
    values = [
        part
        for key, value in settings.items()
        for part in ("-s", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    ]
    ended = forge("train", "mine.toml", *RUN, "-p", f"{head},{data}", *values)
    assert ended.code == 0, ended.err
    records = heads_data.write(tmp_path / "texts.jsonl", ({"text": text} for _, text in texts))
    found = infer(tmp_path / "out.jsonl", data=records)
    alone = infer(tmp_path / "alone.jsonl", "--batch", "1", data=records)
    assert len({json.dumps(one[name]) for one in found}) > 1
    for mine, theirs in zip(found, alone, strict=True):
        assert mine.keys() == theirs.keys()
        assert flat(mine[name]) == pytest.approx(flat(theirs[name]), rel=1e-5, abs=1e-6)
    if head == "classify":
        assert all(sum(one["probabilities"].values()) == pytest.approx(1) for one in found)
        assert all(max(one["probabilities"], key=one["probabilities"].get) == one["class"] for one in found)
    if head == "embed":
        assert all(sum(x * x for x in one["embedding"]) == pytest.approx(1, rel=1e-5) for one in found)
    there = ", ".join(sorted([name, "hidden", "hidden_mean", "layers.*.hidden", "layers.*.hidden_mean"]))
    said = refusal(Path("x"), "--outputs", "log_likelihood", data=records)
    assert said == f"--outputs: this model has no 'log_likelihood', but {there}."


SURE = """
from forge_train import Plugin, hookimpl


class Sure(Plugin):
    api = (1, 0)

    @hookimpl
    def record_outputs(self, job, task):
        from forge_train_tools.inference.outputs import at_last

        def sure(part, hidden, batch):
            shares = at_last(job, task.outputs(part, hidden, batch), batch).softmax(-1)
            return {"sure": shares.amax(-1), "next": shares.argmax(-1).tolist()}

        return {"sure": sure}
"""


def test_a_plugin_names_further_outputs(tmp_path: Path) -> None:
    (tmp_path / "sure.py").write_text(SURE, encoding="utf-8")
    found = infer(tmp_path / "out.jsonl", "-p", tmp_path / "sure.py", "--outputs", "sure")
    model = open_model("runs/first")
    for one, record in zip(found[:5], lines(Path("texts.jsonl")), strict=False):
        shares = model.logits(model.tokenizer.encode(record["text"]))[-1].softmax(-1)
        assert one["sure"] == pytest.approx(float(shares.max()), rel=1e-5)
        assert one["next"] == int(shares.argmax())
    (tmp_path / "short.py").write_text(SURE.replace("shares.amax(-1)", "shares.amax(-1)[1:]"), encoding="utf-8")
    said = refusal(tmp_path / "x", "-p", tmp_path / "short.py", "--outputs", "sure", code=1)
    assert "The output 'sure' gives 7 values of 'sure' for 8 rows; it must give one for each" in said
    (tmp_path / "again.py").write_text(SURE.replace("class Sure", "class Again"), encoding="utf-8")
    said = refusal(tmp_path / "x", "-p", f"{tmp_path / 'sure.py'},{tmp_path / 'again.py'}")
    assert "there is another output 'sure'" in said


def flat(value: Any) -> Any:
    return value if isinstance(value, (list, float)) else [float(sum(map(ord, value)))]


class TestCheck:
    """All records are read and encoded before the first is computed."""

    @pytest.fixture
    def encoded(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The numbers of the records that are encoded, in order."""
        from forge_train_tools.inference.encoding import Encoder

        found, real = [], Encoder.__call__

        def noted(self: Encoder, number: int, *rest: Any) -> Any:
            found.append(number)
            return real(self, number, *rest)

        monkeypatch.setattr(Encoder, "__call__", noted)
        return found

    def test_encodes_once_what_fits(self, tmp_path: Path, encoded: list[int]) -> None:
        infer(tmp_path / "out.jsonl")
        assert encoded == [*range(40)]

    def test_encodes_again_what_does_not_fit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int]
    ) -> None:
        from forge_train_tools.inference import share

        whole = infer(tmp_path / "whole.jsonl")
        encoded.clear()
        monkeypatch.setattr(share, "KEPT", 10_000)
        assert infer(tmp_path / "out.jsonl") == whole
        assert encoded[:40] == [*range(40)]
        assert 10 < len(encoded[40:]) < 40

    def test_is_not_repeated_for_what_is_continued(self, tmp_path: Path, encoded: list[int]) -> None:
        out = tmp_path / "out.jsonl"
        TestContinued.begin(out)
        encoded.clear()
        assert infer(out)[-1]["record"] == 39
        assert encoded == [*range(16, 40)]

    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        data = heads_data.write(tmp_path / "bad.jsonl", [{"text": "good"}, {"text": ""}])
        assert "line 2" in refusal(tmp_path / "out.jsonl", data=data)
        assert [file.name for file in tmp_path.iterdir()] == ["bad.jsonl"]


class TestContinued:
    def test_what_a_full_disk_left(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from forge_train_tools.inference import infer as job
        from forge_train_tools.inference.output_file import OutputFile

        whole = infer(tmp_path / "whole.jsonl", "--batch", "3")
        monkeypatch.setattr(job, "CHUNK", 2)
        out, add = tmp_path / "out.jsonl", OutputFile.add

        def add_until_full(self: OutputFile, found: Any) -> None:
            if self.done < 18:
                add(self, found)
                return
            with full_disk.full_for("records.jsonl"):
                add(self, found)

        with monkeypatch.context() as patch:
            patch.setattr(OutputFile, "add", add_until_full)
            said = refusal(out, "--batch", "3", code=1)
        assert "No space left on device" in said
        assert not out.exists()
        ended = forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out, "--batch", "3")
        assert f"Continuing {out} after 18 records." in ended.err
        assert lines(out) == whole
        assert not out.with_name("out.jsonl.partial").exists()

    def test_another_question_is_refused(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        self.begin(out)
        for more, what in (
            (("--batch", "4"), "with --batch 8, and this command is with --batch 4"),
            (("--outputs", "hidden"), "with --outputs log_likelihood, and this command is with --outputs hidden"),
            (("-s", "decoder.rope.theta=50"), "with another configuration of the model"),
            (("-p", "precision", "-s", "train.precision=bf16"), "with train.precision fp32, and this command is with"),
        ):
            assert f"was begun {what}" in refusal(out, *more)
        other = heads_data.write(tmp_path / "other.jsonl", [{"text": "abc"}])
        assert "was begun with another content of --data" in refusal(out, data=other)
        assert infer(out)[-1]["record"] == 39

    def test_a_line_that_was_half_written_is_written_again(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        self.begin(out)
        with (tmp_path / "out.jsonl.partial" / "records.jsonl").open("ab") as file:
            file.write(b'{"record": 3, "log_lik')
        infer(out)
        assert out.read_bytes() == self.whole(tmp_path).read_bytes()

    def test_a_damaged_folder_is_told(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        self.begin(out)
        state = tmp_path / "out.jsonl.partial" / "job.json"
        state.write_text(state.read_text().replace('"records"', '"recods"'))
        assert "out.jsonl.partial is damaged" in refusal(out)

    def test_two_commands_at_once(self, tmp_path: Path) -> None:
        from forge_train_kit.lock import take

        (tmp_path / "out.jsonl.partial").mkdir()
        lock = take(tmp_path / "out.jsonl.partial")
        try:
            assert "is writing" in refusal(tmp_path / "out.jsonl")
        finally:
            lock.release()

    @pytest.mark.slow
    @pytest.mark.dist
    @pytest.mark.e2e
    def test_killed_four_times_on_changing_layouts(self, tmp_path: Path) -> None:
        many = [{"text": text[: 5 + at % 50]} for at, text in enumerate(4 * heads_data.passages("tkinter", 400))]
        data = heads_data.write(tmp_path / "many.jsonl", many)
        out = tmp_path / "out.jsonl"
        asked = ("infer", "runs/first", "--data", data, "--out", out, "--batch", "2")
        layouts = ((), ("--nproc", "2", "-p", "fsdp2"), ("--nproc", "2", "-p", "pp", "-s", "parallel.pp=2"), ())
        assert 0 < forge_cli.killed_writing(out, asked, layouts) < len(many)
        ended = forge(*asked)
        assert ended.code == 0, ended.err
        assert forge("infer", "runs/first", "--data", data, "--out", tmp_path / "whole", "--batch", "2").code == 0
        assert out.read_bytes() == (tmp_path / "whole").read_bytes()

    @staticmethod
    def whole(folder: Path) -> Path:
        infer(folder / "whole.jsonl")
        return folder / "whole.jsonl"

    @staticmethod
    def begin(out: Path) -> None:
        """Be killed after the first chunk."""
        from forge_train_tools.inference import infer as job
        from forge_train_tools.inference.output_file import OutputFile

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job, "CHUNK", 2)
            patch.setattr(OutputFile, "finish", lambda self: None)
            assert forge("infer", "runs/first", "--data", "texts.jsonl", "--out", out).code == 0
        state = out.with_name(f"{out.name}.partial") / "job.json"
        content = json.loads(state.read_text())
        text = (state.parent / "records.jsonl").read_text().splitlines(keepends=True)
        state.write_text(json.dumps(content | {"records": 16, "bytes": sum(map(len, text[:16]))}))


class TestBadInput:
    def test_records(self, tmp_path: Path) -> None:
        def said(*records: object, more: Sequence[object] = ()) -> str:
            data = heads_data.write(tmp_path / "bad.jsonl", records)
            return refusal(tmp_path / "out.jsonl", *more, data=data)

        fields = said({"text": "ab"}, {"body": "b"})
        assert "bad.jsonl, line 2: expected a text under 'text' (--field); the fields are 'body'." in fields
        assert "under 'completion'" in said({"prompt": "a"})
        assert "line 1: has no token that could be asked for" in said({"text": ""})
        assert "line 1: has no token that could be asked for" in said({"text": "a"})
        assert "line 1: has no token that could be asked for" in said({"text": ""}, more=("--outputs", "hidden"))
        assert "has no record" in said()
        assert "line 1: has 70 tokens, and the model reads 64 at once" in said({"text": "x" * 70})
        long = {"prompt": "a", "completion": "x" * 70}
        assert "what is asked for has 70 tokens" in said(long, more=("--long", "left"))
        assert not (tmp_path / "out.jsonl").exists()

    def test_options(self, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        there = "hidden, hidden_mean, layers.*.hidden, layers.*.hidden_mean, log_likelihood, per_token"
        said = refusal(out, "--outputs", "hiden")
        assert f"this model has no 'hiden', but {there}. Did you mean 'hidden'?" in said
        assert "this model has no 'layers.2.hidden', but" in refusal(out, "--outputs", "layers.2.hidden")
        assert "this model has no 'layer.*', but" in refusal(out, "--outputs", "layer.*")
        assert "--batch: expected at least 1, found 0." in refusal(out, "--batch", "0")
        assert "no such file or folder" in refusal(out, data="nothing.jsonl")
        assert "there is no folder" in refusal(tmp_path / "no" / "out.jsonl")
        out.write_text("mine")
        assert f"{out} exists; name a new file, or remove it." in refusal(out)
        assert out.read_text() == "mine"

    def test_what_is_cut_is_said(self, tmp_path: Path) -> None:
        data = heads_data.write(
            tmp_path / "long.jsonl", [{"prompt": "y" * 70, "completion": "xyz"}, {"text": "ab"}, {"text": "z" * 80}]
        )
        out = tmp_path / "out.jsonl"
        ended = forge("infer", "runs/first", "--data", data, "--out", out, "--long", "left")
        assert ended.code == 0, ended.err
        assert "2 records were cut on their left" in ended.out
        first, second, third = lines(out)
        assert (third["cut"], third["tokens"]) == (16, 63)
        assert (first["cut"], first["tokens"]) == (9, 3)
        assert "cut" not in second
