"""What a hook returns is checked at the call, and so is what its function or object gives later: the message blames the
plugin whose value is wrong, with the place, what came and what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import toys
from forge_train import (
    Applied,
    Batch,
    BatchPhase,
    ConfigError,
    Phase,
    Plugin,
    PluginError,
    PrepareBatch,
    Problem,
    Transform,
    hookimpl,
)
from forge_train.contract import protocols
from forge_train.plugin import hookspecs
from forge_train.registry.declared import Specs
from forge_train_kit import losses
from forge_train_kit.contract import Evaluator
from forge_train_kit.heads import Classes
from forge_train_kit.hf import HFModel
from forge_train_kit.returns import kind_of, results, returned
from forge_train_kit.state_map import Rename
from forge_train_kit.stores.elsewhere import CheckpointCopies

SPECS = Specs([])
"""Forge's own hooks."""
pytestmark = [pytest.mark.unit]
HERE = Path(__file__).name


class Bare:
    """Has nothing that anybody asks for."""


def generator() -> Iterator[None]:
    yield


async def coroutine() -> None: ...


class NoState:
    def __iter__(self) -> Iterator[Batch]:
        raise AssertionError

    def __next__(self) -> Batch:
        raise AssertionError

    def skip(self, sequences: int) -> None: ...


