"""Every command that is proposed at the end of a run does what it says, typed as it stands there."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

import chat_model
from forge_command import Ended, Forge
from forge_train_cli.closing import activation, resume_command

pytestmark = [pytest.mark.e2e]


def proposed(ended: Ended) -> dict[str, list[str]]:
    """Label → command, as words."""
    lines = ended.out.split("\nNext\n")[1].splitlines()
    rows = [(line[2:16].strip(), line[16:].strip()) for line in lines if line.startswith("  ")]
    return {label: shlex.split(command) for label, command in rows if not label.startswith("first")}


def lines(path: Path, *records: str) -> None:
    path.write_text("\n".join(records) + "\n", encoding="utf-8")


def type_all(forge: Forge, ended: Ended) -> set[str]:
    commands = proposed(ended)
    for command in commands.values():
        assert command[0] == "forge"
        forge(*command[1:])
    return set(commands)


CASES: dict[str, tuple[list[str], set[str]]] = {
    "text": ([], {"write with it", "its numbers", "train further", "Hugging Face"}),
    "classify": (
        [
            "--without",
            "text",
            "-p",
            "classify,text_labels",
            "-s",
            "classify.classes=['a','b']",
            "-s",
            "text_labels.path=labels.jsonl",
        ],
        {"its numbers", "train further", "Hugging Face"},
    ),
    "reward": (
        [
            "--without",
            "text",
            "-p",
            "reward,text_pairs",
            "-s",
            "text_pairs.path=pairs.jsonl",
            "-s",
            "text_pairs.template=plain",
        ],
        {"its numbers", "train further", "Hugging Face"},
    ),
    "pictures": (
        [
            *("--without", "text", "-p", "multimodal,image", "-s", "multimodal.path=pictures.jsonl"),
            *("-s", "image.size=32", "-s", "image.dim=12"),
        ],
        {"write with it", "its numbers", "train further"},
    ),
    "sft": (
        ["--without", "text", "-p", "sft,tokenizer", "-s", "tokenizer.path=hf", "-s", "sft.path=chats.jsonl"],
        {"write with it", "its numbers", "train further", "Hugging Face"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_proposed_can_be_typed(forge: Forge, folder: Path, case: str) -> None:
    pytest.importorskip("transformers")
    options, expected = CASES[case]
    lines(folder / "labels.jsonl", *(f'{{"text": "it is {n}", "label": "{"ab"[n % 2]}"}}' for n in range(60)))
    lines(folder / "pairs.jsonl", *(f'{{"prompt": "", "chosen": "{n}", "rejected": "no {n}"}}' for n in range(60)))
    if case == "sft":
        chat_model.write_tokenizer(folder / "hf", special=["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
        chat_model.write_chats(folder / "chats.jsonl")
    if case == "pictures":
        pytest.importorskip("PIL.Image").new("RGB", (32, 32)).save(folder / "a.png")
        lines(folder / "pictures.jsonl", *(f'{{"text": "<image>{n}", "images": ["a.png"]}}' for n in range(60)))
    same = ["-s", "train.steps=2", "-s", "train.sequence=48", "-s", "train.evaluate_every=0"]
    ended = forge("train", "tiny.toml", *same, *options)
    if case == "sft":
        assert proposed(ended)["write with it"][3:] == ["--chat", "--prompt", "Who are you?"]
    if case == "pictures":
        assert proposed(ended)["write with it"][3:] == ["--image", str(folder / "a.png")]
    assert type_all(forge, ended) == expected


@pytest.mark.slow
def test_a_run_on_several_processes_is_told_with_their_number(forge: Forge) -> None:
    experts = ["-p", "moe,ep", "-s", "parallel.ep=2", "-s", "moe.experts=4", "-s", "moe.hidden=8"]
    ended = forge("train", "tiny.toml", "--nproc", "2", "-s", "train.steps=1", "-s", "train.micro_batch=1", *experts)
    assert "failed in export_hf" not in ended.out + ended.err
    commands = proposed(ended)
    assert commands["train further"][-2:] == commands["is it right?"][-2:] == ["--nproc", "2"]
    forge(*commands["Hugging Face"][1:])


def test_a_resume_has_the_number_of_processes_and_quotes() -> None:
    assert resume_command(Path("runs/a b"), 2) == "forge train --resume 'runs/a b' --nproc 2"
    assert resume_command(Path("runs/a"), 1) == "forge train --resume runs/a"


def test_a_shell_that_does_not_find_forge_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert activation() == "source .venv/bin/activate"
    (tmp_path / "forge").touch(mode=0o755)
    assert not activation()
