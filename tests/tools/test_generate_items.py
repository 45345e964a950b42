"""Generation after prompts with items: what the whole text gives in one forward, side by side and file by file."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import items_data
import tiny_models
from forge_cli import forge, one_message
from forge_train import ConfigError
from forge_train.contract.model import Model
from forge_train_kit.activations import layers_of
from forge_train_kit.data.items import ItemPrompts, padded
from forge_train_tools import open_model
from forge_train_tools.generation.engine import run
from forge_train_tools.generation.generate import Generation, generate
from forge_train_tools.generation.rows import TextRow
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.inference.layers import layers_of as numbered
from forge_train_tools.offline.huggingface import export_checkpoint

SIZES = (2, 5, 3)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans")
    items_data.write_scans(folder, SIZES)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a model that takes scans."""
    return tiny_models.trained(tmp_path_factory.mktemp("run"), plugins=("items_data:Scans",))


PROMPTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("<scan>is", ("0.npy",)),
    ("no scan", ()),
    ("a <scan> b <scan><scan>", ("1.npy", "2.npy", "0.npy")),
    ("<scan>", ("2.npy",)),
)


def rows(job: Any, folder: Path) -> list[TextRow]:
    prompts = ItemPrompts(job)
    made = []
    for number, (text, files) in enumerate(PROMPTS):
        ids, items = prompts.place(prompts.tokenizer.encode(text), {"scan": list(files)}, "a prompt", str(folder))
        rule = Sampling(tokens=5 + 2 * number, temperature=0)
        made.append(TextRow(number, ids, rule, prompts.tokenizer, scored=True, items=items))
    return made


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("plugins", [(), ("moe",), ("cross_attention",), ("mot",)])
def test_tokens_are_those_of_a_whole_forward(scans: Path, slots: int, plugins: tuple[str, ...]) -> None:
    values = ("cross_attention.every=1", "cross_attention.gate=1.0") if "cross_attention" in plugins else ()
    job, model = tiny_models.composed("tokenizer.path=bytes", *values, plugins=("items_data:Scans", *plugins))
    for row in run(job, model, iter(rows(job, scans)), slots=slots):
        assert row.items is not None
        ids = torch.tensor([row.ids])
        extras = {name: torch.from_numpy(one) for name, one in padded([row.items.read(ids.shape[1])]).items()}
        with torch.no_grad():
            model.parts[0].eval()
            found = model.parts[0].head(model(ids, **extras))[0].double().log_softmax(-1)
        for at, choice in enumerate(row.choices):
            place = row.prompt + at - 1
            assert choice.model == pytest.approx(float(found[place, choice.id]), abs=1e-5)
            assert choice.id == int(found[place, :257].argmax())
    assert any(size > 1 for size in SIZES)


def test_another_scan_gives_another_answer(trained: Path, scans: Path) -> None:
    def scores(file: str) -> Any:
        prompt = {"prompt": "<scan>The ", "scans": [str(scans / file)]}
        rule = Sampling(tokens=3, temperature=0)
        return generate(Generation(path=trained, prompts=(prompt,), sampling=rule, logprobs=True)).answers[0]

    assert scores("0.npy") == scores("0.npy")
    assert scores("0.npy").log_probabilities is not None
    assert scores("0.npy").model_log_probabilities != scores("1.npy").model_log_probabilities


