"""Tiny models of transformers with updates by `lora`, for its tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import chat_model
from expert_models import MIXTRAL, QWEN
from forge_train import Job, Model
from forge_train.compose.compose import compose
from forge_train.engine import train
from forge_train_kit.starting import load_initial
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.offline.hf_import import import_checkpoint
from forge_train_tools.offline.hf_request import starting_from
from forge_train_tools.offline.opening import lone_job
from hf_models import GROUPED

SHAPE = {**GROUPED, "head_dim": 8}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **SHAPE, **MIXTRAL},
    "qwen3_moe": {"model_type": "qwen3_moe", **SHAPE, **QWEN},
    "dense_first": {"model_type": "qwen3_moe", **SHAPE, **QWEN, "mlp_only_layers": [0]},
}
"""Configurations of transformers."""


def write(folder: Path, model: str) -> None:
    if not model:
        chat_model.write_model(folder)
        return
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**(EXPERTS[model] | {"vocab_size": chat_model.write_tokenizer(folder)}))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def trained(folder: Path, *settings: str, dtype: torch.dtype | None = None, model: str = "") -> Path:
    """A run of some steps on adapters of an imported model, `folder/hf`: a Llama, or one of `EXPERTS`."""
    folder.mkdir(exist_ok=True)
    write(folder / "hf", model)
    imported = import_checkpoint(folder / "hf", folder / "base", dtype=dtype).path
    (folder / "text.txt").write_text("say one two three\n" * 200)
    short = ("train.steps=3", "train.global_batch=2", "train.sequence=16", "train.evaluate_every=0")
    request = Request(
        config=str(imported / "config.toml"),
        plugins=("lora",),
        without=("console", "tensorboard"),
        set=(*short, "adamw.lr=0.05", "run.device=cpu", f"text.path={folder / 'text.txt'}", *settings),
    )
    return train(resolve(request), run_dir=folder / "runs").run


def logits(model: Model, ids: Tensor) -> Tensor:
    (part,) = model.parts
    head: Any = part.head
    found: Tensor = head(part(ids))
    return found


def started(folder: Path, *settings: str, plugins: tuple[str, ...] = ()) -> tuple[Job, Model]:
    """A folder's model with adapters."""
    values = ("checkpoint.only=[]", "run.device=cpu", *settings)
    request = Request(model_from=str(folder), plugins=("lora", *plugins), set=values)
    setup = resolve(starting_from(request), data=False)
    job = lone_job(setup, folder)
    model = compose(job).model
    load_initial(model, job)
    return job, model
