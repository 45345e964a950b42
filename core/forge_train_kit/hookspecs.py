"""The hooks by which models, heads, tasks, data and stored weights work together; the kernel calls none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from forge_train.config import Config
from forge_train.contract.model import Model
from forge_train.plugin.job import Job
from forge_train.plugin.specs import hookspec
from forge_train_kit.capabilities import KernelCapabilities

from .contract import Evaluator, ExtraModel, InitialWeights
from .heads import Classes, Head, HeadSpec, Tail, Trunk
from .hf.model import HFAdapter, HFAround, HFModel
from .layers import Attention, AttentionKernel, FeedForward, Layer
from .losses import LossFunction
from .modalities import Fusion, FusionSpec, Modality
from .state_map import StateMap
from .tokenizer import Tokenizer


@hookspec("chain", asked="composition")
def attention(layer: Layer, job: Job) -> Annotated[Attention, "nn.Module"] | None:
    """The token mixer of one layer, or None to leave it to the default."""


@hookspec("chain", asked="composition")
def feed_forward(layer: Layer, job: Job) -> Annotated[FeedForward, "nn.Module"] | None:
    """The channel mixer of one layer, or None to leave it to the default."""


@hookspec("slot", optional=True, asked="composition", suits="forge_train_kit.kernels")
def attention_kernel(job: Job) -> AttentionKernel:
    """The function that computes attention."""
    raise AssertionError


@hookspec("questions", asked=None)
def kernel_needs(config: Config) -> KernelCapabilities | None:
    """Return what this plugin will ask of the attention kernel. Called before any slow import."""


@hookspec("slot", optional=True, asked="composition", gives="token_logits")
def head(spec: HeadSpec, job: Job) -> Annotated[Head, "nn.Module"]:
    """The module that turns the model's hidden states into outputs."""
    raise AssertionError


@hookspec("slot", optional=True, asked="composition")
def tail(trunk: Trunk, job: Job) -> Annotated[Tail, "nn.Module"]:
    """More layers after the model's last one, in training."""
    raise AssertionError


@hookspec("questions", asked="composition")
def modalities(job: Job) -> Iterable[Modality] | None:
    """Kinds of items beside text, such as images, that the data may hold and the model can take."""


@hookspec("slot", optional=True, asked="composition", gives="features")
def fusion(spec: FusionSpec, job: Job) -> Annotated[Fusion, "nn.Module"]:
    """The modules by which a model takes in the features of items: for a plugin that requires the slot."""
    raise AssertionError


@hookspec("slot", optional=True, keeps="forge_train_kit.model_files")
def tokenizer(job: Job) -> Tokenizer:
    """Text to token ids and back, for generation and evaluation."""
    raise AssertionError


@hookspec("slot", optional=True, asked=None)
def classes(job: Job) -> Classes:
    """The classes that labels stand for, for the data and the head."""
    raise AssertionError


@hookspec(
    "slot",
    optional=True,
    checked=True,
    asked="assembly",
    takes={"head": ("token_logits",), "task": ("token_labels",)},
)
def loss(job: Job) -> LossFunction:
    """The loss of hidden states against labels."""
    raise AssertionError


@hookspec("questions", asked=None, used_later=True)
def intervene(model: Model, job: Job) -> Mapping[str, Callable[..., Any]] | None:
    """Name modules whose activations are changed where the model is evaluated, asked or looked at, never in training.

    A pattern of modules → a function of what such a module gives (`[rows, tokens, …]` with all features, on any layout)
    and of its `Positions`, which gives values of the same shape; `forge_train_kit.activations.OfInput` makes it one of
    what the module is given.
    """


@hookspec("questions")
def extra_models(job: Job) -> Iterable[ExtraModel] | None:
    """Other models that the run needs, such as a teacher: composed as the first is, they are in `job.models`."""


@hookspec("questions", used_later=True)
def evaluators(job: Job) -> Evaluator | Iterable[Evaluator] | None:
    """Evaluations beside the loss on held-out data, each with its own data and metrics; asked once, at start-up."""


@hookspec("chain", optional=True, asked=None, starts_only=True)
def initial_weights(path: Path, model: Model, job: Job) -> InitialWeights | None:
    """Fill the model from `train.init_from`, or return None if this plugin does not read that format.

    The kit reads Forge's own checkpoints, unless `train.init_map` changes their weights.
    """


@hookspec("questions", asked=None)
def import_hf(config: Mapping[str, Any]) -> HFModel | None:
    """Return the layout of a model with this `config.json`, or None if it is not one of this plugin's."""


@hookspec("questions", asked=None)
def export_hf(job: Job) -> HFModel | None:
    """Return the layout of this job's model in Hugging Face format, or None."""


@hookspec("questions", asked=None)
def import_hf_around(config: Mapping[str, Any], beside: Mapping[str, Any]) -> HFAround | None:
    """Return what surrounds the language model in the model with this `config.json`, or None. `beside`: what the
    folder's other JSON files hold that describe its items, one over the other."""


@hookspec("questions", asked=None)
def export_hf_around(layout: HFModel, job: Job) -> HFModel | None:
    """Return the layout of this job's whole model in Hugging Face format, given that of its language model, or None."""


@hookspec("questions", asked=None)
def merge_weights(job: Job) -> StateMap | None:
    """Return a map that adds this plugin's parameters to the weights they adapt, for an export; None without any."""


@hookspec("questions", asked=None)
def export_adapter(modules: Mapping[str, str], job: Job) -> HFAdapter | None:
    """Return what this plugin added to a model as PEFT stores it. `modules`: the model's module → the one in Hugging
    Face layout, for those whose weight is the same tensor there."""
