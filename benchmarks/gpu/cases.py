"""All cases, in the order of the table."""

from __future__ import annotations

from typing import Any

from .case import Case

LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "fsdp2": (2, "fsdp2", ()),
    "ddp": (2, "ddp", ()),
    "tp": (2, "tp", ("parallel.tp=2",)),
    "cp": (2, "cp", ("parallel.cp=2",)),
    "pp": (2, "pp", ("parallel.pp=2",)),
    "ep": (2, "moe,ep", ("parallel.ep=2",)),
    "fsdp2-compile": (2, "fsdp2,compile", ()),
    "fsdp2-tp": (4, "fsdp2,tp", ("parallel.tp=2",)),
    "fsdp2-cp": (4, "fsdp2,cp", ("parallel.cp=2",)),
    "fsdp2-tp-pp": (8, "fsdp2,tp,pp", ("parallel.tp=2", "parallel.pp=2")),
    "fsdp2-ep": (8, "fsdp2,moe,ep", ("parallel.ep=4",)),
    "hsdp": (8, "fsdp2", ("parallel.dp_replicate=2",)),
    "fp8-fsdp2": (8, "fsdp2,fp8", ("fp8.all_gather=true",)),
}
"""Devices, plugins and settings: what several devices add. They are switched on by the number of devices."""


def cases(about: dict[str, Any]) -> list[Case]:
    """Every case; what it needs decides whether it runs.

    Args:
        about: the machine, as `machine.describe` gives it.
    """
    return [*_attention(), *_products(), *_runs(), *_asked(), *_layouts(), *_speed(about["memory_gib"])]


def _attention() -> list[Case]:
    found = []
    for kernel in ("eager", "flash", "flex", "varlen"):
        for precision in ("fp32", "bf16", "fp16"):
            arguments = {"kernel": kernel, "precision": precision}
            seconds = 180 if kernel == "flex" else 90  # it compiles each of its kernels
            found.append(Case(f"attention-{kernel}-{precision}", "attention:check", arguments, seconds=seconds))
    for backend in ("auto", "flash", "efficient", "cudnn", "math"):
        for precision in ("fp32", "bf16", "fp16"):
            arguments = {"kernel": "sdpa", "precision": precision, "backend": backend}
            gpus = int(backend in ("efficient", "cudnn"))
            found.append(Case(f"attention-sdpa-{backend}-{precision}", "attention:check", arguments, gpus, 90))
    return found


def _products() -> list[Case]:
    found = [Case("products-grouped-bf16", "products:grouped")]
    for recipe in ("tensorwise", "rowwise", "rowwise_gw_hp"):
        found.append(Case(f"products-fp8-{recipe}", "products:linear", {"recipe": recipe}))
        found.append(Case(f"products-fp8-experts-{recipe}", "products:experts", {"recipe": recipe}, gpus=1))
    found.append(Case("products-fp8-deepseek", "products:linear", {"recipe": "deepseek"}, gpus=1))
    codes = [Case(f"products-codes-{kind}", "products:codes", {"kind": kind}) for kind in ("nf4", "int8")]
    return [*found, *codes, Case("states-narrow", "products:states")]


