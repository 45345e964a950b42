"""A gigabyte of Debian's documentation, from packages to a trained model, with a kill and an interruption on the way.

    python benchmarks/gigabyte.py FOLDER   # writes benchmarks/results/gigabyte.md and .svg; the text stays in FOLDER

Three sources are made of the packages (debian.py) and prepared, each preparation with `kill -9` in between. A mixture
of them with best-fit packing is trained on 2 ranks, stopped by SIGTERM, and resumed on 1 rank to its end. Texts and
preparations that FOLDER has already are taken as they are; made.json in it says how they were made.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from data import FORGE, family
from debian import SOURCES, collect_all

from forge_train_cli.curves import Curve, colour
from forge_train_cli.plotting import picture

RESULTS = Path(__file__).parent / "results" / "gigabyte.md"
VOCABULARY, STEPS, STOP, EVERY = 8192, 300, 150, 25
WEIGHTS = {"manuals": 2, "science": 1, "interfaces": 1}
MODEL = {
    "decoder.dim": 128,
    "decoder.layers": 4,
    "decoder.heads": 4,
    "train.sequence": 256,
    "train.global_batch": 8,
    "train.micro_batch": 4,
    "train.steps": STEPS,
    "train.evaluate_every": EVERY,
    "train.evaluate_batches": 4,
    "adamw.lr": 2e-3,
    "log.every": 1,
    "run.name": "gigabyte",
    "mixture.packing": "best_fit",
}


@dataclass
class Made:
    """How a source was prepared.

    Args:
        text: bytes of its text.
        kept: tasks that were done when the preparation was killed.
        tasks: of all of it.
        seconds: wall seconds of both runs together.
        peak: bytes of memory of all processes together.
    """

    text: int
    kept: int
    tasks: int
    seconds: float = 0.0
    peak: int = 0
    manifest: dict[str, Any] = field(default_factory=dict)

    def total(self, what: str) -> int:
        return sum(one[what] for side in self.manifest["shards"].values() for one in side)


def prepare(source: Path, out: Path, tokenizer: Path | None) -> Made:
    """`forge data prepare`, killed with all its workers once it has done two tasks, and then run to its end."""
    command = [*FORGE, "data", "prepare", str(source / "*.jsonl"), "--out", str(out)]
    command += ["--tokenizer", str(tokenizer)] if tokenizer else ["--train-tokenizer", str(VOCABULARY)]
    notes = out / ".prepare"
    began, peak, killed = time.perf_counter(), 0, False
    kept = 0
    while True:
        with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None:
                peak = max(peak, family(process.pid))
                time.sleep(0.1)
                if not killed and (kept := len(list(notes.glob("0*.json")))) >= 2:
                    os.killpg(process.pid, signal.SIGKILL)
                    killed = True
        if process.returncode == 0:
            break
        if process.returncode != -signal.SIGKILL or (out / "manifest.json").exists():
            raise RuntimeError(f"{' '.join(command)} exited {process.returncode}")
        print(f"{out.name}: killed with {kept} tasks done", flush=True)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    text = sum(one["bytes"] for side in manifest["shards"].values() for one in side)
    made = Made(text, kept, len(list(notes.glob("0*.json"))), time.perf_counter() - began, peak, manifest)
    print(f"{out.name}: {made.text / 1e6:.0f} MB in {made.seconds:.0f} s, {peak / 1e6:.0f} MB of memory", flush=True)
    return made


def train(folder: Path) -> tuple[int, Path]:
    """Train on 2 ranks, stop, and continue with 1; gives the step of the stop and the run's folder."""
    sources = ", ".join(
        f'{{ path = "{folder / "prepared" / name}", name = "{name}", weight = {weight} }}'
        for name, weight in WEIGHTS.items()
    )
    run = folder / "runs" / "gigabyte"
    shutil.rmtree(run, ignore_errors=True)
    options = [f"{key}={value}" for key, value in MODEL.items()] + [f"mixture.sources=[{sources}]"]
    command = [*FORGE, "train", "--without", "text", "-p", "mixture", "--run-dir", str(folder / "runs"), "--quiet"]
    command += [part for option in options for part in ("-s", option)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--nproc", "2"], env=environment) as process:
        while process.poll() is None and len(lines(run / "metrics.jsonl")) < STOP:
            time.sleep(0.2)
        process.terminate()
        code = process.wait()
    if code != 75:
        raise RuntimeError(f"training on 2 ranks exited {code}, and not 75 as after a signal")
    stopped = int(lines(run / "metrics.jsonl")[-1]["step"])
    print(f"stopped after step {stopped}", flush=True)
    subprocess.run([*command, "--nproc", "1"], env=environment, check=True)
    return stopped, run


def lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; none without it."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def report(made: dict[str, Made], stopped: int, run: Path) -> str:
    """The page; the picture is written beside it."""
    steps = lines(run / "metrics.jsonl")
    evaluations = [one for one in lines(run / "events.jsonl") if one["event"] == "evaluation"]
    curves = [
        Curve(at, name, [(one["step"], one["metrics"][f"{name}.loss"]) for one in evaluations])
        for at, name in enumerate(WEIGHTS)
    ]
    names = "".join(
        f'<text x="540" y="{26 + 16 * one.run}" style="fill:{colour(one.run)}">{one.name}</text>' for one in curves
    )
    svg = picture("Held-out loss of each source, in nats per token, by step", curves)
    RESULTS.with_suffix(".svg").write_text(svg.replace("</svg>", f"{names}</svg>") + "\n", encoding="utf-8")
    text = sum(one.text for one in made.values())
    tokens = sum(one.total("tokens") for one in made.values())
    parts = [
        "# A gigabyte of documentation",
        "",
        f"Written by `python benchmarks/gigabyte.py` on {time.strftime('%Y-%m-%d')}, on {os.cpu_count()} cores.",
        "",
        f"{text / 1e9:.2f} GB of text from {sum(map(len, SOURCES.values()))} of Debian's packages,",
        f"{tokens / 1e6:.0f} million tokens of a BPE tokenizer of {VOCABULARY:,} ids, trained on `manuals`.",
        "Every preparation was killed with `kill -9`, workers too, and run again: it continued with the tasks that had",
        "not been done.",
        "",
        "| source | packages | text | documents | tokens | tasks done at the kill | seconds | MB/s | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in made.items():
        parts.append(
            f"| `{name}` | {', '.join(SOURCES[name])} | {one.text / 1e6:.0f} MB | {one.total('documents'):,} | "
            f"{one.total('tokens'):,} | {one.kept} of {one.tasks} | {one.seconds:.0f} | "
            f"{one.text / one.seconds / 1e6:.1f} | {one.peak / 1e6:.0f} MB |"
        )
    tokens_a_step = MODEL["train.global_batch"] * MODEL["train.sequence"]
    parts += [
        "",
        "Wall seconds hold both runs, and of the first source the tokenizer's training. Memory is of all processes",
        "together, shared pages counted once.",
        "",
        f"A decoder of width {MODEL['decoder.dim']} and {MODEL['decoder.layers']} layers was then trained on a mixture",
        f"of weights {', '.join(f'`{name}` {weight}' for name, weight in WEIGHTS.items())}, packed by best fit:",
        f"{STEPS} steps of {tokens_a_step:,} tokens. It ran on 2 ranks, was stopped by SIGTERM after step {stopped}",
        "(exit 75), and continued with 1 rank.",
        "",
        "| | tokens per second | wait for data, share of the time | training loss at the end |",
        "|---|---|---|---|",
    ]
    for what, here in (
        (f"2 ranks, steps 1 to {stopped}", [one for one in steps if one["step"] <= stopped]),
        (f"1 rank, steps {stopped + 1} to {STEPS}", [one for one in steps if one["step"] > stopped]),
    ):
        rest = here[5:]
        rate, waited = mean(one["tokens_per_second"] for one in rest), mean(one["data_wait"] for one in rest)
        last = mean(one["loss"] for one in here[-10:])
        parts.append(f"| {what} | {rate:,.0f} | {waited:.2%} | {last:.3f} |")
    parts += ["", "![Held-out loss of each source by step](gigabyte.svg)", ""]
    parts += ["| step | " + " | ".join(WEIGHTS) + " |", "|---|" + "---|" * len(WEIGHTS)]
    for one in evaluations[:: max(len(evaluations) // 6, 1)]:
        losses = " | ".join(f"{one['metrics'][f'{name}.loss']:.3f}" for name in WEIGHTS)
        parts.append(f"| {one['step']} | {losses} |")
    return "\n".join(parts) + "\n"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    collect_all(folder / "text")
    note = folder / "made.json"
    made: dict[str, Made] = {}
    if note.exists():
        made = {name: Made(**one) for name, one in json.loads(note.read_text()).items()}
    for name in WEIGHTS:
        if name not in made:
            first = next(iter(WEIGHTS))
            tokenizer = None if name == first else folder / "prepared" / first / "tokenizer"
            made[name] = prepare(folder / "text" / name, folder / "prepared" / name, tokenizer)
            note.write_text(json.dumps({name: vars(one) for name, one in made.items()}))
    stopped, run = train(folder)
    RESULTS.write_text(report(made, stopped, run), encoding="utf-8")


if __name__ == "__main__":
    main()
