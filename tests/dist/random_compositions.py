"""Random compositions of layouts, plugins, precisions and tasks, for the tests and `make verify-random`.

Number n of a seed is always the same composition: it can be drawn again alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import compositions
import heads_data
from forge_train.base.errors import ForgeError
from forge_train_tools.configuration.request import Request
from forge_train_tools.verification import Reference, Verdict
from forge_train_tools.verification.numbers import errors, finite, relative, typical
from forge_train_tools.verification.ranks import metrics_apart
from pipelines import SCHEDULES

TASKS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "next_token": ((), {}),
    "classify": (("classify", "text_labels"), {"classify.classes": heads_data.PACKAGES}),
    "embed": (("embed", "text_pairs"), {"text_pairs.kind": "embedding"}),
    "reward": (("reward", "text_pairs"), {"text_pairs.template": "plain"}),
}
JITTERS = 3
"""Runs of one process that are measured beside a disagreement."""
MARGIN = 3.0
"""How many times as far as jitter moves one process a layout may be from it, where that is noise."""
NOISY = {"loss": "loss", "grad_norm": "grad_norm", "gradients": "gradients", "later gradients": "gradients",
         "evaluation": "evaluation", "metrics": "metrics"}  # fmt: skip
"""Checks that rounding can fail, and the measure of jitter that each is held against."""


@dataclass(frozen=True)
class Drawn:
    """One composition of a seed."""

    seed: int
    number: int
    world: int
    layout: Mapping[str, Any]
    """Settings and, under `plugins`, plugins of the layout alone."""
    model: Mapping[str, Any]
    """The same of both sides."""
    words: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        return f"{self.number}: {' '.join(self.words)}"

    def request(self, file: Path) -> Request:
        """The configuration of the layout."""
        both = {**self.model, **self.layout}
        both["plugins"] = (*self.model["plugins"], *self.layout["plugins"])
        return _request(file, both)

    def reference(self, file: Path) -> Request:
        """The same model and data on one process."""
        return _request(file, self.model)


def _request(file: Path, settings: Mapping[str, Any]) -> Request:
    values = dict(settings)
    plugins: Sequence[str] = values.pop("plugins")
    owner = next((one for one in plugins if one in ("text_pairs", "text_labels")), "text")
    task = next((one for one in TASKS if one in plugins), "next_token")
    values |= {
        f"{owner}.path": str(file.parent / f"{task}.jsonl"),
        f"{owner}.cache": str(file.parent / "cache"),
        f"{owner}.held_out": 0.2,
        **({"text.baseline": False} if owner == "text" else {f"{owner}.long": "right"}),
    }
    request = compositions._request(file, plugins, values)
    return request if owner == "text" else replace(request, without=("text",))


def write(folder: Path) -> Path:
    """The file that all compositions are laid over, and texts for each task."""
    texts = [(name, text[:40].strip()) for name in heads_data.PACKAGES for text in heads_data.passages(name, 60)]
    heads_data.write(folder / "next_token.jsonl", ({"text": text} for _, text in texts))
    heads_data.write_tasks(folder, texts)
    train = {"steps": 6, "sequence": 48, "evaluate_every": 3}
    return compositions.write_config(folder / "random.toml", ("decoder",), train=train, decoder={"max_sequence": 64})


def draw(seed: int, number: int, most: int = 8) -> Drawn:
    """A composition on at most so many processes."""
    chance = random.Random(f"{seed} {number}")
    pick = chance.choice
    while True:
        sizes = {
            "pp": pick((1, 1, 1, 2, 2, 3, 4)),
            "data": pick((1, 1, 2, 2, 3, 4)),
            "cp": pick((1, 1, 1, 2, 2, 4)),
            "tp": pick((1, 1, 1, 2, 2, 4)),
        }
        world = math.prod(sizes.values())
        if 2 <= world <= most and (world <= 4 or chance.random() < 0.4):
            break
    model, words = _model(chance)
    layout, more = _layout(chance, sizes, model)
    micro, count = chance.choice((2, 2, 4)), chance.choice((1, 2, 3))
    if sizes["pp"] > 1:
        count = sizes["pp"] * (2 if layout["pp.schedule"] == "dualpipe_v" else chance.choice((1, 2)))
    alone = micro
    if "embed" in model["plugins"]:
        if count == 1 and model["train.precision"] == "fp32":
            alone = micro * sizes["data"]  # all pairs are each other's negatives
        else:
            model["embed.group"] = micro // 2
    model |= {"train.global_batch": micro * count * sizes["data"], "train.micro_batch": alone}
    layout["train.micro_batch"] = micro
    more.append(f"{count} × {micro}")
    return Drawn(seed, number, world, layout, model, (f"{world} ranks,", *more, *words))


def _model(chance: random.Random) -> tuple[dict[str, Any], list[str]]:
    """Plugins and settings that decide what is computed."""
    pick, maybe = chance.choice, lambda share: chance.random() < share
    plugins: list[str] = []
    task = pick(("next_token",) * 5 + ("classify", "embed", "reward"))
    own, settings = TASKS[task]
    plugins += own
    found: dict[str, Any] = {
        **settings,
        "run.seed": chance.randrange(1000),
        "decoder.layers": pick((2, 3, 4, 6)),
        "decoder.kv_heads": pick((0, 0, 2, 4)),
        "decoder.qk_norm": maybe(0.2),
        "decoder.embedding_dropout": pick((0.0, 0.0, 0.0, 0.1)),
        "decoder.norm": pick(("rms", "rms", "layer")),
    }
    if task == "next_token":
        found |= {"text.isolate": maybe(0.5), "decoder.tied": maybe(0.4)}
        if maybe(0.25):
            plugins.append("mtp")
            found["mtp.depths"] = pick((1, 2))
    attention = pick(("gqa",) * 5 + ("mla", "delta_net"))
    if attention == "mla":
        plugins.append("mla")
        found |= {"mla.kv_rank": 16, "mla.q_rank": pick((0, 24)), "mla.rope_dim": 4, "decoder.kv_heads": 0}
    elif attention == "delta_net":
        plugins.append("delta_net")
        found |= {"delta_net.heads": 4, "delta_net.k_heads": pick((2, 4)), "delta_net.k_dim": 6, "delta_net.chunk": 5}
        found["delta_net.layers"] = pick(([], [True, False]))
    elif maybe(0.3):
        plugins.append(pick(("eager", "flex")))
    if maybe(0.4):
        plugins.append("moe")
        found |= {
            "moe.experts": pick((4, 8, 12)),
            "moe.hidden": 16,
            "moe.top_k": (top := pick((1, 2, 3))),
            "moe.normalise": top > 1,
            "moe.router": pick(("softmax", "softmax", "sigmoid")),
            "moe.shared": pick((0, 0, 1)),
            "moe.bias_speed": pick((0.0, 0.01)),
            "moe.balance": pick((0.0, 0.1)),
            "moe.z_loss": pick((0.0, 0.001)),
        }
    precision = pick(("fp32",) * 5 + ("bf16", "bf16", "fp16"))
    found["train.precision"] = precision
    if precision == "fp16":
        found |= {"loss_scaler.growth": pick((1, 2, 2000)), "loss_scaler.initial": pick((65536.0, 2.0**20))}
    if precision == "bf16" and maybe(0.15):
        plugins.append("bf16_parameters")
    optimizer = pick(("adamw",) * 3 + ("lion", "muon", "schedule_free", "normuon"))
    if optimizer != "adamw":
        plugins.append(optimizer)
    if optimizer == "muon":
        found["muon.dtype"] = "fp32"  # in bf16, products of other stacks of matrices round differently
    if maybe(0.2) and optimizer != "schedule_free":  # which evaluates an average of its own
        plugins.append("ema")
    words = [f"{name}={value}" for name, value in found.items() if value not in (False, 0, 0.0) and value != "fp32"]
    hidden = ("run.", "classify.classes", "text_pairs.", "delta_net.", "mla.", "moe.hidden")
    words = [word for word in words if not word.startswith(hidden)]
    return {"plugins": tuple(plugins), **found}, [*plugins, *words]


def _layout(
    chance: random.Random, sizes: Mapping[str, int], model: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """How it is spread over ranks, and what does not change what is computed."""
    pick, maybe = chance.choice, lambda share: chance.random() < share
    plugins: list[str] = []
    found: dict[str, Any] = {}
    for axis in ("pp", "cp", "tp"):
        if sizes[axis] > 1:
            plugins.append(axis)
            found[f"parallel.{axis}"] = sizes[axis]
    data = sizes["data"]
    how = pick(("fsdp2", "fsdp2", "zero1", "ddp", "hsdp", "never", "step"))
    if how == "hsdp" and data % 2 == 0:
        found["parallel.dp_replicate"] = pick((2, data))
    if how in ("never", "step"):
        found["fsdp2.reshard"] = how
    if how == "ddp" and sizes["tp"] > 1 and maybe(0.9):
        how = "zero1"  # ddp refuses it
    plugins.append(how if how in ("zero1", "ddp") else "fsdp2")
    found |= _experts(chance, sizes, model, found, spread=how != "ddp")
    plugins += ["ep"] if {"parallel.ep", "parallel.etp"} & found.keys() else []
    if sizes["pp"] > 1:
        found["pp.schedule"] = pick(SCHEDULES)
        parts = 1 if found["pp.schedule"] in ("gpipe", "1f1b") else 2
        model["decoder.layers"] = max(model["decoder.layers"], sizes["pp"] * parts - 2)
    if sizes["cp"] > 1:
        found["cp.method"] = pick(("auto", "gather", "ulysses", "ring"))
    if sizes["tp"] > 1 and maybe(0.2):
        found[pick(("tp.sequence_parallel", "tp.loss_parallel"))] = False
    if maybe(0.4):
        plugins.append("ac")
        found["ac.mode"] = pick(("full", "full", "selective"))
        if maybe(0.3):
            found["ac.every"] = 2
    if maybe(0.15):
        plugins.append("compile")
        found["compile.backend"] = "aot_eager"
    words = [f"{name.removeprefix('parallel.')}={value}" for name, value in found.items()]
    return {"plugins": tuple(plugins), **found}, [*(f"dp={data}",) * (data > 1), *plugins, *words]


def _experts(
    chance: random.Random,
    sizes: Mapping[str, int],
    model: Mapping[str, Any],
    layout: Mapping[str, Any],
    *,
    spread: bool,
) -> dict[str, Any]:
    """How experts are spread, if there are any."""
    if "moe" not in model["plugins"]:
        return {}
    parts = sizes["tp"] if sizes["tp"] > 1 and chance.random() < 0.4 else 1
    room = sizes["data"] // layout.get("parallel.dp_replicate", 1) * sizes["cp"] * sizes["tp"] // parts
    able = [size for size in (2, 3, 4, 8) if room % size == 0 and model["moe.experts"] % size == 0]
    found = {"parallel.etp": parts} if parts > 1 else {}
    if able and spread and chance.random() < 0.7:
        found["parallel.ep"] = chance.choice(able)
    return found


@dataclass(frozen=True)
class Jitter:
    """How far one process moves if its weights start one rounding error away; of several draws the most."""

    moved: Mapping[str, float]

    @classmethod
    def measure(cls, request: Request, steps: int) -> Jitter:
        """Take the steps of one process again, with other rounding errors of its weights."""
        still = Reference.take(request, steps).recording
        moved = dict.fromkeys(NOISY.values(), 0.0)
        for draw_number in range(1, JITTERS + 1):
            shaken = replace(
                request,
                plugins=(*request.plugins, "jittered:Jittered"),
                set=(*request.set, f"jittered.draw={draw_number}"),
            )
            other = Reference.take(shaken, steps).recording
            gaps = errors(still.gradients, other.gradients)
            worst = typical(gaps) if still.narrow else max((gap.error for gap in gaps), default=0.0)
            now = {
                "loss": relative(still.first.losses, other.first.losses)[0],
                "grad_norm": relative(*_finite(still.first.norms, other.first.norms))[0],
                "gradients": finite(worst),
                "metrics": metrics_apart(still.first.metrics, other.first.metrics)[0],
                "evaluation": relative(still.first.evaluation, other.first.evaluation)[0],
            }
            moved = {name: max(moved[name], value) for name, value in now.items()}
        return cls(moved)

    def explains(self, verdict: Verdict) -> bool:
        """Whether all that fails is no more than rounding does to one process."""
        failed = [check for check in verdict.checks if not check.ok]
        return all(check.name in NOISY and check.worst <= MARGIN * self.moved[NOISY[check.name]] for check in failed)


def _finite(one: Sequence[float], other: Sequence[float]) -> tuple[list[float], list[float]]:
    """Of the steps that overflow on neither side."""
    both = [pair for pair in zip(one, other, strict=True) if all(map(math.isfinite, pair))]
    return [pair[0] for pair in both], [pair[1] for pair in both]


def sentence(error: ForgeError) -> str:
    """The first line of a refusal."""
    return str(error).partition("\n")[0]
