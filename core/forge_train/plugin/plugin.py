"""Plugin base class: one instance per run and process, configured by its own section."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pluggy

from ..base.errors import PluginError
from ..config.schema import section
from ..contract.attention import KernelCapabilities

if TYPE_CHECKING:
    from .job import Job

__all__ = ["API", "Plugin", "hookimpl"]

PROJECT = "forge_train"
API = (1, 0)
"""The plugin API of this core: (major, minor). A plugin written for a newer one, or another major one, is refused."""

_F = TypeVar("_F", bound=Callable[..., object])
MARK = f"{PROJECT}_impl"
"""The attribute that `@hookimpl` puts on a method."""
_mark = pluggy.HookimplMarker(PROJECT)


def hookimpl(function: _F | None = None, /, *arguments: Any, **options: Any) -> _F:
    """Mark a method as the implementation of the hook of its name.

    There are no options: order comes from phases, slots and sorted names, never from registration.

    Raises:
        PluginError: for options or parentheses, and for what is no method.
    """
    if function is None or arguments or options:
        given = ", ".join([*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())])
        raise PluginError(f"write @hookimpl without parentheses and options, found @hookimpl({given})")
    method = getattr(function, "__func__", function)  # of a staticmethod or a classmethod
    if not inspect.isroutine(method):
        raise PluginError(f"@hookimpl marks a method, found a {type(function).__name__}.")
    _mark(method)
    return function


class Plugin:
    """The base of every plugin. `self.config` is the validated section of the run's configuration.

    An attribute `state_dict` / `load_state_dict` pair makes the plugin part of every checkpoint.
    """

    api: ClassVar[tuple[int, int]] = (1, 0)
    """The plugin API this plugin was written for. The base stays (1, 0) for ever; say your own."""
    requires: ClassVar[tuple[str, ...]] = ()
    """Slots or plugins that must be enabled beside this one."""
    conflicts: ClassVar[tuple[str, ...]] = ()
    """Slots or plugins that can't be enabled beside this one."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Slots of the transforms it may give; those of its hooks are known without."""
    gives: ClassVar[Mapping[str, str]] = {}
    """Slot that it fills → what it gives the providers of other slots: `{"head": "class_logits"}`. What a slot gives
    where nothing is said stands in the slot's spec."""
    takes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Slot → what it can take from that slot's provider: `{"head": ("class_logits",)}`; empty for nothing, which fits
    anything. A run in which a task, a loss or another plugin is given something else is refused."""
    kernel_capabilities: ClassVar[KernelCapabilities] = KernelCapabilities()
    """Capabilities of its attention kernel. Kernels that are not enabled are parsed as text, so write
    `kernel_capabilities = KernelCapabilities(…)` with literals."""
    layout: ClassVar[bool] = False
    """True if it only decides where and how tensors are laid out, or only measures: its settings may differ between a
    checkpoint and the run that resumes it."""
    needs: ClassVar[Mapping[str, str]] = {}
    """Importable module → the command that installs it."""
    devices: ClassVar[tuple[str, ...]] = ()
    """Types of device that it runs on, as `("cuda",)`; empty for all. A run on another one is refused."""
    saves: ClassVar[tuple[str, ...]] = ()
    """Parts of a rank's memory that it makes smaller: `activations`; or those that it spreads over ranks, of
    `parameters`, `gradients` and `optimizer`. Where memory runs out, an installed plugin is recommended by it; so that
    nothing is imported for that, it is read as text: write the tuple out."""
    architectures: ClassVar[tuple[str, ...]] = ()
    """Architectures of a `config.json` that its `import_hf` reads; `*` if it can't list them. Read as text, as `saves`
    is."""
    rounds: ClassVar[float] = 0.0
    """The largest relative error of a value that it rounds below `train.precision`; 0 if it rounds none. `forge verify`
    allows for it, and has `--against train.precision=…` compare with a run without the plugin."""
    per_unit: ClassVar[bool] = False
    """True if each further identical unit of the model adds the same amount to what the plugin has a step store, send
    and compute: `forge plan` then rehearses a few of many such units. Applies to plugins that build units or see all of
    them (`build_model`, `attention`, `feed_forward`, `task`, `executor`, `optimizer`, `parallelize`). False for
    gradients sent in buckets of a fixed size, or a layer that changes behaviour from some index on."""
    weighs_labels: ClassVar[bool] = False
    """True if the task that it provides multiplies the loss of each label by the target `label_weights`, as
    `forge_train_kit.losses.batch_weight` and `batch_loss` do."""
    display: ClassVar[bool] = False
    """True if it only displays the progress of a run; `forge bench` leaves it out."""
    after_observers: ClassVar[bool] = False
    """True if it is called after all other observers, as trackers are, and so sees what they record."""
    example: ClassVar[tuple[str, ...]] = ()
    """Assignments, as of `--set`, with which `plugins check` tries it where its defaults do not train: a required key,
    or `train.precision=fp16`; and `plugins=a,b` for others that it is tried with."""

    @section
    class Config:
        """No options."""

    config: Any

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def brings(cls, config: Any) -> Mapping[str, Any]:
        """Values of other keys that follow from its section, for keys that nobody set: a folder of tokens brings
        `{"tokenizer.path": …}`. Keys of plugins that are not enabled are left out. Called before anything slow is
        imported."""
        return {}

    def data_stages(self, job: Job) -> Iterable[tuple[str, str]]:
        """Describe what it does with the run's data, for `forge data show`: a stage and a line of text each. Stages are
        `source`, `decode`, `render`, `tokenise`, `filter`, `map`, `pack`, `order` and `batch`. No training follows, and
        slow work is skipped; missing data is reported in a line too."""
        return ()
