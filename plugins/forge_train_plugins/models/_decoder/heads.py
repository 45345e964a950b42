"""The decoder with heads other than a language model's, in Hugging Face layout.

A family is a table of a causal language model. With another head, the trunk stays the same. It is read and written
as the trunk of a tied model, which has no tensor for its head, and the other head is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forge_train import ConfigError
from forge_train_kit.heads import Classes
from forge_train_kit.hf import HFModel
from forge_train_kit.state_map import Rename, StateMap

from .families import FAMILIES

if TYPE_CHECKING:
    from torch import nn

CAUSAL = "ForCausalLM"
TRUNKS = {"GPT2": "transformer."}
"""The prefix of the trunk's tensors if it is not `model.`; in the class without a head they have no prefix."""


@dataclass(frozen=True)
class HeadKind:
    """A kind of head.

    Args:
        suffix: of its class in transformers.
        parameters: names of the head's parameters, each stored as one tensor.
        missing: families for which transformers has no such class.
    """

    suffix: str
    parameters: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


TEXT = HeadKind("ForSequenceClassification", ("score.weight",), ("Granite", "Olmoe"))
TOKENS = HeadKind(
    "ForTokenClassification",
    ("score.weight", "score.bias"),
    ("Granite", "Olmo2", "Olmo3", "Olmoe", "Gemma3Text", "DeepseekV2"),
)
KINDS = {"text_class_logits": TEXT, "token_class_logits": TOKENS, "rewards": TEXT, "embeddings": HeadKind("Model")}
"""Output of a head → its class. `embeddings` comes last, because its suffix is the most general."""
CAUSALS = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
"""Stem of a class with another head → the causal class, if that has a different stem."""
SCORES = {"GPT2ForTokenClassification": "classifier"}
"""Class → the name of its head, if it is not `score`."""


def gives(table: Mapping[str, Any]) -> tuple[str, str]:
    """Return the output of a `config.json`'s head, and the family's architecture; both empty for a causal model."""
    named: Sequence[str] = table.get("architectures") or ()
    for given, kind in KINDS.items():
        for one in named:
            if one.endswith(kind.suffix) and one not in FAMILIES and len(named) == 1:
                stem = one.removesuffix(kind.suffix)
                if given == "text_class_logits" and len(_names(table)) == 1:
                    given = "rewards"
                return given, CAUSALS.get(stem, stem + CAUSAL)
    return "", ""


def causal(table: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The `config.json` of the family's causal model with the same trunk."""
    return {**table, "architectures": [architecture], "tie_word_embeddings": True}


def imported(found: HFModel, given: str, causal: str, table: Mapping[str, Any]) -> HFModel:
    """A model that was read as a causal one, with its own head.

    Args:
        found: the model with its trunk alone.
        given: what the head gives.
        causal: the architecture of the causal model.
        table: the `config.json`.

    Raises:
        ConfigError: for labels that no plugin can learn.
    """
    kind = KINDS[given]
    (architecture,) = table["architectures"]
    sections: dict[str, Mapping[str, Any]] = {**found.sections}
    sections["decoder"] = {**sections["decoder"], "tied": FAMILIES[causal].tied(table)}
    if kind.suffix == "Model":
        trunk = _trunk(architecture.removesuffix(kind.suffix))
        return _mapped(found, lambda one: trunk >> one, sections=sections)
    if (problem := table.get("problem_type")) not in (None, "single_label_classification") and given != "rewards":
        raise ConfigError(
            f"config.json: problem_type = {problem!r} can't be imported: Forge supports one class per text."
        )
    plugin = {"rewards": "reward", "text_class_logits": "classify"}.get(given, "token_classify")
    sections[plugin] = {} if given == "rewards" else {"classes": _names(table)}
    head = _head(kind, architecture)
    return _mapped(found, lambda one: one | head, sections=sections)


def _trunk(stem: str) -> Rename:
    """Names in the class without a head → names in the other classes."""
    return Rename({"{name*}": f"{TRUNKS.get(stem, 'model.')}{{name*}}"})


def _head(kind: HeadKind, architecture: str) -> Rename:
    """Names of the head's tensors → names here."""
    theirs = SCORES.get(architecture, "score")
    return Rename({name.replace("score", theirs): f"head.{name}" for name in kind.parameters})


def _mapped(found: HFModel, change: Callable[[StateMap], StateMap], **more: Any) -> HFModel:
    """The model with each of its maps changed."""
    return replace(found, map=change(found.map), others=tuple(map(change, found.others)), **more)


def _names(table: Mapping[str, Any]) -> list[str]:
    """Class names in the order of their labels."""
    given = table.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        ordered = {int(key): str(name) for key, name in given.items()}
        return [ordered[label] for label in range(len(ordered))]
    except (AttributeError, KeyError, ValueError) as error:
        raise ConfigError("config.json: id2label must name the labels 0, 1, …, each once.") from error


def exported(
    found: HFModel, given: str, head: nn.Module, classes: Classes | None, pad: int | None, *, tied: bool = False
) -> HFModel:
    """A model that was written as a tied causal one, with its own head.

    Args:
        found: the model with its trunk alone.
        given: what the head gives.
        head: of the model.
        classes: the classes that it predicts; None if it predicts none.
        pad: the token id of padding, by which transformers finds the last token of a text.
        tied: whether a causal model with this trunk shares the embedding's weights, if the files have no head.

    Raises:
        ConfigError: for a class that transformers does not have, or a head with other parameters.
    """
    kind = KINDS[given]
    (architecture,) = found.config["architectures"]
    renamed = (stem for stem, causal in CAUSALS.items() if causal == architecture)
    stem = next(renamed, architecture.removesuffix(CAUSAL))
    if stem in kind.missing:
        raise ConfigError(f"transformers has no {stem}{kind.suffix}; choose another family in decoder.architecture.")
    own = tuple(name for name, _ in head.named_parameters())
    if own != kind.parameters:
        has, needs = (", ".join(names) or "no parameter" for names in (own, kind.parameters))
        raise ConfigError(f"{stem}{kind.suffix} has a head with {needs}; the head of this model has {has}.")
    untied = {"tie_word_embeddings": tied and not kind.parameters}
    config = {**found.config, "architectures": [stem + kind.suffix], **untied}
    if kind.suffix == "Model":
        return replace(found, map=_trunk(stem) >> found.map, config=config)
    names = classes.names if classes else ("reward",)
    config |= {"id2label": {str(k): name for k, name in enumerate(names)}, "pad_token_id": pad}
    config["label2id"] = {name: k for k, name in enumerate(names)}
    config["problem_type"] = "single_label_classification" if classes else "regression"
    return replace(found, map=found.map | _head(kind, stem + kind.suffix), config=config)
