"""The decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import ConfigError, Ge, Gt, Le, Lt, Plugin, PrepareStep, Problem, hookimpl, section
from forge_train_kit import hookspecs
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.enabled_modalities import enabled_modalities
from forge_train_kit.facts import ARCHITECTURES
from forge_train_kit.hf import HFModel

if TYPE_CHECKING:
    from torch import nn

    from forge_train import Job, Model
    from forge_train.config import Config as RunConfig


@section
class Rope:
    """Rotary position embedding, and how it is stretched to longer sequences."""

    fraction: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of each head's features that is rotated; the others carry no position."""
    layers: tuple[bool, ...] = ()
    """Layers with positions: the list repeats from the first layer to the last; empty means all."""
    window_theta: Annotated[float, Ge(0)] = 0.0
    """Base of the frequencies in layers with a window, where `scaling` is not applied; 0 rotates all layers alike."""
    theta: Annotated[float, Gt(1)] = 10_000.0
    """Base of the frequencies."""
    sections: tuple[Annotated[int, Ge(0)], ...] = ()
    """Pairs of a head's features that are rotated by time, by row and by column of an item's vectors, such as
    [16, 24, 24] (M-RoPE, arXiv:2409.12191, §2.1); tokens have three equal positions. Empty rotates all pairs by the
    position in the sequence."""
    scaling: Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"] = "none"
    """Scaling of the frequencies; each option below names the scalings that read it."""
    factor: Annotated[float, Ge(1)] = 1.0
    """Stretch (linear, llama3, yarn, dynamic)."""
    original_sequence: Annotated[int, Ge(0)] = 0
    """Tokens of context before the stretch (llama3, yarn, dynamic, longrope)."""
    low: Annotated[float, Gt(0)] = 1.0
    """Features with fewer turns in the original context are stretched (llama3, yarn)."""
    high: Annotated[float, Ge(0)] = 0.0
    """Features with more turns are kept (llama3, yarn); 0 means 4 for llama3 and 32 for yarn."""
    temperature: Annotated[float, Ge(0)] = 0.0
    """Factor on cos and sin (yarn, longrope); 0 means 0.1 ln(factor) + 1 for yarn, and for longrope
    √(1 + ln(s) / ln(original_sequence)) with s = max_sequence / original_sequence."""
    truncate: bool = True
    """Round the bounds between stretched and kept features to whole features (yarn)."""
    short: tuple[float, ...] = ()
    """Divisors of the frequency of each pair of features, in sequences within the original context
    (longrope)."""
    long: tuple[float, ...] = ()
    """The same for longer sequences (longrope)."""


