"""What surrounds the fused kernels: block masks, documents' bounds, the choice of a version, refusals; on a CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

import fakes
from forge_train import ConfigError
from forge_train_kit.layers import AttentionOptions
from forge_train_kit.model import TiledAttention
from forge_train_plugins.attention import _flex
from forge_train_plugins.attention._eager import Kernel as Eager
from forge_train_plugins.attention._eager import hidden
from forge_train_plugins.attention._flex import FlexKernel, make_block_mask
from forge_train_plugins.attention._packed import functions, kernel, versions
from forge_train_plugins.attention._packed.functions import Bounds, of_flash, of_torch
from forge_train_plugins.attention._packed.kernel import PackedKernel
from forge_train_plugins.attention.packed import Flash, Varlen
from forge_train_tools.testing import RunForge
from fused_kernels import flash_2, flash_3, flash_4, varlen_attn, varlen_attn_2_11
from peak_memory import peak_memory

pytestmark = [pytest.mark.unit]

SEQUENCE = 300
DOCUMENTS = torch.stack(
    [torch.arange(4).repeat_interleave(torch.tensor(sizes)) for sizes in ([1, 130, 168, 1], [128, 127, 1, 44])]
)
ASKED: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 70},
    {"document_ids": DOCUMENTS},
    {"document_ids": DOCUMENTS, "window": 140},
    {"queries": 1, "document_ids": DOCUMENTS},
    {"queries": 50, "document_ids": DOCUMENTS, "window": 60},
    {"queries": 140, "offset": 90, "document_ids": DOCUMENTS},
    {"scale": 0.5},
]
AFTER = torch.stack([DOCUMENTS[0, -1:].expand(140), DOCUMENTS[1, -1:].expand(140) + (torch.arange(140) >= 30)])
"""Queries after the keys: of the first row all see their last document, of the second row the first 30 do."""
ENDS = torch.zeros(2, SEQUENCE, dtype=torch.int64)
ENDS[0, 1:90], ENDS[0, 131:299], ENDS[1, :128], ENDS[1, 256:290] = 90, 299, 128, 290
"""Of prefixes that end in their document."""
PREFIXES: list[dict[str, Any]] = [
    {"prefix_ends": ENDS},
    {"prefix_ends": ENDS, "document_ids": DOCUMENTS, "window": 20},
    {"prefix_ends": ENDS[:, 90:230], "queries": 140, "offset": 90, "document_ids": DOCUMENTS},
    {"prefix_ends": torch.full_like(ENDS, SEQUENCE)},
]
MORE: list[dict[str, Any]] = [
    {"soft_cap": 0.7, "document_ids": DOCUMENTS},
    {"sinks": True, "document_ids": DOCUMENTS, "window": 70},
    {"sinks": True, "log_sum_exp": True},
    {"log_sum_exp": True, "soft_cap": 0.7, "sinks": True, "queries": 5},
    {"queries": 140, "offset": 250, "query_document_ids": None, "log_sum_exp": True, "window": 200},
    {"queries": 140, "offset": SEQUENCE, "document_ids": DOCUMENTS, "query_document_ids": AFTER, "log_sum_exp": True},
]


def agree(attend: Any, asked: dict[str, Any], kv_heads: int = 2) -> None:
    """Forward and backward are eager's."""
    torch.manual_seed(0)
    asked = dict(asked)
    query = torch.randn(2, asked.pop("queries", SEQUENCE), 4, 8, requires_grad=True)
    key, value = (torch.randn(2, SEQUENCE, kv_heads, 8, requires_grad=True) for _ in range(2))
    given = [query, key, value]
    if "sinks" in asked:
        asked["sinks"] = torch.randn(4, requires_grad=True)
        given.append(asked["sinks"])
    found = []
    for one in (attend, Eager()):
        out = one(query, key, value, AttentionOptions(**asked))
        out = out if isinstance(out, tuple) else (out,)
        weights = [torch.randn(some.shape, generator=torch.Generator().manual_seed(1)) for some in out]
        total = sum((some * by).sum() for some, by in zip(out, weights, strict=True))
        found.append([*out, *torch.autograd.grad(total, given)])  # type: ignore[arg-type]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


def told(asked: dict[str, Any]) -> str:
    """What a kernel is asked for, as the name of a test."""
    return ",".join(key if torch.is_tensor(value) else f"{key}={value}" for key, value in asked.items()) or "plain"


