"""The hooks by which models, heads, tasks and data work together; plugins call them, the kernel does not."""

from __future__ import annotations

from forge_train.contract.attention import Attention, AttentionKernel
from forge_train.contract.job import Job
from forge_train.contract.layers import FeedForward, Head, HeadSpec, Layer
from forge_train.contract.protocols import Classes, LossFunction
from forge_train.contract.specs import hookspec
from forge_train.contract.tail import Tail, Trunk


@hookspec("chain", asked="composition")
def attention(layer: Layer, job: Job) -> Attention | None:
    """The token mixer of one layer, or None to leave it to the default."""


@hookspec("chain", asked="composition")
def feed_forward(layer: Layer, job: Job) -> FeedForward | None:
    """The channel mixer of one layer, or None to leave it to the default."""


@hookspec("slot", optional=True, asked="composition")
def attention_kernel(job: Job) -> AttentionKernel:
    """The function that computes attention."""
    raise AssertionError


@hookspec("slot", optional=True, asked="composition", gives="token_logits")
def head(spec: HeadSpec, job: Job) -> Head:
    """The module that turns the model's hidden states into outputs."""
    raise AssertionError


@hookspec("slot", optional=True, asked="composition")
def tail(trunk: Trunk, job: Job) -> Tail:
    """More layers after the model's last one, in training."""
    raise AssertionError


@hookspec("slot", optional=True, asked=None)
def classes(job: Job) -> Classes:
    """The classes that labels stand for, for the data and the head."""
    raise AssertionError


@hookspec(
    "slot",
    optional=True,
    checked=True,
    asked="step",
    takes={"head": ("token_logits",), "task": ("token_labels",)},
)
def loss(job: Job) -> LossFunction:
    """The loss of hidden states against labels."""
    raise AssertionError
