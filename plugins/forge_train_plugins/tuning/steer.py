"""Steering: vectors added to activations, and heads left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from forge_train import FilePath, Plugin, Problem, Volatile, hookimpl, section

if TYPE_CHECKING:
    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig


class Steer(Plugin):
    """Adds vectors to activations, and zeroes heads, wherever a trained model is asked.

    That is in evaluations, `forge infer`, `forge generate` and `forge debug look`, on any layout. Training computes
    without it.

    A vector, such as the difference of two means that `capture` wrote, is added at each position of a module's output
    (arXiv:2308.10248, arXiv:2312.06681). A zeroed head writes nothing into the residual stream.
    """

    api = (1, 0)
    facts = {"check.example": ("steer.zero_heads=['0.0']",)}

    @section
    class Config:
        path: Annotated[str, FilePath(), Volatile()] = ""
        """The safetensors file that holds the vectors, `[features]` each."""
        add: tuple[str, ...] = ()
        """`MODULE=NAME`: the module whose output a vector is added to, a pattern too, and its name in the file."""
        factor: float = 1.0
        """Multiplies the vectors."""
        zero_heads: tuple[str, ...] = ()
        """`L.H`: number of a layer, and of one of its heads."""

    config: Config

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        own = self.config
        if not (own.add or own.zero_heads):
            yield Problem(
                "steer.add", "is empty, and so is steer.zero_heads; set one of them, or leave the plugin out."
            )
        if bool(own.add) != bool(own.path):
            missing, given = ("path", "add") if own.add else ("add", "path")
            yield Problem(f"steer.{missing}", f"is needed by steer.{given}.")
        for one in own.add:
            if not all(map(str.strip, one.partition("="))):
                yield Problem("steer.add", f"expected MODULE=NAME, like layers.3=honesty, found {one!r}.")
        for one in own.zero_heads:
            layer, _, head = one.partition(".")
            if not (layer.isdigit() and head.isdigit()):
                yield Problem("steer.zero_heads", f"expected L.H, like 3.0, found {one!r}.")

    @hookimpl
    def intervene(self, model: Model, job: Job) -> Mapping[str, Callable[..., Any]]:
        from ._steer import edits

        return edits(self.config, model, job)
