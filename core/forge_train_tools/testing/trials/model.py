"""Trials of `build_model`, of its standing in Hugging Face layout, and of transforms."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forge_train.base.format import format_list
from forge_train.config.tree import DEFAULT, Key, Value
from forge_train.config.validate import validate
from forge_train.contract.model import Model
from forge_train.contract.transform import Phase, Transform
from forge_train.mesh.axes import CONFIGURED
from forge_train.plugin import hookspecs
from forge_train.plugin.calls import implemented
from forge_train_kit.axes import installed
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import View

from ..bench import TOKENS, Bench, Trials, close, hidden_states
from ..conformance import DoubtError, SkippedError, require


def built_on_meta(bench: Bench) -> str:
    with torch.device("meta"):
        part = hookspecs.build_model(bench.job)
    allocated = [name for name, parameter in part.named_parameters() if not parameter.is_meta]
    require(not allocated, f"{format_list(allocated)} has memory before it is asked for: build on the meta device")
    require(any(True for _ in part.parameters()), "the model has no parameters")
    return f"{sum(parameter.numel() for parameter in part.parameters())} parameters"


def gives_hidden_states(bench: Bench) -> None:
    model, (batch,) = bench.model(), bench.batches(1)
    hidden = hidden_states(model, batch)
    require(
        hidden.dim() == 3 and hidden.shape[:2] == batch.inputs.shape,
        f"expected hidden states [batch, sequence, dim] = {[*batch.inputs.shape, 'dim']}, found {list(hidden.shape)}",
    )
    require(bool(torch.isfinite(hidden).all()), "hidden states are not finite with initial weights")
    outputs = model.parts[-1].get_submodule("head")(hidden)
    same = 2 if bench.job.hooks.gives("head") == TOKENS else 1
    require(outputs.shape[:same] == hidden.shape[:same], f"head: {list(outputs.shape)} from {list(hidden.shape)}")


def looks_only_back(bench: Bench) -> None:
    model, (batch,) = bench.model(), bench.batches(1)
    middle = batch.inputs.shape[1] // 2
    changed = batch.inputs.clone()
    changed[:, middle:] = (changed[:, middle:] + 1) % (int(changed.max()) + 1)
    with torch.no_grad():
        before, after = hidden_states(model, batch), hidden_states(model, replace(batch, inputs=changed))
    if not torch.allclose(before[:, :middle], after[:, :middle], atol=1e-5):
        raise DoubtError("hidden states depend on later tokens, which next-token prediction must not see")


def keeps_documents_apart(bench: Bench) -> None:
    model, (batch,) = bench.model(), bench.batches(1)
    length = batch.inputs.shape[1]
    middle = length // 2
    columns = torch.arange(length).expand_as(batch.inputs)
    document_ids = (columns >= middle).long()
    batch = replace(batch, document_ids=document_ids, position_ids=columns - middle * document_ids)
    changed = batch.inputs.clone()
    changed[:, :middle] = (changed[:, :middle] + 1) % (int(changed.max()) + 1)
    with torch.no_grad():
        before, after = hidden_states(model, batch), hidden_states(model, replace(batch, inputs=changed))
    if not torch.allclose(before[:, middle:], after[:, middle:], atol=1e-5):
        raise DoubtError("a document's hidden states depend on the document before it; it does not use `document_ids`")


def trains_every_parameter(bench: Bench) -> None:
    model, (batch,) = bench.model(), bench.batches(1)
    task = hookspecs.task(bench.job)
    torch.autograd.backward(task.loss(model.parts[-1], hidden_states(model, batch), batch))
    idle = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if idle:
        raise DoubtError(f"{format_list(idle)} gets no gradient from a batch")


def declares_what_there_is(bench: Bench) -> str:
    model = bench.model()
    modules = dict(model.named_modules())
    parameters = {name for part in model.parts for name, _ in part.named_parameters(remove_duplicate=False)}
    missing = []
    part: Any
    for part in model.parts:
        declared = [
            ("units", getattr(part, "units", ())),
            ("stages", [name for stage in getattr(part, "stages", ()) for name in stage]),
            ("tensor_plan", part.tensor_plan() if callable(getattr(part, "tensor_plan", None)) else ()),
        ]
        for what, names in declared:
            wrong = _absent(names, modules)
            require(not wrong, f"{what} names {', '.join(wrong)}, which the model does not have")
            missing += [] if names else [what]
        wrong = _absent(getattr(part, "roles", {}), parameters)
        require(not wrong, f"roles names the parameters {', '.join(wrong)}, which the model does not have")
    if missing:
        raise DoubtError(f"it declares no {', '.join(missing)}: techniques that go by them will not find their way")
    return f"{sum(len(getattr(part, 'units', ())) for part in model.parts)} units"


def _absent(names: Iterable[str], there: Iterable[str]) -> list[str]:
    return sorted(set(names) - set(there))


def exports(bench: Bench) -> str:
    answer = bench.answer("export_hf")
    if answer is None:
        raise SkippedError("it does not export this model")
    require(isinstance(answer, HFModel), f"expected an HFModel, found {type(answer).__name__}")
    return f"{len(_exported(answer, bench.model()))} tensors"


def _exported(answer: HFModel, model: Model) -> dict[str, View]:
    """Return the tensors that the inverse of the map makes of the model's parameters."""
    parameters = {name: (tuple(one.shape), one.dtype) for name, one in model.named_parameters()}
    step = answer.map.inverse().trace(parameters)
    require(not step.left, f"the map has no place for {', '.join(step.left[:3])}")
    require(not step.wrong, "the map does not fit the model's parameters: " + "; ".join(step.wrong[:3]))
    return step.given


