"""The page of questions: twenty of them, short, each with commands, and those that are cheap are typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from forge_cli import forge

PAGE = (Path(__file__).parents[2] / "docs" / "questions.md").read_text(encoding="utf-8")
QUESTIONS = {
    part.partition("\n")[0]: part.partition("\n")[2] for part in re.split(r"^### ", PAGE, flags=re.MULTILINE)[1:]
}
COMMANDS = {title: re.findall(r"^\$ (forge .*)$", text, re.MULTILINE) for title, text in QUESTIONS.items()}
SLOW = re.compile(
    r"forge (verify|trace|doctor|data prepare|train quickstart)|(?!forge launch).* --nproc"
    r"|.* (Qwen3|--adapter|-p (profile|anomaly|tokens))"
)
"""Several processes, a machine's check, or a model that is not here: other pages' tests type the like."""
MINE = """preset = "quickstart"
[train]
steps = 4
sequence = 32
global_batch = 16
evaluate_every = 2
evaluate_batches = 1
[decoder]
dim = 16
layers = 1
heads = 2
[text]
path = "texts"
[sample]
tokens = 4
[checkpoint]
every = 2
[log]
every = 1
"""
TASKS = """[colours]
kind = "choice"
data = "questions.jsonl"
prompt = "{question}"
choices = "options"
answer = "right"
"""


def test_there_are_twenty_questions_with_short_answers() -> None:
    assert len(QUESTIONS) == 20
    for title, text in QUESTIONS.items():
        prose = re.sub(r"^```.*?^```$", "", text.partition("\n## ")[0], flags=re.MULTILINE | re.DOTALL)
        assert title.endswith("?") or "?" in title
        assert COMMANDS[title], title
        assert len([line for line in prose.splitlines() if line.strip()]) <= 8, title


@pytest.mark.slow
def test_the_cheap_commands_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("say one and then say two\n" * 400, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(MINE, encoding="utf-8")
    (tmp_path / "tasks.toml").write_text(TASKS, encoding="utf-8")
    question = {"question": "The sky is", "options": [" blue", " square"], "right": 0}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 60, encoding="utf-8")
    for name in ("first", "second"):
        ended = forge("train", "mine.toml", "--name", name, "--quiet")
        assert ended.code == 0, ended.err
    typed = [line for lines in COMMANDS.values() for line in lines if not SLOW.match(line)]
    assert len(typed) >= 12
    for line in typed:
        ended = forge(*shlex.split(line)[1:])
        assert ended.code == 0, f"{line}\n{ended.out}{ended.err}"
    assert (tmp_path / "both.html").is_file()
    assert (tmp_path / "first-hf" / "model.safetensors").is_file()
    assert list(tmp_path.glob("*.sbatch"))
