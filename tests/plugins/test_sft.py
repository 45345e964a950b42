"""`sft`: what of a small file of chats is learned, held out, kept, and gone on with."""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chat_model
import fakes
from forge_train import MASKED, Batch, ConfigError
from forge_train.config.sections import TrainSection
from forge_train_kit.data import progress
from forge_train_kit.data.chats import open_template, write_beside
from forge_train_kit.data.learned import tell_learned
from forge_train_kit.data.tokenizers import open_tokenizer
from forge_train_plugins.data.sft import SFT
from forge_train_plugins.data.tokenizer import Tokenizer
from text_fakes import Shown

pytest.importorskip("transformers")
pytestmark = [pytest.mark.unit]
END, TURN_END = 0, 2


@pytest.fixture
def here(tmp_path: Path) -> Path:
    chat_model.write_tokenizer(tmp_path / "hf")
    chat_model.write_chats(tmp_path / "chats.jsonl")
    return tmp_path


def job(here: Path, sequence: int = 48, rank: int = 0, ranks: int = 1, seed: int = 0) -> Any:
    section = Tokenizer.Config(path=str(here / "hf"))
    plugin = Tokenizer(section)
    return SimpleNamespace(
        hooks=SimpleNamespace(
            call=lambda spec, arguments: [] if spec.name == "modalities" else plugin.tokenizer(None),  # type: ignore[arg-type]
            provider=lambda slot: slot,
            plugins={"tokenizer": plugin},
        ),
        config=SimpleNamespace(
            train=SimpleNamespace(sequence=sequence, micro_batch=1, evaluate_every=0), sections={"tokenizer": section}
        ),
        dist=SimpleNamespace(data_rank=rank, data_ranks=ranks),
        device=torch.device("cpu"),
        seed=seed,
    )


def sft(here: Path, **options: Any) -> SFT:
    options = {"path": str(here / "chats.jsonl"), "cache": str(here / "cache"), "held_out": 0.0, **options}
    return SFT(SFT.Config(**options))


def write(here: Path, *records: object) -> None:
    (here / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")


def epoch(loader: Any) -> list[Batch]:
    """All rows, each once."""
    return list(itertools.islice(loader, loader._stream.rows.count))


def learned(here: Path, batches: list[Batch]) -> Counter[str]:
    """The stretches of labels, as text with special tokens."""
    import tokenizers

    decode = tokenizers.Tokenizer.from_file(str(here / "hf" / "tokenizer.json")).decode
    found: Counter[str] = Counter()
    for batch in batches:
        for masked, group in itertools.groupby(batch.labels[0].tolist(), lambda label: label == MASKED):
            if not masked:
                found[decode(list(group), skip_special_tokens=False)] += 1
    return found


def several(*answers: str) -> dict[str, object]:
    turns = [(("user", f"say {at}"), ("assistant", answer)) for at, answer in enumerate(answers)]
    return {"messages": [{"role": role, "content": text} for pair in turns for role, text in pair]}


def test_labels_are_what_the_assistant_says_and_the_ends_of_its_turns(here: Path) -> None:
    write(here, several("zero", "one"), several("two"))
    batches = epoch(sft(here).build_data(job(here), "train"))
    assert learned(here, batches) == Counter(["zero<|im_end|>", "one<|im_end|>", "two<|im_end|>"])
    for batch in batches:
        for now, following in itertools.pairwise(range(48)):
            if batch.labels[0, now] != MASKED:
                assert batch.labels[0, now] == batch.inputs[0, following]


def test_the_last_turn_only(here: Path) -> None:
    write(here, several("zero", "one"), several("two"))
    batches = epoch(sft(here, learn="last").build_data(job(here), "train"))
    assert learned(here, batches) == Counter(["one<|im_end|>", "two<|im_end|>"])


def test_only_what_a_pattern_matches(here: Path) -> None:
    write(here, {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "hm. A: three"}]})
    loader = sft(here, learn_pattern="A: .*").build_data(job(here), "train")
    assert [*learned(here, epoch(loader))] == ["A: three<|im_end|>"]
    (problem,) = [one for one in sft(here, learn_pattern="(").check_config(fakes.run_config()) if "pattern" in one.key]
    assert problem.message.startswith("no regular expression: missing ), unterminated subpattern")


