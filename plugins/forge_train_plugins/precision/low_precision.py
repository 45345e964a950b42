"""Products in 8 and 4 bits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from forge_train import Applied, ConfigError, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forge_train import Job, Model, StepResult
    from forge_train.config import Config as RunConfig

    from ._low_precision.convert import Conversion
    from ._low_precision.layers import Rule
    from ._low_precision.products import Recipe

EVERYTHING = ("*",)
HIGH = ("head", "*router*")
"""Modules that stay in the run's precision unless the user asks otherwise."""


class LowPrecisionPlugin(Plugin):
    """Base of the four plugins of this file; weights, optimizer and checkpoints stay as they are."""

    api = (1, 0)
    provides = ("fp8",)
    facts = {"verify.rounds": 2**-4}  # half of the epsilon of e4m3
    name: str
    experimental: str = ""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._conversion: Any = None

    @hookimpl
    def parallelize(self, job: Job) -> list[Transform]:
        self._conversion = self._convert(job)
        return [Transform(Phase.FLOAT8, "fp8", self._conversion.apply, after=("compute_dtypes",))]

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._conversion.begin()

    @hookimpl
    def on_step(self, step: StepResult) -> None:
        self._conversion.step(step)

    @abstractmethod
    def _convert(self, job: Job) -> Conversion:
        """Convert the model."""

    def _rules(self) -> list[Rule]:
        """Of `include` and `exclude`."""
        from ._low_precision.layers import rules_of

        return [
            *rules_of(self.name, "include", self.config.include, EVERYTHING, take=True),
            *rules_of(self.name, "exclude", self.config.exclude, HIGH, take=False),
        ]

    def _emulated(self, job: Job, rules: list[Rule], recipe: Recipe, says: str) -> Conversion:
        """A conversion without kernels."""
        from ._low_precision.convert import Conversion

        if self.experimental:
            says = f"{says} (experimental: {self.experimental})"
        return Conversion(self.name, job, rules, recipe, recipe, says, experimental=bool(self.experimental))


class FP8(LowPrecisionPlugin):
    """Multiplies matrices in float8 with scales found on the way (torchao's recipes; arXiv:2209.05433).

    Scales are powers of two, the same on every layout: where tensor parallelism splits what shares a scale, ranks agree
    on its maximum. Experts always have a scale for each row, as their kernel wants it.
    """

    name = "fp8"
    facts = {"plan.peak": "fp8"}

    @section
    class Config:
        recipe: Literal["tensorwise", "rowwise", "rowwise_gw_hp"] = "tensorwise"
        """One scale for each operand of a product (gradients in e5m2), or one for each row (e4m3 only); `rowwise_gw_hp`
        leaves the product that gives the weights' gradients in the precision of the run."""
        mode: Literal["on", "auto"] = "on"
        """`auto` times forward and backward of each layer's shape at start-up and leaves layers as they are where
        float8 is not faster on this device."""
        emulate: Literal["auto", "on", "off"] = "auto"
        """Round operands and multiply them as they are, or have torch's float8 kernels multiply; auto takes the kernels
        on CUDA devices that have them, if `train.precision` is bf16. Either way sums are in fp32."""
        include: tuple[str, ...] = EVERYTHING
        """Patterns of the names of linear layers, and of experts, that multiply in float8."""
        exclude: tuple[str, ...] = HIGH
        """Patterns of those among them that do not."""
        all_gather: bool = False
        """Have FSDP2 gather the weights of these layers in e4m3, with a power of two for each row: half the bytes of
        bf16. Only values below 1/14336 of the largest that shares their scale come to be rounded otherwise."""

    @hookimpl
    def parallelize(self, job: Job) -> list[Transform]:
        gather = Transform(Phase.SHARD, "fp8_gather", lambda part: self._gather(part, job), after=("data_parallel",))
        return [*super().parallelize(job), *([gather] if self._gathers(job) else [])]

    def _gathers(self, job: Job) -> bool:
        return self.config.all_gather and job.dist.layout.shard_average_size > 1

    def _gather(self, part: nn.Module, job: Job) -> Applied:
        from ._low_precision.gather import gather_packed, weights_of

        weights = weights_of(part, self._conversion.products)
        found, groups = gather_packed(part, weights)
        if not groups and job.dist.layout.pp == 1:
            raise ConfigError(
                "fp8.all_gather: no weights are gathered on this layout. Shard them, with fsdp2 and parallel.dp_shard "
                "above 1 or with zero1, or set fp8.all_gather = false."
            )
        matched = found or self._conversion.declined  # it is no mistake if `auto` declined every layer
        return Applied(part, tuple(matched), f"{len(found)} of {len(weights)} weights gathered in e4m3")

    def _convert(self, job: Job) -> Conversion:
        from ._low_precision import recipes, trial
        from ._low_precision.convert import Conversion
        from ._low_precision.kernels import can_group, lacking

        config = self.config
        missing = lacking(job.device, job.precision.compute, rows=config.recipe != "tensorwise")
        if config.emulate == "off" and missing:
            raise ConfigError(f"fp8.emulate = 'off' needs a float8 kernel, but {missing}; use 'auto' or 'on'.")
        auto = job.device.type == "cuda" and not missing  # the CPU's kernel is slower than emulation
        kernel = {"auto": auto, "on": False, "off": True}[config.emulate]
        linear = recipes.scaled(config.recipe, kernel=kernel)
        experts = recipes.scaled_experts(config.recipe, kernel=kernel and can_group(job.device))
        says = f"{config.recipe}, {'by kernel' if kernel else 'emulated'}"
        if config.all_gather and not self._gathers(job):
            says += ", nothing to gather"
        conversion = Conversion(self.name, job, self._rules(), linear, experts, says)
        if config.mode == "auto":
            conversion.decline = lambda found: trial.slower(job, linear, experts, found)
        return conversion


