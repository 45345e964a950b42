"""A frozen vision model: nothing is kept for its gradients, and it encodes each item once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from drawn import OPTIONS, Drawn
from forge_train import ConfigError, Job, Model, Plugin, hookimpl
from forge_train_plugins.modalities._vision import once
from forge_train_plugins.modalities._vision.encoder import VisionEncoder
from forge_train_plugins.modalities._vision.transformer import Pixels, VisionTransformer
from forge_train_tools.testing import TinyRun, run_forge
from test_image_encoder import batch, each_mode, encoder, items, modality

pytestmark = pytest.mark.unit

VISION = "fusion.enter.encoders.image.vision"
THAWS: dict[str, Any] = {
    **OPTIONS,
    "freeze.parameters": [f"{VISION}.*"],
    "freeze.thaw": [{"match": f"{VISION}.*", "steps": 2}],
}


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that vision models are called with."""
    seen: list[int] = []
    own = VisionTransformer.forward

    def forward(self: VisionTransformer, values: Tensor, where: Any) -> Tensor:
        seen.append(len(values))
        return own(self, values, where)

    monkeypatch.setattr(VisionTransformer, "forward", forward)
    return seen


def frozen(mode: str, folder: Path, dtype: torch.dtype = torch.float64, **more: Any) -> VisionEncoder:
    """An encoder whose vision model is frozen, with a cache in a folder."""
    built = encoder(mode).to(dtype)
    built.vision.requires_grad_(False)
    one = modality(mode)
    config = type(one.config)(**{**vars(one.config), **more, "once": True, "cache": str(folder)})
    built.vision.pixels = Pixels(config).to(dtype)
    job: Any = SimpleNamespace(device=torch.device("cpu"), precision=SimpleNamespace(param=dtype))
    inside = torch.nn.ModuleDict({one.name: built})
    once.attach(config, one.name, job, Model([inside]))
    return built


