"""`forge infer` with records that are chats: what training would learn of them, in the model's own template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import forge_cli
import heads_data
from forge_cli import forge, one_message

pytest.importorskip("transformers")

import chat_model

USER, ANSWER = {"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"}
LATER = [{"role": "user", "content": "now two"}, {"role": "assistant", "content": "two"}]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in `hf`."""
    folder = tmp_path_factory.mktemp("infer-chats")
    chat_model.write_model(folder / "hf")
    return folder


@pytest.fixture(autouse=True)
def here(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("FORGE_SET", "run.device=cpu")


def infer(folder: Path, *records: object, more: tuple[object, ...] = ()) -> list[dict[str, Any]]:
    data, out = heads_data.write(folder / "chats.jsonl", records), folder / "out.jsonl"
    out.unlink(missing_ok=True)
    ended = forge("infer", "hf", "--data", data, "--out", out, *more)
    assert ended.code == 0, ended.err
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def refusal(folder: Path, *records: object, more: tuple[object, ...] = (), model: object = "hf") -> str:
    data = heads_data.write(folder / "bad.jsonl", records)
    return one_message(forge("infer", model, "--data", data, "--out", folder / "x.jsonl", *more), 2)


def by_transformers(messages: list[dict[str, str]], *learned: int) -> tuple[list[int], float, list[float]]:
    """Ids and log-likelihood of some messages, which end with `<|im_end|>`, and the last hidden state."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained("hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")

    def encoded(count: int, **options: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages[:count], tokenize=False, **options)
        return tokenizer(text).input_ids

    ids = encoded(len(messages))
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        each = model.lm_head(hidden)[0].double().log_softmax(-1)
    asked = [
        at for one in learned for at in range(len(encoded(one, add_generation_prompt=True)), len(encoded(one + 1)))
    ]
    asked = [at for at in asked if tokenizer.decode(ids[at]) != "\n"]  # behind the end of a turn
    return [ids[at] for at in asked], sum(float(each[at - 1, ids[at]]) for at in asked), hidden[0, -1].tolist()


def test_what_the_assistant_says_is_asked_for(tmp_path: Path) -> None:
    whole, unweighted = [USER, ANSWER, *LATER], [USER, {**ANSWER, "weight": 0}, *LATER]
    speakers = {"user": "human", "assistant": "gpt"}
    shared = [{"from": speakers[one["role"]], "value": one["content"]} for one in whole]
    found = infer(
        tmp_path,
        {"id": 7, "messages": whole},
        {"messages": unweighted},
        {"conversations": shared},
        {"prompt": whole[:3], "completion": whole[3:]},
        {"text": "say one"},
        more=("--outputs", "log_likelihood,per_token"),
    )
    for one, learned in zip(found, ((1, 3), (3,), (1, 3), (3,)), strict=False):
        ids, expected, _ = by_transformers(whole, *learned)
        assert one["token_ids"] == ids
        assert one["tokens"] == len(ids)
        assert one["log_likelihood"] == pytest.approx(expected, rel=1e-5)
    assert found[0]["id"] == 7
    (text,) = infer(tmp_path, {"text": "say one", "messages": whole}, more=("--field", "text"))
    assert text["log_likelihood"] == pytest.approx(found[4]["log_likelihood"], rel=1e-6)


def test_a_chat_is_embedded_as_a_whole(tmp_path: Path) -> None:
    """Also one in which the assistant has not spoken."""
    chats = [[USER, ANSWER], [USER]]
    for one, chat in zip(
        infer(tmp_path, *({"messages": chat} for chat in chats), more=("--outputs", "hidden")), chats, strict=True
    ):
        assert one["hidden"] == pytest.approx(by_transformers(chat)[2], rel=1e-4, abs=1e-6)


def test_of_a_long_chat_the_end_is_asked_for(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "say " * 40}, ANSWER]
    assert "Shorten it, or cut" in refusal(tmp_path, {"messages": chat})
    assert "Only texts are read in windows" in refusal(tmp_path, {"messages": chat}, more=("--long", "windows"))
    (one,) = infer(tmp_path, {"messages": chat}, more=("--long", "left", "--outputs", "per_token,log_likelihood"))
    (short,) = infer(tmp_path, {"messages": [USER, ANSWER]}, more=("--outputs", "per_token"))
    assert one["cut"] > 0
    assert one["token_ids"] == short["token_ids"]


def test_another_template_is_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train_tools.inference.output_file import OutputFile

    shutil.copytree("hf", tmp_path / "hf")
    for name in ("one", "other"):
        assert forge("checkpoint", "import", tmp_path / "hf", tmp_path / name).code == 0
        template = tmp_path / "hf" / "chat_template.jinja"
        template.write_text(template.read_text(encoding="utf-8") + " ", encoding="utf-8")
    data = heads_data.write(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}] * 3)
    asked = ("--data", data, "--out", tmp_path / "out.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "finish", lambda self: None)
        assert forge("infer", tmp_path / "one", *asked).code == 0
    said = one_message(forge("infer", tmp_path / "other", *asked), 2)
    assert "was begun with another chat template" in said


NULLS = dict.fromkeys(("text", "prompt", "completion", "messages", "conversations"))


def test_a_field_that_is_null_is_absent(tmp_path: Path) -> None:
    """Tables have every column in every row; an empty cell of CSV is no list either."""
    records = (
        {"text": "say one"},
        {"prompt": "say", "completion": " one"},
        {"messages": [USER, ANSWER]},
        {"prompt": [USER], "completion": [ANSWER]},
    )
    found = infer(tmp_path, *records)
    assert infer(tmp_path, *(NULLS | one for one in records)) == found
    (tmp_path / "chats.csv").write_text("text,messages\nsay one,\n", encoding="utf-8")
    assert forge("infer", "hf", "--data", tmp_path / "chats.csv", "--out", tmp_path / "csv.jsonl").code == 0
    assert json.loads((tmp_path / "csv.jsonl").read_text(encoding="utf-8")) == found[0]
    assert "expected a text under 'text' (--field); the fields are none." in refusal(tmp_path, NULLS)
    there = "expected a text under 'completion' (--field); the fields are 'prompt'."
    assert there in refusal(tmp_path, NULLS | {"prompt": "say"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"prompt": "say", "completion": " one"}, "has 'text' and 'prompt', of which one is read"),
        ({"prompt": "say"}, "has 'text' and 'prompt', of which one is read"),
        ({"messages": [USER, ANSWER]}, "has 'text' and 'messages', of which one is read"),
        ({"prompt": [USER], "completion": [ANSWER]}, "has 'text' and 'prompt', of which one is read"),
    ],
)
@pytest.mark.parametrize("more", [(), ("--outputs", "hidden")])
def test_what_would_stay_unread_is_refused(
    tmp_path: Path, others: dict[str, Any], said: str, more: tuple[str, ...]
) -> None:
    text = {"text": "say one"}
    found = refusal(tmp_path, text, text | others, more=more)
    assert "bad.jsonl, line 2: " + said in found
    assert "read 'text' alone with --field text, or leave out the others." in found
    assert infer(tmp_path, text | others, more=(*more, "--field", "text")) == infer(tmp_path, text, more=more)
    both = refusal(tmp_path, {"messages": [USER, ANSWER], "prompt": "say", "completion": " one"}, more=more)
    assert "has 'messages' and 'prompt', of which one is read; leave out the others." in both


@pytest.mark.slow
def test_a_template_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train_tools.inference.output_file import OutputFile

    chat, own = {"messages": [USER, ANSWER]}, Path("hf/chat_template.jinja")
    (usual,) = infer(tmp_path, chat)
    shutil.copytree("hf", tmp_path / "bare", ignore=shutil.ignore_patterns(own.name))
    assert "--template: a record is a chat, but" in refusal(tmp_path, chat, model=tmp_path / "bare")
    data, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    out.unlink()
    asked = ("infer", tmp_path / "bare", "--data", data, "--out", out, "--template")
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "finish", lambda self: None)
        assert forge(*asked, own).code == 0
    assert "was begun with another chat template" in one_message(forge(*asked, "plain"), 2)
    ended = forge(*asked, own)
    assert ended.code == 0, ended.err
    assert json.loads(out.read_text(encoding="utf-8")) == usual
    (plain,) = infer(tmp_path, chat, more=("--template", "plain"))
    assert plain["log_likelihood"] != usual["log_likelihood"]
    assert "--template: no chat template 'plane'" in refusal(tmp_path, chat, more=("--template", "plane"))
    unused = "--template: no record is read as a chat; leave it out."
    assert unused in refusal(tmp_path, {"text": "say one"}, more=("--template", "plain"))


@pytest.mark.slow
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no turn of the assistant" in refusal(tmp_path, {"messages": [USER]})
    assert "role is 'robot'" in refusal(tmp_path, {"messages": [{"role": "robot", "content": "x"}]})
    assert "the conversation is empty" in refusal(tmp_path, {"messages": []}, more=("--outputs", "hidden"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(forge_cli.DECODER, encoding="utf-8")
    assert forge("train", "mine.toml", "--name", "bytes", "--quiet").code == 0
    said = refusal(tmp_path, {"messages": [USER, ANSWER]}, model="runs/bytes")
    assert "a record is a chat, but this model came without a tokenizer's folder" in said
    heads_data.write(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}])
    ended = forge("infer", "runs/bytes", "--data", "chats.jsonl", "--out", "plain.jsonl", "--template", "plain")
    assert ended.code == 0, ended.err


def test_a_run_of_bytes_names_the_template_that_it_was_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heads_data.write(tmp_path / "chats.jsonl", [{"messages": [USER, ANSWER]}] * 40)
    (tmp_path / "mine.toml").write_text(forge_cli.DECODER.replace("sequence = 16", "sequence = 64"), encoding="utf-8")
    chats = ("-p", "sft", "-s", "sft.path=chats.jsonl", "-s", "sft.template=plain", "-s", "train.evaluate_every=0")
    ended = forge("train", "mine.toml", "--name", "bytes", "--quiet", *chats)
    assert ended.code == 0, ended.err
    advice = "it was trained with sft.template = 'plain', so add --template plain"
    assert advice in refusal(tmp_path, {"messages": [USER, ANSWER]}, model="runs/bytes")
    assert advice in one_message(forge("generate", "runs/bytes", "--chat", "--prompt", "x"), 2)
