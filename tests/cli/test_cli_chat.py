"""`forge chat`: what is said, what is remembered, and how it is left."""

from __future__ import annotations

import io
import json
import math
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import chat_model
import forge_cli
import full_disk
from forge_cli import Ended, forge, one_message
from forge_train_kit.data.chats import conversation
from forge_train_tools import generate
from forge_train_tools.generation.drafts import Drafts
from forge_train_tools.generation.rows import Choice, TextRow
from forge_train_tools.testing import run_forge

pytest.importorskip("transformers")

Typed = Callable[..., Ended]
COLD = ("--temperature", "0", "--tokens", "8")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "hf"
    chat_model.write_model(folder, head=8.0)
    return folder


@pytest.fixture
def chat(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typed:
    monkeypatch.chdir(tmp_path)

    def typed(lines: str | bytes, *more: object, path: Path = hf) -> Ended:
        content = lines.encode() if isinstance(lines, str) else lines
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return forge("chat", path, *more)

    return typed


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def expected(hf: Path, *messages: dict[str, str]) -> str:
    return generate(hf, [{"messages": messages}], tokens=8, temperature=0).answers[0].text


def saved(file: str) -> list[dict[str, str]]:
    (record,) = map(json.loads, Path(file).read_text().splitlines())
    return list(conversation(record).messages)


def test_each_line_is_answered_with_those_before(hf: Path, chat: Typed) -> None:
    first = expected(hf, said("say 3"))
    second = expected(hf, said("say 3"), answered(first), said("say 4"))
    ended = chat("say 3\n\nsay 4\n", *COLD)
    assert (ended.code, ended.out) == (0, f"{first}\n{second}\n")
    assert second != expected(hf, said("say 4"))


def test_a_seed_gives_the_same_chat_and_each_answer_is_drawn_anew(hf: Path, chat: Typed) -> None:
    asked = "say 3\n/reset\nsay 3\n"
    one, again, other = (chat(asked, "--tokens", 8, "--seed", seed).out for seed in (1, 1, 2))
    assert one == again != other
    assert one.splitlines()[0] != one.splitlines()[1]
    assert one.startswith(generate(hf, [{"messages": [said("say 3")]}], tokens=8, seed=1).answers[0].text + "\n")


def test_system_reset_and_save(hf: Path, chat: Typed) -> None:
    lines = ("/system be brief", "say 3", "/save a.jsonl", "/reset", "//x", "/save b.jsonl")
    more = ("/reset", "/system", "say 3", "/save c.jsonl")
    ended = chat("\n".join((*lines, *more)), *COLD, "--system", "be loud")
    assert ended.code == 0, ended.err
    system = {"role": "system", "content": "be brief"}
    first = expected(hf, system, said("say 3"))
    assert saved("a.jsonl") == [system, said("say 3"), answered(first)]
    second = expected(hf, system, said("/x"))
    assert saved("b.jsonl") == [system, said("/x"), answered(second)]
    third = expected(hf, said("say 3"))
    assert saved("c.jsonl") == [said("say 3"), answered(third)]
    assert ended.out == f"{first}\n{second}\n{third}\n"


@pytest.mark.parametrize("late", ["/system be brief", "/system"])
def test_a_chat_is_saved_with_the_system_that_all_answers_followed(hf: Path, chat: Typed, late: str) -> None:
    ended = chat(f"say 3\n{late}\nsay 4\n/save a.jsonl", *COLD, "--system", "be loud")
    assert ended.code == 2
    assert "stands before all answers, and there are some; /reset forgets them." in ended.err
    system, asked, first, again, second = saved("a.jsonl")
    assert system == {"role": "system", "content": "be loud"}
    assert first["content"] == expected(hf, system, asked)
    assert second["content"] == expected(hf, system, asked, first, again)


def test_the_oldest_turns_go_when_there_is_no_room(hf: Path, chat: Typed) -> None:
    ended = chat("say 3\nsay 4\nsay one and two\n/save all.jsonl\n/quit\nsay 9\n", *COLD, "--system", "be brief")
    found = re.search(
        r"longer than what the model reads at once: it answers without the (\d) oldest turns\.", ended.err
    )
    assert found is not None, ended.err
    system, *turns = saved("all.jsonl")
    assert len(turns) == 6, "all are kept for the file"
    kept = turns[2 * int(found[1]) : -1]
    assert kept
    assert (
        turns[-1]["content"] == expected(hf, system, *kept) != expected(hf, system, *turns[2 * int(found[1]) - 2 : -1])
    )


def test_mistakes_do_not_end_the_chat(hf: Path, chat: Typed) -> None:
    Path("mine").write_text("mine")
    lines = ("/hlp", "x" * 100, "/save", "/save mine", "/save no/file", "/reset now", "say 3", "/save mine")
    ended = chat("\n".join(lines), *COLD)
    assert ended.code == 2
    assert ended.out == expected(hf, said("say 3")) + "\n"
    errors = [line for line in ended.err.splitlines() if line.startswith("Error: ")]
    for error, wanted in zip(
        errors,
        (
            "There is no /hlp; /help lists the commands. Did you mean '/help'?",
            "The prompt has 10",
            "/save needs a file",
            "There is nothing to save yet.",
            "There is nothing to save yet.",
            "/reset takes nothing after it.",
            "mine exists; name a new file.",
        ),
        strict=True,
    ):
        assert wanted in error
    assert Path("mine").read_text() == "mine"


def test_a_full_disk_leaves_no_half_of_a_chat(chat: Typed) -> None:
    with full_disk.full_for("chat.jsonl"):
        ended = chat("say 3\n/save chat.jsonl\n", *COLD)
    assert "chat.jsonl: can't be written: No space left on device" in ended.err
    assert not Path("chat.jsonl").exists(), "and can be saved under that name once there is room"


def test_help_lists_the_commands(chat: Typed) -> None:
    told = chat("/help\n").err
    assert all(name in told for name in ("/system TEXT", "/reset", "/save FILE", "/quit"))


@pytest.mark.slow
def test_what_cannot_chat_is_told_at_once(hf: Path, chat: Typed, tmp_path: Path) -> None:
    assert "temperature: expected" in one_message(chat("", "--temperature", "-1"), 2)
    assert "stdin is not UTF-8 in line 2." in one_message(chat(b"/reset\n\xff\n"), 2)
    folder = tmp_path / "hf"
    shutil.copytree(hf, folder)
    template = folder / "chat_template.jinja"
    template.write_text("{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}hi")
    assert "no system" in one_message(chat("", "--system", "x", path=folder), 2)
    ended = chat("/system x\nsay 3\n/save x.jsonl", *COLD, path=folder)
    assert "no system" in ended.err
    assert [one["role"] for one in saved("x.jsonl")] == ["user", "assistant"]
    template.unlink()
    assert "has no chat template" in one_message(chat("", path=folder), 2)
    assert chat("say 3\n", *COLD, "--template", "chatml", path=folder).out == chat("say 3\n", *COLD).out


def test_ctrl_c_stops_the_answer_and_what_was_said_stays(
    hf: Path,
    chat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add, count = TextRow.add, iter(range(1000))

    def interrupted(self: TextRow, choice: Choice) -> None:
        add(self, choice)
        if next(count) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextRow, "add", interrupted)
    ended = chat("say 3\nsay 4\n/save a.jsonl", *COLD)
    assert ended.code == 0
    assert "(Stopped.)" in ended.err
    asked, part, again, whole = saved("a.jsonl")
    monkeypatch.setattr(TextRow, "add", add)
    full = expected(hf, said("say 3"))
    assert full.startswith(part["content"])
    assert 0 < len(part["content"]) < len(full)
    assert whole["content"] == expected(hf, asked, part, again)


def test_control_characters_are_visible_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    from forge_train_cli.chat import Talk

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Wild:
        left_out, completion = 0, None

        def answer(self, text: str) -> Iterator[str]:
            yield from ("a\x1b[2J", "b\n\tc")

    monkeypatch.setattr("sys.stdout", out := Terminal())
    assert Talk(Wild()).take("hi")  # type: ignore[arg-type]
    assert out.getvalue() == "a\\x1b[2Jb\n\tc\n"


SPAWN = """
import os, pty, signal, sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell ignores for what it runs in the background
sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))
"""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.dist
def test_on_a_terminal(hf: Path) -> None:
    """At the prompt Ctrl-C says how to leave, and Ctrl-D leaves."""
    given = [sys.executable, "-c", SPAWN, *forge_cli.command("chat", hf, "--tokens", "40")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": forge_cli.environment(TERM="dumb")}
    with subprocess.Popen(given, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert "/help lists the commands, Ctrl-D leaves." in until_prompt(process)
            said = until_prompt(process, b"say 3\n")
            assert "(The answer ended" in said
            assert "(Ctrl-D leaves.)" in until_prompt(process, b"\x03", again=5)
            process.stdin.write(b"\x04")
            process.stdin.flush()
            assert process.wait(60) == 0
        finally:
            process.kill()


def until_prompt(
    process: subprocess.Popen[bytes], typed: bytes = b"", timeout: float = 120, again: float = math.inf
) -> str:
    """What the terminal shows until it waits for a message.

    Type it `again` after so many seconds: Python hears no Ctrl-C between the prompt and its wait for a key.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    shown, began, last = "", time.monotonic(), -math.inf
    while not shown.endswith("\n> ") and shown != "> ":
        assert time.monotonic() - began < timeout, shown
        if time.monotonic() - last >= again or last == -math.inf:
            process.stdin.write(typed)
            process.stdin.flush()
            last = time.monotonic()
        if select.select([process.stdout], [], [], 1)[0]:
            shown += os.read(process.stdout.fileno(), 4096).decode(errors="replace").replace("\r", "")
    return shown


def test_drafts_change_no_answer(tmp_path: Path, chat: Typed) -> None:
    more = {"mtp.depths": 2, "adamw.lr": 0.02, "train.sequence": 32}
    run = run_forge(("mtp",), more, steps=2, folder=tmp_path, name="ahead").run
    asked = ("say 3\nsay 4\n", "--template", "plain", "--tokens", 12, "--temperature", 0)
    plain = chat(*asked, path=run)
    assert (plain.code, len(plain.out) > 2) == (0, True), plain.err
    counted: list[Drafts] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafts, "count", lambda self, proposed, accepted: counted.append(self))
        drafted = chat(*asked, "--drafts", 2, path=run)
        looked_up = chat(*asked, "--lookup", 2, path=run)
    assert plain.out == drafted.out == looked_up.out
    assert {(one.tokens, one.lookup) for one in counted} == {(2, 0), (0, 2)}
    assert "can draft at most 2 tokens" in one_message(chat("", *asked[1:], "--drafts", 3, path=run), 2)


def test_a_model_that_can_not_draft_says_so_before_it_is_asked(chat: Typed) -> None:
    assert "without modules that predict further tokens" in one_message(chat("", "--drafts", 1), 2)