class Decoder(Plugin):
    """Decoder-only transformer with rotary positions, as in Llama, Qwen, Gemma, OLMo and similar families."""

    api = (1, 0)
    facts = {
        "plan.per_unit": True,
        "hf.architectures": (
            "LlamaForCausalLM",
            "MllamaForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen2ForCausalLM",
            "MistralForCausalLM",
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "SmolLM3ForCausalLM",
            "GraniteForCausalLM",
            "GemmaForCausalLM",
            "Gemma2ForCausalLM",
            "Gemma3ForCausalLM",
            "Phi3ForCausalLM",
            "GPT2LMHeadModel",
            "GptOssForCausalLM",
            "MixtralForCausalLM",
            "Qwen3MoeForCausalLM",
            "OlmoeForCausalLM",
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
        ),
    }

    @section
    class Config:
        dim: Annotated[int, Gt(0)] = 256
        """Width of the residual stream."""
        layers: Annotated[int, Gt(0)] = 4
        """Number of blocks."""
        heads: Annotated[int, Gt(0)] = 4
        """Query heads."""
        kv_heads: Annotated[int, Ge(0)] = 0
        """Key and value heads, a divisor of heads; 0 means as many as heads."""
        head_dim: Annotated[int, Ge(0)] = 0
        """Features per head; 0 means dim / heads."""
        hidden: Annotated[int, Ge(0)] = 0
        """Width of the feed-forward blocks; 0 means 8/3 dim, rounded up to a multiple of 64."""
        vocabulary: Annotated[int, Ge(0)] = 0
        """Number of token ids; 0 means the tokenizer's."""
        placeholders: Annotated[int, Ge(0)] = 0
        """Ids after these that the embedding has and the head does not: of tokens that stand for items, which are
        read and never written (Llama 3.2 Vision)."""
        max_sequence: Annotated[int, Gt(0)] = 2048
        """Longest sequence in tokens."""
        norm: Literal["rms", "layer"] = "rms"
        """RMSNorm or LayerNorm."""
        norm_at: Literal["pre", "post", "both"] = "pre"
        """Norms before attention and feed-forward, after them (OLMo 2), or both (Gemma 2). A final norm follows the
        last layer in each case."""
        unit_offset: bool = False
        """RMSNorm multiplies by 1 + its weight, which starts at zero (Gemma)."""
        norm_eps: Annotated[float, Gt(0)] = 1e-6
        """Added to the mean square (or the variance) in norms."""
        qk_norm: bool = False
        """Normalise queries and keys with RMSNorm, as Qwen3 does."""
        qk_norm_over: Literal["head", "width"] = "head"
        """Normalise each head on its own (Qwen3), or all heads of a token together (OLMo 2)."""
        tied: bool = False
        """Share the weights of embedding and head; a head without token logits, such as that of `classify`, has its
        own."""
        bias: bool = False
        """Biases in the feed-forward projections, and in LayerNorm."""
        qkv_bias: bool = False
        """Biases in the query, key and value projections."""
        o_bias: bool = False
        """Biases in attention's output projection."""
        window: Annotated[int, Ge(0)] = 0
        """Sliding window: number of positions that a query sees, its own and those before it; 0 means all."""
        window_layers: tuple[bool, ...] = ()
        """Layers with the window: the list repeats from the first layer to the last; empty means all."""
        soft_cap: Annotated[float, Ge(0)] = 0.0
        """Attention's logits become cap · tanh(logits / cap), as in Gemma 2; 0 means no cap."""
        scale: Annotated[float, Ge(0)] = 0.0
        """Factor on attention's logits; 0 means 1/√head_dim."""
        logit_soft_cap: Annotated[float, Ge(0)] = 0.0
        """The same as `soft_cap`, for a head's token logits."""
        logit_divisor: Annotated[float, Gt(0)] = 1.0
        """Divides a head's token logits, before any cap (Granite)."""
        embedding_multiplier: Annotated[float, Gt(0)] = 1.0
        """Factor on embeddings (Gemma: √dim)."""
        residual_multiplier: Annotated[float, Gt(0)] = 1.0
        """Factor on the outputs of attention and feed-forward, before the residual addition (Granite)."""
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Share of the outputs of attention and feed-forward that is zeroed in training (arXiv:1706.03762, §5.4)."""
        embedding_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Share of the embeddings that is zeroed in training."""
        std: Annotated[float, Gt(0)] = 0.02
        """Standard deviation of initial weights."""
        depth_scaled: bool = True
        """Divide the standard deviation of projections into the residual stream by √(2 · layers)."""
        architecture: str = ""
        """Architecture of exports in Hugging Face layout, such as MistralForCausalLM; empty means the first that can
        hold the model."""
        rope: Rope = Rope()
        """Rotary positions."""
        positions: Literal["rotary", "learned"] = "rotary"
        """Rotate queries and keys, or add a learned embedding of each position (GPT-2)."""
        sinks: bool = False
        """Add a learned logit without a value to each head's softmax, so that a head can attend to nothing
        (GPT-OSS)."""
        parallel: bool = False
        """Attention and feed-forward both read the input of the layer, as in GPT-NeoX, instead of running one after the
        other (arXiv:2204.02311, §2)."""
        prefix: bool = False
        """The tokens of a document before the first learned one see each other; later ones see what comes before them
        (prefix language models, arXiv:1910.10683, §3.2.1; PaliGemma, arXiv:2407.07726). A prompt is a prefix as a
        whole."""
        attention_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Share of attention's weights that is zeroed in training, after the softmax. It needs a kernel that can drop
        the same weights on every layout, such as `eager`."""

    config: Config

    @hookimpl
    def kernel_needs(self) -> KernelCapabilities:
        asked = self.config
        return KernelCapabilities(
            dropout=asked.attention_dropout > 0, soft_caps=asked.soft_cap > 0, sinks=asked.sinks, prefixes=asked.prefix
        )

    @hookimpl
    def build_model(self, job: Job) -> nn.Module:
        from ._decoder.build import build

        return build(self.config, self._vocabulary(job), job)

    @hookimpl
    def prepare_batch(self, job: Job) -> list[PrepareStep]:
        changes: list[PrepareStep] = []
        if self.config.prefix:
            from ._decoder.prefix import Ends

            changes.append(PrepareStep(Ends(tell=job.dist.main)))
        if self.config.rope.sections:
            from ._decoder.build import item_positions

            if (found := item_positions(self.config, job)) is not None:
                changes.append(PrepareStep(lambda batches: [found.prepared(one) for one in batches]))
        if self.config.placeholders and job.hooks.gives("head") == "token_logits":
            from ._decoder.placeholders import unlearned

            changes.append(PrepareStep(lambda batches: unlearned(batches, self._vocabulary(job))))
        return changes

    @hookimpl
    def data_stages(self, job: Job) -> list[tuple[str, str]]:
        from ._decoder.build import item_positions

        asked = self.config
        found = [("map", "ends of prefixes, which see all of themselves (decoder.prefix)")] if asked.prefix else []
        turned = "positions of items along time, height and width (decoder.rope.sections)"
        return found + ([("map", turned)] if asked.rope.sections and item_positions(asked, job) else [])

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        if not job.dist.main or (given := job.hooks.gives("head")) == "token_logits":
            return
        from forge_train_kit.data.progress import tell

        head = f"the head of plugin {job.hooks.provider('head')!r}"
        if self.config.tied and not any(getattr(part, "tied", False) for part in model.parts):
            tell(f"decoder.tied: untied, because {head} can't share the embedding's weights.")
        for name in ("logit_soft_cap", "logit_divisor"):
            if getattr(self.config, name) != getattr(type(self.config), name):
                tell(f"decoder.{name}: left out, because {head} gives {given}.")

    @hookimpl
    def check_config(self, config: RunConfig) -> Iterator[Problem]:
        from ._decoder.rules import check

        known = ARCHITECTURES.of(self)
        if self.config.architecture not in ("", *known):
            yield Problem("decoder.architecture", f"found {self.config.architecture!r}; known: {', '.join(known)}.")
        yield from check(self.config, config)

    @hookimpl
    def import_hf(self, config: Mapping[str, Any]) -> HFModel | None:
        from ._decoder import heads
        from ._decoder.huggingface import read

        given, architecture = heads.gives(config)
        if not given:
            return read(config, self.config)
        found = read(heads.causal(config, architecture), self.config)
        return heads.imported(found, given, architecture, config) if found else None

    @hookimpl
    def export_hf(self, job: Job) -> HFModel:
        import torch

        from ._decoder import heads, own_head
        from ._decoder.huggingface import write

        if self.config.prefix and not enabled_modalities(job):
            raise ConfigError(
                "decoder.prefix: transformers has models whose prefixes see all of themselves with images only; "
                "without any, this one would be read as another model."
            )
        with torch.device("meta"):
            model: Any = self.build_model(job)
        model.fusion = None  # described by whoever reads items (export_hf_around)
        if (given := job.hooks.gives("head")) == "token_logits":
            own_head.check(job, self.config.logit_divisor, self.config.logit_soft_cap or None)
            return write(self.config, self._vocabulary(job), model, job.config.sections)
        if given not in heads.KINDS:
            raise ConfigError(
                f"A decoder in Hugging Face layout needs a head that gives token_logits, {', '.join(heads.KINDS)}; "
                f"plugin {job.hooks.provider('head')!r} gives {given!r}."
            )
        head, model.head = model.head, None
        trunk = write(replace(self.config, tied=True), self._vocabulary(job), model, job.config.sections)
        classes = hookspecs.classes(job) if job.hooks.provider("classes") else None
        # Texts to classify don't end with the token that ends documents; texts with a reward do.
        pad = hookspecs.tokenizer(job).end if classes and job.hooks.provider("tokenizer") else None
        return heads.exported(trunk, given, head, classes, pad, tied=self.config.tied)

    def _vocabulary(self, job: Job) -> int:
        """The model's number of token ids: with its placeholders, at least as many as the tokenizer has.

        Raises:
            ConfigError: if neither the number nor a tokenizer is given, or the number is too small.
        """
        wanted = self.config.vocabulary
        if not job.hooks.provider("tokenizer"):
            if not wanted:
                raise ConfigError("decoder.vocabulary: no enabled plugin provides a tokenizer to take it from; set it.")
            return wanted
        needed = hookspecs.tokenizer(job).vocabulary
        if wanted and wanted + self.config.placeholders < needed:
            raise ConfigError(f"decoder.vocabulary: expected at least the tokenizer's {needed}, found {wanted}.")
        return wanted or needed
