"""Initial weights: a pure function of seed, name and place, the same for a shard as for the whole."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_train import Init, PluginError
from forge_train.compose import initialise
from forge_train.compose.initialise import ROWS, declared_init, fill, materialise, retie, tied_groups

pytestmark = pytest.mark.unit
NORMAL = Init("normal", 0.5)


def filled(shape: tuple[int, ...], name: str = "w", init: Init = NORMAL, seed: int = 1, dtype: Any = None) -> Tensor:
    tensor = torch.full(shape, 7.0, dtype=dtype)
    fill(tensor, name, init, seed)
    return tensor


def test_weights_are_a_function_of_seed_and_name() -> None:
    assert torch.equal(filled((5, 3)), filled((5, 3)))
    assert not torch.equal(filled((5, 3)), filled((5, 3), seed=2))
    assert not torch.equal(filled((5, 3)), filled((5, 3), name="v"))


def test_they_do_not_depend_on_the_global_generator_and_leave_it_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = filled((70, 3))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(9)
    assert torch.equal(first, filled((70, 3)))


def test_the_distributions() -> None:
    normal, uniform = filled((500, 400)), filled((500, 400), init=Init("uniform", 0.5))
    for values in (normal, uniform):
        assert float(values.mean()) == pytest.approx(0, abs=0.01)
        assert float(values.std()) == pytest.approx(0.5, rel=0.01)
    assert float(uniform.abs().max()) <= 0.5 * 3**0.5
    assert filled((3, 2), init=Init("ones")).eq(1).all()
    assert filled((3, 2), init=Init("zeros")).eq(0).all()


def test_given_values_are_a_function_of_the_seed_and_have_the_right_shape() -> None:
    given = Init("given", values=lambda seed: torch.arange(6.0).view(3, 2) + seed)
    assert filled((3, 2), init=given, seed=4).tolist() == [[4, 5], [6, 7], [8, 9]]
    with pytest.raises(PluginError, match=r"'w' is given values of shape \[3, 2\], but has shape \[2, 3\]"):
        filled((2, 3), init=given)


def test_blocks_of_rows_are_not_each_others_copies() -> None:
    values = filled((3 * ROWS, 4))
    blocks = values.split(ROWS)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(blocks, 2))
    stacked = filled((3, 2, 4))
    assert not torch.equal(stacked[0], stacked[1])


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 3), (2, 0), (1, 1), (2, 3, 4), (2, 2, 70, 3)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    values = filled(shape)
    assert values.shape == shape
    assert not values.eq(7).any()


def test_narrow_dtypes_are_the_rounded_wide_ones() -> None:
    assert torch.equal(filled((70, 3), dtype=torch.bfloat16), filled((70, 3)).to(torch.bfloat16))


# -- shards ---------------------------------------------------------------------------------------


def shard_of(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], window: list[tuple[int, int]]) -> Tensor:
    """What `fill` writes into a rank's part of a tensor of this shape."""
    local = torch.full([high - low for low, high in window], 7.0)

    class Global(nn.Parameter):
        """Has the global shape; its own memory is not used."""

    monkeypatch.setattr(initialise, "local_window", lambda tensor: (local, list(window)))
    fill(Global(torch.empty(shape), requires_grad=False), "w", NORMAL, 1)
    monkeypatch.undo()
    return local


