"""`forge config import axolotl`: files of axolotl become configurations that resolve; nothing is lost in silence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forge_command import Forge
from forge_train_cli.axolotl import ELSEWHERE, LISTS, SAME, WORDS
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.unit

TUNED: dict[str, Any] = {
    "base_model": "hf",
    "datasets": [{"path": "chats.jsonl", "type": "chat_template"}],
    "chat_template": "chatml",
    "adapter": "qlora",
    "load_in_4bit": True,
    "lora_r": 8,
    "lora_target_modules": ["q_proj", "down_proj"],
    "lora_modules_to_save": ["lm_head"],
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "adamw_torch",
    "lr_scheduler": "linear",
    "learning_rate": "2e-4",  # which YAML 1.1 takes for a text
    "warmup_ratio": 0.1,
    "val_set_size": 0.05,
    "bf16": "auto",
    "gradient_checkpointing": True,
    "special_tokens": {"pad_token": "<pad>"},
    "kto_desirable_weight": 0.2,
    "eval_steps": 0.1,
    "wandb_project": None,
}
EXPECTED = {
    "adamw": {"lr": 0.0002, "weight_decay": 0.0},
    "linear": {"warmup": 0.1},
    "lora": {"rank": 8, "base": "nf4", "modules": ["*.q", "*.down"], "tune": ["head"]},
    "sft": {"path": "chats.jsonl", "template": "chatml", "held_out": 0.05, "packing": "pad"},
    "train": {"sequence": 2048, "micro_batch": 2, "global_batch": 8, "epochs": 3, "precision": "bf16"},
}
LEFT = {"gradient_accumulation_steps", "special_tokens", "kto_desirable_weight", "eval_steps"}
OTHERS: tuple[tuple[dict[str, Any], list[str], dict[str, Any]], ...] = (
    ({"rl": "simpo", "rl_beta": 2.0, "simpo_gamma": 1.0}, ["dpo", "text_pairs"], {"beta": 2.0, "target_margin": 1.0}),
    ({"rl": "kto", "rl_beta": 0.2}, ["kto", "text_feedback"], {"beta": 0.2}),
    (
        {"datasets": [{"path": "texts", "type": "completion"}], "fsdp": ["full_shard"], "chat_template": "chatml"},
        ["fsdp2"],
        {"path": "texts"},
    ),
    ({"optimizer": "lion_pytorch", "learning_rate": 1e-5, "max_steps": 9}, ["sft", "lion"], {"lr": 1e-5}),
)


def imported(forge: Forge, folder: Path, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    (folder / "theirs.yml").write_text(yaml.safe_dump(given), encoding="utf-8")
    text = forge("config", "import", "axolotl", str(folder / "theirs.yml")).out
    return text, tomllib.loads(text)


def test_a_file_is_translated(forge: Forge, tmp_path: Path) -> None:
    text, made = imported(forge, tmp_path, TUNED)
    assert made == {"preset": "finetune", "plugins": ["sft", "linear", "lora", "ac"], **EXPECTED}
    assert {*re.findall(r"^# Left out: (\w+) ", text, re.MULTILINE)} == LEFT
    assert "# forge train THIS_FILE --from hf" in text
    (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    config = resolve(Request(config=str(tmp_path / "ours.toml"), set=("train.init_from=x",)), training=False).config
    assert config.sections["lora"].rank == 8


@pytest.mark.parametrize(("given", "plugins", "section"), OTHERS)
def test_other_methods(
    forge: Forge, tmp_path: Path, given: dict[str, Any], plugins: list[str], section: dict[str, Any]
) -> None:
    text, made = imported(forge, tmp_path, given)
    assert made["plugins"] == plugins
    assert any(section.items() <= one.items() for one in made.values() if isinstance(one, dict))
    (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    resolve(Request(config=str(tmp_path / "ours.toml"), set=("train.init_from=x",)), training=False)


def test_every_key_of_the_page_is_known() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text(encoding="utf-8")
    cells = [line.split("|")[3] for line in page.splitlines() if re.match(r"\| [`a-z]", line)]
    keys = {word for cell in cells for word in re.findall(r"`([a-z_0-9]+)(?::[^`]*)?`", cell)}
    others = {"base_model", "datasets", *ELSEWHERE}
    told = {"roles_to_train", "train_on_eos", "special_tokens", "kd_trainer"}
    assert keys - {*SAME, *WORDS, *LISTS, *others} == told | {"lora_target_parameters"}


def test_defaults_that_differ_are_written(forge: Forge, tmp_path: Path) -> None:
    text, made = imported(forge, tmp_path, {"datasets": [{"path": "c.jsonl"}], "lr_scheduler": "constant_with_warmup"})
    assert made["sft"] == {"path": "c.jsonl", "held_out": 0.0, "packing": "pad"}
    assert made["train"] == {"evaluate_every": 0}
    assert made["adamw"] == {"weight_decay": 0.0}
    assert "constant" in made["plugins"]
    assert "Left out" not in text


def test_what_data_sets_lose_is_told_and_their_paths_stay(forge: Forge, tmp_path: Path) -> None:
    sets = [{"path": "a.jsonl", "type": "chatml.intel", "split": "train"}, {"path": "b.jsonl", "type": "completion"}]
    text, made = imported(forge, tmp_path, {"rl": "dpo", "base_model": "hf", "datasets": sets})
    assert made["text_pairs"]["path"] == ["a.jsonl", "b.jsonl"]
    assert "# Left out: datasets has split, for which text_pairs has options of its own" in text
    assert "records of type chatml.intel, completion, which text_pairs may read or render otherwise" in text
    assert "# forge checkpoint import hf base\n# forge train THIS_FILE --from base\n" in text


@pytest.mark.parametrize(
    ("text", "says"), [("- 1", "expected keys and values of axolotl, found list"), ("a: [", "can't")]
)
def test_other_files_are_refused(forge: Forge, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "theirs.yml").write_text(text, encoding="utf-8")
    assert says in forge("config", "import", "axolotl", str(tmp_path / "theirs.yml"), fails=2).err