def test_records_name_files_beside_them_and_bring_bytes(trained: Path, scans: Path) -> None:
    content = items_data.encoded(items_data.scan(0, 2))
    data = "data:application/octet-stream;base64," + base64.b64encode(content).decode()
    records = [{"prompt": "<scan>The ", "scans": [one]} for one in ("0.npy", data)]
    items_data.write_records(scans / "asked.jsonl", records)
    out = scans / "answers.jsonl"
    asked = ("generate", str(trained), "--from-file", str(scans / "asked.jsonl"), "--out", str(out))
    assert not forge(*asked, "--tokens", "5", "--temperature", "0", "--logprobs").code
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first | {"record": 1} == second


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "<scan>x", "scans": ["gone.npy"]}, r"The prompt: .*gone\.npy: No such file"),
        ({"prompt": "<scan><scan>", "scans": ["0.npy"]}, "The prompt: the text has 2 placeholders <scan> for 1 scan"),
        ({"prompt": "<scan>x"}, "The prompt: the text has 1 placeholder <scan> for 0 scans"),
        ({"prompt": "x", "scans": "0.npy"}, r"The prompt: 'scans': expected a list of items"),
    ],
)
def test_a_prompt_that_can_not_be_is_one_sentence(trained: Path, scans: Path, record: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        generate(Generation(path=trained, prompts=(record,)))
    assert str(caught.value).count("The prompt") == 1


def test_a_model_of_text_alone_refuses_images(tmp_path: Path) -> None:
    run_ = tiny_models.trained(tmp_path)
    said = forge("generate", run_, "--prompt", "x", "--image", "cat.png")
    assert one_message(said, 2) == "This model takes text alone, but no 'image'."


def test_items_of_any_modality_are_shown_to_each_prompt(trained: Path, scans: Path) -> None:
    asked = ("generate", trained, "--temperature", "0", "--tokens", "4", "--json")
    items = [str(scans / "0.npy"), str(scans / "1.npy")]
    shown = [word for one in items for word in ("--item", f"scan={one}")]
    alone = forge(*asked, *shown, "--prompt", "The ").json
    model = open_model(trained)
    assert alone["scans"] == items
    assert alone["text"] == model.generate("The ", items={"scan": items}, tokens=4, temperature=0)
    both = forge(*asked, *shown, "--prompt", "The ", "--prompt", "A ").json["answers"]
    assert [one["prompt"] for one in both] == ["The ", "A "]
    assert both[0]["text"] == alone["text"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--item", "0.npy"), "--item 0.npy: expected MODALITY=FILE, as in video=clip.mp4."),
        (("--item", "scam=0.npy"), "This model takes text and 'scan', but no 'scam'."),
        (("--image", "0.npy"), "This model takes text and 'scan', but no 'image'."),
        (("--item", "scan=gone.npy"), "The prompt: gone.npy: No such file or directory."),
        (("--item", "scan=0.npy", "--from-file", "a.jsonl", "--out", "b.jsonl"), "--image and --item go with --prompt"),
    ],
)
def test_an_item_that_can_not_be_shown_is_told(
    trained: Path, scans: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(scans)
    told = one_message(forge("generate", trained, *options), 2)
    assert message in told.replace(f"{scans}/", "")


def test_a_chat_has_a_command_for_each_modality(
    trained: Path, scans: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = ("/help", "/scan", "/video a.mp4", f"/scan {scans / '0.npy'}", "A", f"/save {tmp_path / 'chat.jsonl'}")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    ended = forge("chat", trained, "--template", "plain", "--tokens", "3")
    assert "/scan FILE    begin the next message with this file" in ended.err
    assert "Error: /scan needs a file" in ended.err
    assert "Error: There is no /video; /help lists the commands." in ended.err
    assert json.loads((tmp_path / "chat.jsonl").read_text())["scans"] == [str(scans / "0.npy")]


def test_broken_scans_are_told(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.npy").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"bad\.npy: a broken scan"):
        generate(Generation(path=trained, prompts=({"prompt": "<scan>", "scans": [str(tmp_path / "bad.npy")]},)))


def test_a_chat_shows_items_and_saves_them(trained: Path, scans: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    options: Any = {"tokens": 4, "temperature": 0.0}
    chat = model.chat(template="plain", **options)
    assert chat.modalities == ("scan",)
    with pytest.raises(ConfigError, match=r"gone\.npy"):
        chat.show("scan", scans / "gone.npy")
    chat.show("scan", scans / "0.npy")
    first = "".join(chat.answer("A"))
    assert chat.messages[0] == {"role": "user", "content": "<scan>A"}
    items = {"scan": [scans / "0.npy"]}
    assert first == model.generate("A", chat=True, items=items, template="plain", **options)
    chat.show("scan", scans / "1.npy")
    second = "".join(chat.answer("B"))
    assert chat.completion is not None
    assert sum(SIZES[:2]) == chat.completion.prompt.count(model.tokenizer.end)
    chat.save(tmp_path / "chat.jsonl")
    record = json.loads((tmp_path / "chat.jsonl").read_text())
    assert record["scans"] == [str(scans / "0.npy"), str(scans / "1.npy")]
    asked = {"messages": record["messages"][:-1], "scans": record["scans"]}
    rule = Sampling(tokens=4, temperature=0)
    again = generate(Generation(path=trained, prompts=(asked,), sampling=rule, template="plain"))
    assert again.answers[0].text == second
    chat.reset()
    "".join(chat.answer("A"))
    assert chat.messages[0]["content"] == "A"


def test_other_items_are_refused_where_they_are_asked_for(trained: Path) -> None:
    with pytest.raises(ConfigError, match=r"This model takes text and 'scan', but no 'image'"):
        open_model(trained).generate("x", items={"image": ["cat.png"]})


TASK = """
[seen]
kind = "generate"
data = "asked.jsonl"
prompt = "The "
answer = "answer"
check = "regex"
tokens = 4
items = { scan = "shown" }
"""


def test_a_task_shows_items_beside_its_prompts(trained: Path, scans: Path, tmp_path: Path) -> None:
    model = open_model(trained)
    answers = [
        model.generate("The ", items={"scan": [str(scans / one)]}, tokens=4, temperature=0) for one in ("0.npy",)
    ]
    folder = scans / "tasks"
    folder.mkdir()
    records = [{"shown": "../0.npy", "answer": f"^{re.escape(answers[0])}$"}, {"shown": ["../1.npy"], "answer": "^$"}]
    items_data.write_records(folder / "asked.jsonl", records)
    (folder / "seen.toml").write_text(TASK, encoding="utf-8")
    asked = ("eval", trained, "--task", folder / "seen.toml", "--samples", tmp_path / "samples", "--json")
    ended = forge(*asked)
    assert ended.code == 0, ended.err
    first, second = (json.loads(line) for line in (tmp_path / "samples" / "seen.jsonl").read_text().splitlines())
    assert first["answers"] == answers
    assert first["right"] == [1.0]
    assert second["answers"] == [
        model.generate("The ", items={"scan": [str(scans / "1.npy")]}, tokens=4, temperature=0)
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('scan = "shown"', 'image = "shown"'), "This model takes text and 'scan', but no 'image'"),
        (('scan = "shown"', 'scan = "seen"'), "has no field 'seen'; the fields are 'shown', 'answer'"),
        (("tokens = 4", "tokens = 60"), "A prompt has 6 tokens with its items, and the model reads 64"),
        (("tokens = 4", 'shots = 1\nshots_data = "asked.jsonl"'), "leave shots out where prompts have items"),
    ],
)
def test_a_task_that_can_not_show_items_is_told(
    trained: Path, scans: Path, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    items_data.write_records(tmp_path / "asked.jsonl", [{"shown": str(scans / "0.npy"), "answer": "x"}] * 2)
    (tmp_path / "seen.toml").write_text(TASK.replace(*change), encoding="utf-8")
    assert message in one_message(forge("eval", trained, "--task", tmp_path / "seen.toml"), 2)


def test_a_placeholder_without_an_item_is_told_for_a_single_prompt_too(trained: Path) -> None:
    with pytest.raises(ConfigError, match="The prompt: the text has 1 placeholder <scan> for 0 scans"):
        open_model(trained).generate("<scan>x")


def test_the_layers_of_encoders_are_none_of_the_models(trained: Path, tmp_path: Path) -> None:
    ended = forge("debug", "look", trained, "--text", "abc", "--out", tmp_path / "look.html")
    assert ended.code == 0, ended.err
    model = open_model(trained).module
    assert layers_of(model) == ("layers.0", "layers.1")
    assert [*numbered(Model([model]))] == [0, 1]
    assert "fusion.enter.encoders.scan.layers.0" in model.units


def test_training_without_items_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_models.trained(tmp_path, plugins=("items_data:Scans",))
    assert caplog.text.count("its encoder learns nothing") == 1
    assert "The model takes in items of 'scan' (plugin 'scans'), but the data plugin reads none" in caplog.text
    assert "'<scan>'" in caplog.text
    assert sum("'scan'" in one.message for one in caplog.records if one.levelname == "WARNING") == 1


def test_an_export_without_a_place_for_the_encoder_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no place for(?s:.)*fusion\.enter\.encoders\.scan\."):
        export_checkpoint(trained, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "scaling",
    [
        ("decoder.rope.scaling=dynamic", "decoder.rope.factor=4"),
        ("decoder.rope.scaling=longrope", "decoder.rope.short=[1,1,1,1]", "decoder.rope.long=[2,2,2,2]"),
    ],
)
def test_a_model_that_reads_its_text_again_does_not_lose_items_in_silence(
    scans: Path, scaling: tuple[str, ...]
) -> None:
    """From the second forward on, it would read placeholders as if they were tokens."""
    values = ("tokenizer.path=bytes", "decoder.rope.original_sequence=8", *scaling)
    job, model = tiny_models.composed(*values, plugins=("items_data:Scans",))
    given = rows(job, scans)
    with pytest.raises(ConfigError, match="reads its whole text again as it grows, and can't keep images"):
        list(run(job, model, iter(given[:1]), slots=1))
    (text,) = run(job, model, iter(rows(job, scans)[1:2]), slots=1)
    assert text.done
