"""Training of the rows of added tokens alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_train import Applied, ConfigError, MicroBatch
from forge_train.base.format import format_list
from forge_train.compose.initialise import local_window
from forge_train_kit import model_files
from forge_train_kit.data.tokenizers.added import added_tokens

if TYPE_CHECKING:
    from forge_train import Job

log = logging.getLogger("forge_train")

TRAINED_BY_OTHERS = {"freeze", "lora"}
"""Names that are provided by plugins which choose the other trained parameters themselves."""


class Rows:
    """Trains some rows of the embedding and of the head; all others stay as they are, to the bit.

    Gradients of other rows are set to zero before the norm, and so moments of theirs stay zero too. An optimizer may
    still change them, by weight decay for instance: they are put back after its step.
    """

    def __init__(self, ids: Collection[int], job: Job) -> None:
        self.ids, self.job = sorted(ids) or _added(job), job
        self._places: list[tuple[nn.Module, str]] = []
        """Modules, and the names of their parameters that have such rows."""
        self._held: list[nn.Parameter] = []
        self._rows: dict[tuple[int, int], Tensor] = {}
        """Window of rows → those of added tokens in it."""
        self._seen: set[int] = set()
        """Those that this rank's batches had."""

    def apply(self, part: nn.Module) -> Applied:
        """Freeze a part but for the matrices of the vocabulary, unless another plugin says what is trained.

        Raises:
            ConfigError: if they have fewer rows.
        """
        parameters = dict(part.named_parameters(remove_duplicate=False))
        roles: dict[str, str] = getattr(part, "roles", {})
        owners = {name.rpartition(".")[0] for name, role in roles.items() if role in ("embedding", "head")}
        own = {
            name: one.shape[0]
            for name, one in parameters.items()
            if name.rpartition(".")[0] in owners and "lora_" not in name
        }
        names = [name for name, rows in own.items() if rows > self.ids[-1]]
        if own and not names:
            raise ConfigError(
                f"new_rows.ids: the vocabulary has no token {self.ids[-1]}; its ids are 0 to {max(own.values()) - 1}.",
                key="new_rows.ids",
            )
        provided = {what for one in self.job.hooks.enabled.values() for what in one.cls.provides}
        if not provided & TRAINED_BY_OTHERS:
            part.requires_grad_(False)
        for name in names:
            parameters[name].requires_grad_(True)
            module, _, key = name.rpartition(".")
            owner: Any = part.get_submodule(module)
            owner.trained_at_first = {key: len(self.ids) * parameters[name][0].numel()}
            self._places.append((owner, key))
        note = f"{len(self.ids)} rows each"
        return Applied(part, tuple(names), note, on_micro_batch=self._look_up, after_backward=self._only_new)

    def _look_up(self, micro: MicroBatch) -> None:
        """Before the first forward, when the parameters have their memory."""
        if not self._held:
            found = [one for module, key in self._places if (one := module._parameters[key]) is not None]
            self._held = list({id(one): one for one in found}.values())

    def look(self) -> None:
        """Note the tokens of the step that ends."""
        if missing := [id for id in self.ids if id not in self._seen]:
            wanted = torch.tensor(missing)
            for batch in self.job.step.batches:
                for tokens in (batch.inputs, batch.labels):
                    self._seen.update(wanted[torch.isin(wanted, tokens.cpu())].tolist())

    def warn(self) -> None:
        """Tell of the tokens that no rank's batches had; every rank calls this."""
        seen = set().union(*self.job.dist.gather_objects(self._seen))
        if missing := [str(id) for id in self.ids if id not in seen]:
            log.warning(
                "new_rows: these steps read none of the tokens %s (%s of %s whose rows are trained). Look at the data, "
                "and at what the tokenizer makes of it: forge data show --sample.",
                format_list(missing, 5),
                len(missing),
                len(self.ids),
            )

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around the optimizer's step."""
        before = [local_window(one.detach())[0].clone() for one in self._held]
        yield
        for one, old in zip(self._held, before, strict=True):
            part, rows = self._new(one.detach())
            old.index_copy_(0, rows, part.index_select(0, rows))
            part.copy_(old)

    @torch.no_grad()
    def _only_new(self) -> None:
        if all(one.grad is None for one in self._held):
            raise ConfigError(
                "new_rows: the gradients are gone before those of other rows can be left out; disable the plugin that "
                "updates weights in the backward pass."
            )
        for gradient in (one.grad for one in self._held if one.grad is not None):
            part, rows = self._new(gradient)
            kept = part.index_select(0, rows)
            part.zero_()
            part.index_copy_(0, rows, kept)

    def _new(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of a tensor, and its rows of added tokens, which are copied to the device once."""
        part, window = local_window(tensor)
        first, last = window[0]
        if (first, last) not in self._rows:
            rows = [id - first for id in self.ids if first <= id < last]
            self._rows[first, last] = torch.tensor(rows, dtype=torch.int64).to(part.device)
        return part, self._rows[first, last]


def _added(job: Job) -> list[int]:
    """The ids of added tokens.

    Raises:
        ConfigError: if there are none.
    """
    place = model_files.option(job.hooks)
    path = Path(getattr(job.config.sections[place[0]], place[1])) if place else Path()
    if found := added_tokens(path) if path.exists() else {}:
        return sorted(found.values())
    raise ConfigError(
        "new_rows: no token was added to the tokenizer; name some in tokenizer.add, or rows in new_rows.ids."
    )
