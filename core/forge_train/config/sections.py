"""The sections of the configuration that the core owns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from ..mesh.axes import Axis
from ..mesh.layout import Device
from .schema import FilePath, Ge, Gt, Lt, Volatile, section

Precision = Literal["fp32", "bf16", "fp16"]


@section
class RunSection:
    """Identity and reproducibility."""

    name: Annotated[str, Volatile()] = ""
    """The run's name and folder; the same command again continues the run."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seed for the initial weights, the order of the data and all other random numbers."""
    deterministic: bool = False
    """Use only deterministic kernels (torch.use_deterministic_algorithms)."""
    device: Device = "auto"
    """auto takes cuda if a CUDA device is available, else cpu."""
    start_timeout: Annotated[float, Gt(0), Volatile()] = 120.0
    """Until the first step is done: seconds that processes wait for one that does not arrive."""
    timeout: Annotated[float, Gt(0), Volatile()] = 1800.0
    """After the first step: seconds that processes wait for one that hangs."""


@section
class WarmUpBatches:
    """Steps with smaller batches, at the beginning of a run: an item of `train.batch_warmup`."""

    steps: Annotated[int, Gt(0)]
    """Number of such steps."""
    global_batch: Annotated[int, Gt(0)]
    """Sequences per step, over all ranks."""


@section
class TrainSection:
    """Length, batches and precision of training."""

    steps: Annotated[int, Ge(0)] = 0
    """Length of the run in optimizer steps; set one of steps, tokens and epochs."""
    tokens: Annotated[int, Ge(0)] = 0
    """Length of the run in tokens over all ranks, rounded up to whole steps."""
    epochs: Annotated[float, Ge(0)] = 0.0
    """Length of the run in passes over the data, such as 2 or 0.5. Each record is read once per epoch; what the last
    batch lacks is padding that counts for nothing."""
    global_batch: Annotated[int, Gt(0)] = 8
    """Sequences per step, over all ranks."""
    batch_warmup: tuple[WarmUpBatches, ...] = ()
    """Smaller batches at first, each larger than the one before: `[{ steps = 100, global_batch = 8 }]`."""
    micro_batch: Annotated[int, Ge(0)] = 0
    """Sequences per forward pass of one rank, which determines gradient accumulation. 0 takes a rank's whole share of
    the global batch, or a size that also divides the shares of `batch_warmup`."""
    sequence: Annotated[int, Gt(0)] = 512
    """Tokens per sequence."""
    max_hours: Annotated[float, Ge(0), Volatile()] = 0.0
    """Hours of training, from each start, after which a run saves and stops with exit code 75; 0 sets no limit."""
    clip_norm: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    evaluate_every: Annotated[int, Ge(0), Volatile()] = 0
    """Steps between evaluations on held-out data, with one more at the end. 0 never evaluates."""
    evaluate_batches: Annotated[int, Gt(0), Volatile()] = 16
    """Batches per evaluation, each of `global_batch` sequences: the same text on every layout."""
    precision: Precision = "fp32"
    """dtype of the forward and backward passes; weights and optimizer state stay in fp32."""
    init_from: Annotated[str, FilePath()] = ""
    """A checkpoint or a run to take the initial weights from."""
    init_missing: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns (`*.lora_*`) of tensor names that `init_from` may lack; these tensors keep their initial values."""
    init_unexpected: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns of tensor names that `init_from` may have in addition to the model's; these tensors are ignored."""
    init_map: Annotated[str, FilePath(dotted=True), Volatile()] = ""
    """`FILE.py:NAME` or `package.module:NAME` of a state map from the weights in `init_from` to those of this model;
    tensors that it does not take keep their names."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks; after the warm-up of batches, if there is one."""
        return self.global_batch * self.sequence

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, in whichever unit its length was given."""
        return self.steps or math.ceil(self.steps_of(self.tokens))

    @property
    def length(self) -> str:
        """The key that gives the run's length, for messages; where epochs or tokens do, `steps` follows from them."""
        return "train.epochs" if self.epochs else "train.tokens" if self.tokens else "train.steps"

    def sequences_of(self, epoch: int) -> int:
        """Sequences of the run's epochs, of which one has so many."""
        return max(round(self.epochs * epoch), 1)

    @property
    def batches(self) -> tuple[int, ...]:
        """The sizes of batches, in the order of the run."""
        return *(phase.global_batch for phase in self.batch_warmup), self.global_batch

    def batch_at(self, step: int) -> int:
        """Sequences of the step that follows `step` others, over all ranks."""
        for phase in self.batch_warmup:
            if step < phase.steps:
                return phase.global_batch
            step -= phase.steps
        return self.global_batch

    def steps_of(self, tokens: float) -> float:
        """Steps from the beginning of the run in which so many tokens are trained on."""
        steps = 0
        for phase in self.batch_warmup:
            held = phase.steps * phase.global_batch * self.sequence
            if tokens <= held:
                return steps + phase.steps * tokens / held
            steps, tokens = steps + phase.steps, tokens - held
        return steps + tokens / self.tokens_per_step