def imports_its_export(bench: Bench) -> None:
    if "export_hf" not in implemented(bench.enabled.cls):
        raise SkippedError("it exports nothing to try it with")
    exported = bench.answer("export_hf")
    if exported is None:
        raise SkippedError("it does not export this model")
    back = bench.answer("import_hf", config=dict(exported.config))
    require(isinstance(back, HFModel), "import_hf does not know the config.json that export_hf wrote")
    files = {name: (view.shape, view.dtype) for name, view in _exported(exported, bench.model()).items()}
    step = back.map.trace(files)
    fits = not step.wrong and not step.left and step.given.keys() == _names(bench.model())
    require(fits, "the map of import_hf does not take what that of export_hf gives")
    mistakes: list[str] = []
    for name, section in back.sections.items():
        if enabled := bench.setup.hooks.enabled.get(name):
            values: dict[Key, Value] = {(key,): Value(value, DEFAULT) for key, value in section.items()}
            validate(name, enabled.cls.Config, values, mistakes)
    require(not mistakes, "; ".join(mistakes))


def _names(model: Model) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def leaves_other_paths(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as name:
        answer = bench.answer("initial_weights", path=Path(name) / "weights", model=bench.model())
    require(answer is None, f"it must leave a path that is not there to others, and answered {answer!r}")


def gives_transforms(bench: Bench) -> str:
    answer = bench.answer("parallelize")
    transforms = [answer] if isinstance(answer, Transform) else list(answer or ())
    if not transforms:
        raise SkippedError("it has nothing to do in one process")
    for one in transforms:
        require(isinstance(one, Transform), f"expected a Transform, found {type(one).__name__}")
        require(isinstance(one.phase, Phase), f"{one.slot!r}: expected a Phase, found {one.phase!r}")
        require(isinstance(one.slot, str) and one.slot, f"a slot must have a name, found {one.slot!r}")
        for what in ("after", "requires", "conflicts", "covers"):
            value: Any = getattr(one, what)
            require(isinstance(value, tuple), f"{one.slot!r}: {what} must be a tuple of names, found {value!r}")
        there = {*CONFIGURED, *installed(), "precision"}
        unknown = sorted(set(one.covers) - there)
        require(not unknown, f"{one.slot!r} covers {unknown}; there is {', '.join(sorted(there))}")
    return ", ".join(f"{one.phase.name} {one.slot}" for one in transforms)


def same_numbers_with_and_without(bench: Bench) -> None:
    """Transforms change how a model computes; whether they also change what, a reader should know."""
    model, (batch,) = bench.model(), bench.batches(1)
    close(hidden_states(bench.model(), batch), hidden_states(model, batch), "a second composition")


TRIALS: Trials = {
    "build_model": [
        ("is built on the meta device", built_on_meta),
        ("gives hidden states", gives_hidden_states),
        ("looks only back", looks_only_back),
        ("keeps documents apart", keeps_documents_apart),
        ("trains every parameter", trains_every_parameter),
        ("declares what there is", declares_what_there_is),
    ],
    "export_hf": [("names every parameter", exports)],
    "import_hf": [("reads what it exports", imports_its_export)],
    "initial_weights": [("leaves other paths alone", leaves_other_paths)],
    "parallelize": [
        ("gives valid transforms", gives_transforms),
        ("composes alike every time", same_numbers_with_and_without),
    ],
}