@pytest.mark.parametrize(("packing", "most"), [("pad", 1), ("best_fit", 3)])
def test_conversations_in_a_row(here: Path, packing: str, most: int) -> None:
    batches = epoch(sft(here, packing=packing).build_data(job(here), "train"))
    asked = [batch.inputs[0].tolist().count(TURN_END) // 2 for batch in batches]
    assert sum(asked) == 60
    assert max(asked) == most
    assert sum(learned(here, batches).values()) == 60


def test_the_held_out_share_is_apart_and_equal_chats_are_on_one_side(here: Path) -> None:
    write(here, *(chat_model.chat(f"say {at % 400}", str(at % 400)) for at in range(800)))
    plugin = sft(here, held_out=0.25)
    train, validation = (learned(here, epoch(plugin.build_data(job(here), split))) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert not train.keys() & validation.keys()
    assert (train + validation).total() == 800
    assert {*train.values(), *validation.values()} == {2}
    assert 140 < validation.total() < 260


def test_goes_on_in_the_middle_of_an_epoch_on_other_ranks(here: Path) -> None:
    expected = [batch.inputs[0].tolist() for batch in itertools.islice(sft(here).build_data(job(here), "train"), 70)]
    first = sft(here).build_data(job(here), "train")
    begun = [next(first).inputs[0].tolist() for _ in range(7)]
    state = json.loads(json.dumps(first.state_dict()))
    others = [sft(here).build_data(job(here, rank=rank, ranks=3), "train") for rank in range(3)]
    for loader in others:
        loader.load_state_dict(state)
    rest = [next(loader).inputs[0].tolist() for _ in range(21) for loader in others]
    assert begun + rest == expected


def test_what_one_makes_is_shared_by_all_who_wait(here: Path) -> None:
    """Each has a lock of its own on the folder, in threads as in processes."""
    with ThreadPoolExecutor(3) as pool:
        every = [pool.submit(lambda: next(sft(here).build_data(job(here), "train"))) for _ in range(3)]
        rows = [one.result().inputs.tolist() for one in every]
    assert rows[0] == rows[1] == rows[2]
    assert len(list((here / "cache").iterdir())) == 1
    made = next((here / "cache").glob("*/train-00000.tokens")).stat()
    sft(here).build_data(job(here), "train")
    assert next((here / "cache").glob("*/train-00000.tokens")).stat().st_mtime_ns == made.st_mtime_ns


@pytest.mark.parametrize("left", [0, 40])
def test_what_was_made_and_is_damaged_is_made_again(here: Path, left: int) -> None:
    expected = next(sft(here).build_data(job(here), "train")).inputs.tolist()
    shard = next((here / "cache").glob("*/train-00000.tokens"))
    shard.write_bytes(shard.read_bytes()[:left])
    assert next(sft(here).build_data(job(here), "train")).inputs.tolist() == expected


def test_another_template_in_the_same_place_is_rendered_anew(here: Path) -> None:
    before = next(sft(here).build_data(job(here), "train")).inputs.tolist()
    template = here / "hf" / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|im_end|>\n'", "'<|im_end|>'"))
    after = next(sft(here).build_data(job(here), "train")).inputs.tolist()
    assert after != before
    template.write_text(chat_model.CHATML)
    assert next(sft(here).build_data(job(here), "train")).inputs.tolist() == before


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (
            {"instruction": "x", "output": None, "messages": None},
            r"chats.jsonl, line 2: output is null; a record of instruction and output needs a value",
        ),
        ({"messages": None}, r"chats.jsonl, line 2: messages is null"),
        ({"text": "x"}, r"chats.jsonl, line 2: its fields \(text\) are no conversation's"),
        (several(" "), r"chats.jsonl, line 2: the assistant's turn is empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, r"chats.jsonl, line 2: there is no turn of the assistant"),
        (several("long " * 50), r"sft.long: 1 of 2 texts are longer than a row of 48 tokens"),
    ],
)
def test_a_record_that_can_not_be_learned_is_named(here: Path, record: object, said: str) -> None:
    write(here, several("one"), record)
    with pytest.raises(ConfigError, match=said):
        sft(here).build_data(job(here), "train")


def test_rendering_tells_how_far_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    shown, log = Shown(), logging.getLogger(progress.LOGGER)
    monkeypatch.setattr(log, "handlers", [shown])
    monkeypatch.setattr(log, "level", logging.INFO)
    sft(here).build_data(job(here), "train")
    *passing, (last_passes, last) = shown.lines
    assert passing
    assert all(passes and re.match(r"tokenising: +\d+% of [\d.]+ k?B, ", line) for passes, line in passing)
    assert not last_passes
    assert re.match(r"sft: tokenised [\d.]+ k?B, .*B/s, in 0:\d\d$", last)
    shown.lines.clear()
    sft(here).build_data(job(here), "train")
    assert not [line for passes, line in shown.lines if not passes], "it is taken from the cache"


def test_a_run_says_first_how_much_it_learns(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(here, several("one"), several("two"), several("long " * 50))
    for long, lost, count in (("drop", "1 are dropped", 2), ("right", "1 are cut", 3), ("left", "1 are cut", 3)):
        plugin, run = sft(here, long=long, packing="pad"), job(here)
        run.config.train, run.dist.main = TrainSection(steps=60, sequence=48, global_batch=1, micro_batch=1), True
        loader = plugin.build_data(run, "train")
        labels = sum(int((batch.labels != MASKED).sum()) for batch in epoch(loader))
        caplog.clear()
        with caplog.at_level(logging.INFO, "forge_train"):
            tell_learned("sft", "conversations", plugin._sides or {}, plugin._epoch, run)  # type: ignore[arg-type]
        told, warned = (record.getMessage() for record in caplog.records)
        assert re.match(
            rf"sft: {count} conversations of \d+ tokens, {labels} of them learned \(.*%\); "
            rf"the longest has \d+ tokens; {lost} \(sft.long\); 0 more held out; "
            rf"{60 / count:.2f} epochs of {count} rows in this run$",
            told,
        ), (told, labels)
        assert f"goes through its {count} conversations {60 / count:.1f} times" in warned
        assert f"one epoch is about {count} steps" in warned
    run.config.train = TrainSection(steps=60, sequence=48, global_batch=count, micro_batch=1)
    tell_learned("sft", "conversations", plugin._sides or {}, plugin._epoch, run)  # type: ignore[arg-type]
    assert "one epoch is about 1 step (train.steps)." in caplog.records[-1].getMessage()


class TestTemplates:
    def test_without_one(self, here: Path) -> None:
        chat_model.write_tokenizer(here / "hf", template=None)
        (here / "hf" / "chat_template.jinja").unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=r"^sft.template: .*hf has no chat template .* choose 'chatml'"):
            sft(here).build_data(job(here), "train")

    def test_with_tokens_that_the_tokenizer_lacks(self, here: Path) -> None:
        (here / "hf" / "chat_template.jinja").write_text(chat_model.CHATML.replace("im_end", "turn_end"))
        with pytest.raises(ConfigError, match=r"ends a turn with '<\|turn_end\|>', which is no token"):
            sft(here).build_data(job(here), "train")

    def test_the_chosen_one_and_its_end_are_written_beside_the_tokenizer(self, here: Path) -> None:
        folder = here / "hf"
        (folder / "chat_template.jinja").unlink()
        (folder / "generation_config.json").write_text('{"_from_model_config": true, "temperature": 0.6}')
        tokenizer = open_tokenizer(str(folder))
        assert tokenizer.stops == (END,)
        for _ in range(2):  # at each save
            write_beside(folder, open_template("chatml", folder), tokenizer, chosen=True)
            assert json.loads((folder / "generation_config.json").read_text()) == {
                "temperature": 0.6,
                "eos_token_id": [END, TURN_END],
                "_forge_former_stops": [],
            }
        again = open_tokenizer(str(folder))
        assert again.stops == (END, TURN_END)
        assert again.digest == tokenizer.digest, "a run continues with the files that it wrote"
        own = open_template("", folder).render([{"role": "user", "content": "a"}], generation_prompt=True)
        assert own[0] == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_records_with_other_names(here: Path) -> None:
    write(here, {"row": {"question": "say", "answer": "one"}})
    names = {"prompt": "row.question", "completion": "row.answer"}
    assert learned(here, epoch(sft(here, rename=names).build_data(job(here), "train"))) == {"one<|im_end|>": 1}
    write(here, {"dialog": [{"who": "me", "text": "say"}, {"who": "bot", "text": "two"}]})
    names, roles = {"messages": "dialog", "role": "who", "content": "text"}, {"me": "user", "bot": "assistant"}
    found = epoch(sft(here, rename=names, roles=roles).build_data(job(here), "train"))
    assert learned(here, found) == {"two<|im_end|>": 1}
    with pytest.raises(ConfigError, match=r"^sft\.rename: no field 'promt' is read; .* Did you mean 'prompt'\?"):
        sft(here, rename={"promt": "question"}).build_data(job(here), "train")


def test_half_a_surrogate_pair_is_refused_with_its_line(here: Path) -> None:
    write(here, several("one"), several("t\ud83do"))
    with pytest.raises(ConfigError, match=r"chats\.jsonl, line 2 has half a surrogate pair at character"):
        sft(here).build_data(job(here), "train")


def test_what_the_template_leaves_out_is_refused_with_its_line(here: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write(here, several("one"), {"messages": messages})
    with pytest.raises(ConfigError, match=r"line 2: .*chat template leaves out messages\[1\]\.tool_calls\. Take"):
        sft(here).build_data(job(here), "train")


@pytest.mark.parametrize(("long", "other"), [("right", "left"), ("left", "right")])
def test_all_that_is_learned_is_never_cut_away(here: Path, long: str, other: str) -> None:
    asked = {"role": "user", "content": "a" * 80}
    answer = {"role": "assistant", "content": "one"}
    write(here, {"messages": [asked, answer] if long == "right" else [answer, asked]}, several("two"))
    with pytest.raises(
        ConfigError, match=rf"sft\.long: '{long}' cuts away all .* of 1 of 2 texts\. .* choose {other} or"
    ):
        sft(here, long=long).build_data(job(here), "train")
    assert learned(here, epoch(sft(here, long=other).build_data(job(here), "train")))["two<|im_end|>"] == 1


def test_options_of_the_template_are_learned_and_saved(here: Path) -> None:
    template = here / "hf" / "chat_template.jinja"
    opened = "'<|im_start|>assistant\n' + ('(calm) ' if mood is defined and mood == 'calm' else '')"
    source = chat_model.CHATML.replace("'<|im_start|>assistant\n'", opened).replace(
        "m.role + '\n' +", "m.role + '\n' + ('(calm) ' if m.role == 'assistant' and mood == 'calm' else '') +"
    )
    template.write_text(source)
    write(here, several("one"))
    plain, calm = (sft(here, template_options=options) for options in ({}, {"mood": "calm"}))
    rows = [epoch(plugin.build_data(job(here), "train"))[0].inputs.tolist() for plugin in (plain, calm)]
    assert rows[0] != rows[1]
    assert learned(here, epoch(calm.build_data(job(here), "train"))) == Counter(["one<|im_end|>"])
    chosen = open_template("", here / "hf", options={"mood": "calm"})
    write_beside(here / "hf", chosen, open_tokenizer(str(here / "hf")), chosen=True)
    text, _ = open_template("", here / "hf").render([{"role": "user", "content": "x"}], generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n(calm) ")
    with pytest.raises(
        ConfigError, match=r"sft\.template_options: .* reads no option 'mode'; it reads mood\. Did you mean 'mood'"
    ):
        sft(here, template_options={"mode": 1}).build_data(job(here), "train")


def test_a_run_s_copy_of_the_tokenizer_gives_the_same_tokens(here: Path) -> None:
    before = [batch.inputs.tolist() for batch in epoch(sft(here).build_data(job(here), "train"))]
    folder = here / "hf"
    write_beside(folder, open_template("", folder), open_tokenizer(str(folder)), chosen=False)
    assert TURN_END in open_tokenizer(str(folder)).stops
    again = sft(here, cache=str(here / "other"))
    assert [batch.inputs.tolist() for batch in epoch(again.build_data(job(here), "train"))] == before


def test_a_row_for_each_turn(here: Path) -> None:
    turns = [message for at in ("one", "two", "three") for message in chat_model.chat(f"say {at}", at)["messages"]]  # type: ignore[attr-defined]
    write(here, {"messages": turns})
    plugin = sft(here, each_turn=True, packing="pad")
    loader = plugin.build_data(job(here), "train")
    assert learned(here, epoch(loader)) == Counter(f"{at}<|im_end|>" for at in ("one", "two", "three"))
    (problem,) = SFT(SFT.Config(path=plugin.config.path, each_turn=True, learn="last")).check_config(SimpleNamespace())  # type: ignore[arg-type]
    assert problem.key == "sft.learn"


def test_special_tokens_of_users_stay_text(here: Path) -> None:
    write(here, chat_model.chat("say <|im_end|>", "one"))
    counts = []
    for split in (False, True):
        plugin = sft(here, split_special_tokens=split, packing="pad")
        (batch,) = epoch(plugin.build_data(job(here), "train"))
        counts.append((batch.inputs == TURN_END).sum().item())
    assert counts == [3, 2]
