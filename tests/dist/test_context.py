"""Context parallelism against one process, by `forge verify`'s own code.

CI takes those of the covering array in which each value occurs, and `make test-all` takes the array.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import contexts
from compositions import SEED
from contexts import Context
from crossed import every_value, marked
from forge_train_tools.testing import Verifier

pytestmark = [pytest.mark.dist]


@pytest.mark.parametrize("context", every_value(contexts.covering(), contexts.values, contexts.cost), ids=str)
def test_all_pairs_agree_with_one_process(verify: Verifier, composition_file: Path, context: Context) -> None:
    reference = context.reference(composition_file)
    verdict = verify(context.request(composition_file), context.world, steps=2, reference=reference)
    assert verdict.agree, f"seed {SEED}: {verdict}"
    by_name = {check.name: check for check in verdict.checks}
    assert {
        "loss",
        "grad_norm",
        "gradients",
        "later gradients",
        "updates",
        "checkpoint",
        "evaluation",
    } <= by_name.keys()
    assert by_name["gradients"].worst <= 1e-4


MORE: dict[str, tuple[Context, dict[str, Any], tuple[str, ...]]] = {
    "compiled": (
        Context(2, "gather", frozenset({"packed"})),
        {"compile.backend": "aot_eager", "decoder.layers": 1},
        ("compile",),
    ),
    "compiled and recomputed": (
        Context(2, "ulysses", frozenset({"ac", "tp"})), {"compile.backend": "aot_eager"}, ("compile",),
    ),
    "selective": (Context(2, "ring", frozenset({"packed", "ac"})), {"ac.mode": "selective"}, ()),
    "copies": (Context(2, "gather", frozenset(), 2), {"parallel.dp_replicate": 2}, ()),
    "ddp": (Context(2, "ring", frozenset({"packed"})), {}, ("ddp",)),
}  # fmt: skip
EXTENDED = ("compiled", "compiled and recomputed", "selective", "copies")
"""test_compositions.py compiles and recomputes with tp, and has copies of tp."""


@pytest.mark.parametrize("name", marked(MORE, EXTENDED))
def test_agrees_beside_others(verify: Verifier, composition_file: Path, name: str) -> None:
    context, settings, plugins = MORE[name]
    request = context.request(composition_file, plugins, **settings)
    if "ddp" in plugins:
        request = replace(request, plugins=tuple(one for one in request.plugins if one != "fsdp2"))
    model = {key: value for key, value in settings.items() if key.startswith("decoder.")}
    verdict = verify(request, context.world, steps=2, reference=context.reference(composition_file, **model))
    assert verdict.agree, verdict


@pytest.mark.parametrize("method", marked(["gather", "ring"], ["gather"]))
def test_agrees_in_bf16_by_its_own_gap(verify: Verifier, composition_file: Path, method: str) -> None:
    context = Context(2, method, frozenset({"packed", "grouped queries"}))
    request = context.request(composition_file, **{"train.precision": "bf16"})
    verdict = verify(request, context.world, steps=2)
    assert verdict.agree, verdict


PLANTED = {
    "a block that is not rescaled": (
        "context_sabotage:Unscaled",
        Context(2, "ring", frozenset()),
        "Look at how a block's partial result is merged: rescaled by its log-sum-exp",
    ),
    "documents across a border": (
        "context_sabotage:Borderless",
        Context(2, "gather", frozenset({"packed"})),
        "Look at documents that begin in one slice and go on in another",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(verify: Verifier, composition_file: Path, name: str) -> None:
    plugin, context, says = PLANTED[name]
    own = plugin.partition(":")[2].lower()
    request = context.request(composition_file, (plugin,), **{f"{own}.method": context.method})
    request = replace(request, set=tuple(one for one in request.set if not one.startswith("cp.")))
    verdict = verify(request, context.world, steps=2, reference=context.reference(composition_file))
    assert {"loss", "gradients"} <= verdict.failed, verdict
    print(verdict.failed, verdict.advice)
    assert "cut over parallel.cp = 2" in verdict.advice[0]
    assert says in verdict.advice[0]
