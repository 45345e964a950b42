"""The one typed way in which core, and plugins, call hooks: `job.hooks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from ..ground.errors import ConfigError, PluginError, Problem
from .announce import Events
from .attention import Attention, AttentionKernel, KernelCapabilities
from .batch import Batch, Preparation, PrepareBatch, PrepareStep
from .blame import note_plugin
from .calls import Calls, EnabledPlugin, Whose, at_home, without
from .extra import ExtraModel
from .fit import check_fit, gives
from .guards import Guarded, Prepare, first_state, guarded, nesting, preparing
from .hookspecs import KINDS, OPTIONAL, TAKES
from .layers import FeedForward, Head, HeadSpec, Layer
from .losses import with_rows
from .metric import Metric
from .plugin import Plugin
from .protocols import (
    Classes,
    Evaluator,
    Executor,
    HFModel,
    Loader,
    LossFunction,
    LossScale,
    Schedule,
    Span,
    SpanName,
    Task,
    TokenDispatch,
    Tokenizer,
)
from .returns import results
from .tail import Tail, Trunk
from .transform import Transform

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..config import Config
    from .job import Job
    from .model import Model
    from .run import Run

_T = TypeVar("_T")


class Hooks(Events):
    """The enabled plugins behind typed methods, one for each hook."""

    def __init__(self, plugins: Sequence[tuple[EnabledPlugin, Plugin]], defaults: Mapping[str, str]) -> None:
        self.plugins = {enabled.name: plugin for enabled, plugin in plugins}
        self.enabled = {enabled.name: enabled for enabled, _ in plugins}
        self.defaults = dict(defaults)
        self.opened = False  # whether the model is only opened, as to generate text: nothing reads rows of the data
        self.unused: set[str] = set()  # plugins that turned out to have nothing to do; see `registry.unused`
        self.used: set[tuple[str, str]] = set()  # slot or chain, and a plugin whose answer was taken
        self.asked_of_kernel: list[KernelCapabilities] = []  # what attention modules need, said when they asked for it
        self.inside: list[SpanName] = []  # spans that the run is in, outermost first, where there is an `around`
        self._calls, self._job = Calls.of(plugins), cast("Job | None", None)

    def bind(self, job: Job) -> None:
        """Give the job that hooks are called with."""
        self._job = job

    @property
    def job(self) -> Job:
        if self._job is None:
            raise PluginError("A hook was called before the job exists.")
        return self._job

    @property
    def run(self) -> Run | None:
        """The folder of the run, once there is a job."""
        return self._job.run if self._job else None

    def provider(self, slot: str) -> str | None:
        """The name of the plugin that fills a slot, or None where nobody does.

        Raises:
            ConfigError: if two do, naming both.
        """
        owners = self._calls.owners(slot)
        if len(owners) > 1:
            names = " and ".join(owner.ref.label for owner in owners)
            raise ConfigError(f"Plugins {names} both fill the slot {slot!r}; {without(owners)}.")
        return owners[0].name if owners else None

    def whose(self, hook: str, name: str = "") -> Whose:
        """A plugin, its hook and where it stands, for messages; the slot's provider where no plugin is named."""
        return self._calls.whose(hook, name or self.provider(hook) or "")

    def acting(self, hook: str) -> list[str]:
        """The same without those that turned out to have nothing to do."""
        return [name for name in self.implementers(hook) if name not in self.unused]

    def mute(self, name: str) -> None:
        """Leave an observer, or what only rounds, out of this process: it stays enabled, but is told nothing.

        Raises:
            ConfigError: if the plugin does more than that.
        """
        if enabled := self.enabled.get(name):
            if not enabled.observer and not enabled.cls.rounds:
                raise ConfigError(f"Plugin {enabled.ref.label} does more than watch the run; it can't be left out.")
            self._calls.mute(enabled)

    def owner(self, thing: object) -> str:
        """`plugin 'mine' (my-package 1.0)` for what an enabled plugin's code made; empty for anything else."""
        labels = dict.fromkeys(one.ref.label for one in at_home(type(thing).__module__, self.enabled.values()))
        return f"plugin {' or '.join(labels)}" if labels else ""

    def note_plugin(self, error: BaseException) -> None:
        """Add a note to an error that names the plugin it comes from."""
        note_plugin(error, self.enabled.values())

    def vacate(self, slot: str) -> None:
        """Have nobody fill an optional slot in this process."""
        self._calls.vacate(slot)

    def check_slots(self) -> None:
        """Check that each required slot has a provider and that providers fit together."""
        for slot, kind in KINDS.items():
            if kind == "slot" and self.provider(slot) is None and slot not in OPTIONAL:
                raise ConfigError(f"No enabled plugin fills the slot {slot!r}; see `forge plugins list`.")
        check_fit(list(self.enabled.values()), {slot for slot, _ in self.used})

    def gives(self, slot: str) -> str:
        """Return what a slot's provider gives to others, such as `token_logits` for a head; empty if unfilled."""
        return next((gives(one, slot) for one in self.enabled.values() if slot in one.provides), "")

    # -- slots ------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        return cast("nn.Module", self._slot("build_model"))

    def head(self, spec: HeadSpec) -> Head:
        return cast(Head, self._slot("head", spec=spec))

    def tail(self, trunk: Trunk) -> Tail | None:
        return cast(Tail, self._slot("tail", trunk=trunk)) if self.provider("tail") else None

    def attention_kernel(self, needs: KernelCapabilities | None = None) -> AttentionKernel:
        """The kernel; `needs` is what it will be asked for beside what `kernel_needs` says."""
        self.asked_of_kernel += [needs] if needs else []
        return cast(AttentionKernel, self._slot("attention_kernel"))

    def token_dispatch(self) -> TokenDispatch:
        return cast(TokenDispatch, self._slot("token_dispatch"))

    def build_data(self, split: Literal["train", "validation"]) -> Loader:
        loader = cast(Loader, self._slot("build_data", split=split))
        state = first_state(loader, self.whose("build_data"))
        if not isinstance(state.get("sequences"), int):
            raise PluginError(
                f"{self.whose('build_data')}: state_dict must have the integer 'sequences', found {state}."
            )
        return loader

    def tokenizer(self) -> Tokenizer:
        tokenizer = cast(Tokenizer, self._slot("tokenizer"))
        guard = Guarded(tokenizer, Tokenizer, self.whose("tokenizer"))
        guard.decode(guard.encode("a"))
        return tokenizer

    def classes(self) -> Classes:
        return cast(Classes, self._slot("classes"))

    def task(self) -> Task:
        return cast(Task, Guarded(self._slot("task"), Task, self.whose("task")))

    def loss(self) -> LossFunction:
        (kind,) = results(LossFunction).values()
        function = self._slot("loss")
        return with_rows(guarded(function, kind, self.whose("loss"), "the function"), function)

    def executor(self, model: Model, task: Task) -> Executor:
        return cast(Executor, Guarded(self._slot("executor", model=model, task=task), Executor, self.whose("executor")))

    def optimizer(self, model: Model) -> torch.optim.Optimizer:
        return cast("torch.optim.Optimizer", self._slot("optimizer", model=model))

    def lr_schedule(self, optimizer: torch.optim.Optimizer) -> Schedule:
        schedule = cast(Schedule, self._slot("lr_schedule", optimizer=optimizer))
        first_state(schedule, self.whose("lr_schedule"))
        return schedule

    def loss_scale(self) -> LossScale | None:
        if self.provider("loss_scale") is None:
            return None
        return cast(LossScale, Guarded(self._slot("loss_scale"), LossScale, self.whose("loss_scale")))

    # -- chains -----------------------------------------------------------------------------------

    def attention(self, layer: Layer) -> Attention:
        return cast(Attention, self._chain("attention", layer))

    def feed_forward(self, layer: Layer) -> FeedForward:
        return cast(FeedForward, self._chain("feed_forward", layer))

    # -- phases, steps, spans ---------------------------------------------------------------------

    def parallelize(self) -> list[tuple[str, Transform]]:
        """Every transform with the name of its plugin."""
        return self._each("parallelize", Transform)

    def prepare_batch(self) -> Prepare:
        """All preparations as one function, for what a loader gives in a step: by phase, then by plugin name."""
        answers: list[tuple[str, Preparation]] = self._each("prepare_batch", (PrepareBatch, PrepareStep))
        return preparing(self.whose("build_data"), answers, self._calls, self.job.step_state)

    def span(self, name: SpanName) -> Span:
        """All context managers around a span, nested in order of plugin names, as one factory."""
        answers = self._calls.collect("around", {"span": name, "job": self.job})
        return nesting(name, [(self.whose("around", o), span) for o, span in answers if span is not None], self.inside)

    # -- questions --------------------------------------------------------------------------------

    def check_config(self, config: Config) -> list[Problem]:
        return [one for _, found in self._calls.collect("check_config", {"config": config}) for one in found or ()]

    def extra_models(self) -> list[tuple[str, ExtraModel]]:
        return [(n, one) for n, found in self._calls.collect("extra_models", {"job": self.job}) for one in found or ()]

    def kernel_needs(self, config: Config) -> list[tuple[str, KernelCapabilities]]:
        """Return each plugin's needs of the attention kernel, labelled; without the data's if no data is read."""
        idle = self.provider("build_data") if self.opened else None
        answers = dict(self._calls.collect("kernel_needs", {"config": config}))
        return [(f"plugin {name!r} asks for it", one) for name, one in answers.items() if one and name != idle]

    def example_batch(self) -> Batch | None:
        answers = dict(self._calls.collect("example_batch", {"job": self.job}))
        return cast("Batch | None", answers.get(self.provider("build_data") or ""))

    def import_hf(self, config: Mapping[str, Any]) -> HFModel | None:
        return cast("HFModel | None", self._only("import_hf", {"config": config}))

    def export_hf(self) -> HFModel | None:
        return cast("HFModel | None", self._only("export_hf", {"job": self.job}))

    def evaluators(self) -> list[tuple[str, Evaluator]]:
        """Every evaluator, with whose it is."""
        return [(self.whose("evaluators", name), one) for name, one in self._each("evaluators", Evaluator)]

    def evaluation_weights(self) -> Mapping[str, float]:
        return cast("Mapping[str, float]", self._only("evaluation_weights", {"job": self.job}) or {})

    def metrics(self, model: Model) -> dict[str, Metric]:
        """Every plugin's metrics, as `plugin.name`."""
        answers = self._calls.collect("metrics", {"model": model, "job": self.job})
        return {f"{plugin}.{name}": one for plugin, found in answers for name, one in (found or {}).items()}

    def _slot(self, slot: str, **arguments: Any) -> Any:
        name = self.provider(slot)
        if name is None:
            raise ConfigError(f"No enabled plugin fills the slot {slot!r}; see `forge plugins list`.")
        ((_, answer),) = self._calls.collect(slot, {"job": self.job, **arguments})
        self.used.add((slot, name))
        if slot in TAKES:
            check_fit(list(self.enabled.values()), {slot for slot, _ in self.used})
        return answer

    def _chain(self, chain: str, layer: Layer) -> Any:
        arguments = {"layer": layer, "job": self.job}
        default = [name for name in self.implementers(chain) if name == self.defaults.get(chain)]
        others = [name for name in self.implementers(chain) if name not in default]
        claimed = self._given(chain, arguments, others) or self._given(chain, arguments, default)
        if len(claimed) > 1:
            names, way_out = self._several(claimed)
            raise ConfigError(f"Plugins {names} both build {chain} for layer {layer.index}; {way_out}.")
        if not claimed:
            raise ConfigError(f"No enabled plugin builds {chain} for layer {layer.index}; see `forge plugins list`.")
        self.used.add((chain, claimed[0][0]))
        return claimed[0][1]

    def _each(self, hook: str, kind: type[_T] | tuple[type[Any], ...]) -> list[tuple[str, _T]]:
        """Everything that plugins answered, one thing or several each, with the plugin's name."""
        answers = self._calls.collect(hook, {"job": self.job})
        return [(n, one) for n, answer in answers for one in ([answer] if isinstance(answer, kind) else answer or ())]

    def _given(self, hook: str, arguments: Mapping[str, Any], names: list[str]) -> list[tuple[str, Any]]:
        """Return the answers of the named plugins, except None."""
        return [one for name in names for one in self._calls.collect(hook, arguments, only=name) if one[1] is not None]

    def _several(self, answers: list[tuple[str, Any]]) -> tuple[str, str]:
        """Names of plugins of which one is too many, and how to be rid of it."""
        names = [name for name, _ in answers]
        return " and ".join(map(repr, names)), without(self.enabled[name] for name in names)

    def _only(self, hook: str, arguments: Mapping[str, Any]) -> Any:
        given = self._given(hook, arguments, self.implementers(hook))
        if len(given) > 1:
            names, way_out = self._several(given)
            raise ConfigError(f"Plugins {names} both answer {hook}; {way_out}.")
        return given[0][1] if given else None
