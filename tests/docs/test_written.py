"""What pages take from the code is what the code says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.accept("house", 4)
def test_no_page_is_stale() -> None:
    spec = importlib.util.spec_from_file_location("docs_write", ROOT / "docs" / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stale = [str(page.relative_to(ROOT)) for page in module.stale()]
    assert stale == [], "run `python docs/write.py`"


@pytest.mark.accept("house", 4)
def test_the_slurm_script_is_bash(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text(encoding="utf-8")
    (tmp_path / "job.sh").write_text(page.partition('title="train.sbatch"\n')[2].partition("```")[0], encoding="utf-8")
    done = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.accept("house", 4)
def test_use_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "text.txt").write_text("A line of text, and another one.\n" * 4000, encoding="utf-8")
    values = ("train.steps=2", "train.evaluate_batches=1", "text.path=text.txt", "decoder.dim=16", "decoder.layers=1")
    small = ", ".join(f'"{value}"' for value in (*values, "decoder.heads=2", "sample.tokens=4"))
    assert code.count('"train.steps=20",') == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace('"train.steps=20",', f"{small},"), "python.md", "exec"), {})
    assert capsys.readouterr().out.startswith("done 2 ")


@pytest.mark.accept("house", 4)
@pytest.mark.parametrize(("shell", "words", "found"), [("bash", "forge pl", "plugins"), ("zsh", "forge tra", "train")])
def test_the_shell_completes(shell: str, words: str, found: str) -> None:
    environment = {**os.environ, "_FORGE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": "1"}
    command = [sys.executable, "-c", "from forge_train_cli import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert found in done.stdout.replace(",", "\n").splitlines()
    assert f"_FORGE_COMPLETE={shell}_source" in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
