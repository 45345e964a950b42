"""How much low precision loses: signal-to-noise of single layers, and the loss of short runs.

    python benchmarks/run.py low_precision            # writes benchmarks/results/low-precision.md
    python benchmarks/low_precision.py                # the table of single layers alone

Losses are means over seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from forge_train_plugins.precision._low_precision import recipes
from forge_train_plugins.precision._low_precision.products import ALONE, GroupedProduct, LinearProduct, Recipe

RESULTS = Path(__file__).parent / "results" / "low-precision.md"
TOKENS, INPUTS, OUTPUTS, EXPERTS, SEEDS = 1024, 512, 768, 4, 5
RECIPES: dict[str, Recipe] = {
    "fp8 tensorwise": recipes.scaled("tensorwise", kernel=False),
    "fp8 rowwise": recipes.scaled("rowwise", kernel=False),
    "fp8 rowwise_gw_hp": recipes.scaled("rowwise_gw_hp", kernel=False),
    "deepseek_fp8": recipes.deepseek(),
    "deepseek_fp8 stochastic": recipes.deepseek(stochastic=True),
    "mxfp8": recipes.mx(),
    "fp4 nvfp4": recipes.fp4("nvfp4"),
    "fp4 nvfp4 stochastic": recipes.fp4("nvfp4", stochastic=True),
    "fp4 mxfp4": recipes.fp4("mxfp4"),
}
TORCHAO = {
    "fp8 tensorwise": "tensorwise",
    "fp8 rowwise": "rowwise",
    "fp8 rowwise_gw_hp": "rowwise_with_gw_hp",
}
RUNS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "bf16, learning rate + 0.1 %": ("-s", "adamw.lr=2.002e-3"),  # how far chance alone takes it
    "fp8 tensorwise": ("-p", "fp8"),
    "fp8 rowwise": ("-p", "fp8", "-s", "fp8.recipe=rowwise"),
    "deepseek_fp8": ("-p", "deepseek_fp8"),
    "fp8 rowwise_gw_hp": ("-p", "fp8", "-s", "fp8.recipe=rowwise_gw_hp"),
    "mxfp8": ("-p", "mxfp8"),
    "fp4 nvfp4": ("-p", "fp4"),
    "fp4 nvfp4 stochastic": ("-p", "fp4", "-s", "fp4.rounding=stochastic"),
    "fp4 mxfp4": ("-p", "fp4", "-s", "fp4.format=mxfp4"),
}
JUDGED = ("fp8 tensorwise", "fp8 rowwise", "deepseek_fp8")
STEPS, LAST, BAR, DRAWS = 200, 20, 1.01, 3
FEWER = ("train.global_batch=4", "train.sequence=64")

Layer = Callable[[Tensor, Tensor], Tensor]
Ratios = tuple[float, ...]
"""Of output, gradient of the input, gradient of the weight, in dB."""
Losses = dict[str, list[float]]
"""Of runs, by the recipe, one for each seed."""


def decibels(signal: Tensor, other: Tensor) -> float:
    return float(20 * torch.log10(signal.norm() / (other.double() - signal).norm()))


def ratios(layer: Layer, seed: int) -> Ratios:
    """What a linear layer gives and passes back, beside the same in fp64: normal numbers, gradients of 1e-3."""
    draw = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(TOKENS, INPUTS, generator=draw), torch.randn(OUTPUTS, INPUTS, generator=draw) * 0.02
    gradient = torch.randn(TOKENS, OUTPUTS, generator=draw) * 1e-3
    found = _passes(layer, x, weight, gradient)
    exact = _passes(lambda a, b: a @ b.t(), x.double(), weight.double(), gradient.double())
    return tuple(decibels(one, other) for one, other in zip(exact, found, strict=True))


def _passes(layer: Layer, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    x, weight = x.requires_grad_(), weight.requires_grad_()
    out = layer(x, weight)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), gradient.to(out.dtype)))


def bf16(x: Tensor, weight: Tensor) -> Tensor:
    return x.bfloat16() @ weight.bfloat16().t()


def ours(recipe: Recipe) -> Layer:
    return lambda x, weight: LinearProduct.apply(x, weight, recipe, ALONE)[0]


def experts(recipe: Recipe) -> Layer:
    """All experts have one weight, and shares of the rows that are no multiples of anything."""
    sizes = torch.tensor([TOKENS // 3, 0, TOKENS // 5, TOKENS - TOKENS // 3 - TOKENS // 5])

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return GroupedProduct.apply(x, weight.expand(EXPERTS, -1, -1), sizes, recipe)[0]

    return layer


def torchao(name: str) -> Layer:
    """torchao's own layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    emulate = ScaledMMConfig(True, False, False, False)
    product = LinearMMConfig(emulate, emulate, emulate)
    return lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), product, config)


