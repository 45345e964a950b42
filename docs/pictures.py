"""The timelines of pipelines in docs/assets, drawn by `forge plan --svg`.

    python docs/pictures.py

`tests/docs/test_written.py` draws them again and compares.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from forge_train_cli.app import run

ASSETS = Path(__file__).parent / "assets"
COMMAND = "plan quickstart -p pp --world 4 -s parallel.pp=4 -s decoder.layers=8 -s train.micro_batch=1"
SCHEDULES = ("1f1b", "interleaved_1f1b", "zbv")


def picture(schedule: str) -> str:
    """The SVG that the command draws for a schedule."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as output:
        file = Path(folder, "timeline.svg")
        if run([*COMMAND.split(), "-s", f"pp.schedule={schedule}", "--svg", str(file)]):
            raise RuntimeError(output.getvalue())
        return file.read_text(encoding="utf-8")


def target(schedule: str) -> Path:
    """Where its picture is kept."""
    return ASSETS / f"pipeline-{schedule}.svg"


def main() -> None:
    """Draw all of them."""
    for schedule in SCHEDULES:
        target(schedule).write_text(picture(schedule), encoding="utf-8")
        print(target(schedule).relative_to(ASSETS.parent))


if __name__ == "__main__":
    main()
