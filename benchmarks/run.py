"""Measures forge against plain PyTorch and plain Python on this machine, and writes benchmarks/results/core.md.

    python benchmarks/run.py            # everything
    python benchmarks/run.py loop text  # some of it: startup, first, loop, loss, text, quickstart, trials
    python benchmarks/run.py parallel   # several processes: benchmarks/results/distributed.md
    python benchmarks/run.py experts    # experts: benchmarks/results/experts.md
    python benchmarks/run.py low_precision   # fp8 and its like: benchmarks/results/low-precision.md
    python benchmarks/run.py optimizers      # muon: benchmarks/results/optimizers.md
    python benchmarks/run.py attention       # packed documents: benchmarks/results/attention.md
    python benchmarks/run.py observing       # metrics and trackers: benchmarks/results/observing.md
    python benchmarks/run.py data            # token shards: benchmarks/results/data.md
    python benchmarks/run.py planning        # plans of large models: benchmarks/results/planning.md
    python benchmarks/run.py presets         # plans of published models: benchmarks/results/presets.md
    python benchmarks/run.py checkpoints     # what a save costs: benchmarks/results/checkpoints.md
    python benchmarks/run.py huggingface     # exchange with transformers: benchmarks/results/huggingface.md
    python benchmarks/run.py surviving       # a killed rank, and those that watch: benchmarks/results/surviving.md
    python benchmarks/run.py records         # records through a model: benchmarks/results/records.md
    python benchmarks/run.py seeing          # fusions on pictures and clips: benchmarks/results/seeing.md
    python benchmarks/run.py chaos           # 100 misfortunes on two ranks: benchmarks/results/chaos.md

Each ratio is of two things measured alternately in one go, by the CPU time of one thread, and the best of each counts:
other work on the machine adds time and never takes any away.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "core.md"
DISTRIBUTED = HERE / "results" / "distributed.md"
EXPERTS = HERE / "results" / "experts.md"
OPTIMIZERS = HERE / "results" / "optimizers.md"
ATTENTION = HERE / "results" / "attention.md"
OBSERVING = HERE / "results" / "observing.md"
PLANNING = HERE / "results" / "planning.md"
PRESETS = HERE / "results" / "presets.md"
CHECKPOINTS = HERE / "results" / "checkpoints.md"
HUGGING_FACE = HERE / "results" / "huggingface.md"
SURVIVING = HERE / "results" / "surviving.md"
RECORDS = HERE / "results" / "records.md"
FORGE = [sys.executable, "-m", "forge_train_cli"]


@dataclass
class Row:
    """One line of the table."""

    what: str
    measured: str
    bar: str
    ok: bool


def cpu_seconds(command: list[str], times: int) -> float:
    """The least CPU time of a command over several runs."""
    best = float("inf")
    for _ in range(times):
        before = children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        best = min(best, children() - before)
    return best


def children() -> float:
    """CPU seconds of the processes that this one started and saw end."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def probe(name: str) -> dict[str, float]:
    """Run one of `probes.py` in a fresh process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "probes.py"), name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return {key: float(value) for key, value in json.loads(line).items()}


def best(names: tuple[str, ...], key: str, times: int) -> dict[str, float]:
    """The least of a value for each probe, measured alternately."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(times):
        for name in names:
            found[name].append(probe(name)[key])
    return {name: min(values) for name, values in found.items()}


def startup() -> list[Row]:
    rows = []
    base = cpu_seconds([sys.executable, "-c", "pass"], 15)
    for arguments, bar in ((["--version"], 5), (["--help"], 12), (["plugins", "list"], 12)):
        ratio = cpu_seconds([*FORGE, *arguments], 10) / base
        rows.append(
            Row(
                f"CPU time of `forge {' '.join(arguments)}` / `python -c pass`",
                f"{ratio:.1f}",
                f"≤ {bar}",
                ratio <= bar,
            )
        )
    return rows


def first() -> list[Row]:
    cpu = best(("plain-first", "forge-first"), "cpu", 5)
    extra = cpu["forge-first"] - cpu["plain-first"]
    what = f"`forge train` to the first finished step, CPU s beyond a bare script ({cpu['plain-first']:.2f} s)"
    return [Row(what, f"{extra:.2f}", "≤ 1.5", extra <= 1.5)]