# -- flex -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*ASKED, *MORE, *PREFIXES], ids=told)
def test_what_flex_asks_of_flex_attention_is_attention(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses gradients on a CPU, and has an unfused backward pass all the same."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    agree(FlexKernel(torch_flex.flex_attention), asked, kv_heads=2)


@pytest.mark.parametrize("asked", [*ASKED, *PREFIXES], ids=told)
def test_block_masks_are_those_of_every_query_and_key(asked: dict[str, Any]) -> None:
    queries, document_ids = asked.get("queries", SEQUENCE), asked.get("document_ids")
    offset = asked.get("offset", SEQUENCE - queries)
    ends = asked.get("prefix_ends")
    cpu, keys = torch.device("cpu"), offset + queries if ends is None else SEQUENCE
    mask = make_block_mask(document_ids, queries, keys, offset, asked.get("window"), cpu, None, ends)
    cut = None if document_ids is None else document_ids[:, :keys]
    visible = ~hidden(cut, queries, keys, offset, asked.get("window"), cpu, None, ends)[0][:, 0]
    made = torch_flex.create_block_mask(
        lambda b, h, q, k: visible[b if len(visible) > 1 else 0, q, k], len(visible), None, queries, keys, device="cpu"
    )
    wanted = made.to_dense().bool()
    assert mask.shape[-2:] == (queries, keys)
    assert not (wanted & ~mask.to_dense().bool()).any()  # nothing that is seen is left out
    assert mask.to_dense().sum() <= 1.35 * wanted.sum()  # and hardly anything is looked at in vain
    for batch, row in torch.cartesian_prod(*(torch.arange(n) for n in mask.full_kv_num_blocks[:, 0].shape)).tolist():
        for block in mask.full_kv_indices[batch, 0, row, : mask.full_kv_num_blocks[batch, 0, row]].tolist():
            assert visible[batch, row * 128 : (row + 1) * 128, block * 128 : (block + 1) * 128].all()


def test_layers_share_a_block_mask_and_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    for module, name in ((_flex, "make_block_mask"), (kernel, "make_bounds")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, of=original, name=name: made.append(name) or of(*given))
    for one in (FlexKernel(torch_flex.flex_attention), PackedKernel(of_flash(flash_2, "2"))):
        query = torch.randn(2, SEQUENCE, 2, 8)
        for _ in range(4):
            one(query, query, query, AttentionOptions(document_ids=DOCUMENTS))
    assert made == ["make_block_mask", "make_bounds"]


# -- packed documents -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ASKED, ids=told)
@pytest.mark.parametrize(
    "function",
    [
        of_flash(flash_2, "2"),
        of_flash(flash_3, "3"),
        of_flash(flash_4, "4"),
        of_torch(varlen_attn),
        of_torch(varlen_attn_2_11),
    ],
    ids=["flash2", "flash3", "flash4", "torch", "torch 2.11"],
)
def test_packed_documents_are_attended_to_apart(function: Any, asked: dict[str, Any]) -> None:
    agree(PackedKernel(function), asked)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's own function has no windows and grouped heads")
def test_torchs_own_function_takes_what_it_is_given() -> None:
    """It runs on CUDA only; on a CPU it gets as far as looking for its kernel."""
    function = functions.torch_function()
    assert function is not None
    bounds = Bounds(torch.tensor([0, 4], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), 4, 4)
    query = torch.randn(4, 2, 8)
    with pytest.raises(NotImplementedError, match="_flash_attention_forward"):
        function(query, query, query, bounds, 0.5, None)


@pytest.mark.parametrize("attend", [TiledAttention(), PackedKernel(of_flash(flash_2, "2"))], ids=["tiled", "packed"])
def test_a_document_that_comes_back_is_an_error(attend: Any) -> None:
    query = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match="come back after another document's; its tokens must be neighbours"):
        attend(query, query, query, AttentionOptions(document_ids=torch.tensor([[0, 0, 1, 1, 0, 2]])))


def test_so_it_is_for_flex_which_waits_for_no_device() -> None:
    with pytest.raises(RuntimeError, match="must be neighbours"):
        make_block_mask(torch.tensor([[0, 0, 1, 1, 0, 2]]), 6, 6, 0, None, torch.device("cpu"))


