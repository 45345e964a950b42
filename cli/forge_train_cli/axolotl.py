"""Configurations of axolotl as ours: the keys of docs/how-to/coming-from.md, and what has no counterpart by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_train.base.errors import ConfigError, describe

SAME = {
    "sequence_len": "train.sequence",
    "micro_batch_size": "train.micro_batch",
    "num_epochs": "train.epochs",
    "max_steps": "train.steps",
    "max_grad_norm": "train.clip_norm",
    "eval_steps": "train.evaluate_every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "logging_steps": "log.every",
    "seed": "run.seed",
    "learning_rate": "{optimizer}.lr",
    "weight_decay": "{optimizer}.weight_decay",
    "warmup_steps": "{schedule}.warmup",
    "warmup_ratio": "{schedule}.warmup",
    "val_set_size": "{data}.held_out",
    "lora_r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "peft_use_rslora": "lora.rslora",
    "peft_use_dora": "lora.dora",
    "loraplus_lr_ratio": "lora.lr_ratio",
    "lora_model_dir": "lora.adapter",
    "rl_beta": "{task}.beta",
    "dpo_label_smoothing": "dpo.label_smoothing",
    "simpo_gamma": "dpo.target_margin",
    "rpo_alpha": "dpo.sft_weight",
    "kto_desirable_weight": "kto.desirable_weight",
    "kto_undesirable_weight": "kto.undesirable_weight",
}
"""Keys whose value stays."""
WORDS: Mapping[str, Mapping[Any, Mapping[str, Any]]] = {
    "chat_template": {"tokenizer_default": {}, **{one: {"{data}.template": one} for one in ("chatml", "llama3")}},
    "train_on_inputs": {False: {}, True: {"sft.learn": "all"}},
    "excess_length_strategy": {
        one: {"{data}.long": ours} for one, ours in (("drop", "drop"), ("truncate", "right"), ("raise", "refuse"))
    },
    "sample_packing": {True: {}, False: {"sft.packing": "pad"}},
    "bf16": {True: {"train.precision": "bf16"}, "auto": {"train.precision": "bf16"}, False: {}},
    "fp16": {True: {"train.precision": "fp16"}, False: {}},
    "peft_init_lora_weights": {True: {}, "pissa": {"lora.start": "pissa"}},
    "load_in_4bit": {True: {"lora.base": "nf4"}, False: {}},
    "load_in_8bit": {True: {"lora.base": "int8"}, False: {}},
    "lora_target_linear": {True: {}, False: {}},
    "adapter": {"lora": {}, "qlora": {"lora.base": "nf4"}},
    "rl": {"dpo": {}, "kto": {}, **{one: {"dpo.loss": one} for one in ("ipo", "orpo", "simpo")}},
    "gradient_checkpointing": {True: {}, False: {}},
    "lr_scheduler": {"cosine": {}, "linear": {}, "constant": {}, "constant_with_warmup": {}},
    "optimizer": {one: {} for one in ("adamw_torch", "adamw_torch_fused", "adamw_hf", "lion_pytorch")},
    "fsdp_version": {1: {}, 2: {}},
}
"""Keys with some values that have a counterpart → what each value sets, beside plugins."""
DEFAULTS = {"weight_decay": 0.0, "val_set_size": 0.0, "sample_packing": False}
"""Values of axolotl's that are not ours, where a file leaves them out."""
RECORDS = {"text": ("completion",), "sft": ("chat_template", None)}
"""Plugin → types of data sets that it reads as axolotl does."""
LISTS = {"tokens": "tokenizer.add", "lora_target_modules": "lora.modules", "lora_modules_to_save": "lora.tune"}
MODULES = {f"{one}_proj": f"*.{one}" for one in ("q", "k", "v", "o", "gate", "up", "down")}
MODULES |= {"lm_head": "head", "embed_tokens": "embedding", "norm": "*norm*"}
ELSEWHERE = {
    "gradient_accumulation_steps": "is part of train.global_batch, which is that of one process here",
    "output_dir": "is runs/NAME with --name NAME",
    "resume_from_checkpoint": "is --resume, or the same command again",
    "flash_attention": "is chosen by the machine (forge plugins list shows kernels of attention)",
    "unfrozen_parameters": "is -p freeze with freeze.parameters and freeze.but",
    "deepspeed": "is -p fsdp2",
    **dict.fromkeys(("fsdp", "fsdp_config"), "is -p fsdp2, whose own options keep their defaults"),
}
"""Keys that are something else than an option."""


