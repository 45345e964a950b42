"""Trials of a run on two ranks: one misfortune each, chosen by a seed, and what must be true once the run is over.

Each trial repeats one command until the run is done. Its metrics and its last checkpoint then equal those of a run that
nothing disturbed, bit for bit; every command ended well or with a documented refusal; and no attempt began before the
newest checkpoint that was whole.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import toys
import warm
from chaotic import MOMENTS, ON_MAIN, STRUCK, VARIABLE, Misfortune, Moment
from forge_cli import command, environment
from forge_train.checkpoint.checkpoint import check, found
from forge_train.run.records import TIMINGS, read
from saving import contents

STEPS, EVERY, KEEP = 10, 2, 2
KINDS = (
    *("one rank killed", "all ranks killed", "launcher killed", "storm of signals", "full disk", "damaged checkpoint"),
    *("hung rank", "slow disk", "clock that jumps back", "two commands at once", "one rank killed", "all ranks killed"),
)
"""Of the trials, by their seeds in turn."""
MOST_COMMANDS = 4
PATIENCE = 600.0
"""Seconds after which a command counts as hung, on a machine that is busy with other things."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Trial:
    """What one seed means."""

    seed: int
    kind: str
    misfortune: Misfortune | None
    asynchronous: bool
    form: str
    """`checkpoint.format`"""
    restarts: int = 2
    disk: int = 0
    """KiB of the disk that fills up."""
    damage: str = ""
    """`flip` or `truncate`."""
    apart: float = 0.0
    """Seconds between two commands."""

    @property
    def words(self) -> str:
        """`rename of checkpoint 2, rank 0, asynchronous`"""
        parts = []
        if self.misfortune:
            parts.append(f"{self.misfortune.deed} at {self.misfortune.moment} {self.misfortune.at}")
            parts.append(f"rank {self.misfortune.rank}")
        parts += [f"{self.disk} KiB"] if self.disk else []
        parts += [self.damage] if self.damage else []
        return ", ".join([*parts, "asynchronous" if self.asynchronous else "synchronous", self.form])


@dataclass
class Verdict:
    """How a trial went."""

    trial: Trial
    struck: bool = False
    """Whether the misfortune came; one that waits some time may find the run done."""
    codes: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def choose(seed: int) -> Trial:
    """The trial of a seed, the same everywhere."""
    kind, dice = KINDS[seed % len(KINDS)], random.Random(seed)
    behind = dice.random() < 0.5
    moments = [one for one in MOMENTS if one != "copy" or behind]

    def misfortune(deed: Any, among: list[Moment] = moments, **more: Any) -> Misfortune:
        moment = dice.choice(among)
        saves = STEPS // EVERY
        most = {"step": STEPS - 1, "any": 1, "import": 1, "start": 1, "copy": saves - 1}.get(moment, saves)
        delay = dice.uniform(0, 6) if moment == "any" else dice.choice([0.0, dice.uniform(0, 0.05)])
        rank = 0 if moment in ON_MAIN else dice.randrange(2)
        return Misfortune(deed, moment, dice.randint(1, most), rank, delay, **more)

    def trial(deed: Misfortune | None, **more: Any) -> Trial:
        return Trial(seed, kind, deed, behind, "sharded" if seed % 5 else "safetensors", **more)

    def storm() -> dict[str, Any]:
        numbers = [int(dice.choice(SIGNALS)) for _ in range(dice.randint(1, 5))]
        return {"signals": numbers, "gap": dice.choice([0.0, 0.02, 0.3])}

    saving: list[Moment] = ["write", "seal", "prune", "step"]
    trials: dict[str, Callable[[], Trial]] = {
        "one rank killed": lambda: trial(misfortune("kill")),
        "all ranks killed": lambda: trial(misfortune("kill_all")),
        "launcher killed": lambda: trial(misfortune("kill_launcher")),
        "storm of signals": lambda: trial(misfortune("signals", **storm())),
        "full disk": lambda: trial(misfortune("full", ["write"]), disk=dice.randint(300, 1000)),
        "damaged checkpoint": lambda: trial(
            Misfortune("kill_launcher", "step", dice.randint(5, STEPS - 1)), damage=dice.choice(["flip", "truncate"])
        ),
        "hung rank": lambda: trial(misfortune("hang", saving)),
        "slow disk": lambda: trial(misfortune("kill", saving, slow=dice.uniform(0.05, 0.3))),
        "clock that jumps back": lambda: trial(misfortune("clock", ["start", "step", "write", "seal"])),
        "two commands at once": lambda: trial(None, apart=dice.choice([0.0, dice.uniform(0, 8)])),
    }
    return trials[kind]()


