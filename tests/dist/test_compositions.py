"""Compositions against one process, by `forge verify`'s own code: all pairs of factors, options, compile, precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compositions
import forge_cli
from compositions import IN_CI, LAYOUTS, SEED, Composition
from crossed import few
from forge_train import ForgeError
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]
STEPS = 2
"""The second sees weights that the optimizer moved; `make verify-all` takes more."""

Settings = Mapping[str, Any]


def plain(value: object) -> str:
    """For an id that can be typed."""
    return str(value if not isinstance(value, dict) else ", ".join(value)).replace("×", "x")


LARGE = [
    pytest.param(one, marks=pytest.mark.extended)
    for one in compositions.covering(layouts=[name for name in LAYOUTS if name not in IN_CI])
]


@pytest.mark.parametrize("composition", [*compositions.covering(), *LARGE], ids=plain)
def test_all_pairs_agree_with_one_process(verify: Verifier, composition_file: Path, composition: Composition) -> None:
    reference = composition.reference(composition_file)
    verdict = verify(composition.request(composition_file), composition.world, steps=STEPS, reference=reference)
    assert verdict.agree, f"seed {SEED}: {verdict}"
    by_name = {check.name: check for check in verdict.checks}
    assert by_name["loss"].says == by_name["grad_norm"].says == "relative", "free runs part"
    assert {"updates", "optimizer", "later gradients", "evaluation"} <= by_name.keys()


def test_ranks_of_ddp_can_not_split_weights(composition_file: Path) -> None:
    arguments = ("verify", composition_file, "--nproc", 4, "-p", "ddp,tp", "-s", "parallel.tp=2")
    message = forge_cli.one_message(forge_cli.forge(*arguments), 2)
    assert "ddp can't take weights that are split over tp ranks; use fsdp2 instead of ddp" in message


# -- options that are no factor ---------------------------------------------------------------------------------------

MASK = {"probe.mask": True, "probe.count": False}
RICH = {
    "decoder.qk_norm": True,
    "decoder.bias": True,
    "decoder.qkv_bias": True,
    "decoder.o_bias": True,
    "decoder.norm": "layer",
    "swiglu.activation": "gelu",
}
LOSS = {"cross_entropy.z_loss": 1e-2, "cross_entropy.label_smoothing": 0.1, "cross_entropy.chunk": 80}
WHOLE, LOGITS = {"tp.sequence_parallel": False}, {"tp.loss_parallel": False}
TIED = ("tied", "packed")
GROWING = {
    "train.micro_batch": 6,
    "train.batch_warmup": "[{ steps = 1, global_batch = 12 }, { steps = 1, global_batch = 24 }]",
}
BUDGET = {"ac.mode": "memory_budget", "ac.budget": 0.2}
OPTIONS: dict[str, tuple[Composition, Settings, Settings]] = {
    # What it is: the composition, what belongs to the layout, and what one process has too.
    "reduced after each": (Composition("dp2", "no ac", "three", "untied", "packed"), {"fsdp2.reduce": "each"}, MASK),
    "gathered once a step": (Composition("dp2", "no ac", "three", *TIED), {"fsdp2.reshard": "step"}, {}),
    "head in chunks": (Composition("dp2", "no ac", "three", *TIED), {}, {**LOSS, **MASK}),
    "replicas of fsdp2": (Composition("replicas2", "no ac", "one", *TIED), {}, {}),
    "small buckets": (Composition("ddp2", "no ac", "three", *TIED), {"ddp.bucket_mb": 0.01}, {**LOSS, **MASK}),
    "ddp on two axes": (Composition("ddp2×2", "no ac", "one", "untied", "packed"), {}, {}),
    "a vocabulary that divides nowhere": (Composition("tp2×dp4", "no ac", "one", "untied", "packed"), {}, {}),
    "zero1 on two axes": (Composition("zero1 2×2", "no ac", "three", *TIED), {}, MASK),
    "tp, whole sequences": (Composition("tp2", "no ac", "one", *TIED), {**WHOLE, **LOGITS}, {"decoder.kv_heads": 2}),
    "tp, rich": (Composition("tp2", "no ac", "three", "untied", "packed"), {}, {**RICH, **LOSS, **MASK}),
    "tp, rich, whole sequences": (
        Composition("tp2×replicas2", "no ac", "one", "untied", "packed"), WHOLE, {**RICH, **LOSS, **MASK},
    ),
    "tp, uneven": (Composition("tp2", "no ac", "one", "untied", "one text"), {}, {"train.sequence": 15}),
    "tp4, rich": (Composition("tp4", "no ac", "one", *TIED), LOGITS, RICH),
    "growing batches": (Composition("dp2", "no ac", "three", *TIED), {"fsdp2.reduce": "each"}, {**GROWING, **MASK}),
    "growing batches, ddp": (Composition("ddp2", "full", "three", *TIED), {}, GROWING),
    "tp, sums kept": (Composition("tp2", "selective", "one", *TIED), {"ac.save": ["attention", "collectives"]}, {}),
}  # fmt: skip
ORDERED = dict(sorted(OPTIONS.items(), key=lambda item: item[1][0].world))
"""Those of one number of ranks together: they share a process group."""
EXTENDED = ("tp, rich, whole sequences", "tp4, rich")


@pytest.mark.parametrize(
    ("composition", "layout", "model"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.extended] if case[0].world > 4 or name in EXTENDED else [])
        for name, case in ORDERED.items()
    ],
)
def test_options_agree(
    verify: Verifier, composition_file: Path, composition: Composition, layout: Settings, model: Settings
) -> None:
    plugins = ("cases:Probe",) if MASK.items() <= model.items() else ()
    request = composition.request(composition_file, plugins, **layout, **model)
    reference = composition.reference(composition_file, plugins, **model)
    steps = 3 if GROWING.items() <= model.items() else STEPS
    verdict = verify(request, composition.world, steps=steps, reference=reference)
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("composition", "settings"),
    [
        pytest.param(
            Composition("dp2", "full", "one", "tied", "packed"), {"compile.fullgraph": True}, marks=pytest.mark.extended
        ),
        (Composition("tp2", "full", "three", "untied", "packed"), {"compile.backend": "aot_eager"}),
        (Composition("dp2", "no ac", "one", "tied", "packed"), {"compile.backend": "aot_eager", **BUDGET}),
        pytest.param(
            Composition("tp2×dp2", "selective", "one", "untied", "packed"),
            {"compile.backend": "aot_eager"},
            marks=pytest.mark.extended,
        ),
    ],
    ids=plain,
)
def test_compiled_layouts_agree(
    verify: Verifier, composition_file: Path, composition: Composition, settings: Settings
) -> None:
    plugins = ("ac", "compile") if BUDGET.items() <= settings.items() else ("compile",)
    request = composition.request(composition_file, plugins, **settings)
    reference = composition.reference(composition_file)
    verdict = verify(request, composition.world, steps=STEPS, reference=reference)
    assert verdict.agree, verdict


def test_one_process_takes_the_micro_batches_of_a_narrow_layout(verify: Verifier, composition_file: Path) -> None:
    """Without `train.micro_batch`, a process takes all its sequences at once, and two take half of them each."""
    request = Composition("dp2", "no ac", "three", "tied", "packed").request(composition_file)
    free = tuple(one for one in request.set if not one.startswith("train.micro_batch"))
    assert len(free) < len(request.set)
    request = replace(request, set=(*free, "train.precision=bf16"))
    verdict = verify(request, 2, steps=2)
    assert verdict.agree, verdict


@pytest.mark.parametrize(
    ("layout", "precision", "head"),
    few(
        [
            *(("dp2", "bf16", "tied"), ("dp2", "fp16", "untied"), ("ddp2", "bf16", "untied"), ("ddp2", "fp16", "tied")),
            *(("zero1×2", "bf16", "tied"), ("zero1×2", "fp16", "untied"), ("hsdp2×2", "bf16", "tied")),
            *(("tp2", "bf16", "tied"), ("tp2×dp2", "bf16", "untied")),
        ],
        [("dp2", "bf16", "tied"), ("ddp2", "fp16", "tied"), ("zero1×2", "fp16", "untied"), ("tp2", "bf16", "tied")],
    ),
    ids=plain,
)
def test_narrow_layouts_are_near_one_process(
    verify: Verifier, composition_file: Path, layout: str, precision: str, head: str
) -> None:
    composition = Composition(layout, "no ac", "three", head, "packed")
    settings = {"train.precision": precision}
    if head == "untied":
        settings["precision.rules"] = '[{match = "*norm"}, {match = "layers.0.attention"}, {match = "head"}]'
    verdict = verify(composition.request(composition_file, **settings), composition.world, steps=STEPS)
    gradients = next(check for check in verdict.checks if check.name == "gradients")
    print(f"{composition}, {precision}: {gradients.worst:.1e}, allowed {gradients.tolerance:.1e}")
    assert 1e-5 < gradients.tolerance < 1e-2
    assert verdict.agree, verdict


# -- sabotage ---------------------------------------------------------------------------------------------------------


SABOTAGED = {
    # Who: whose place it takes, and the name of its section.
    "LateTP": ("tp", "late_tp"),
    "Misnamed": ("decoder", "misnamed"),
}


@pytest.mark.parametrize(
    ("name", "says"), [("LateTP", "is sharded already"), ("Misnamed", "'layers.0.attention.query'")]
)
def test_a_composition_that_can_not_be_is_refused(
    verify: Verifier, composition_file: Path, name: str, says: str
) -> None:
    with pytest.raises(ForgeError, match=says):
        verify(_sabotaged(composition_file, name), 4)


def _sabotaged(file: Path, name: str) -> Request:
    """tp2 × dp2, with one plugin's place taken by a wrong one."""
    right, section = SABOTAGED[name]
    text = file.read_text(encoding="utf-8")
    text = text.replace(f'"{right}"', f'"sabotage:{name}"').replace(f"[{right}]", f"[{section}]")
    own = file.with_name(f"{section}.toml")
    own.write_text(text, encoding="utf-8")
    request = Composition("tp2×dp2", "no ac", "one", "untied", "packed").request(own)
    plugins = (f"sabotage:{name}" if plugin == right else plugin for plugin in request.plugins)
    return replace(request, plugins=tuple(plugins))


# -- the array itself -------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(5))
def test_the_array_has_every_pair_and_is_small(seed: int) -> None:
    array = compositions.covering(seed)
    assert array == compositions.covering(seed)
    assert pairs(array) == pairs(compositions.product(IN_CI))
    assert {one.layout for one in array if one.accumulation == "three"} == set(IN_CI)
    assert len(array) <= 2 * len(IN_CI)


def pairs(found: Iterable[Composition]) -> set[tuple[tuple[str, str], ...]]:
    """A layout stands for its plugins and, where it meets activation checkpointing, for how they hold weights."""
    met = set()
    for one in found:
        values = {name: value for name, value in vars(one).items() if name != "layout"}
        met |= set(itertools.combinations(values.items(), 2))
        met |= {(("plugins", compositions.kind(one.layout)), value) for value in values.items() if value[0] != "ac"}
        met |= {(("weights", how), ("ac", one.ac)) for how in compositions.held(one.layout)}
    return met


def test_another_seed_gives_another_array() -> None:
    assert compositions.covering(1) != compositions.covering(2)
