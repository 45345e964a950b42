"""What pages take from the code is what the code says, and what they show is what it prints."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import warm
from crossed import marked
from forge_cli import forge
from forge_train_tools.planning import fewer
from pages import parse

ROOT = Path(__file__).parents[2]


sys.path.append(str(ROOT / "docs"))
matching, pictures, screen, transcripts, write = (
    importlib.import_module(name) for name in ("matching", "pictures", "screen", "transcripts", "write")
)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not compared, so a pipeline's rehearsal takes few micro-batches."""
    monkeypatch.setattr(fewer, "AFFORDABLE", -1)


OUTSIDE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))}
PAGES |= {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")}


@pytest.mark.slow
def test_no_page_is_stale() -> None:
    """In a process of its own: another test may have changed a class whose methods a page lists."""
    command = [sys.executable, "-m", "write", "--check"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with warm.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "docs")}, **pipes) as process:
        said, _ = process.communicate()
    assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(transcripts.SESSIONS))
def test_no_transcript_is_stale(page: str) -> None:
    with warm.ranks():
        transcripts.written(page, PAGES[f"docs/{page}"], quick=True)


def test_pages_are_not_written_from_metadata_that_lacks_entry_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        write, "entry_points", lambda group: [one for one in entry_points(group=group) if one.name != "kit"]
    )
    monkeypatch.setattr(write, "stale", lambda: pytest.fail("pages are written"))
    assert write.main() == 1
    assert "lacks kit of forge_train.hookspecs: run `pip install --no-deps -e .`" in capsys.readouterr().out


def test_every_transcript_is_checked() -> None:
    shown = {page for page, text in PAGES.items() for block in OUTSIDE.findall(text) if output(block)}
    assert shown == {f"docs/{page}" for page in transcripts.SESSIONS}


def output(block: str) -> bool:
    return any(below.strip() for _, below in transcripts.commands(block))


def test_a_line_is_found_for_what_stands_around_its_numbers() -> None:
    printed = ["forge · cpu · 60 steps", "", "step 30/60 · loss 2.9 · grad norm 1.5 · 0:04 left", "done"]
    shown = ["forge · cpu · 6 steps", "…", "step 3/6 · loss 4.1 · … · 1:30 left", "done"]
    assert matching.matched(shown, printed) == (
        "forge · cpu · 60 steps\n…\nstep 30/60 · loss 2.9 · … · 0:04 left\ndone\n"
    )
    steps = ["step 1/3 · loss 3", "step 2/3 · loss 2", "held out: 4", "step 3/3 · loss 1", "held out: 3"]
    assert matching.matched(["…", "step 9/9 · loss 9", "held out: 9"], steps) == "…\nstep 2/3 · loss 2\nheld out: 4\n"
    assert matching.matched(["…", "step 3/3 · loss 9", "held out: 9"], steps) == "…\nstep 3/3 · loss 1\nheld out: 3\n"
    for wrong in (["forge · cuda · 6 steps"], ["done"], ["…", "done", "…", "step 3/6 · … left"], ["…", "Done"]):
        with pytest.raises(matching.StaleError):
            matching.matched(wrong, printed)


@pytest.mark.slow
def test_the_picture_shows_what_the_preset_shows_now() -> None:
    """And a model that has learned more than pairs of bytes predict."""
    settings = ("train.steps=2", "train.evaluate_batches=1", f"text.path={ROOT / 'docs'}")
    kept = screen.words(screen.TARGET.read_text(encoding="utf-8"))
    assert matching.masked(screen.words(screen.picture(*settings))) == matching.masked(kept)
    found = re.search(r"held out [\d.]+ ([\d.]+) bits per byte · ([\d.]+) trigram bits per byte", kept)
    assert found
    assert float(found[1]) < float(found[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", screen.SCREENS)
def test_pictures_of_commands_show_what_they_print_now(name: str) -> None:
    kept = screen.target(name).read_text(encoding="utf-8")
    with warm.ranks():
        assert matching.masked(screen.words(screen.shot(name))) == matching.masked(screen.words(kept))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", marked(pictures.SCHEDULES, ("interleaved_1f1b", "zbv")))
def test_timelines_are_those_that_the_command_draws_now(schedule: str) -> None:
    assert pictures.target(schedule).read_text(encoding="utf-8") == pictures.picture(schedule)


COMMANDS = sorted(
    {
        (page, command)
        for page, text in PAGES.items()
        for block in OUTSIDE.findall(text)
        for command, _ in transcripts.commands(block)
        if command.startswith("forge ") and command != "forge --version"
    }
)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_every_command_has_the_options_that_it_is_shown_with(page: str, line: str) -> None:
    parse(line)


def test_the_slurm_script_is_the_one_that_the_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGES["docs/how-to/slurm.md"]
    command = re.search(r"^```bash\nforge (launch slurm .*)\n```$", page, re.MULTILINE)
    shown = page.partition('title="mine.sbatch"\n')[2].partition("```")[0]
    assert command
    monkeypatch.chdir(tmp_path)
    text = "[train]\nsteps = 1\nglobal_batch = 32\n"
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    ended = forge(*shlex.split(command[1]))
    assert ended.code == 0, ended.err
    written = (tmp_path / "mine.sbatch").read_text(encoding="utf-8")
    there = {str(tmp_path): "/shared/work", sys.executable: "/shared/venv/bin/python"}
    for here, path in there.items():
        written = written.replace(here, path)
    assert shown == written
    done = subprocess.run(["bash", "-n", tmp_path / "mine.sbatch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_use_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every program of the page, one after the other, on a model that is small by FORGE_SET."""
    page = PAGES["docs/how-to/python.md"]
    programs = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(programs) == 7
    assert {match[1] for match in re.finditer(r"^(?:from|import) ([\w.]+)", "".join(programs), re.MULTILINE)} == {
        "forge_train",
        "forge_train_tools",
    }
    (tmp_path / "text.txt").write_text("A line of text, and another one.\n" * 4000, encoding="utf-8")
    small = ("train.evaluate_batches=1", "text.path=text.txt", "decoder.dim=16", "decoder.layers=1", "decoder.heads=2")
    monkeypatch.setenv("FORGE_SET", ";".join((*small, "sample.tokens=4")))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with warm.ranks():
        for program in programs:
            exec(compile(program, "python.md", "exec", dont_inherit=True), names)
    said = capsys.readouterr().out
    assert re.search(r"^done 20 [\d.]+ runs/first$", said, re.MULTILINE)
    assert re.search(r"^torch.Size\(\[4, \d+\]\)$", said, re.MULTILINE)
    assert "did you mean 'steps'" in said.lower()


@pytest.mark.parametrize(("shell", "words", "found"), [("bash", "forge pl", "plugins"), ("zsh", "forge tra", "train")])
def test_the_shell_completes(shell: str, words: str, found: str) -> None:
    environment = {**os.environ, "_FORGE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from forge_train_cli import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert found in done.stdout.replace(",", "\n").splitlines()
    assert f"_FORGE_COMPLETE={shell}_source" in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