@pytest.mark.parametrize("shape", [(150, 6), (64, 8), (7, 5), (9,), (3, 130, 4), (2, 3, 70, 2)])
def test_a_shard_has_the_values_of_its_place_in_the_whole(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    whole = filled(shape)
    cuts = [sorted({0, 1, size // 3, size // 2, size}) for size in shape]
    for axis, size in enumerate(shape):
        for low, high in itertools.combinations(cuts[axis], 2):
            window = [(0, other) for other in shape]
            window[axis] = (low, high)
            part = shard_of(monkeypatch, shape, window)
            assert torch.equal(part, whole.narrow(axis, low, high - low)), (axis, low, high)
        assert (
            shard_of(monkeypatch, shape, [(size, size) if a == axis else (0, n) for a, n in enumerate(shape)]).numel()
            == 0
        )


def test_a_shard_along_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled((150, 10))
    for rows, columns in itertools.product(((0, 64), (10, 70), (63, 65), (128, 150)), ((0, 5), (3, 10))):
        assert torch.equal(shard_of(monkeypatch, (150, 10), [rows, columns]), whole[slice(*rows), slice(*columns)])


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


@pytest.mark.usefixtures("group")
def test_a_dtensor_of_one_rank_is_filled_like_a_plain_tensor() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = init_device_mesh("cpu", (1,))
    for shape in ((150, 6), (9,), (2, 70, 3)):
        for placement in (Shard(0), Replicate()):
            tensor = empty(*shape, device_mesh=mesh, placements=[placement])
            fill(tensor, "w", NORMAL, 1)
            assert torch.equal(tensor.to_local(), filled(shape))


# -- modules --------------------------------------------------------------------------------------


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(70, 3, device="meta"))
        self.bias = nn.Parameter(torch.empty(3, device="meta"))

    def initial(self, name: str) -> Init:
        return NORMAL if name == "weight" else Init("zeros")


def test_the_order_of_modules_plays_no_part() -> None:
    values = []
    for names in ("ab", "ba"):
        part = nn.ModuleDict({name: Leaf() for name in names})
        materialise(part, torch.device("cpu"), 1)
        values.append({name: parameter.detach() for name, parameter in part.named_parameters()})
    assert values[0].keys() == values[1].keys()
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    assert not torch.equal(values[0]["a.weight"], values[0]["b.weight"])


def test_the_nearest_module_that_declares_a_start_is_asked() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.ModuleDict({"leaf": Leaf(), "plain": nn.Linear(2, 2)})

        def initial(self, name: str) -> Init | None:
            return Init("ones") if name == "deep.plain.weight" else None

    outer = Outer()
    assert declared_init(outer, "deep.leaf.weight") == NORMAL
    assert declared_init(outer, "deep.plain.weight") == Init("ones")
    with pytest.raises(Exception, match=r"Nobody declares how parameter 'deep\.plain\.bias' \(Linear\) starts"):
        declared_init(outer, "deep.plain.bias")


def test_tied_weights_survive_the_meta_device() -> None:
    part = nn.ModuleDict({"a": Leaf(), "b": Leaf()})
    part["b"].weight = part["a"].weight
    assert tied_groups(part) == [("a.weight", "b.weight")]
    materialise(part, torch.device("cpu"), 1)
    assert part["b"].weight is part["a"].weight
    part["b"].weight = nn.Parameter(part["a"].weight.detach().clone())
    assert retie(part, [("a.weight", "b.weight")]) == []
    assert part["b"].weight is part["a"].weight
    part["b"].weight = nn.Parameter(torch.ones(1))
    assert retie(part, [("a.weight", "b.weight")]) == ["b.weight"]


@pytest.mark.parametrize("shape", [(1000, 32), (3, 2, 130, 5)])
def test_threads_draw_the_same_bits(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """8 billion weights take minutes on one thread. The order in which threads come to the blocks changes nothing."""
    wanted, names = filled(shape), set()
    drawn = initialise._draw

    def draw(block: Tensor, init: Init, seed: int) -> None:
        names.add(threading.current_thread().name)
        barrier.wait(timeout=20)  # as many threads as there are cores are at work at once
        drawn(block, init, seed)

    barrier = threading.Barrier(2)
    monkeypatch.setattr(initialise, "THREADED", 1)
    monkeypatch.setattr(initialise, "cores", lambda: 2)
    monkeypatch.setattr(initialise, "_draw", draw)
    parameter = nn.Parameter(torch.empty(shape))
    fill(parameter, "w", NORMAL, 1)
    assert len(names) == 2
    assert all(name.startswith("initial-weights") for name in names)
    assert torch.equal(parameter, wanted)


def test_an_error_in_a_thread_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(block: Tensor, init: Init, seed: int) -> None:
        raise ValueError("no numbers")

    monkeypatch.setattr(initialise, "THREADED", 1)
    monkeypatch.setattr(initialise, "cores", lambda: 2)
    monkeypatch.setattr(initialise, "_draw", draw)
    with pytest.raises(ValueError, match="no numbers"):
        filled((300, 4))


def test_offloaded_weights_start_on_the_host_and_buffers_on_the_device() -> None:
    class Offloaded(Leaf):
        offloaded = True

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(2))

        def reset_buffers(self) -> None:
            self.table.zero_()

    with torch.device("meta"):
        part = Offloaded()
    initialise.allocate(part, torch.device("meta"))
    assert part.weight.device.type == "cpu"
    assert part.table.device.type == "meta"  # which stands for the device