class Deaf(nn.Module):
    """Takes no positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class NoLoss:
    def weight(self, batch: Batch) -> int:
        return 1

    def outputs(self, part: Any, hidden: Any, batch: Any) -> Any: ...


class Encodes:
    vocabulary, end = 3, None

    def decode(self, ids: Any) -> str:
        return ""


def apply(part: nn.Module) -> Applied:
    return Applied(part)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.zeros(1)])


ANYWHERE: list[Any] = [
    "a string",
    3,
    0.5,
    True,
    Bare(),
    Bare,
    [3],
    (None,),
    {"a": 1},
    torch.zeros(2),
    generator,
    object,
]
"""No hook returns any of these; those that some do are taken out by `fits`."""

WRONG: dict[str, list[tuple[Any, str]]] = {
    "build_model": [(nn.Linear, "found the class Linear itself"), (None, "found None"), ([nn.Identity()], "a list")],
    "attention": [
        ("gqa", "expected a torch.nn.Module or None, found 'gqa'"),
        (Deaf(), "can't be called with (x, posi"),
    ],
    "feed_forward": [
        ("swiglu", "found 'swiglu'"),
        (nn.Linear, "the class Linear itself"),
        (torch.tanh, "function tanh"),
    ],
    "evaluators": [
        ("accuracy", "expected an Evaluator, a list of Evaluator or None, found 'accuracy'"),
        ([3], "found a list, and in it 3"),
        (Evaluator("x", list, print, {}, due=3), "found one whose `due` is not a function: found 3"),  # type: ignore[arg-type]
    ],
    "metrics": [
        ([], "expected a dictionary of Metric or None, found a list"),
        ({"loss": 1.0}, "found a dict, and in it 1.0"),
    ],
    "kernel_needs": [({"documents": True}, "expected a KernelCapabilities or None, found a dict")],
    "head": [(None, "found None"), (nn.Linear, "the class Linear itself"), (torch.tanh, "function tanh")],
    "modalities": [
        ("image", "expected a list of Modality or None, found 'image'"),
        ([3], "found a list, and in it 3"),
    ],
    "fusion": [(None, "found None"), (nn.Linear, "the class Linear itself"), (nn.Identity(), "which lacks ")],
    "tail": [(None, "found None"), (nn.Linear, "the class Linear itself"), (nn.Identity(), "which lacks ")],
    "attention_kernel": [(None, "found None"), (lambda query: query, "can't be called with (query, key, value")],
    "expert_groups": [(Bare(), "found a Bare, which lacks of_tokens"), ([0, 1], "found a list")],
    "token_dispatch": [(Bare(), "found a Bare, which lacks dispatch, combine"), (lambda x: x, "which lacks dispatch")],
    "parallelize": [
        ([Transform(Phase.ADAPT, "x", apply), "y"], "found a list, and in it 'y'"),
        (Transform(Phase.ADAPT, "x", "apply"), "found one whose `apply` is not a function: found 'apply'"),  # type: ignore[arg-type]
        (apply, "found the function apply"),
    ],
    "build_data": [(NoState(), "which lacks state_dict, load_state_dict"), (iter([]), "which lacks state_dict")],
    "extra_models": [
        ("teacher", "expected a list of ExtraModel or None, found 'teacher'"),
        (["teacher"], "found a list, and in it 'teacher'"),
    ],
    "example_batch": [(torch.zeros(1), "found a Tensor of shape [1]"), (Batch(1, 2), "whose `inputs` is not a torch")],  # type: ignore[arg-type]
    "data_stages": [("source", "expected a list of tuple or None, found 'source'"), ([3], "and in it 3")],
    "record_outputs": [
        ([torch.tanh], "expected a dictionary of function or None, found a list"),
        ({"sure": 3}, "found a dict, and in it 3"),
    ],
    "intervene": [
        ([torch.tanh], "expected a dictionary of function or None, found a list"),
        ({"layers.0": 3}, "found a dict, and in it 3"),
    ],
    "tokenizer": [(Encodes(), "which lacks encode"), (Encodes, "the class Encodes itself")],
    "classes": [
        (["ham", "spam"], "expected a Classes, found a list"),
        (Classes(("a", "b"), "word"), "found one whose `of` is not 'text' or 'token': found 'word'"),  # type: ignore[arg-type]
        (None, "found None"),
    ],
    "prepare_batch": [
        ("mask", "expected a PrepareBatch, a PrepareStep, a list of PrepareBatch or PrepareStep or None, found 'mask'"),
        (PrepareBatch(BatchPhase.MASK, 3), "found one whose `apply` is not a function: found 3"),
    ],
    "task": [(NoLoss(), "found a NoLoss, which lacks loss"), (NoLoss, "the class NoLoss itself")],
    "loss": [(lambda logits, labels: 0, "can't be called with (hidden, head, labels): too many positional")],
    "executor": [(Bare(), "which lacks train, evaluate")],
    "optimizer": [
        ([optimizer()], "expected a torch.optim.Optimizer, found a list."),
        (torch.optim.SGD, "found the class SGD itself; return an instance of it."),
        (None, "found None"),
    ],
    "lr_schedule": [(0.1, "expected a Schedule, found 0.1"), (lambda step: 1.0, "which lacks step, state_dict")],
    "loss_scale": [(1024.0, "expected a LossScale, found 1024.0"), (None, "found None")],
    "around": [(torch.no_grad(), "a context manager; return the function that makes it"), ("x", "found 'x'")],
    "import_hf": [
        ({"names": {}}, "expected an HFModel or None, found a dict"),
        (HFModel([]), "whose `map` is not a StateMap: found a list"),
    ],  # type: ignore[arg-type]
    "export_hf": [({"names": {}}, "found a dict")],
    "import_hf_around": [(HFModel(Rename({})), "expected an HFAround or None, found an HFModel")],
    "export_hf_around": [({}, "expected an HFModel or None, found a dict")],
    "export_adapter": [({}, "expected an HFAdapter or None, found a dict")],
    "merge_weights": [([], "expected a StateMap or None, found a list")],
    "initial_weights": [("weights.npz", "expected an InitialWeights or None, found 'weights.npz'")],
    "check_config": [
        ("too big", "expected a list of Problem or None, found 'too big'"),
        (["too big"], "found a list, and in it 'too big'"),
        (Problem("a.b", "no"), "found a Problem"),
    ],
    "on_start": [(3, "expected None, found 3")],
    "on_gradients": [(False, "expected None, found False")],
    "on_step": [(generator(), "found a generator"), (False, "found False"), ({"loss": 1}, "found a dict")],
    "on_log": [({}, "expected None, found a dict")],
    "on_checkpoint": [(True, "expected None, found True")],
    "on_end": [("bye", "expected None, found 'bye'")],
    "checkpoint_copies": [
        ("s3://bucket", "expected a CheckpointCopies or None, found 's3://bucket'"),
        (CheckpointCopies, "found the class CheckpointCopies itself; return an instance of it"),
    ],
}
"""Hook → values it must not return, with what is said of them."""


@pytest.mark.parametrize("hook", SPECS)
def test_every_hook_refuses_wrong_values(hook: str) -> None:
    assert hook in WRONG, "a hook without wrong values here: what must it not return?"
    kind = returned(SPECS[hook])
    assert kind.words != "anything"
    for value, says in WRONG[hook]:
        assert says in f"expected {kind.words}, {kind.problem(value)}."
    accepted = [value for value in ANYWHERE if not kind.problem(value)]
    functions = {
        "attention_kernel": [],
        "loss": [],
        "around": [Bare, generator, object],
    }
    assert accepted == functions.get(hook, [])


PROTOCOLS = [protocols.Executor, protocols.Loader, losses.LossFunction, protocols.LossScale, protocols.Task]
"""Those whose results a run looks at."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_method_of_a_protocol_says_what_it_gives(protocol: type) -> None:
    assert results(protocol)
    assert all(kind.words != "anything" for kind in results(protocol).values())


