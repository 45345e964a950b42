"""Warns of tokens whose rows are not trained."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from forge_train.base.format import format_list
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers.added import added_tokens

if TYPE_CHECKING:
    from forge_train import Job, Model

log = logging.getLogger("forge_train")


def warn_of_new_tokens(model: Model, job: Job) -> None:
    """Tell of added tokens whose rows stay as they start."""
    place = model_files.option(job.hooks)
    path = Path(getattr(job.config.sections[place[0]], place[1])) if place else Path()
    roles = {name: role for part in model.parts for name, role in getattr(part, "roles", {}).items()}
    owners = tuple(f"{name.rpartition('.')[0]}." for name, role in roles.items() if role == "embedding")
    learned = any(name.startswith(owners) for name, one in model.named_parameters() if one.requires_grad)
    if place and owners and not learned and path.exists() and (added := added_tokens(path)):
        log.warning(
            "lora: the rows of added tokens (%s) are not trained. Enable new_rows too, or name the embedding and "
            "the head in lora.tune.",
            format_list(list(added), 3),
        )