@each_mode
def test_it_gives_what_the_encoder_gives(mode: str, tmp_path: Path, encoded: list[int]) -> None:
    """Several items a row, rows without any, and padding; each is encoded once, wherever it stands."""
    a, b, c = items(mode)
    mine, plain = frozen(mode, tmp_path), encoder(mode)
    plain.vision.requires_grad_(False)
    counts = plain.vectors(batch([[a, b], [], [c]])[1]).sum(1).tolist()
    given = batch([[a, b], [], [c]], room=sum(len(values) for _, values in (a, b)) + 16)
    ours, theirs = mine(*given), plain(*given)
    for row, count in enumerate(counts):
        assert torch.allclose(ours[row, :count], theirs[row, :count], rtol=0, atol=1e-12)
        (ours[row, :count].sum() * (row + 1)).backward(retain_graph=True)
        (theirs[row, :count].sum() * (row + 1)).backward(retain_graph=True)
    for (name, one), other in zip(mine.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("vision"):
            assert one.grad is other.grad is None
        else:
            assert (one.grad - other.grad).abs().max() <= 1e-10, name
    encoded.clear()
    again = frozen(mode, tmp_path)
    other_rows = again(*batch([[c], [b, a, c]]))
    assert not encoded
    ends = plain.vectors(batch([[b, a, c]])[1])[0].cumsum(0).tolist()
    assert torch.allclose(other_rows[1, ends[0] : ends[1]], ours[0, : ends[1] - ends[0]], rtol=0, atol=1e-12)


def test_features_have_the_same_bits_in_any_batch_with_and_without_a_cache(tmp_path: Path) -> None:
    some = items("square")
    for rows in ([some], [[one] for one in some], [some[:2], some[1:]]):
        cold, warm = (
            frozen("square", tmp_path / str(len(rows)), torch.float32),
            frozen("square", tmp_path, torch.float32),
        )
        cold.once.features(*batch([[some[2]]]))
        found = [one.once.features(*batch(rows)) for one in (cold, cold, warm)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        first = found[0][0, :16]
        assert torch.equal(
            first, frozen("square", tmp_path / "alone", torch.float32).once.features(*batch([some[:1]]))[0]
        )


def test_other_weights_and_options_are_other_features(tmp_path: Path, encoded: list[int]) -> None:
    given = batch([items("square")[:1]])
    one = frozen("square", tmp_path)
    before = one(*given)
    with torch.no_grad():
        one.vision.layers["0"].q.weight.add_(0.1)
    one.once.leave()
    after = one(*given)
    assert (before - after).abs().max() > 1e-3
    assert torch.equal(one(*given), after)
    assert encoded == [1, 1]
    darker = frozen("square", tmp_path, mean=(0.4, 0.5, 0.5))
    assert (darker(*given) - before).abs().max() > 1e-3
    assert encoded == [1, 1, 1]


def test_what_thaws_is_trained_from_then_on(tmp_path: Path, encoded: list[int]) -> None:
    given, plain = batch([items("square")]), encoder("square")
    one = frozen("square", tmp_path)
    one(*given)
    one(*given)
    assert encoded == [1, 1, 1]
    known = one.flops(16)
    one.vision.requires_grad_(True)
    for each in (one, plain):
        each(*given).sum().backward()
    assert encoded[3:] == [3, 3]
    assert known == one.connector.flops(16)
    assert one.flops(16) == plain.flops(16) > known
    for mine, other in zip(one.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, other.grad)


class Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Counts(Plugin):
    """Counts the tensors of the vision model that autograd keeps for the backward pass, and its gradients."""

    api = (1, 0)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.kept: list[int] = []
        """After each forward pass of the model."""
        self.calls = 0
        self.gradients: list[int] = []

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self.vision = model.parts[0].get_submodule(VISION)
        held: WeakSet[Held] = WeakSet()
        inside = ExitStack()

        def hold(tensor: Tensor) -> Held:
            held.add(one := Held(tensor))
            return one

        def enter(*_: Any) -> None:
            self.calls += 1
            inside.enter_context(torch.autograd.graph.saved_tensors_hooks(hold, lambda one: one.tensor))

        self.vision.register_forward_pre_hook(enter)
        self.vision.register_forward_hook(lambda *_: inside.close())
        model.parts[0].register_forward_hook(lambda *_: self.kept.append(len(held)))

    @hookimpl
    def on_gradients(self) -> None:
        self.gradients.append(sum(one.grad is not None for one in self.vision.parameters()))


@pytest.mark.parametrize("more", [(), ("ac",)], ids=["plain", "ac"])
def test_nothing_is_kept_of_a_frozen_vision_model(tmp_path: Path, more: tuple[str, ...]) -> None:
    counts = run_forge((Drawn, "image", "freeze", Counts, *more), THAWS, steps=3, folder=tmp_path).plugin("counts")
    assert counts.kept[:4] == [0] * 4, "two micro-batches a step"
    assert min(counts.kept[4:]) > 0
    assert counts.gradients[:2] == [0, 0]
    assert counts.gradients[2] == len([*counts.vision.parameters()])


def test_once_the_vision_model_itself_is_not_called_until_it_thaws(tmp_path: Path) -> None:
    config = {**THAWS, "image.once": True, "image.cache": str(tmp_path / "cache")}
    counts = run_forge((Drawn, "image", "freeze", Counts), config, steps=3, folder=tmp_path).plugin("counts")
    assert counts.calls == 2, "two micro-batches in the step after the thaw"
    assert counts.kept[:4] == [0] * 4
    assert counts.gradients == [0, 0, len([*counts.vision.parameters()])]


def values(run: TinyRun) -> Iterator[Tensor]:
    return (one.detach() for one in run.model.parameters())


@pytest.mark.slow
def test_stopped_runs_repeat_to_the_bit_with_any_cache(tmp_path: Path) -> None:
    """Before, at and after the thaw; cold, and with what the other runs kept."""

    def train(name: str, cache: str, **more: Any) -> TinyRun:
        config = {**THAWS, "image.once": True, "image.cache": str(tmp_path / cache), "run.seed": 2}
        return run_forge((Drawn, "image", "freeze"), config, steps=4, folder=tmp_path, name=name, **more)

    whole = train("whole", "one")
    for stop in (1, 2, 3):
        train(f"stop-{stop}", f"cache-{stop}", stop_at=stop)
        again = train(f"stop-{stop}", ("one", "new", f"cache-{stop}")[stop - 1])
        assert again.numbers == whole.numbers, stop
        assert all(torch.equal(one, other) for one, other in zip(values(again), values(whole), strict=True)), stop


@pytest.mark.parametrize(
    ("plugins", "settings", "says"),
    [
        ((), {}, rf"image\.once: {VISION}\.patches\.weight is trained, so what the vision model gives changes"),
        (
            ("freeze",),
            {"freeze.parameters": [f"{VISION}.layers.*"]},
            rf"image\.once: {VISION}\.patches\.weight is trained.*freeze it \(freeze\.parameters = \[\"{VISION}",
        ),
        (("freeze",), {"image.once": False, "image.cache": "kept"}, r"image\.cache: has no effect without image\.once"),
        (("freeze",), {"image.once": False, "image.cache_bytes": 5}, r"image\.cache_bytes: has no effect without"),
        (("freeze",), {"image.cache_bytes": 0}, r"image\.cache_bytes"),
        (
            ("freeze", "fp8"),
            {},
            r"image\.once: another plugin has changed how layers\.0\.q of the vision model computes \(Linear\)",
        ),
        (
            ("freeze", "precision"),
            {"train.precision": "bf16", "precision.rules": [{"match": f"{VISION}.layers.0", "dtype": "fp32"}]},
            r"image\.once: parts of the vision model compute in bfloat16 and float32; give it one dtype",
        ),
    ],
)
def test_bad_input(tmp_path: Path, plugins: tuple[str, ...], settings: dict[str, Any], says: str) -> None:
    frozen = {"freeze.parameters": [f"{VISION}.*"]} if "freeze" in plugins else {}
    config = {**OPTIONS, "image.once": True, **frozen, **settings}
    with pytest.raises(ConfigError, match=says):
        run_forge((Drawn, "image", *plugins), config, folder=tmp_path)
