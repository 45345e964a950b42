"""The cache of tokens knows every file that decides a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import chat_model
from forge_train import ConfigError
from forge_train_kit.data.chats import open_template, write_beside
from forge_train_kit.data.prepare import Preparation, Report, prepare, settled
from forge_train_kit.data.prepare.cached import obtained
from forge_train_kit.data.tokenizers import open_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.unit


@pytest.fixture
def wanted(tmp_path: Path) -> Preparation:
    chat_model.write_tokenizer(tmp_path / "hf")
    chat_model.write_chats(tmp_path / "chats.jsonl")
    return Preparation((str(tmp_path / "chats.jsonl"),), Path(), tokenizer=str(tmp_path / "hf"), chat=True)


def change(file: Path, **values: Any) -> None:
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(known | values))


def settle(wanted: Preparation) -> Preparation:
    return settled(wanted, str(Path(wanted.tokenizer).parent / "cache"), "sft")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"eos_token_id": 2}),
        ("config.json", {"model_type": "gpt2"}),
        ("generation_config.json", {"eos_token_id": [0, 2]}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}),
        ("tokenizer_config.json", {"split_special_tokens": True}),
        ("special_tokens_map.json", {"extra_special_tokens": ["<tool>"]}),
        ("added_tokens.json", {"<tool>": 340}),
        ("chat_template.jinja", {}),
    ],
)
def test_what_decides_a_token_is_in_its_name(wanted: Preparation, name: str, values: dict[str, Any]) -> None:
    folder, before = Path(wanted.tokenizer), settle(wanted)
    change(folder / "config.json", hidden_size=32)
    assert settle(wanted).out == before.out, "the size of a model decides no token"
    if values:
        change(folder / name, **values)
    else:
        (folder / name).write_text(chat_model.CHATML + " ")
    assert settle(wanted).out != before.out


def test_tokens_are_made_again_where_stops_have_changed(wanted: Preparation) -> None:
    ends = []
    for stops in ([0], [0, 2]):
        change(Path(wanted.tokenizer) / "generation_config.json", eos_token_id=stops)
        one = settle(wanted)
        prepare(one, Report(), key="sft.path", wait=True)
        ends.append(one.out)
    assert ends[0] != ends[1]


def test_the_stop_that_a_run_adds_to_its_copy_is_not_another_tokenizer(wanted: Preparation) -> None:
    before, folder = settle(wanted), Path(wanted.tokenizer)
    write_beside(folder, open_template("", folder), open_tokenizer(str(folder)), chosen=False)
    assert 2 in open_tokenizer(str(folder)).stops
    assert settle(wanted).out == before.out, "a resumed run finds its tokens"


def test_a_stale_folder_is_named(wanted: Preparation) -> None:
    class Job:
        class hooks:
            @staticmethod
            def call(spec: Any, arguments: Any) -> Any:
                return open_tokenizer("bytes")

    one = settle(wanted)
    with pytest.raises(ConfigError, match=rf"the tokens in {one.out} were made with another tokenizer.*delete"):
        obtained(one, Job, "sft")  # type: ignore[arg-type]