class Ground:
    """Where trials are done: a configuration, and the runs that nothing disturbed.

    Args:
        folder: for all of it.
        preloaded: whether torch is there already when a process begins, see `warm`.
    """

    def __init__(self, folder: Path, *, preloaded: bool = False) -> None:
        self.folder = folder
        self._popen = warm.Popen if preloaded else subprocess.Popen
        values = {
            "train.steps": STEPS,
            "train.evaluate_every": 0,
            "checkpoint.every": EVERY,
            "checkpoint.keep": KEEP,
            "watchdog.seconds": 10.0,
            "watchdog.slow_seconds": 30.0,
        }
        plugins = ("layouts:Replicas", "toys:Average", "watchdog", "chaotic:Chaos")
        self.file = toys.write_config(folder, *plugins, **values)
        self._expected: dict[str, dict[str, Any]] = {}

    def expected(self, form: str) -> dict[str, Any]:
        """What a run leaves that nothing disturbs."""
        if form not in self._expected:
            done = self.start(self.folder, form, "-s", f"checkpoint.format={form}")
            _, said = done.communicate(timeout=PATIENCE)
            assert done.returncode == 0, said
            self._expected[form] = outcome(self.folder / form)
        return self._expected[form]

    def start(self, where: Path, name: str, *more: object, misfortune: Misfortune | None = None) -> Any:
        """Start the command of a trial."""
        env = environment(**({VARIABLE: misfortune.as_json(), STRUCK: str(where / "struck")} if misfortune else {}))
        env["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
        arguments = ("--nproc", 2, "--quiet", "--without", "fsdp2,tensorboard,console", "--run-dir", where)
        line = command("train", self.file, "--name", name, *arguments, *more)
        return self._popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def run(self, trial: Trial) -> Verdict:
        """Do a trial."""
        verdict, began = Verdict(trial), time.monotonic()
        folder = self.folder / f"trial-{trial.seed}"
        folder.mkdir()
        with disk_of(folder, trial.disk) as mounted:
            if trial.disk and not mounted:  # the plugin stands in
                trial = Trial(**{**vars(trial), "disk": 0})
            self._until_done(trial, verdict, folder)
            verdict.struck = (folder / "struck").exists() or not trial.misfortune or mounted
            if not (verdict.struck or trial.misfortune.delay):
                verdict.wrong.append("the misfortune never came")
            if not verdict.wrong:
                judge(verdict, folder / "run", self.expected(trial.form))
        verdict.seconds = time.monotonic() - began
        return verdict

    def _until_done(self, trial: Trial, verdict: Verdict, folder: Path) -> None:
        more: list[object] = ["--max-restarts", trial.restarts]
        more += ["-s", f"checkpoint.asynchronous={str(trial.asynchronous).lower()}"]
        more += ["-s", f"checkpoint.format={trial.form}"]
        more += ["-s", "checkpoint.keep=9"] if trial.disk else []
        for number in range(MOST_COMMANDS):
            misfortune = trial.misfortune if number == 0 and not trial.disk else None
            started = [self.start(folder, "run", *more, misfortune=misfortune)]
            if trial.kind == "two commands at once" and number == 0:
                time.sleep(trial.apart)
                started.append(self.start(folder, "run", *more))
            for process in started:
                self._hear(process, verdict)
            if verdict.codes[-len(started) :].count(0):
                return
            if verdict.wrong:
                return
            if number == 0 and trial.disk:
                make_room(folder)
            if number == 0 and trial.damage:
                damage(folder / "run", trial)
        verdict.wrong.append(f"the run was not done after {MOST_COMMANDS} commands")

    def _hear(self, process: Any, verdict: Verdict) -> None:
        try:
            _, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            verdict.wrong.append(f"a command did not end in {PATIENCE:g} s")
        verdict.codes.append(process.returncode)
        verdict.said.append(said)
        if problem := undocumented(verdict.trial, process.returncode, said):
            verdict.wrong.append(problem)


def undocumented(trial: Trial, code: int, said: str) -> str:
    """What is wrong with how a command ended; empty if that is documented."""
    allowed = {
        "launcher killed": {-signal.SIGKILL: ""},
        "damaged checkpoint": {-signal.SIGKILL: ""},
        "storm of signals": {75: "", **{128 + number: "before it could save" for number in SIGNALS}},
        "full disk": {1: "Make room there, then go on"},
        "hung rank": {1: "hangs"},
        "two commands at once": {2: "is training this run"},
    }.get(trial.kind, {})
    if "Traceback" in said:
        return "a traceback is on the screen"
    if code != 0 and (code not in allowed or allowed[code] not in said):
        return f"exit code {code}"
    return ""


def outcome(run: Path) -> dict[str, Any]:
    """What a run that is done left: every line of metrics without timings, and its last checkpoint."""
    lines = [
        {key: repr(value) for key, value in line.items() if key not in TIMINGS} for line in read(run / "metrics.jsonl")
    ]
    return {"metrics": lines, "checkpoint": contents(run / "checkpoints" / f"step-{STEPS:08d}")}


def judge(verdict: Verdict, run: Path, expected: dict[str, Any]) -> None:
    """Note what is wrong with a run that is done."""
    found_there = outcome(run)
    verdict.wrong += [f"{what} differs" for what, value in expected.items() if found_there[what] != value]
    damaged = {int(name.name) for name in (run.parent / "damaged").glob("*")}
    for aside in run.glob("attempt-*/events.jsonl"):
        if any(event["event"] == "checkpoint_saved" and event["step"] not in damaged for event in read(aside)):
            verdict.wrong.append("the run started over although it had a whole checkpoint")
    saved, resumed = 0, 0
    for event in read(run / "events.jsonl"):
        if event["event"] == "checkpoint_saved" and event["step"] not in damaged:
            saved = event["step"]
        elif event["event"] == "resumed":
            resumed = event["step"]
            verdict.resumed.append(resumed)
            if resumed < saved:
                verdict.wrong.append(f"resumed at step {resumed}, although that of {saved} was whole")
    last = json.loads((run / "outcome.json").read_text(encoding="utf-8"))
    if (last["outcome"], last["step"]) != ("done", STEPS):
        verdict.wrong.append(f"outcome.json says {last['outcome']} at step {last['step']}")
    remains = [path.name for path in run.rglob("*.partial")] + [path.name for path in run.glob(".lock.*")]
    if remains:
        verdict.wrong.append(f"{remains[0]} is left over")


@contextmanager
def disk_of(folder: Path, size: int) -> Iterator[bool]:
    """A disk of so many KiB at a folder, where one may be mounted."""
    options = ["-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    there = size > 0 and subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield there
    finally:
        if there:
            subprocess.run(["umount", str(folder)], check=True)


def make_room(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)


def damage(run: Path, trial: Trial) -> None:
    """Change one sealed file of the newest checkpoint."""
    dice = random.Random(trial.seed)
    whole = [one for one in found(run / "checkpoints") if not check(one.path, contents=True)]
    if len(whole) < 2:  # there is none to fall back to
        return
    sealed = json.loads((whole[0].path / "manifest.json").read_text(encoding="utf-8"))
    listed = sealed["files"].items()
    names = [*sorted(name for name, entry in listed if entry.get(sealed["hash"])), "manifest.json"]
    file = whole[0].path / dice.choice(names)
    data = bytearray(file.read_bytes())
    at = dice.randrange(len(data))
    if trial.damage == "flip":
        data[at] ^= 1 << dice.randrange(8)
    file.write_bytes(bytes(data) if trial.damage == "flip" else bytes(data[:at]))
    if check(whole[0].path, contents=True):  # a flipped space in the manifest may mean nothing
        mark = run.parent / "damaged" / str(whole[0].step)
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