@section
class ParallelSection:
    """Sizes of the mesh axes; their product is the number of processes."""

    __axes__: ClassVar[tuple[Axis, ...]] = ()
    """Axes of other packages that the configuration names. Dunders, because an axis may have any other name."""
    __field_docs__: ClassVar[Mapping[str, str]]
    """The meaning of each."""
    __suggested__: ClassVar[tuple[str, ...]] = ()
    """Axes of installed packages, if the configuration names one that does not exist."""
    dp_replicate: Annotated[int, Gt(0)] = 1
    """Replicas, each sharded over the next axis."""
    dp_shard: Annotated[int, Ge(-1)] = -1
    """Ranks that share one sharded copy of the model; -1 takes all remaining ranks."""
    tp: Annotated[int, Gt(0)] = 1
    """Tensor parallelism."""
    cp: Annotated[int, Gt(0)] = 1
    """Context parallelism."""
    pp: Annotated[int, Gt(0)] = 1
    """Pipeline parallelism."""
    ep: Annotated[int, Gt(0)] = 1
    """Expert parallelism, over the ranks of dp_shard × cp × tp."""
    etp: Annotated[int, Gt(0)] = 1
    """Tensor parallelism inside experts: 1 or tp."""


@section
class CheckpointSection:
    """Schedule, format and retention of checkpoints."""

    every: Annotated[int, Ge(0), Volatile()] = 500
    """Steps between checkpoints; the last step is always saved. 0 saves only the last step."""
    minutes: Annotated[float, Ge(0), Volatile()] = 0.0
    """Save when this many minutes have passed since the last checkpoint; 0 ignores the clock."""
    early: Annotated[int, Ge(0), Volatile()] = 0
    """Save at steps 1, 2, 4, 8, … up to this one, and keep these checkpoints."""
    best: Annotated[str, Volatile()] = ""
    """Save when this value is better than in every kept checkpoint: `evaluation.loss`, `evaluation.` followed by a
    metric of evaluations, or a key of metrics.jsonl."""
    best_is: Annotated[Literal["lowest", "highest"], Volatile()] = "lowest"
    """Direction in which `best` improves: the lowest or the highest value wins."""
    keep_best: Annotated[int, Gt(0), Volatile()] = 1
    """In addition to the newest checkpoints, keep this many of the best by `best`."""
    asynchronous: Annotated[bool, Volatile()] = False
    """Continue training while a copy of the state is written; the copy takes host memory for one more state."""
    format: Annotated[Literal["sharded", "safetensors", "both"], Volatile()] = "sharded"
    """Format of the model's weights in checkpoints: the shards of each rank; full tensors in safetensors files, which
    other programs can read; or both."""
    keep: Annotated[int, Gt(0), Volatile()] = 2
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0), Volatile()] = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps no others."""
    folder: Annotated[str, Volatile()] = ""
    """Keep checkpoints in this folder or at this fsspec address (`s3://bucket/runs`), under the run's name. Each is
    written in the run's folder first, and stays there until the next is whole and this one has been copied, or is no
    longer selected by `keep` and the like."""
    mirror: Annotated[str, Volatile()] = ""
    """Copy each whole checkpoint to this folder or fsspec address too, under the run's name, while training continues;
    the same checkpoints are kept there. If the copy fails, a warning says so and the run continues."""
    only: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns of parameters to save, which must include all trained parameters; at resume, `train.init_from` supplies
    the others. If empty, all are saved."""
    allow_changes: Annotated[tuple[str, ...], Volatile()] = ()
    """Keys, sections (`adamw.lr`, `text`) and plugins that may differ from the checkpoint's at resume."""


@section
class LogSection:
    """Logging interval, and peak FLOP/s of the device."""

    every: Annotated[int, Gt(0), Volatile()] = 10
    """Steps between lines of metrics.jsonl; training waits for the device only at these steps."""
    peak_tflops: Annotated[float, Ge(0), Volatile()] = 0.0
    """Peak of one device in TFLOP/s, for `mfu` (causal attention, input embedding not counted); 0 looks it up by the
    device's name, and `mfu` is null if the name is unknown."""


CORE_SECTIONS: dict[str, type] = {
    "run": RunSection,
    "train": TrainSection,
    "parallel": ParallelSection,
    "checkpoint": CheckpointSection,
    "log": LogSection,
}