def test_an_annotation_that_cannot_be_checked_is_an_error() -> None:
    with pytest.raises(TypeError, match="can't be checked"):
        kind_of(TypeVar("T"))


def answering(name: str, hook: str, value: Any) -> type[Plugin]:
    """A plugin whose hook returns a value."""

    def method(self: Any) -> Any:
        return value() if value is coroutine else value

    return type(name, (Plugin,), {hook: hookimpl(method)})


def blamed(folder: Path, plugin: type[Plugin], **more: Any) -> str:
    """What a run says; the plugin's name is `wrong`."""
    with pytest.raises(PluginError) as caught:
        toys.run(folder, plugin, **more)
    message = str(caught.value)
    assert message.startswith("Plugin 'wrong' (under-test 0), hook "), message
    assert re.search(rf"{HERE}:\d+\)", message), message
    return message


SETTINGS = {
    "initial_weights": {"train.init_from": "weights.npz"},
    "evaluators": {"train.evaluate_every": 1},
    "on_checkpoint": {"checkpoint.every": 1},
}
NOT_ASKED = {
    "attention",
    "feed_forward",
    "head",
    "attention_kernel",
    "token_dispatch",
    "expert_groups",
    "modalities",
    "fusion",
    "tail",
    "classes",
    "example_batch",
    "data_stages",
    "record_outputs",
    "import_hf",
    "export_hf",
    "import_hf_around",
    "export_hf_around",
    "merge_weights",
    "export_adapter",
}
"""Hooks that a toy run does not call."""


@pytest.mark.parametrize("hook", [hook for hook in SPECS if hook not in NOT_ASKED | {"tokenizer"}])
def test_a_run_blames_the_plugin_that_returned_it(hook: str, tmp_path: Path) -> None:
    wrong = answering("Wrong", hook, WRONG[hook][0][0])
    if SPECS[hook].kind == "event":
        wrong = type("Wrong", (wrong,), {"on_step": hookimpl(getattr(wrong, "on_step", lambda self: None))})
    without = ["toy_model"] if hook == "build_model" else ["toy_data"] if hook == "build_data" else []
    message = blamed(tmp_path, wrong, config=SETTINGS.get(hook), without=without)
    assert f"hook {hook} (" in message
    assert WRONG[hook][0][1].rpartition("found ")[2] in message


def test_an_observer_that_returns_something_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert toys.run(tmp_path, answering("Wrong", "on_log", 3)).finished.outcome == "done"
    (warning,) = [record for record in caplog.records if "left out" in record.getMessage()]
    assert "'wrong'" in warning.getMessage()
    assert "expected None, found 3" in warning.getMessage()


# -- what the returned functions and objects give -------------------------------------------------


class Loader(toys.ToyLoader):
    gives: Any = None
    state: Any = None

    def __next__(self) -> Batch:
        return super().__next__() if self.gives is None else self.gives()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self.state is None else self.state  # type: ignore[no-any-return]


