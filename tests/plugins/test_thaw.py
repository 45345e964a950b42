"""`freeze.thaw`: parameters that are frozen at first, against a plain loop of torch, and across stops."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forge_train import (
    Batch,
    BatchPhase,
    ConfigError,
    Job,
    Model,
    Plugin,
    PrepareBatch,
    Span,
    SpanName,
    Update,
    hookimpl,
)
from forge_train.plugin import hookspecs
from forge_train_tools.testing import TinyRun, run_forge

pytestmark = pytest.mark.unit

THAW = [{"match": "layers.1.*", "steps": 2}, {"match": "embedding.*", "steps": 3}]
FROZEN: dict[str, Any] = {"freeze.parameters": ["embedding.*", "layers.*"], "freeze.thaw": THAW}
LATE = ("layers.1.", "embedding.")
STEPS = 5


class Products(TorchDispatchMode):
    """Counts matrix products by the shape of what they give, and gradients of embeddings."""

    def __init__(self, seen: Counter[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.embedding_dense_backward):
            self.seen[func.overloadpacket.__name__, tuple(out.shape)] += 1
        return out


class Looks(Plugin):
    """Keeps the model that a run starts with, and of each step its batches, products and parameters with state."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.begun: nn.Module | None = None
        self.batches: list[list[tuple[Tensor, Tensor]]] = []
        self.products: list[Counter[Any]] = []
        self.stateful: list[int] = []
        self.norms: list[float] = []

    @hookimpl
    def on_start(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    @hookimpl
    def prepare_batch(self) -> PrepareBatch:
        def keep(batch: Batch) -> Batch:
            self.batches[-1].append((batch.inputs.clone(), batch.labels.clone()))
            return batch

        return PrepareBatch(BatchPhase.MASK, keep)

    @hookimpl
    def around(self, span: SpanName) -> Span | None:
        if span == "step":
            return self._begin  # type: ignore[return-value]
        return (lambda: Products(self.products[-1])) if span == "forward_backward" else None

    def _begin(self) -> Any:
        import contextlib

        if self.begun is None:
            self.begun = copy.deepcopy(self.model.parts[0]).requires_grad_(True)
        self.batches.append([])
        self.products.append(Counter())
        return contextlib.nullcontext()

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        self.norms.append(float(update.grad_norm))
        self.stateful.append(len(self.optimizer.state))


def train(folder: Path, plugins: Sequence[Any] = (), steps: int = STEPS, **more: Any) -> TinyRun:
    config = {**FROZEN, "cosine.warmup": 2, **more.pop("config", {})}
    return run_forge(("freeze", *plugins), config, steps=steps, folder=folder, **more)


def plain(run: TinyRun, looks: Looks) -> tuple[dict[str, Tensor], list[float]]:
    """The same by hand: what thaws joins the optimizer as groups of their own when it is due."""
    config = run.job.config
    adamw, clip = config.sections["adamw"], config.train.clip_norm
    model = looks.begun
    assert model is not None
    model.requires_grad_(False)
    names = dict(model.named_parameters())
    decays = {name: one.ndim > 1 and not name.startswith("embedding") for name, one in names.items()}

    def groups(prefix: str) -> list[dict[str, Any]]:
        own = [name for name in names if name.startswith(prefix)]
        for name in own:
            names[name].requires_grad_(True)
        return [
            {"params": [names[n] for n in own if decays[n] is decay], "weight_decay": adamw.weight_decay * decay}
            for decay in (True, False)
        ]

    rest = ("norm", "head")
    optimizer = torch.optim.AdamW(
        [group for prefix in rest for group in groups(prefix)], lr=adamw.lr, betas=tuple(adamw.betas), eps=adamw.eps
    )
    norms = []
    for step, batches in enumerate(looks.batches):
        for thaw in THAW:
            if thaw["steps"] == step:
                for group in groups(str(thaw["match"]).removesuffix("*")):
                    optimizer.add_param_group(group)
        count = sum(int((labels != -100).sum()) for _, labels in batches)
        for inputs, labels in batches:
            logits = model.head(model(inputs))  # type: ignore[operator]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / count).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        for group in optimizer.param_groups:
            group["lr"] = run.metrics[step]["lr"]
        optimizer.step()
        optimizer.zero_grad()
    return {name: one.detach() for name, one in model.named_parameters()}, norms


def test_it_is_a_plain_loop_that_thaws(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forge_train")
    run = train(tmp_path, [Looks])
    looks = run.plugin("looks")
    expected, norms = plain(run, looks)
    for name, one in run.model.named_parameters():
        assert (one.detach() - expected[name]).abs().max() <= 1e-6, name
    assert looks.norms == pytest.approx(norms, rel=1e-5)
    sizes = {name: one.numel() for name, one in run.model.named_parameters()}
    own, total = sum(n for name, n in sizes.items() if name.startswith("layers.1.")), sum(sizes.values())
    first = sum(n for name, n in sizes.items() if not name.startswith(("layers.", "embedding.")))
    told = [line for line in caplog.messages if "thawed" in line]
    assert told[0] == (
        f"freeze: 'layers.1.*' thawed after step 2 ({own:,} parameters); {first + own:,} parameters are trained now."
    )
    below = sum(n for name, n in sizes.items() if name.startswith("layers.0."))
    assert told[1].endswith(f"{total - below:,} parameters are trained now.")
    assert len(told) == 2


def test_nothing_is_computed_or_kept_for_what_is_frozen(tmp_path: Path) -> None:
    """The products that give a gradient of a frozen matrix are those that the thaw adds."""
    run = train(tmp_path, [Looks])
    looks = run.plugin("looks")
    weights = {name: tuple(one.shape) for name, one in run.model.named_parameters() if one.ndim == 2}
    head, embedding = weights.pop("head.weight"), weights.pop("embedding.weight")
    layer = Counter(("mm", shape) for name, shape in weights.items() if name.startswith("layers.1."))
    micro_batches = 2
    of_head = {("mm", head): micro_batches}
    first, _, third, fourth, _ = looks.products
    of_weights = {("mm", shape) for shape in {*weights.values(), head}}
    assert {key: n for key, n in first.items() if key in of_weights} == of_head
    assert {key: n for key, n in third.items() if key in of_weights} == {
        **of_head,
        **{key: micro_batches * n for key, n in layer.items()},
    }
    of_embedding = ("embedding_dense_backward", embedding)
    assert [seen[of_embedding] for seen in (first, third, fourth)] == [0, 0, micro_batches]
    counts = [sum(1 for name, _ in run.model.named_parameters() if name.startswith(p)) for p in ("norm", "layers.1.")]
    ours = counts[0] + 1
    assert looks.stateful == [0, ours, ours, ours + counts[1], ours + counts[1] + 1]


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [(), ("muon",)], ids=["adamw", "muon"])
def test_stopped_before_at_and_after_a_thaw_it_repeats_to_the_bit(tmp_path: Path, plugins: tuple[str, ...]) -> None:
    whole = train(tmp_path / "whole", plugins)
    for stop in (1, 2, 3):
        train(tmp_path, plugins, name=f"stop-{stop}", stop_at=stop)
        again = train(tmp_path, plugins, name=f"stop-{stop}")
        assert again.numbers == whole.numbers, stop
        for (name, one), other in zip(again.model.named_parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(one, other), (stop, name)


class Apart(Plugin):
    """Takes each step also with two optimizers of their own, of which one never sees what thaws, and one nothing else.

    Their parameters are copies of those that the run starts with.
    """

    api = (1, 0)

    @hookimpl
    def on_start(self, job: Job, model: Model, optimizer: Any) -> None:
        self.optimizer, self.parameters = optimizer, dict(model.named_parameters())
        copies = [Model([copy.deepcopy(model.parts[0])]) for _ in range(2)]
        self.copies = [dict(one.named_parameters()) for one in copies]
        self.optimizers = [hookspecs.optimizer(one, job) for one in copies]

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        for thaws, (copied, optimizer) in enumerate(zip(self.copies, self.optimizers, strict=True)):
            for group in optimizer.param_groups:
                group["lr"] = self.optimizer.param_groups[0]["lr"]
            for name, one in self.parameters.items():
                mine = name.startswith(LATE) is bool(thaws)
                copied[name].grad = one.grad.clone() if mine and one.grad is not None else None
            optimizer.step()


@pytest.mark.parametrize(
    ("plugins", "settings"),
    [
        (("lion",), {}),
        (("schedule_free",), {}),
        (("muon",), {}),
        ((), {"adamw.state": {"first": "bf16", "second": "bf16"}}),
        (("torch_optimizer",), {"torch_optimizer.name": "torch.optim:NAdam"}),
    ],
    ids=["lion", "schedule_free", "muon", "adamw in bf16", "nadam"],
)
def test_every_optimizer_begins_anew_with_what_thaws(
    tmp_path: Path, plugins: tuple[str, ...], settings: dict[str, Any]
) -> None:
    config = {**FROZEN, "train.clip_norm": 0.0, **settings}
    run = run_forge(("freeze", *plugins, Apart), config, steps=STEPS, folder=tmp_path)
    copies = run.plugin("apart").copies
    for name, one in run.model.named_parameters():
        assert torch.equal(one, copies[name.startswith(LATE)][name]), name


def test_it_thaws_where_updates_are_made_in_the_backward_pass(tmp_path: Path) -> None:
    config = {"train.clip_norm": 0.0, "train.micro_batch": 0}
    plain, fused = (
        train(tmp_path / (plugins or ("plain",))[0], plugins, config=config)
        for plugins in ((), ("optimizer_in_backward",))
    )
    for (name, mine), other in zip(fused.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_tokens_are_rounded_to_steps_of_their_own_sizes(tmp_path: Path) -> None:
    config = {
        "train.batch_warmup": [{"steps": 2, "global_batch": 2}],
        "freeze.parameters": ["layers.*"],
        "freeze.thaw": [{"match": "layers.*", "tokens": 256.0}],
    }
    run = run_forge(("freeze", Looks), config, folder=tmp_path, steps=5)
    counts = run.plugin("looks").stateful
    assert [counts[0] == 0, counts[1] == counts[2] == counts[3], counts[4] > counts[3]] == [True] * 3
    few = {**config, "freeze.thaw": [{"match": "layers.*", "tokens": 20}]}
    with pytest.raises(ConfigError, match=r"freeze\.thaw: 'layers\.\*' would thaw before the first step"):
        run_forge(("freeze",), few, folder=tmp_path)


@pytest.mark.parametrize(
    ("thaw", "settings", "says"),
    [
        ([{"match": "layers.0.*"}], {}, r"'layers\.0\.\*' needs either steps or tokens"),
        ([{"match": "layers.0.*", "steps": 1, "tokens": 1}], {}, r"needs either steps or tokens"),
        ([{"match": "layers.0.*", "steps": 5}], {}, r"would thaw after step 5, and the run ends at step 5"),
        ([{"match": "layers.0.*", "tokens": 1e4}], {}, r"would thaw after step 78, and the run ends at step 5"),
        ([{"match": "layer.0.*", "steps": 1}], {}, r"'layer\.0\.\*' matches no frozen parameter"),
        ([{"match": "head.*", "steps": 1}], {}, r"'head\.\*' matches no frozen parameter"),
        (
            [{"match": m, "steps": 1} for m in ("layers.0.*", "*norm*")],
            {},
            r"'layers\.0\.\*' and '\*norm\*' both match",
        ),
        ([{"match": "layers.0.*", "steps": 1}], {"freeze.parameters": ["*"]}, r"nothing is left to train in the first"),
        (
            [{"match": "layers.0.*", "steps": 1}],
            {"torch_optimizer.name": "torch.optim:Adagrad"},
            r"Adagrad keeps state of parameters without gradients",
        ),
    ],
)
def test_bad_input(tmp_path: Path, thaw: Any, settings: dict[str, Any], says: str) -> None:
    plugins = ("freeze", *({key.split(".")[0] for key in settings} - {"freeze"}))
    config = {**FROZEN, "freeze.thaw": thaw, **settings}
    with pytest.raises(ConfigError, match=r"freeze\.[a-z]+: .*" + says):
        run_forge(plugins, config, steps=STEPS, folder=tmp_path)
