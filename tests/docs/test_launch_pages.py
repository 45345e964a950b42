"""The pages about launchers, as somebody would type them: every command, as far as it needs no cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forge_cli import forge
from forge_train_tools.launchers.job import ClusterJob, Machines

pytestmark = pytest.mark.unit
PAGES = Path(__file__).parents[2] / "docs" / "how-to"
TEXTS = {
    name: (PAGES / f"{name}.md").read_text(encoding="utf-8")
    for name in ("slurm", "kubernetes", "machines", "launchers")
}
COMMANDS = [
    (page, line.partition("#")[0].strip())
    for page, text in TEXTS.items()
    for line in re.findall(r"^(forge launch .*)$", text, re.MULTILINE)
]


def test_there_are_commands() -> None:
    assert {page for page, _ in COMMANDS} == set(TEXTS)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command(page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is submitted, and the job of an earlier command is not there."""
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 1\nglobal_batch = 32\n", encoding="utf-8")
    (file,) = re.findall(r'^```toml title="cluster.toml"\n(.*?)^```', TEXTS["slurm"], re.MULTILINE | re.DOTALL)
    (tmp_path / "cluster.toml").write_text(file.replace("/shared:/shared", f"/shared:{tmp_path}"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = [word.replace("/shared:/shared", f"/shared:{tmp_path}") for word in shlex.split(command)[1:]]
    ended = forge(*(word for word in words if word != "--submit"), *(["--dry-run"] if "--submit" in words else []))
    if {"--status", "--logs", "--cancel"} & set(words):
        assert (ended.code, ended.err) == (2, f"Error: No job 'mine' was submitted with slurm from {tmp_path}.\n")
    else:
        assert ended.code == 0, ended.err


def test_the_launcher_of_the_page(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXTS["launchers"], re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_package"}
    exec(compile(code, "launchers.md", "exec", dont_inherit=True), names)
    made = names["Ours"](names["OursOptions"](project="llm"))
    job = ClusterJob("mine", Machines(), ("train",), tmp_path, tmp_path)
    assert made.files(job)["mine.ours"].startswith("# Written by forge launch ours.\n")
    assert made.submit(job, Path("mine.ours")) == ("ours-submit", "--project", "llm", "mine.ours")