def stop() -> Any:
    raise StopIteration


@pytest.mark.parametrize(
    ("attributes", "says"),
    [
        ({"gives": lambda self: None}, "the loader must give a Batch, found None."),
        ({"gives": lambda self: (torch.zeros(1), torch.zeros(1))}, "the loader must give a Batch, found a tuple."),
        ({"gives": lambda self: Batch(torch.zeros(1), [1])}, "found one whose `labels` is not a torch.Tensor"),  # type: ignore[arg-type]
        ({"gives": lambda self: stop()}, "the loader ended. A loader never ends."),
        ({"state": [1]}, "must return a dictionary, found a list."),
        ({"state": {"at": 1}}, "state_dict must have the integer 'sequences', found {'at': 1}."),
    ],
)
def test_a_loader(tmp_path: Path, attributes: dict[str, Any], says: str) -> None:
    class Wrong(Plugin):
        @hookimpl
        def build_data(self, job: Any, split: str) -> Any:
            return type("L", (Loader,), attributes)(job, mask=False, offset=0)

    assert says in blamed(tmp_path, Wrong, without=["toy_data"])


@pytest.mark.parametrize(
    ("value", "found"), [(None, "None"), ({}, "a dict"), (torch.zeros(2), "a Tensor of shape [2]"), ("x", "'x'")]
)
def test_a_function_that_prepares_batches(tmp_path: Path, value: Any, found: str) -> None:
    wrong = answering("Wrong", "prepare_batch", PrepareBatch(BatchPhase.MAKE, lambda batch: value))
    fine = answering("After", "prepare_batch", PrepareBatch(BatchPhase.MAKE, lambda batch: batch))
    with pytest.raises(PluginError) as caught:
        toys.run(tmp_path, wrong, fine)
    assert "Plugin 'wrong' (under-test 0), hook prepare_batch" in str(caught.value)
    assert f"must return a Batch, found {found}." in str(caught.value)


NUMBERS = [(3.0, "found 3.0"), (torch.zeros(2), "a Tensor of shape [2]"), (None, "found None"), ("x", "found 'x'")]


@pytest.mark.parametrize(("value", "says"), NUMBERS)
def test_a_loss(tmp_path: Path, value: Any, says: str) -> None:
    message = blamed(tmp_path, answering("Wrong", "loss", lambda hidden, head, labels: value))
    assert "hook loss (" in message
    assert "must return a 0-dim tensor, " in message
    assert says in message


@pytest.mark.parametrize(("value", "says"), NUMBERS)
def test_the_loss_of_a_task(tmp_path: Path, value: Any, says: str) -> None:
    class Task(toys.ToyTask):
        def loss(self, part: Any, hidden: Any, batch: Any) -> Any:
            return value

    message = blamed(tmp_path, answering("Wrong", "task", Task()))
    assert "hook task (" in message
    assert ": loss (" in message
    assert says in message


@pytest.mark.parametrize("value", [None, "12", torch.zeros(1)])
def test_the_weight_of_a_task(tmp_path: Path, value: Any) -> None:
    class Task(toys.ToyTask):
        def weight(self, batch: Any) -> Any:
            return value

    assert "must return an integer or a number, found" in blamed(tmp_path, answering("Wrong", "task", Task()))


@pytest.mark.parametrize("method", ["train", "evaluate"])
@pytest.mark.parametrize(("value", "says"), NUMBERS)
def test_an_executor(tmp_path: Path, method: str, value: Any, says: str) -> None:
    class Wrong(Plugin):
        @hookimpl
        def executor(self, model: Any, task: Any, job: Any) -> Any:
            made = toys.TwoPartExecutor(model, task)
            setattr(made, method, lambda *arguments: value)
            return made

    message = blamed(tmp_path, Wrong, config={"train.evaluate_every": 1})
    assert f"hook executor ({HERE}" in message.replace(str(Path.cwd()), "").replace("tests/kernel/", "")
    assert f": {method} (" in message
    assert says in message