# -- versions and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "found"),
    [
        ((), ()),
        (("flash_attn", "flash_attn_2_cuda"), ("2",)),
        (("flash_attn_interface",), ("3",)),
        (("flash_attn/cute",), ("4",)),
        (("flash_attn/cute", "flash_attn_interface", "flash_attn_2_cuda"), ("4", "3", "2")),
    ],
)
def test_versions_are_found_without_an_import(
    modules: tuple[str, ...], found: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    if modules:
        (tmp_path / modules[0].partition("/")[0] / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions.installed() == found


@pytest.mark.parametrize(
    ("wanted", "here", "major", "taken"),
    [
        ("auto", ("4", "3", "2"), 9, "4"),
        ("auto", ("4", "3", "2"), 8, "2"),
        ("auto", ("3", "2"), 10, "2"),
        ("3", ("4", "3", "2"), 9, "3"),
        ("3", ("3",), 8, ""),
        ("auto", (), 9, ""),
    ],
)
def test_the_newest_version_that_runs_is_taken(wanted: str, here: tuple[str, ...], major: int, taken: str) -> None:
    assert versions.choose(wanted, here, major) == taken


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_is_refused_where_it_is_not_installed(run_forge: RunForge) -> None:
    with pytest.raises(ConfigError) as error:
        run_forge([Flash])
    assert str(error.value) == (
        "flash.version: flash-attn is not installed. Install it: pip install flash-attn --no-build-isolation"
    )
    with pytest.raises(ConfigError, match=r"flash-attn 3 is not installed \(package flash_attn_3\); installed: none\."):
        run_forge([Flash], {"flash.version": "3"})


def test_flash_on_a_cpu_is_refused_with_the_kernels_that_run_there(
    run_forge: RunForge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: ("2",))
    monkeypatch.setattr(functions, "flash_function", lambda *given: of_flash(flash_2, "2"))
    with pytest.raises(ConfigError, match=r"cuda"):
        run_forge([Flash], {"train.precision": "bf16"})


@pytest.mark.parametrize("plugin", [Varlen, Flash])
def test_fp32_on_cuda_is_refused(plugin: Any) -> None:
    job = fakes.job()
    job.device, job.config = torch.device("cuda"), SimpleNamespace(train=SimpleNamespace(precision="fp32"))
    with pytest.raises(ConfigError, match=r"computes in bf16 or fp16 only, and train.precision is 'fp32'; set it to"):
        fakes.make(plugin).attention_kernel(job)


def test_flash_is_deterministic_where_the_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    asked: list[bool] = []

    def able(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, **more: Any) -> Tensor:
        asked.append(deterministic)
        return flash_2(q, k, v, deterministic=deterministic, **more)

    agree(PackedKernel(of_flash(able, "2")), {})
    assert set(asked) == {True}
    with pytest.raises(ConfigError, match=r"run\.deterministic: this flash-attn 4 has no deterministic backward pass"):
        of_flash(flash_4, "4")


def test_no_fused_kernel_for_a_device_names_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(functions, "installed", lambda: ("3", "2"))
    with pytest.raises(
        ConfigError,
        match=r"varlen: no fused kernel for this device \(compute capability 7\.5\): found flash-attn 3, 2, ",
    ):
        functions.flash_function("auto", torch.device("cuda"), "varlen")


# -- tiles ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [*ASKED, *MORE], ids=told)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_tiles_are_attention(asked: dict[str, Any], kv_heads: int) -> None:
    agree(TiledAttention(), asked, kv_heads)


def test_tiles_never_hold_queries_times_keys() -> None:
    """Sixteen documents: a dense mask alone would be 2,048² × 4 bytes, and its kernel would hold more than one."""
    options = AttentionOptions(document_ids=(torch.arange(2048) // 128)[None])
    query = torch.randn(1, 2048, 2, 8, requires_grad=True)
    attend = TiledAttention()
    peak = peak_memory(lambda: attend(query, query, query, options).sum().backward())
    assert peak < 2048**2 * 4 / 8


def test_a_plan_sees_the_memory_of_tiles_without_any_values() -> None:
    """The bounds of documents that are not there can't be read."""
    with FakeTensorMode():
        query, key = torch.randn(2, SEQUENCE, 4, 8, requires_grad=True), torch.randn(2, SEQUENCE, 2, 8)
        for kernel_of in (TiledAttention, lambda: FlexKernel(torch_flex.flex_attention)):
            ids = torch.zeros(2, SEQUENCE, dtype=torch.int64)
            out = kernel_of()(query, key, key, AttentionOptions(document_ids=ids))
            (grad,) = torch.autograd.grad(out.sum(), query)
            assert out.shape == grad.shape == query.shape
        bounds = kernel.make_bounds(torch.zeros(2, SEQUENCE, dtype=torch.int64), 2, SEQUENCE, 0, query.device)
        assert bounds.most_keys == SEQUENCE


def test_a_compiled_layer_gives_the_same_and_is_not_compiled_again_for_other_documents() -> None:
    torch._dynamo.reset()
    attend, layer = TiledAttention(), torch.nn.Linear(16, 16)

    def mix(x: Tensor, document_ids: Tensor) -> Tensor:
        heads = layer(x).unflatten(-1, (2, 8))
        return torch.relu(attend(heads, heads, heads, AttentionOptions(document_ids=document_ids)).flatten(2))

    compiled = torch.compile(mix, backend="eager")
    x = torch.randn(2, SEQUENCE, 16)
    compiled(x, DOCUMENTS)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for document_ids in (DOCUMENTS, DOCUMENTS.flip(0), torch.zeros_like(DOCUMENTS)):
        torch.testing.assert_close(compiled(x, document_ids), mix(x, document_ids))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
