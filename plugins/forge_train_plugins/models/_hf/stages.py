"""Pipeline cuts of a class of `transformers`: its plan's stages, and its forward with only some of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from forge_train.base.errors import describe
from forge_train.base.format import format_list

from .attention import attending, mixing


@dataclass(frozen=True)
class Staging:
    """The modules of a class, in the order of its plan.

    Args:
        layers: the name of the list of layers.
        before: modules before them.
        after: modules after them.
        given: the layers as they were built. If a layer is in another part, the class may still read its attributes.
    """

    layers: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    given: tuple[nn.Module, ...]

    @contextmanager
    def standing_in(
        self, inner: nn.Module, kept: Mapping[int, Callable[..., Tensor]], hidden: Tensor | None, out: list[Tensor]
    ) -> Iterator[None]:
        """Have a class run only some of its layers inside this block.

        A class may scale its embeddings in any part, and call modules of any part. So the first layer is given the
        hidden states directly, and those of the last layer are taken as they are. Thus whatever the class does before
        and after the layers has no effect if it belongs to another part.

        Args:
            inner: the class's module; its modules in other parts are None.
            kept: index → layer of this part.
            hidden: the output of the previous part; None in the first part.
            out: receives the output of the last layer.
        """
        passing: list[Any] = [kept.get(at, Absent(one)) for at, one in enumerate(self.given)]
        if hidden is not None:
            passing[0] = First(passing[0], hidden)
        passing[-1] = Last(passing[-1], out)
        stand_ins: dict[str, Any] = {self.layers: passing}
        stand_ins |= {n: _same for n in (*self.before, *self.after) if inner._modules[n] is None}
        inner.__dict__.update(stand_ins)
        try:
            yield
        finally:
            for name in stand_ins:
                del inner.__dict__[name]


def _same(hidden: Tensor) -> Tensor:
    return hidden


class Absent:
    """A layer of another part: returns its input."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class First(Absent):
    """The first layer, which reads the output of the previous part."""

    def __init__(self, layer: Any, hidden: Tensor) -> None:
        super().__init__(layer)
        self.hidden = hidden

    def __call__(self, hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
        found: Tensor = self.layer(self.hidden, *args, **keywords)
        return found


class Last(Absent):
    """The last layer, whose output is kept."""

    def __init__(self, layer: Any, out: list[Tensor]) -> None:
        super().__init__(layer)
        self.out = out

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        found: Tensor = self.layer(*args, **keywords)
        self.out.append(found)
        return found


class Watched(Absent):
    """A layer in a run that looks for anything that layers share besides the hidden states."""

    def __init__(self, layer: nn.Module, watch: Watch) -> None:
        super().__init__(layer)
        self.watch = watch

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        hidden, *rest = args or (keywords.pop("hidden_states"),)
        if self.watch.given is not None and hidden is not self.watch.given:
            raise CutError("changes the hidden states between two layers")
        found: Any = self.layer(hidden.detach().requires_grad_(), *rest, **keywords)
        if not isinstance(found, Tensor):
            raise CutError(f"has layers that return more than hidden states ({type(found).__name__})")
        own = {id(one) for one in self.layer.parameters()}
        if foreign := [one for one in _reached(found) if id(one) not in own]:
            names = {id(one): name for name, one in self.watch.inner.named_parameters()}
            shared = sorted(names[id(one)] for one in foreign if id(one) in names)
            raise CutError(f"passes its layers more than hidden states: a result of {format_list(shared, 2)}")
        self.watch.calls.append((self.layer, frozenset(name for name, one in keywords.items() if one is not None)))
        self.watch.given = found
        return found


class Watch:
    """Observations about the layers in one run."""

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner
        self.given: Tensor | None = None
        self.calls: list[tuple[nn.Module, frozenset[str]]] = []


class CutError(Exception):
    """Names what prevents a class from being cut."""


def staged(inner: Any) -> Staging | str:
    """The stages that a class declares, or the reason why there are none."""
    name = type(inner).__name__
    plan: Mapping[str, Any] = getattr(inner.config.get_text_config(), "base_model_pp_plan", None) or {}
    if not plan:
        return f"{name} of transformers declares no base_model_pp_plan"
    lists = [one for one in plan if isinstance(inner._modules.get(one), nn.ModuleList)]
    if len(lists) != 1 or any(one not in inner._modules for one in plan):
        return (
            f"the base_model_pp_plan of {name} of transformers must name one list of layers and the modules around it"
        )
    names, layers = [*plan], lists[0]
    at = names.index(layers)
    left = {n.partition(".")[0] for n, _ in inner.named_parameters()} - plan.keys()
    if left:
        return f"the base_model_pp_plan of {name} of transformers leaves {format_list(sorted(left))} out"
    return Staging(layers, tuple(names[:at]), tuple(names[at + 1 :]), tuple(getattr(inner, layers)))


def separable(inner: Any, staging: Staging, inputs: Mapping[str, Tensor]) -> str:
    """Why the layers can't be in different parts; empty if they can.

    Args:
        inner: on the meta device.
        staging: its stages.
        inputs: token ids as `input_ids`, and the other arguments.
    """
    name, layers = type(inner).__name__, staging.given
    whole, rest = Watch(inner), Watch(inner)
    try:
        with attending(inner.config, mixing):
            with _instead(inner, staging.layers, [Watched(one, whole) for one in layers]):
                inner(**inputs, use_cache=False)
            if [one for one, _ in whole.calls] != [*layers]:
                raise CutError("does not call each of its layers once, in order")
            hidden = whole.given.detach()  # type: ignore[union-attr]  # there is a layer
            later = {key: one for key, one in inputs.items() if key != "input_ids"}
            kept = {len(layers) - 1: Watched(layers[-1], rest)}
            with staging.standing_in(inner, kept, hidden, []):
                inner(inputs_embeds=hidden, **later, use_cache=False)
            if rest.calls != whole.calls[-1:]:
                raise CutError("passes its layers other arguments if it is given no token ids")
    except CutError as error:
        return f"{name} of transformers {error}"
    except Exception as error:  # a class may do anything with values or layers
        return f"{name} of transformers can't run with only some of its layers: {describe(error)}"
    return ""


@contextmanager
def _instead(inner: nn.Module, name: str, one: Sequence[Any]) -> Iterator[None]:
    inner.__dict__[name] = one
    try:
        yield
    finally:
        del inner.__dict__[name]


def _reached(tensor: Tensor) -> Iterable[Tensor]:
    """The parameters in a tensor's graph that need a gradient."""
    seen, ahead = set[Any](), [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            yield leaf
        ahead += [next_one for next_one, _ in node.next_functions]