def _runs() -> list[Case]:
    fresh = {"train.init_missing": "[]", "checkpoint.only": "[]"}  # the base is drawn, as no checkpoint is here
    coded = {"lora.base": "nf4", "lora.base_block": 32, **fresh}
    found = [
        Case("verify-fp32", "runs:against_cpu", {"precision": "fp32"}, seconds=90),
        Case("verify-bf16", "runs:against_cpu", {"precision": "bf16"}, seconds=90),
        Case("verify-moe", "runs:against_cpu", {"precision": "fp32", "plugins": "moe"}, seconds=90),
        Case("verify-lora", "runs:against_cpu", {"precision": "fp32", "plugins": "lora", "values": fresh}, seconds=90),
        Case("verify-qlora", "runs:against_cpu", {"precision": "fp32", "plugins": "lora", "values": coded}, seconds=90),
    ]
    for kernel in ("sdpa", "varlen", "flex", "flash"):
        for ac in (False, True):
            arguments, gpus = {"kernel": kernel, "ac": ac}, int(kernel == "flash")
            found.append(Case(f"compile-{kernel}{'-ac' * ac}", "runs:compiled", arguments, gpus, 120))
    resumed: tuple[tuple[str, dict[str, Any]], ...] = (
        ("fp32", {}),
        ("bf16", {"train.precision": "bf16"}),
        ("moe", {"plugins": ["moe"]}),
        ("asynchronous", {"checkpoint.asynchronous": True}),
    )
    found += [Case(f"resume-{name}", "runs:resumed", values) for name, values in resumed]
    watched: tuple[tuple[str, dict[str, Any]], ...] = (
        ("dense", {}),
        ("varlen", {"plugins": ["varlen"]}),
        ("moe", {"plugins": ["moe"]}),
        ("fp8", {"plugins": ["fp8"]}),
    )
    found += [Case(f"waits-{name}", "runs:waits", values) for name, values in watched]
    return [
        *found,
        Case("saves-asynchronous", "runs:saves"),
        Case("one-rank", "runs:one_rank", {"offload": False}),
        Case("one-rank-offload", "runs:one_rank", {"offload": True}, gpus=1),
        Case("peak-plain", "runs:peak", gpus=1, alone=True),
        Case("peak-ac", "runs:peak", {"plugins": ["ac"]}, gpus=1, alone=True),
        Case("peak-lora", "runs:peak", {"plugins": ["lora"], **fresh}, gpus=1, alone=True),
        Case("peak-qlora", "runs:peak", {"plugins": ["lora"], "lora.base": "nf4", **fresh}, gpus=1, alone=True),
    ]


def _asked() -> list[Case]:
    """A trained model that is asked, and what a run does between its steps."""
    return [
        Case("ask-generate-fp32", "asking:answers", seconds=240),
        Case("ask-generate-speed", "asking:speed", alone=True),
        Case("ask-generate-memory", "asking:memory", {"group": 1}, alone=True),
        Case("ask-generate-memory-gqa", "asking:memory", {"group": 4}, alone=True),
        Case("ask-infer", "asking:scores", seconds=90),
        *(
            Case(f"ask-capture-{model}", "asking:captured", {"model": model})
            for model in ("decoder", "moe", "mla", "delta_net")
        ),
        Case("ask-steer", "asking:steered"),
        Case("ask-grpo", "rewarded:steps", {"temperature": 1.0}, seconds=180),
        Case("ask-grpo-cold", "rewarded:steps", {"temperature": 0.6}, seconds=180),
        Case("ask-sleep-memory", "sleeping:naps", {"disk": False}, gpus=1),
        Case("ask-sleep-disk", "sleeping:naps", {"disk": True}, seconds=90),
    ]


def _layouts() -> list[Case]:
    """Layouts over several devices against one."""
    return [
        Case(f"layout-{name}", "runs:layout", {"gpus": gpus, "plugins": plugins, "sets": sets}, gpus, 120, alone=True)
        for name, (gpus, plugins, sets) in LAYOUTS.items()
    ]


def _speed(gib: int) -> list[Case]:
    """Speeds; all layers of 8B where its weights, gradients and optimizer state fit."""
    found = []
    for model in ("1b", "8b" if gib >= 130 else "8b-8-layers", "moe"):
        for fp8 in (False, True):
            # 128 GB of state leave little room on an H200, and each step takes a second.
            arguments = {"model": model, "fp8": fp8, "turns": 2 if model == "8b" else 4}
            name = f"speed-{model}-{'fp8' if fp8 else 'bf16'}"
            found.append(Case(name, "speed:train", arguments, seconds=170, alone=True, judges="speed"))
    return [*found, Case("speed-torchtitan", "speed:torchtitan", gpus=1, seconds=170, alone=True, judges="speed")]