@pytest.mark.parametrize("value", [None, "1024", [1]])
def test_a_scale(tmp_path: Path, value: Any) -> None:
    class Scale:
        def scale(self) -> Any:
            return value

        def update(self, skipped: bool) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    assert "scale (" in blamed(tmp_path, answering("Wrong", "loss_scale", Scale()))


def test_a_schedule_whose_state_is_no_dictionary(tmp_path: Path) -> None:
    class Schedule:
        def step(self) -> None: ...
        def state_dict(self) -> Any:
            return 3

        def load_state_dict(self, state: Any) -> None: ...

    assert "must return a dictionary, found 3." in blamed(tmp_path, answering("Wrong", "lr_schedule", Schedule()))


@pytest.mark.parametrize(
    ("method", "value"), [("encode", "abc"), ("encode", [0.5]), ("encode", None), ("decode", None)]
)
def test_a_tokenizer(tmp_path: Path, method: str, value: Any) -> None:
    class Tokens(Encodes):
        begin, stops, digest = (), (), "0"

        def encode(self, text: str) -> Any:
            return [1]

    class Wrong(Plugin):
        @hookimpl
        def tokenizer(self, job: Any) -> Any:
            tokens = Tokens()
            setattr(tokens, method, lambda given: value)
            return tokens

    message = blamed(tmp_path, Wrong)
    assert "hook tokenizer (" in message
    assert f": {method} (" in message


@pytest.mark.parametrize("value", [None, 3, "x"])
def test_a_function_around_a_span(tmp_path: Path, value: Any) -> None:
    message = blamed(tmp_path, answering("Wrong", "around", lambda: value))
    assert "hook around (" in message
    assert "must return a context manager, found" in message


@pytest.mark.parametrize(
    ("applied", "says"),
    [
        (lambda part: None, "must return an Applied, found None."),
        (lambda part: part, "must return an Applied, found a Tower."),
        (lambda part: Applied(part, "head"), "whose `matched` is not a tuple of string: found 'head'"),  # type: ignore[arg-type]
        (lambda part: Applied(None, ("head",)), "whose `model` is not a torch.nn.Module or a list"),  # type: ignore[arg-type]
        (lambda part: Applied(part, ("head",), free_gathered=3), "whose `free_gathered` is not a function or None"),  # type: ignore[arg-type]
    ],
)
def test_what_a_transform_gives(tmp_path: Path, applied: Any, says: str) -> None:
    message = blamed(tmp_path, answering("Wrong", "parallelize", Transform(Phase.ADAPT, "mine", applied)))
    assert "hook parallelize (" in message
    assert says in message


# -- and what fits passes -------------------------------------------------------------------------


def test_generators_answer_questions_and_give_transforms(tmp_path: Path) -> None:
    class Several(Plugin):
        @hookimpl
        def check_config(self, config: Any) -> Iterator[Problem]:
            yield Problem("train.steps", "no")

        @hookimpl
        def parallelize(self, job: Any) -> Iterator[Transform]:
            yield Transform(Phase.ADAPT, "x", lambda part: Applied(part, ("head",)))

    with pytest.raises(ConfigError, match=r"train.steps: no"):
        toys.run(tmp_path, Several)
    assert toys.run(tmp_path, type("Adapts", (Several,), {"check_config": None}), steps=1).finished.outcome == "done"


def test_a_class_that_is_a_context_manager_may_go_around(tmp_path: Path) -> None:
    assert toys.run(tmp_path, answering("Fine", "around", torch.enable_grad), steps=1).finished.outcome == "done"

    @contextmanager
    def inside() -> Iterator[None]:
        yield

    assert toys.run(tmp_path, answering("Also", "around", inside), steps=1).finished.outcome == "done"


def test_what_a_plugin_gave_is_used_as_it_is(tmp_path: Path) -> None:
    class Task(toys.ToyTask):
        more = "of its own"

    run = toys.run(tmp_path, answering("Fine", "task", Task()), steps=1)
    assert hookspecs.task(run.job).more == "of its own"  # type: ignore[attr-defined]