def loop() -> list[Row]:
    runs: dict[str, list[dict[str, float]]] = {"plain-loop": [], "forge-loop": []}
    for _ in range(4):
        for name, results in runs.items():
            results.append(probe(name))
    seconds = {name: min(result["loop"] for result in results) for name, results in runs.items()}
    peak = {name: min(result["peak"] for result in results) for name, results in runs.items()}
    speed = seconds["plain-loop"] / seconds["forge-loop"]
    memory = peak["forge-loop"] / peak["plain-loop"]
    return [
        Row("tokens per CPU-second, forge / hand-written loop", f"{speed:.3f}", "≥ 0.98", speed >= 0.98),
        Row("peak memory, forge / hand-written loop", f"{memory:.3f}", "≤ 1.05", memory <= 1.05),
    ]


def transformers() -> list[Row]:
    """A class of transformers by the plugin `hf`, and by hand."""
    seconds = best(("plain-transformers", "forge-transformers"), "loop", 4)
    speed = seconds["plain-transformers"] / seconds["forge-transformers"]
    what = "tokens per CPU-second, a class of transformers by `hf` / in a hand-written loop"
    return [Row(what, f"{speed:.3f}", "≥ 0.98", speed >= 0.98)]


def loss() -> list[Row]:
    extra = best(("plain-loss", "chunked-loss"), "extra", 2)
    share = extra["chunked-loss"] / extra["plain-loss"]
    return [Row("peak memory of the loss at 32,768 words, chunked / plain", f"{share:.2f}", "≤ 0.30", share <= 0.3)]


def text(*settings: str) -> list[Row]:
    import torch

    from forge_train_tools.configuration.request import Request
    from forge_train_tools.configuration.setup import resolve
    from forge_train_tools.offline.opening import lone_job

    torch.set_num_threads(1)
    request = Request(config="quickstart", set=("train.micro_batch=8", "train.sequence=512", *settings))
    with tempfile.TemporaryDirectory() as folder:
        job = lone_job(resolve(request), Path(folder), "cpu")
        loader = iter(job.hooks.build_data("train"))
    for _ in range(20):
        next(loader)
    rate = 0.0
    for _ in range(5):
        started = time.process_time()
        for _ in range(400):
            next(loader)
        rate = max(rate, 400 * 8 * 512 / (time.process_time() - started))
    return [Row("`text`, warm cache, micro-batches of 8 × 512, M tokens/s", f"{rate / 1e6:.0f}", "≥ 20", rate >= 20e6)]


def quickstart() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [*FORGE, "train", "--run-dir", folder, "--name", "q", "--quiet"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - started
        lines = (Path(folder) / "q" / "events.jsonl").read_text().splitlines()
        evaluation = [json.loads(line) for line in lines if '"evaluation"' in line][-1]["metrics"]
    ours, theirs = evaluation["text.bits_per_byte"], evaluation["text.trigram_bits_per_byte"]
    return [
        Row(
            "quickstart, held-out bits per byte, against a byte trigram's",
            f"{ours:.3f} : {theirs:.3f}",
            "below",
            ours < theirs,
        ),
        Row("quickstart, wall seconds", f"{seconds:.0f}", "about 60", seconds < 90),
    ]


def parallel() -> list[Row]:
    """Both ways in turn, in the same processes; the sum of the ranks' CPU seconds, and the best round of each."""
    from forge_train_tools.testing import Pool

    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(HERE))
    tokens = 8 * 4 * 256  # of the timed steps
    rows = []
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), size=4) as pool:
        for kind in ("fsdp2", "tp", "pp"):
            for world in (2, 4):
                rounds: dict[str, list[float]] = {"by_hand": [], "forge": []}
                for _ in range(3):
                    for how, seconds in rounds.items():
                        seconds.append(sum(pool.run("parallel:measure", world, timeout=300, kind=kind, how=how)))
                rate = {how: tokens / min(seconds) for how, seconds in rounds.items()}
                ratio = rate["forge"] / rate["by_hand"]
                what = f"`{kind}` on {world} ranks, tokens per CPU-second, forge / by hand"
                measured = f"{ratio:.3f} ({rate['forge']:.0f} / {rate['by_hand']:.0f})"
                rows.append(Row(what, measured, "≥ 0.97", ratio >= 0.97))
    note = (
        "A decoder of 6 M parameters in fp32, 1,024 tokens a step over all ranks, gloo. Each figure is of the ranks' "
        "CPU seconds together, over 8 steps after 3 of warm-up, the best of 3 rounds taken in turn."
    )
    text = table(rows, "Several processes", "python benchmarks/run.py parallel", note)
    DISTRIBUTED.write_text(text, encoding="utf-8")
    return rows


