"""Takes pictures for docs/assets: of the report of three short runs and of a traced step, by headless Chromium; and of
the comparison of two runs, on a narrow and on a wide terminal.

    python docs/viewer.py

Takes about a minute. `python docs/write.py --all` calls it where there is a Chromium; nothing else needs one.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import screen

from forge_train_cli.app import run

ASSETS = Path(__file__).parent / "assets"
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
PICTURES = {
    "report.png": ("report.html", "--window-size=1200,1010"),
    "report-dark.png": ("report.html", "--window-size=420,1250", *DARK),
    "trace.png": ("trace.html", "--window-size=1200,980"),
    "trace-dark.png": ("trace.html", "--window-size=420,980", *DARK),
}
"""File → page and window: light and wide, dark and narrow."""
TERMINALS = {"compare-80": 80, "compare-160": 160}
COMPARE = "forge runs compare runs/adamw runs/lion"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--virtual-time-budget=5000")  # fmt: skip
MODEL = ("decoder.dim=64", "decoder.layers=2", "decoder.heads=2", "train.sequence=64", "train.global_batch=8",
         "train.micro_batch=8", "train.evaluate_every=20", "train.evaluate_batches=2", "checkpoint.every=100",
         "log.every=1", f"text.path={Path(__file__).parent / 'how-to'}")  # fmt: skip
COMMANDS = (
    "train quickstart --without sample -q --name adamw -s train.steps=300",
    "train quickstart --without sample -q --name adamw-fast -s train.steps=300 -s adamw.lr=0.02",
    "train quickstart --without sample -q --name lion -p lion -s train.steps=200",
    "train --resume runs/lion -q -s train.steps=300",
    "runs report runs/adamw runs/adamw-fast runs/lion -o report.html",
    "trace quickstart --nproc 2 -p fsdp2 --out trace.html",
)


def browser() -> str | None:
    """Path of Chromium, if there is one."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def main() -> int:
    """Train, and take the pictures; 1 without Chromium."""
    chromium = browser()
    if not chromium:
        print("There is no Chromium: the pictures of the report stay as they are.")
        return 1
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for command in COMMANDS:
            settings = [word for one in MODEL for word in ("-s", one)] if command.startswith("train quickstart") else []
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = run([*command.split(), *settings])
            if code:
                raise RuntimeError(said.getvalue())
        for target, (page, *flags) in PICTURES.items():
            place, profile = ASSETS / target, Path(name, "profile")
            words = [chromium, *FLAGS, *flags, f"--user-data-dir={profile}", f"--screenshot={place}"]
            words.append(Path(page).absolute().as_uri())
            subprocess.run(words, check=True, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": name})
            print(place.relative_to(ASSETS.parent))
        for target, columns in TERMINALS.items():
            place = screen.target(target)
            place.write_text(screen.drawn(target, COMPARE, columns), encoding="utf-8")
            print(place.relative_to(ASSETS.parent))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