def typical(layer: Layer) -> Ratios:
    """The mean over seeds."""
    return tuple(mean(column) for column in zip(*(ratios(layer, seed) for seed in range(SEEDS)), strict=True))


def last_loss(more: tuple[str, ...], folder: str, name: str, own: Sequence[str]) -> float:
    """The mean loss of the last steps of a quickstart with experts, and with settings of its own."""
    command = [sys.executable, "-m", "forge_train_cli", "train", "-p", "moe", "--run-dir", folder, "--name", name]
    settings = [f"train.steps={STEPS}", "train.precision=bf16", "train.evaluate_every=0", "checkpoint.every=0"]
    command += ["--quiet", *more, *(part for one in (*settings, *own, "log.every=1") for part in ("-s", one))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    lines = (Path(folder) / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return mean(json.loads(line)["loss"] for line in lines[-LAST:])


def signal_table() -> list[str]:
    """In Markdown."""
    rows = [("bf16", typical(bf16), None, None)]
    for name, recipe in RECIPES.items():
        own = recipe if not name.startswith("fp8") else recipes.scaled_experts(name.split()[1], kernel=False)  # type: ignore[arg-type]
        theirs = typical(torchao(TORCHAO[name])) if name in TORCHAO else None
        rows.append((name, typical(ours(recipe)), typical(experts(own)), theirs))
    lines = [
        "| recipe | output | gradient of the input | of the weight | experts, the same three | torchao's layer |",
        "|---|---:|---:|---:|---|---|",
    ]
    for name, linear, grouped, theirs in rows:
        three = [_decibels(value) for value in linear]
        lines.append(f"| {name} | {' | '.join(three)} | {_three(grouped)} | {_three(theirs)} |")
    return lines


def _three(values: Ratios | None) -> str:
    return "" if values is None else ", ".join(map(_decibels, values))


def _decibels(value: float) -> str:
    return f"{value:.1f}" if value < 100 else "exact"


def losses(names: Iterable[str] = (*list(RUNS)[:2], *JUDGED), own: Sequence[str] = (), draws: int = DRAWS) -> Losses:
    """Of runs, by their names: one for each seed."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as several:
        runs = {
            name: [
                several.submit(last_loss, RUNS[name], folder, f"run-{number}-{seed}", (*own, f"run.seed={seed}"))
                for seed in range(draws)
            ]
            for number, name in enumerate(names)
        }
        return {name: [run.result() for run in each] for name, each in runs.items()}


def ratio(found: Losses, name: str) -> float:
    """Of the mean loss to bf16's."""
    return mean(found[name]) / mean(found["bf16"])


def write(judged: Losses, all_of_them: Losses) -> None:
    """The whole page.

    Args:
        judged: losses of those that there is a bar for.
        all_of_them: losses of every run, with `FEWER` tokens.
    """
    command = "forge train -p moe -s train.precision=bf16"
    fewer = "".join(f" -s {one}" for one in FEWER)
    lines = [
        "# Low precision\n",
        f"`python benchmarks/run.py low_precision`, torch {torch.__version__}, emulated on a CPU.\n",
        "## Signal to noise\n",
        f"Of one linear layer, {INPUTS} → {OUTPUTS}, on {TOKENS} tokens of normal numbers, against fp64, in dB:",
        f"20 log₁₀ of ‖exact‖ / ‖difference‖, the mean of {SEEDS} seeds; “exact” is above 100.\n",
        *signal_table(),
        "\n## Loss\n",
        f"The mean loss of the last {LAST} of {STEPS} steps of `{command}`, the quickstart",
        f"with experts, over {DRAWS} seeds, and its ratio to that without low precision. The bar is {BAR}.\n",
        *_losses(judged),
        f"\nThe same with fewer tokens and one seed, for all recipes: `{command}{fewer}`. Reported only.\n",
        *_losses(all_of_them),
    ]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _losses(found: Losses) -> list[str]:
    lines = ["| | loss | by seed | ratio |", "|---|---:|---|---:|"]
    for name, each in found.items():
        lines.append(
            f"| {name} | {mean(each):.4f} | {', '.join(f'{one:.3f}' for one in each)} | {ratio(found, name):.4f} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(signal_table()))