@dataclass
class Imported:
    """A configuration of ours, made of one of axolotl's."""

    model: str = ""
    """Its `base_model`."""
    plugins: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key → value."""
    left: dict[str, str] = field(default_factory=dict)
    """Key of axolotl that has no place → why."""

    def commands(self, target: str) -> list[str]:
        """Commands that train with the file; a second model, as a reference is, takes a checkpoint."""
        model, compares = self.model or "MODEL", self.values.get("dpo.loss") not in ("orpo", "simpo")
        if {"dpo", "kto"}.intersection(self.plugins) and compares and "lora" not in self.plugins:
            return [f"forge checkpoint import {model} base", f"forge train {target} --from base"]
        return [f"forge train {target} --from {model}"]

    def text(self, source: Path, target: str) -> str:
        """The TOML file."""
        import tomlkit

        document: Any = tomlkit.document()
        document.add(tomlkit.comment(f"Imported from {source}."))
        for command in self.commands(target):
            document.add(tomlkit.comment(command))
        for key, why in self.left.items():
            document.add(tomlkit.comment(f"Left out: {key} {why}."))
        document.add(tomlkit.nl())
        document["preset"], document["plugins"] = "finetune", self.plugins
        for key, value in sorted(self.values.items()):
            section, _, option = key.partition(".")
            document.setdefault(section, tomlkit.table())[option] = value
        return tomlkit.dumps(document)


def read(file: Path) -> Mapping[str, Any]:
    """A file of axolotl.

    Raises:
        ConfigError: if it can't be read, or holds no table.
    """
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError as error:
        raise ConfigError("forge config import needs 'yaml'. Install it: pip install pyyaml") from error
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: can't be read: {describe(error)}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected keys and values of axolotl, found {type(found).__name__}.")
    return found


def translate(given: Mapping[str, Any]) -> Imported:
    """Translate keys and values of axolotl; what has no counterpart is left out, with the reason."""
    made = Imported(str(given.get("base_model") or ""))
    given = {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    names, asked = _plugins(given)
    made.plugins = [name for name, one in asked.items() if name and one]
    read_by = {*made.plugins, *names.values(), *("train", "run", "checkpoint", "log", "tokenizer")}
    steps = isinstance(given.get("max_steps"), int) and given["max_steps"] > 0
    for key, value in given.items():
        if key == "base_model" or value in ("", [], {}) or (value is False and key not in WORDS):
            continue
        if key == "datasets":
            paths, made.left["datasets"] = _datasets(value, names["data"])
            made.values |= {f"{names['data']}.path": paths[0] if len(paths) == 1 else paths} if paths else {}
            continue
        if (key == "num_epochs" and steps) or (key == "max_steps" and not steps):
            made.left[key] = "has no effect beside max_steps" if steps else "sets no length"
            continue
        found = _option(key, value)
        if isinstance(found, str):
            made.left[key] = found
            continue
        for ours, word in found.items():
            own = ours.format(**names)
            if own.partition(".")[0] in read_by and own not in ("text.template", "text.long"):
                made.values[own] = word
            else:
                made.left[key] = "belongs to a method that this file does not use" if key not in DEFAULTS else ""
    made.left = {key: why for key, why in made.left.items() if why}
    if not given["val_set_size"]:
        made.values["train.evaluate_every"] = 0
    if size := given.get("micro_batch_size"):
        made.values["train.global_batch"] = int(size) * int(given.get("gradient_accumulation_steps") or 1)
    return made


def _plugins(given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, bool]]:
    """The plugins of the places in `SAME` and `WORDS`, and those to enable."""
    rl, sets = given.get("rl"), [one for one in given.get("datasets") or () if isinstance(one, dict)]
    texts = bool(sets) and all(one.get("type") == "completion" for one in sets)
    schedule = str(given.get("lr_scheduler")).removesuffix("_with_warmup")
    names = {
        "task": "kto" if rl == "kto" else "dpo" if rl else "",
        "data": "text_feedback" if rl == "kto" else "text_pairs" if rl else "text" if texts else "sft",
        "optimizer": "lion" if str(given.get("optimizer")).startswith("lion") else "adamw",
        "schedule": schedule if schedule in WORDS["lr_scheduler"] else "cosine",
    }
    asked = {
        names["task"]: True,
        names["data"]: not texts,
        names["optimizer"]: names["optimizer"] == "lion",
        names["schedule"]: names["schedule"] != "cosine",
        "lora": bool(given.get("adapter")),
        "ac": bool(given.get("gradient_checkpointing")),
        "fsdp2": bool(given.get("fsdp_config") or given.get("fsdp")),
    }
    return names, asked


def _option(key: str, value: Any) -> Mapping[str, Any] | str:
    """Our options and their values for a key of axolotl, or why there is none."""
    if key in SAME and isinstance(value, float) and value < 1 and key in ("eval_steps", "save_steps"):
        return f"is a share of the run; set {SAME[key]} to a number of steps"
    if key in SAME:
        return {SAME[key]: float(value) if isinstance(value, str) and key == "learning_rate" else value}
    if key in WORDS:
        known = isinstance(value, (str, int)) and value in WORDS[key]
        instead = {"optimizer": "; adamw takes its place", "lr_scheduler": "; cosine takes its place"}.get(key, "")
        return WORDS[key][value] if known else f"= {value!r} has no counterpart{instead}"
    if key in LISTS and isinstance(value, list):
        return {LISTS[key]: value if key == "tokens" else [MODULES.get(one, f"*.{one}") for one in value]}
    return ELSEWHERE.get(key, "has no counterpart")


def _datasets(value: Any, data: str) -> tuple[list[str], str]:
    """The paths of the data sets, and what is left out of them."""
    sets = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    paths = [one["path"] for one in sets if isinstance(one.get("path"), str)]
    odd = sorted({name for one in sets for name in one.keys() - {"path", "type", "ds_type"}})
    types = sorted({str(one.get("type")) for one in sets if one.get("type") not in RECORDS.get(data, ())})
    said = [f"has {', '.join(odd)}, for which {data} has options of its own (rename, learn)"] if odd else []
    if types:
        said.append(f"has records of type {', '.join(types)}, which {data} may read or render otherwise: look at them")
        said[-1] += " with forge data show --sample"
    return paths, "; it ".join(said) if paths else f"has no paths; set {data}.path"
