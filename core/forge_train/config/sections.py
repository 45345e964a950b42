"""The sections of the configuration that core owns."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from ..ground.layout import Device
from .schema import FilePath, Ge, Gt, Lt, Volatile, section

Precision = Literal["fp32", "bf16", "fp16"]


@section
class RunSection:
    """Identity and reproducibility."""

    name: Annotated[str, Volatile()] = ""
    """The run's folder and identity; the same command again continues it."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Seeds the initial weights, the data's order and every other random number."""
    deterministic: bool = False
    """Use only deterministic kernels (torch.use_deterministic_algorithms)."""
    device: Device = "auto"
    """auto takes cuda where there is one, else cpu."""
    start_timeout: Annotated[float, Gt(0), Volatile()] = 120.0
    """Seconds that the processes wait for one that does not come, until the first step is done."""
    timeout: Annotated[float, Gt(0), Volatile()] = 1800.0
    """Seconds that they wait for one that hangs, from then on."""


@section
class WarmUpBatches:
    """Steps with smaller batches, at the beginning of a run: an item of `train.batch_warmup`."""

    steps: Annotated[int, Gt(0)]
    """How many."""
    global_batch: Annotated[int, Gt(0)]
    """Sequences per step, over all ranks."""


@section
class TrainSection:
    """How much to train, on what batches, and how exactly."""

    steps: Annotated[int, Ge(0)] = 0
    """Optimizer steps; say either steps or tokens."""
    tokens: Annotated[int, Ge(0)] = 0
    """Tokens over all ranks, rounded up to whole steps."""
    global_batch: Annotated[int, Gt(0)] = 8
    """Sequences per step, over all ranks."""
    batch_warmup: tuple[WarmUpBatches, ...] = ()
    """Smaller batches at first, each larger than the one before: `[{ steps = 100, global_batch = 8 }]`."""
    micro_batch: Annotated[int, Ge(0)] = 0
    """Sequences per forward pass of one rank; the number of accumulated passes follows. 0 takes a rank's whole share of
    the global batch, or what divides the shares of a warm-up too."""
    sequence: Annotated[int, Gt(0)] = 512
    """Tokens per sequence."""
    max_hours: Annotated[float, Ge(0), Volatile()] = 0.0
    """Hours of training after which a run saves, and stops with exit code 75; each start counts anew. 0 never does."""
    clip_norm: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0 does not clip."""
    evaluate_every: Annotated[int, Ge(0), Volatile()] = 0
    """Steps between evaluations on held-out data; one more at the end. 0 never evaluates."""
    evaluate_batches: Annotated[int, Gt(0), Volatile()] = 16
    """Batches per evaluation, each of `global_batch` sequences: the same text on every layout."""
    precision: Precision = "fp32"
    """dtype of the forward and backward pass; weights and optimizer state stay fp32."""
    init_from: Annotated[str, FilePath()] = ""
    """A checkpoint, or a run, whose weights to start from."""
    init_missing: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns (`*.lora_*`) of names that it may lack; these tensors keep their initial values."""
    init_unexpected: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns of names that it may hold beside the model's; they are left out."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over all ranks; after the warm-up of batches, if there is one."""
        return self.global_batch * self.sequence

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run, in whichever unit its length was given."""
        return self.steps or math.ceil(self.steps_of(self.tokens))

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

    dp_replicate: Annotated[int, Gt(0)] = 1
    """Replicas, each sharded over the next axis."""
    dp_shard: Annotated[int, Ge(-1)] = -1
    """Ranks that share one sharded copy of the model; -1 is what is left over."""
    tp: Annotated[int, Gt(0)] = 1
    """Tensor parallelism."""
    cp: Annotated[int, Gt(0)] = 1
    """Context parallelism."""
    pp: Annotated[int, Gt(0)] = 1
    """Pipeline parallelism."""
    ep: Annotated[int, Gt(0)] = 1
    """Expert parallelism, re-tiling dp_shard × cp × tp."""
    etp: Annotated[int, Gt(0)] = 1
    """Tensor parallelism inside experts: 1, or tp."""


@section
class CheckpointSection:
    """When to save, and what to keep."""

    every: Annotated[int, Ge(0), Volatile()] = 500
    """Steps between checkpoints; the last step is always saved. 0 saves only there."""
    minutes: Annotated[float, Ge(0), Volatile()] = 0.0
    """Minutes after which a checkpoint is saved if there was none; 0 does not look at the clock."""
    early: Annotated[int, Ge(0), Volatile()] = 0
    """Save at steps 1, 2, 4, 8, … up to this one, and keep these checkpoints."""
    best: Annotated[str, Volatile()] = ""
    """Save whenever this is better than in every checkpoint that is kept: `evaluation.loss`, `evaluation.` and a metric
    of evaluations, or a key of metrics.jsonl."""
    best_is: Annotated[Literal["lowest", "highest"], Volatile()] = "lowest"
    """Which value of `best` is the better one."""
    keep_best: Annotated[int, Gt(0), Volatile()] = 1
    """Keep, beside the newest, so many of the best by `best`."""
    asynchronous: Annotated[bool, Volatile()] = False
    """Copy the state and train on while the copy is written; takes the memory of one more state on the host."""
    keep: Annotated[int, Gt(0), Volatile()] = 2
    """The newest checkpoints to keep."""
    keep_every: Annotated[int, Ge(0), Volatile()] = 0
    """Keep, beside those, every checkpoint whose step is a multiple of this; 0 keeps no others."""
    only: Annotated[tuple[str, ...], Volatile()] = ()
    """Patterns of parameters to save, among them every trained one; at resume `train.init_from` gives the others again.
    Empty saves all."""
    allow_changes: Annotated[tuple[str, ...], Volatile()] = ()
    """Keys or sections (`adamw.lr`, `text`) and plugins that may differ from the checkpoint's at resume."""


@section
class LogSection:
    """How often to look."""

    every: Annotated[int, Gt(0), Volatile()] = 10
    """Steps between lines of metrics.jsonl; only there is the device waited for."""
    peak_tflops: Annotated[float, Ge(0), Volatile()] = 0.0
    """Peak of one device in TFLOP/s, for `mfu` (causal attention, input embedding not counted); 0 takes that of the
    device's name, and gives null where it is not known."""


CORE_SECTIONS: dict[str, type] = {
    "run": RunSection,
    "train": TrainSection,
    "parallel": ParallelSection,
    "checkpoint": CheckpointSection,
    "log": LogSection,
}
