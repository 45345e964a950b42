"""Facts that plugins state about themselves for a tool, and the facts that the kit's libraries read.

A tool declares its facts; a plugin lists those that are true of it in `Plugin.facts`.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forge_train.base.names import PluginRef

from .source import Source

if TYPE_CHECKING:
    from forge_train import Job

__all__ = ["Fact", "tuners"]

FactValue = bool | int | float | str | tuple[str, ...]
_T = TypeVar("_T", bound=FactValue)


@dataclass(frozen=True)
class Fact(Generic[_T]):
    """A fact that a tool reads from plugins, like `PER_UNIT = Fact("plan.per_unit", bool, "…")`.

    The module that holds it is an entry point of the group `forge_train.facts`, named like the part before the point.
    """

    name: str
    """`tool.fact`."""
    type: type[_T]
    """`bool`, `int`, `float`, `str` or `tuple[str, ...]`. A plugin that does not state the fact has the empty value:
    `False`, `0`, `0.0`, `""` or `()`."""
    meaning: str
    """One sentence or more, for the documentation."""
    literal: bool = False
    """True if the tool also reads it from plugins that are not enabled, from their source. A plugin writes it out in
    its own class."""

    def of(self, plugin: object) -> _T:
        """Return what a plugin, or a plugin's class, states."""
        cls = plugin if isinstance(plugin, type) else type(plugin)
        return typing.cast(_T, stated(cls).get(self.name, self._empty))

    def read(self, ref: PluginRef) -> _T:
        """Return what the source of a plugin states, without importing it."""
        value = Source(ref).fact(self.name)
        return typing.cast(_T, value) if self.fits(value) else self._empty

    def fits(self, value: Any) -> bool:
        """Return True for a value of the declared type. An integer is a float too; a truth value is no number."""
        if self._kind is tuple:
            return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
        if isinstance(value, bool):
            return self._kind is bool
        return isinstance(value, (int, float) if self._kind is float else self._kind)

    @property
    def described(self) -> str:
        """The type as it is written: `tuple[str, ...]`."""
        return self._kind.__name__ if self._kind is not tuple else "tuple[str, ...]"

    @property
    def _kind(self) -> Any:
        return typing.get_origin(self.type) or self.type

    @property
    def _empty(self) -> _T:
        return typing.cast(_T, self._kind())


def stated(cls: type) -> dict[str, FactValue]:
    """The facts of a class and its bases; the class's own override those of its bases."""
    return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).get("facts", {}).items()}


def facts_in(module: object) -> dict[str, Fact[Any]]:
    """The facts that a module declares itself, by name."""
    return {one.name: one for one in vars(module).values() if isinstance(one, Fact)}


ARCHITECTURES = Fact(
    "hf.architectures",
    tuple[str, ...],
    "Architectures of a `config.json` that the plugin's `import_hf` reads; `*` if it can't list them. The message "
    "about an unknown architecture names the plugins that know it.",
    literal=True,
)
TUNES = Fact(
    "hf.tunes",
    bool,
    "True if the plugin says what of a trained model is trained, or adds parameters to it. A teacher or a reference is "
    "built without it.",
)
ADDS = Fact(
    "hf.adds",
    bool,
    "True if such a plugin adds parameters: a run that starts from a run with them has them too.",
)
SWITCHES = Fact(
    "hf.switches",
    bool,
    "True if all that the plugin adds is switched off inside `forge_train_kit.model.without_updates`: the run's own "
    "model, without updates, is then a reference that needs no second copy.",
    literal=True,
)
ADAPTERS = Fact(
    "hf.adapters",
    tuple[str, ...],
    "Kinds of PEFT's adapters (`peft_type`) that the plugin continues: its option `adapter` names the folder. "
    "`forge train --adapter FOLDER` enables it.",
    literal=True,
)


def tuners(job: Job, *, adding: bool = False) -> tuple[str, ...]:
    """Return the enabled plugins that tune a trained model (the fact `hf.tunes`).

    An extra model of trained weights is built without them: `ExtraModel(…, without=tuners(job))`.

    Args:
        job: the run's.
        adding: return those alone that add parameters (`hf.adds`).
    """
    fact = ADDS if adding else TUNES
    return tuple(name for name, one in job.hooks.enabled.items() if fact.of(one.cls))


WEIGHS_LABELS = Fact(
    "task.weighs_labels",
    bool,
    "True if the task that the plugin provides multiplies the loss of each label by the target `label_weights`, as "
    "`forge_train_kit.losses.batch_weight` and `batch_loss` do. Data with weights are refused by every other task.",
)
PACKED_PAIRS = Fact(
    "task.packed_pairs",
    bool,
    "True if the task that the plugin provides learns from rows that hold several pairs, as "
    "`forge_train_kit.reference.scores.AnswerScores` does. Packed pairs are refused by every other task.",
)
SAVES = Fact(
    "memory.saves",
    tuple[str, ...],
    "Parts of a rank's memory that the plugin makes smaller (`activations`) or spreads over ranks (`parameters`, "
    "`gradients`, `optimizer`). Where memory runs out, and in `forge plan`, Forge recommends installed plugins by it.",
    literal=True,
)
