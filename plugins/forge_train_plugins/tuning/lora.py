"""Low-rank adaptation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from forge_train import FilePath, Ge, Gt, Lt, Phase, Plugin, Problem, Transform, hookimpl, section

if TYPE_CHECKING:
    import torch

    from forge_train import Job, Model, Update
    from forge_train_kit.hf import HFAdapter
    from forge_train_kit.state_map import StateMap

ADDED = "*lora_*"
"""Pattern of the parameters that it adds."""


@section
class Group:
    """Weights whose names match a pattern, and their own rank and alpha: an item of `groups`."""

    match: str
    """Names, with `*`, `?` and `[…]` as in a shell: `layers.*.attention.*`. `*` matches dots too."""
    rank: Annotated[int, Gt(0)] | None = None
    """Without it, as in the section."""
    alpha: Annotated[float, Gt(0)] | None = None
    """The same."""


class LoRA(Plugin):
    """Trains low-rank updates of weights, `W x + scale · B A x`, and freezes everything else (arXiv:2106.09685).

    Linears, embeddings and experts have updates; each expert of a stack has its own. `A` and `B` are parameters of the
    module itself, such as `lora_A` and `lora_B`, and split as its weight is. Checkpoints hold only them, and name the
    base: the checkpoint in `train.init_from`.
    """

    api = (1, 0)
    provides = ("lora",)
    facts = {
        "plan.per_unit": True,
        "hf.tunes": True,
        "hf.adds": True,
        "hf.switches": True,
        "hf.adapters": ("LORA",),
        "check.example": ("train.init_missing=[]", "checkpoint.only=[]"),
    }

    @section
    class Config:
        modules: tuple[str, ...] = ()
        """Patterns of linears, embeddings and stacks of experts to adapt, such as `*.q`, `head` or `*.experts.up`; each
        must match one. Empty means all linears and stacks in the model's units: those of attention and of feed-forward
        blocks, except linears of a single row."""
        tune: tuple[str, ...] = ()
        """Patterns of modules to train in full beside the updates, such as `*norm*` or `head`; each must match one.
        Checkpoints hold them too, and an adapter has them as PEFT's `modules_to_save`."""
        rank: Annotated[int, Gt(0)] = 16
        """Rows of `A`, and columns of `B`."""
        alpha: Annotated[float, Gt(0)] = 32.0
        """Numerator of the scale, which is alpha / rank."""
        groups: tuple[Group, ...] = ()
        """Weights by pattern, with a rank or an alpha of their own."""
        rslora: bool = False
        """Scale by alpha / √rank (rank-stabilised, arXiv:2312.03732)."""
        dora: bool = False
        """Also train the length of each row of a linear's weight, apart from its direction (DoRA, arXiv:2402.09353)."""
        dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
        """Of the input of `A` of a linear. Experts have none."""
        adapter: Annotated[str, FilePath()] = ""
        """A folder of PEFT whose updates the run begins with; its rank, alpha and weights are then those of the run.
        Modules that it has in full (`modules_to_save`) are trained in full."""
        beneath: tuple[Annotated[str, FilePath()], ...] = ()
        """Folders of PEFT whose updates stay as they are, beneath those that the run trains, also where a model is its
        own reference. Each weight that they update must have an update of the run's own."""
        start: Literal["", "pissa"] = ""
        """Begin each linear's update as the `rank` largest singular directions of its weight, and take the same away
        from the weight ("pissa", arXiv:2404.02948)."""
        base: Literal["", "nf4", "int8"] = ""
        """Hold linears and stacks that have an update in 4 bits ("nf4", the NormalFloat4 of QLoRA, arXiv:2305.14314) or
        in 8 ("int8"). They are decoded where they are multiplied."""
        base_block: Annotated[int, Gt(1)] = 64
        """Values of a row that share a scale. It must divide the width of each such weight, and be even for "nf4"."""
        base_double: bool = False
        """Keep these scales in 8 bits too (double quantisation), with two fp32 numbers for each row."""
        lr_ratio: Annotated[float, Gt(0)] = 1.0
        """Learning rate of `B` as a multiple of that of `A`, except in embeddings (LoRA+, arXiv:2402.12354, recommends
        about 16)."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._adapters: Any = None

    @classmethod
    def implied_values(cls, config: Any) -> Mapping[str, Any]:
        """The base lacks what is added here, and checkpoints hold nothing else. An adapter determines its size."""
        from ._lora.folder import Folder

        own = Folder(config.adapter).implied if config.adapter else {}
        return {"train.init_missing": [ADDED], "checkpoint.only": [ADDED, *(f"{one}.*" for one in config.tune)], **own}

    @hookimpl
    def check_config(self) -> Iterator[Problem]:
        for key in ("modules", "groups") if self.config.adapter else ():
            if getattr(self.config, key):
                yield Problem(f"lora.{key}", "has no effect with lora.adapter, which names its weights itself.")
        if self.config.adapter:
            yield from self._check_adapter()
        if self.config.start and self.config.adapter:
            yield Problem("lora.start", "has no effect with lora.adapter, whose updates have begun.")
        for key in ("start", "beneath") if self.config.dora else ():
            if getattr(self.config, key):
                yield Problem(
                    f"lora.{key}", "is not possible with lora.dora, which stretches the rows of a single update."
                )
        for key in ("base_block", "base_double") if not self.config.base else ():
            if getattr(self.config, key) != getattr(type(self.config)(), key):
                yield Problem(f"lora.{key}", "has no effect without lora.base.")
        if self.config.base == "nf4" and self.config.base_block % 2:
            yield Problem("lora.base_block", "must be even with nf4: two codes share a byte.")
        for group in self.config.groups:
            if group.rank is None and group.alpha is None:
                yield Problem("lora.groups", f"{group.match!r} changes nothing; set its rank or its alpha.")

    def _check_adapter(self) -> Iterator[Problem]:
        from ._lora.folder import Folder

        for key, value in Folder(self.config.adapter).implied.items():
            name = key.removeprefix("lora.")
            if name != "dropout" and getattr(self.config, name) != value:
                yield Problem(key, f"is {value!r} in {self.config.adapter}, and can't be changed.")

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        from ._lora.adapters import Adapters

        self._adapters = Adapters(self.config, job)
        return Transform(Phase.ADAPT, "lora", self._adapters.apply)

    @hookimpl
    def merge_weights(self, job: Job) -> StateMap:
        from ._lora.merge import Merge

        return Merge(self.config, self._adapters.sizes)

    @hookimpl
    def export_adapter(self, modules: Mapping[str, str], job: Job) -> HFAdapter:
        from ._lora.peft import adapter

        own = self._adapters
        return adapter(self.config, own.sizes, job, own.adapted, own.stored, modules, own.tuned)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: torch.optim.Optimizer) -> None:
        self._adapters.begin(model, optimizer)

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self._adapters.check_used()