class DeepSeekFP8(LowPrecisionPlugin):
    """DeepSeek-V3's float8: e4m3 in tiles of 1 × 128 and blocks of 128 × 128 (arXiv:2412.19437, §3.3).

    Activations and gradients have a scale for each 128 values along the axis that is contracted, weights one for each
    128 × 128; sums are in fp32. The head, norms, routers and the embedding stay in the precision of the run. Experts'
    tokens are sent in float8 too with `alltoall.payload`.
    """

    name = "deepseek_fp8"

    @section
    class Config:
        exclude: tuple[str, ...] = HIGH
        """Patterns of the names of linear layers, and of experts, that stay in the precision of the run."""
        overrides: tuple[str, ...] = ()
        """`name=fp8` or `name=high` for single modules, by name or pattern; a later one wins over an earlier one and
        over `exclude`."""
        scales: Literal["float32", "e8m0"] = "float32"
        """As in the paper, or powers of two: these move no rounding, so that layouts round alike even where a rank's
        tokens are no multiple of 128."""
        rounding: Literal["nearest", "stochastic"] = "nearest"
        """Of gradients; everything else is rounded to the nearest. What is stochastic is other on another layout."""
        emulate: Literal["auto", "on", "off"] = "auto"
        """Round operands and multiply them in fp32, or have torch's kernel for such blocks multiply; auto takes it for
        linear layers on Hopper, if `train.precision` is bf16. Experts have none."""

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        for one in self.config.overrides:
            if one.rpartition("=")[2].strip() not in ("fp8", "high") or not one.rpartition("=")[0].strip():
                yield Problem("deepseek_fp8.overrides", f"{one!r}: expected name=fp8 or name=high.")

    def _convert(self, job: Job) -> Conversion:
        from ._low_precision import recipes
        from ._low_precision.convert import Conversion
        from ._low_precision.kernels import lacking_blocks
        from ._low_precision.layers import Rule, rules_of

        rules = [
            Rule("*", True, "", given=False),
            *rules_of(self.name, "exclude", self.config.exclude, HIGH, take=False),
        ]
        for one in self.config.overrides:
            pattern, _, value = one.rpartition("=")
            rules.append(Rule(pattern.strip(), value.strip() == "fp8", "deepseek_fp8.overrides"))
        missing = lacking_blocks(job.device, job.precision.compute)
        if self.config.emulate == "off" and missing:
            raise ConfigError(f"deepseek_fp8.emulate = 'off' needs a kernel for blocks, but {missing}; use 'auto'.")
        kernel, stochastic = not missing and self.config.emulate != "on", self.config.rounding == "stochastic"
        how = "linear layers by kernel" if kernel else "emulated"
        says = f"1 × 128 and 128 × 128, {how}{', stochastic gradients' if stochastic else ''}"
        linear, experts = (
            recipes.deepseek(self.config.scales, stochastic=stochastic, kernel=one) for one in (kernel, False)
        )
        return Conversion(self.name, job, rules, linear, experts, says)


class MXFP8(LowPrecisionPlugin):
    """Experimental, emulated: e4m3 in blocks of 32 with scales that are powers of two (OCP MX, arXiv:2310.10537)."""

    name = "mxfp8"
    experimental = "emulated on every device"

    @section
    class Config:
        include: tuple[str, ...] = EVERYTHING
        """Patterns of the names of linear layers, and of experts, that multiply in MXFP8."""
        exclude: tuple[str, ...] = HIGH
        """Patterns of those among them that do not."""

    def _convert(self, job: Job) -> Conversion:
        from ._low_precision import recipes

        return self._emulated(job, self._rules(), recipes.mx(), "e4m3, blocks of 32")


class FP4(LowPrecisionPlugin):
    """Experimental, emulated: products in 4 bits, as NVFP4 or MXFP4 (arXiv:2310.10537)."""

    name = "fp4"
    experimental = "emulated on every device; losses are clearly higher than in 8 bits"

    @section
    class Config:
        format: Literal["nvfp4", "mxfp4"] = "nvfp4"
        """e2m1 in blocks of 16, with scales in e4m3 and one for the whole operand; or in blocks of 32, with scales that
        are powers of two."""
        rounding: Literal["nearest", "stochastic"] = "nearest"
        """Of gradients; everything else is rounded to the nearest. What is stochastic is other on another layout."""
        include: tuple[str, ...] = EVERYTHING
        """Patterns of the names of linear layers, and of experts, that multiply in 4 bits."""
        exclude: tuple[str, ...] = HIGH
        """Patterns of those among them that do not."""

    def _convert(self, job: Job) -> Conversion:
        from ._low_precision import recipes

        stochastic = self.config.rounding == "stochastic"
        recipe = recipes.fp4(self.config.format, stochastic=stochastic)
        return self._emulated(
            job, self._rules(), recipe, f"{self.config.format}{', stochastic gradients' * stochastic}"
        )
