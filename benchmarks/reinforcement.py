"""How far `grpo` brings a model in ten minutes, on one process and on two, undisturbed and killed.

    python benchmarks/reinforcement.py         # writes benchmarks/results/reinforcement.md

A decoder of 35 thousand weights has learned to write `low: 271` and `high: 905` with digits by chance. The reward is
1 for three digits below 5 after `low`, or from 5 on after `high`, and 0 otherwise: at the start, for about one in
eight answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

RESULTS = Path(__file__).parent / "results" / "reinforcement.md"
FORGE = [sys.executable, "-m", "forge_train_cli"]
LINES, BASE_STEPS, STEPS, GROUP, ROWS = 4000, 150, 150, 32, 128
KILLED_AT = 50
"""The step whose checkpoint the killed run continues from."""
MODEL = {
    "decoder.dim": 32,
    "decoder.layers": 2,
    "decoder.heads": 4,
    "decoder.kv_heads": 2,
    "decoder.hidden": 64,
    "decoder.max_sequence": 64,
    "train.sequence": 32,
    "train.evaluate_every": 0,
    "adamw.lr": 3e-3,
    "train.clip_norm": 0,  # a norm of shards is rounded otherwise, and would scale all gradients
    "adamw.eps": 1e-5,  # gradients that only rounding keeps from 0 would otherwise become whole updates
    "cosine.warmup": 5,
    "log.every": 1,
    "run.device": "cpu",
}
NOTE = f"{ROWS} answers of up to 4 bytes a step, in groups of {GROUP}; {STEPS} steps. Rewards are means of five steps."
RULES = """
def right(prompt, answer, record):
    digits = answer.strip()
    if len(digits) != 3 or not digits.isdigit():
        return 0.0
    low = [int(one) < 5 for one in digits]
    return float(all(low) if record["prompt"].startswith("low") else not any(low))
"""


def write(folder: Path) -> None:
    """Guesses to learn the form of answers from, the prompts, and the reward."""
    draw = random.Random(0)
    lines = [f"{draw.choice(('low', 'high'))}: {draw.randrange(1000):03}\n" for _ in range(LINES)]
    (folder / "guesses.txt").write_text("".join(lines), encoding="utf-8")
    prompts = [json.dumps({"prompt": f"{word}: "}) + "\n" for word in ("low", "high")]
    (folder / "prompts.jsonl").write_text("".join(prompts), encoding="utf-8")
    (folder / "rules.py").write_text(RULES, encoding="utf-8")


def command(name: str, values: dict[str, Any], *more: str) -> list[str]:
    """`forge train` with some values."""
    sets = [word for key, value in {**MODEL, **values}.items() for word in ("-s", f"{key}={value}")]
    return [*FORGE, "train", "--name", name, *more, *sets]


def of_base(folder: Path) -> list[str]:
    values = {"text.path": folder / "guesses.txt", "text.cache": folder, "checkpoint.every": BASE_STEPS}
    return command("base", {**values, "train.steps": BASE_STEPS, "train.global_batch": 32, "train.micro_batch": 32})


def of_answers(folder: Path, name: str, ranks: int) -> list[str]:
    values = {
        "train.init_from": folder / "runs" / "base",
        "train.steps": STEPS,
        "train.global_batch": ROWS,
        "train.micro_batch": ROWS // 2,
        "checkpoint.every": KILLED_AT,
        "grpo.prompts": folder / "prompts.jsonl",
        "grpo.reward": f"{folder / 'rules.py'}:right",
        "grpo.held_out": 0,
        "grpo.tokens": 4,
        "grpo.group": GROUP,
        "grpo.batch": ROWS // 2,
    }
    layout = (
        ["--nproc", str(ranks), "-p", "grpo,fsdp2", "-s", f"parallel.dp_shard={ranks}"] if ranks > 1 else ["-p", "grpo"]
    )
    return command(name, values, *layout)


def rewards(run: Path) -> list[float]:
    """Of each step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [float(json.loads(line)["grpo.reward"]) for line in lines]


def losses(run: Path) -> list[tuple[float, float]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(one["loss"], one["grad_norm"]) for one in map(json.loads, lines)]


def weights(run: Path) -> str:
    """The digest of all tensors of the last checkpoint."""
    found = hashlib.sha256()
    for file in sorted((run / "checkpoints" / f"step-{STEPS:08}").glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


def killed(folder: Path) -> None:
    """The run on one process, ended by SIGKILL some steps after a checkpoint, and resumed."""
    began = subprocess.Popen(of_answers(folder, "killed", 1), cwd=folder, stdout=subprocess.DEVNULL)
    metrics = folder / "runs" / "killed" / "metrics.jsonl"
    while began.poll() is None and not (metrics.exists() and len(metrics.read_bytes().splitlines()) > KILLED_AT + 5):
        time.sleep(0.05)
    began.send_signal(signal.SIGKILL)
    began.wait()
    subprocess.run([*FORGE, "train", "--resume", "runs/killed"], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    from run import Row, table

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        subprocess.run(of_base(folder), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        rows = []
        for ranks in (1, 2):
            began = time.monotonic()
            asked = of_answers(folder, f"on-{ranks}", ranks)
            subprocess.run(asked, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            minutes = (time.monotonic() - began) / 60
            found = rewards(folder / "runs" / f"on-{ranks}")
            first, last = sum(found[:5]) / 5, sum(found[-5:]) / 5
            who = "one process" if ranks == 1 else f"{ranks} ranks (fsdp2)"
            rows += [
                Row(f"reward at the start, on {who}", f"{first:.3f}", "≤ 0.2", first <= 0.2),
                Row(f"reward at the end, on {who}", f"{last:.3f}", "≥ 0.9", last >= 0.9),
                Row(
                    f"minutes, on {who}, start and end of the command included", f"{minutes:.1f}", "≤ 10", minutes <= 10
                ),
            ]
        one, two = (rewards(folder / "runs" / f"on-{ranks}") for ranks in (1, 2))
        same = next((at for at, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1]), STEPS)
        rows.append(
            Row("steps with equal rewards on one process and on two", f"{same} of {STEPS}", "all", same == STEPS)
        )
        means = [[sum(one[at : at + 5]) / 5 for at in range(0, STEPS, 5)] for one in (one, two)]
        apart = max(abs(mine - theirs) for mine, theirs in zip(*means, strict=True))
        rows.append(Row("largest difference of the two curves, in means of five steps", f"{apart:.3f}", "—", True))
        killed(folder)
        undisturbed, resumed = (folder / "runs" / name for name in ("on-1", "killed"))
        alike = weights(undisturbed) == weights(resumed) and losses(undisturbed) == losses(resumed)
        rows.append(
            Row(
                "killed after a checkpoint and resumed: losses and weights",
                "equal" if alike else "differ",
                "equal",
                alike,
            )
        )
    for row in rows:
        print(f"{'ok  ' if row.ok else 'MISS'} {row.what}: {row.measured} (bar {row.bar})", flush=True)
    page = table(rows, "Reinforcement learning from a checkable reward", "python benchmarks/reinforcement.py", NOTE)
    RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