def low_precision() -> list[Row]:
    """Losses of short runs, by the recipe; the page has a table of signal to noise too."""
    sys.path.insert(0, str(HERE))
    from low_precision import BAR, FEWER, JUDGED, RUNS, losses, ratio, write

    found = losses()
    write(found, losses(RUNS, FEWER, draws=1))
    ratios = {name: ratio(found, name) for name in JUDGED}
    return [Row(f"{name}, loss / bf16's", f"{one:.4f}", f"≤ {BAR}", one <= BAR) for name, one in ratios.items()]


def experts() -> list[Row]:
    """The grouped product, a layer and a step with experts, and memory when all tokens go to one."""
    done = subprocess.run([sys.executable, str(HERE / "experts.py")], check=True, capture_output=True, text=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    dense = "tokens per CPU-second with 16 experts, top 2, over a dense one's of equal active FLOPs"
    uneven = found["memory_ratio"]
    rows = [
        Row(
            "32 experts on 2,048 tokens, grouped: times faster than transformers' loop",
            f"{found['product']:.1f}",
            "≥ 3",
            found["product"] >= 3,
        ),
        Row("the same, than forge's own loop", f"{found['own_loop']:.2f}", "≥ 1", found["own_loop"] >= 1),
        Row(f"a feed-forward block of width 256, {dense}", f"{found['layer']:.2f}", "—", True),
        Row(f"a step of width 256, {dense}", f"{found['step']:.2f}", "≥ 0.75, goal 0.9", found["step"] >= 0.75),
        Row("peak memory, all tokens on the same two experts / an even load", f"{uneven:.2f}", "≤ 1.1", uneven <= 1.1),
    ]
    EXPERTS.write_text(table(rows, "Experts", "python benchmarks/run.py experts"), encoding="utf-8")
    return rows


def optimizers() -> list[Row]:
    """Muon on one process and on four ranks."""
    done = subprocess.run([sys.executable, str(HERE / "optimizers.py")], check=True, capture_output=True, text=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    of = "24 matrices 512 × 2048"
    rows = [
        Row(
            f"muon's speed on one process, {of}, over torch.optim.Muon's",
            f"{found['speed']:.2f}",
            "≥ 1.0",
            found["speed"] >= 1,
        ),
        Row(
            f"CPU time of a rank of four without its collectives, {of}, over a quarter of one process's iterations",
            f"{found['cpu']:.2f}",
            "≤ 1.15",
            found["cpu"] <= 1.15,
        ),
        Row(
            "bytes sent, over each shard to its owner and back once",
            f"{found['bytes']:.3f}",
            "≤ 1.05",
            found["bytes"] <= 1.05,
        ),
        Row("extra memory of a rank's step, in fp32 matrices", f"{found['memory']:.2f}", "≤ 2", found["memory"] <= 2),
    ]
    most = {"fp32": 8.1, "bf16": 4.1, "8bit": 2.1, "4bit": 1.1}
    for dtype, (size, spent) in found["state"].items():
        what = f"adamw's two moments in {dtype}: bytes per parameter; a step's CPU time per parameter"
        bar = f"≤ {most[dtype]}; —"
        rows.append(Row(what, f"{size:.2f}; {spent:.1f} ns", bar, size <= most[dtype]))
    OPTIMIZERS.write_text(table(rows, "Optimizers", "python benchmarks/run.py optimizers"), encoding="utf-8")
    return rows


def observing() -> list[Row]:
    """Metrics and trackers, as a share of a step of 100 ms."""
    done = subprocess.run([sys.executable, str(HERE / "observing.py")], check=True, capture_output=True, text=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    usual = found["usual"] + found["adding up"]
    step = usual + found["handing over"]
    rows = [
        Row(f"{what}, of a step of 100 ms", f"{share:.3f} %", f"≤ {bar} %" if bar else "—", share <= (bar or share))
        for what, share, bar in (
            ("mean, maximum, accuracy and perplexity over 2,048 values in each step", usual, 0.5),
            ("that, and handing records to `csv` and `tensorboard`", step, 0.5),
            ("the same with what their threads do", step + found["threads"], None),
            ("all eleven kinds of metric in each step", usual + found["others"], None),
            ("handing records to a tracker that blocks", found["blocked"], 0.5),
        )
    ]
    note = "One step of ten is logged. CPU time, the median of 100 steps, the best of 3 rounds."
    text = table(rows, "Metrics and trackers", "python benchmarks/run.py observing", note)
    OBSERVING.write_text(text, encoding="utf-8")
    return rows


def attention() -> list[Row]:
    """Packed documents against a dense mask, and a step that keeps documents apart against one that does not."""
    done = subprocess.run([sys.executable, str(HERE / "attention.py")], check=True, capture_output=True, text=True)
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    of = "of attention on 8,192 tokens of 16 documents, forward and backward, over sdpa's with a dense mask"
    dense = {"time": f"{found['dense_seconds']:.2f} s", "memory": f"{found['dense_bytes'] / 2**20:.0f} MiB"}
    rows = []
    for kernel in ("varlen", "flex"):
        for what, bar in (("time", 0.25), ("memory", 0.125)):
            ratio = found[f"{kernel}_{what}"]
            rows.append(Row(f"`{kernel}`: {what} {of} ({dense[what]})", f"{ratio:.3f}", f"≤ {bar:.3g}", ratio <= bar))
    for sequence in (256, 2048):
        step = f"a step on {2048 // sequence} × {sequence:,} tokens"
        ratio = found[f"isolate_{sequence}"]
        what = f"{step} with `auto`: CPU time with `text.isolate = true` over `false`"
        rows.append(Row(what, f"{ratio:.2f}", "≤ 1.02", ratio <= 1.02))
        rows.append(Row(f"{step}: the same with `sdpa`'s dense mask", f"{found[f'dense_{sequence}']:.2f}", "—", True))
    note = (
        "On one thread of a CPU, in fp32: 8 heads of 64 features, 2 key heads. There `varlen` and `flex` compute in "
        "the same tiles of plain torch operations; their fused kernels on CUDA have not been run. Documents of the "
        "steps have 100 to 700 tokens, the decoder 4 layers of width 256."
    )
    ATTENTION.write_text(table(rows, "Attention", "python benchmarks/run.py attention", note), encoding="utf-8")
    return rows


def data() -> list[Row]:
    """Token shards: reading them, making them, and packing."""
    done = subprocess.run([sys.executable, str(HERE / "data.py")], check=True, stdout=subprocess.PIPE, text=True)
    return [Row(*one) for one in json.loads(done.stdout.splitlines()[-1])]


def planning() -> list[Row]:
    """Plans of models and worlds that no machine here could hold."""
    sys.path.insert(0, str(HERE))
    from planning import PLANS, planned

    rows = []
    for what, (world, plugins, config) in PLANS.items():
        _, seconds, memory = planned(world, plugins, config)
        name = f"{what}, {world:,} ranks"
        rows.append(Row(f"{name}: CPU seconds", f"{seconds:.1f}", "≤ 60", seconds <= 60))
        rows.append(Row(f"{name}: peak memory", f"{memory:.2f} GB", "≤ 2 GB", memory <= 2))
    note = "`forge plan --device h100` with these sizes, start-up included, on one thread, once each."
    PLANNING.write_text(table(rows, "Plans", "python benchmarks/run.py planning", note), encoding="utf-8")
    return rows


def presets() -> list[Row]:
    """Plans of the presets of published models, each on the hardware that it names."""
    from forge_train_cli.presets import everything

    rows = []
    for preset in everything():
        if not preset.parameters:
            continue
        world, device = preset.hardware.split()
        command = [*FORGE, "plan", preset.name, "--world", world, "--device", device, "--json"]
        plan = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        name, peak, roofline = f"`{preset.name}` on {preset.hardware}", plan["memory"]["peak"], plan["roofline"]
        sizes = plan["parameters"]
        count = sizes["total"] - sizes["by_module"].get("tail", 0)  # as published: without mtp
        rows.append(Row(f"{name}: parameters", f"{count:,}", f"{preset.parameters:,}", count == preset.parameters))
        bar = f"≤ {roofline['memory_bytes'] / 2**30:.1f} GiB"
        rows.append(Row(f"{name}: memory of a rank at its peak", f"{peak / 2**30:.1f} GiB", bar, roofline["fits"]))
        rate = f"{roofline['tokens_per_second']:,.0f}, MFU {roofline['mfu']:.0%}, bound by {roofline['bound']}"
        rows.append(Row(f"{name}: tokens per second, at most", rate, "—", True))
    note = "Planned, not run: `forge plan NAME --world N --device h100`. Speeds are upper bounds."
    PRESETS.write_text(table(rows, "Published models", "python benchmarks/run.py presets", note), encoding="utf-8")
    return rows


def checkpoints() -> list[Row]:
    """What a checkpoint costs."""
    sys.path.insert(0, str(HERE))
    from checkpoints import bars, page, parts

    found = parts(Path(tempfile.gettempdir()))
    CHECKPOINTS.write_text(page(found), encoding="utf-8")
    return [Row(*row) for row in bars(found)]


def huggingface() -> list[Row]:
    """Weights from and to Hugging Face layout."""
    sys.path.insert(0, str(HERE))
    from huggingface import bars, note, parts

    found = parts(Path(tempfile.gettempdir()))
    rows = [Row(*row) for row in bars(found)]
    page = table(rows, "Exchange with Hugging Face layout", "python benchmarks/run.py huggingface", note(found))
    HUGGING_FACE.write_text(page, encoding="utf-8")
    return rows


def surviving() -> list[Row]:
    """How soon a run continues, and what it costs to watch one."""
    sys.path.insert(0, str(HERE))
    from surviving import STEP, WATCHERS, restart, watching

    soon, cost = restart(), watching() / STEP
    rows = [
        Row("a rank is killed → next finished step, 2 ranks", f"{soon:.1f} s", "≤ 15 s", soon <= 15),
        Row(f"{', '.join(WATCHERS)}: of a step of 100 ms", f"{cost:.2%}", "≤ 0.5%", cost <= 0.005),
    ]
    note = (
        "The first is wall time, with those plugins, of the preset quickstart, from the kill to the end of the step "
        "that follows the checkpoint. The second is CPU time of all threads, on one process."
    )
    SURVIVING.write_text(table(rows, "Surviving", "python benchmarks/run.py surviving", note), encoding="utf-8")
    return rows


def records() -> list[Row]:
    """A forward-only job that is killed, and what it costs beside the model."""
    sys.path.insert(0, str(HERE))
    from records import COUNT, FEW, LARGE, LAYOUTS, SMALL, desk, killed, shares, train, used

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        desk(folder)
        train(folder, "small", SMALL)
        train(folder, "large", LARGE)
        rows = []
        for suffix in ("jsonl", "parquet", "safetensors"):
            whole, stops = used(folder, "many", f"whole.{suffix}"), killed(folder, f"killed.{suffix}")
            same = (folder / f"whole.{suffix}").read_bytes() == (folder / f"killed.{suffix}").read_bytes()
            at = ", ".join(f"{one:,}" for one in stops)
            rows.append(
                Row(
                    f"{COUNT:,} records into .{suffix}, killed {len(LAYOUTS)} times (after {at})",
                    "the same bytes" if same else "other bytes",
                    "the same bytes",
                    same,
                )
            )
            more = whole.peak / used(folder, "few", f"few.{suffix}").peak - 1
            rows.append(
                Row(
                    f"memory for {COUNT:,} records over that for {FEW:,}, .{suffix}",
                    f"{more:+.1%}",
                    "≤ 5%",
                    more <= 0.05,
                )
            )
            for outputs in ("log_likelihood", "layers.*.hidden"):
                found = shares(folder, f"shares-{outputs[:3]}.{suffix}", outputs)
                speed = found.records / (found.check + found.forward + found.rest)
                rows.append(
                    Row(
                        f"time outside forward passes, {outputs}, .{suffix} ({speed:,.0f} records/s)",
                        f"{found.outside:.1%}",
                        "≤ 10%",
                        found.outside <= 0.1,
                    )
                )
    note = (
        f"Stretches of 20 to 120 bytes of the standard library's sources. Kills and memory with a model of {SMALL[1]} "
        f"layers of width {SMALL[0]}, time with one of {LARGE[1]} of {LARGE[0]}. A kill is SIGKILL of all processes: "
        "of one, of fsdp2 on two, of a pipeline of two, and of fsdp2 again; one process finishes. Memory is the peak "
        "of one process."
    )
    RECORDS.write_text(table(rows, "Records", "python benchmarks/run.py records", note), encoding="utf-8")
    return rows


def chaos() -> list[Row]:
    """Runs that meet misfortunes; the page has a line for each kind."""
    code = subprocess.run([sys.executable, str(HERE / "chaos.py")], check=False).returncode
    return [
        Row("100 misfortunes on two ranks, survived or refused", "pass" if code == 0 else "FAIL", "pass", code == 0)
    ]


def seeing() -> list[Row]:
    """Fusions that learn to see."""
    sys.path.insert(0, str(HERE))
    from seeing import main

    return [Row(*one) for one in main([])]


def trials() -> list[Row]:
    environment = {**os.environ, "FORGE_TRIALS": "20", "FORGE_EXAMPLES": "3000"}
    rows = []
    for what, file in (
        ("20 × `kill -9` at a random moment, resumed bit for bit", "tests/laws/test_law_03_resume.py"),
        ("3,000 mutated configurations and option lists", "tests/e2e/test_properties.py"),
    ):
        command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3000", file]
        code = subprocess.run(command, cwd=HERE.parent, env=environment, check=False).returncode
        rows.append(Row(what, "pass" if code == 0 else "FAIL", "pass", code == 0))
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    part.__name__: part
    for part in (
        *(startup, first, loop, transformers, loss, text, quickstart, trials),
        *(parallel, experts, low_precision, optimizers, attention, observing, data, planning),
        *(presets, checkpoints, huggingface, surviving, records, chaos, seeing),
    )
}
APART = {
    *("parallel", "experts", "low_precision", "optimizers", "attention", "observing", "data", "planning"),
    *("presets", "checkpoints", "huggingface", "surviving", "records", "chaos", "seeing"),
}
"""Those that have a table of their own."""


def main() -> int:
    """Measure what the command line names, print it, and write the table if it is all of it."""
    chosen = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        print(f"There is no part {unknown[0]!r}; there are {', '.join(PARTS)}.", file=sys.stderr)
        return 2
    rows, core = [], []
    for name in chosen:
        for row in PARTS[name]():
            rows.append(row)
            core += [row] if name not in APART else []
            print(f"{'ok  ' if row.ok else 'MISS'} {row.what}: {row.measured} (bar {row.bar})", flush=True)
    if set(chosen) >= set(PARTS) - {"trials", *APART}:  # trials take half an hour
        RESULTS.write_text(table(core, "Core, on one process", "make bench"), encoding="utf-8")
    return 0 if all(row.ok for row in rows) else 1


def table(rows: list[Row], title: str, command: str, note: str = "") -> str:
    import torch

    lines = [f"| {row.what} | {row.measured} | {row.bar} | {'yes' if row.ok else '**no**'} |" for row in rows]
    machine = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    return "\n".join(
        [
            f"# {title}",
            "",
            f"Written by `{command}` on {time.strftime('%Y-%m-%d')}: {machine}.",
            *([note] if note else []),
            "",
            "| what | measured | bar | met |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(main())
