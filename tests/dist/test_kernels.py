"""Attention kernels say what they can do: what a run will ask for is there, or the run is refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kernels
from forge_train import ConfigError, Plugin
from forge_train.base.names import PluginRef
from forge_train.registry.discovery import discover
from forge_train_kit.capabilities import KernelCapabilities
from forge_train_kit.plugins import find
from forge_train_kit.source import Source
from forge_train_tools.generation.completion import Completion
from forge_train_tools.generation.sampling import Sampling
from forge_train_tools.testing import Installed, Pool, RunForge, check, contract, practice

pytestmark = [pytest.mark.dist]

LAYOUTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dp2": (("fsdp2",), {"parallel.dp_shard": 2}),
    "tp2": (("tp",), {"parallel.tp": 2}),
}


def train(ranks: Pool, folder: Path, world: int, plugins: tuple[str, ...], config: dict[str, Any]) -> dict[str, Any]:
    folder.mkdir()
    config = {"train.micro_batch": 6, "train.evaluate_every": 3, **config}
    reply: dict[str, Any] = ranks.run("cases:train", world, folder=str(folder), plugins=plugins, config=config)[0]
    return reply


def test_a_kernel_without_document_masks_trains_where_nobody_asks_for_them(ranks: Pool, tmp_path: Path) -> None:
    joined = {"text.isolate": False}
    expected = train(ranks, tmp_path / "sdpa", 1, (), joined)
    alone = train(ranks, tmp_path / "one", 1, ("kernels:Plain",), joined)
    assert "sdpa" not in alone["plugins"]
    replies = {"one": alone}
    for name, (more, config) in LAYOUTS.items():
        replies[name] = train(ranks, tmp_path / name, 2, ("kernels:Plain", *more), {**joined, **config})
    for name, reply in replies.items():
        for what in ("losses", "norms", "evaluations"):
            assert reply[what] == pytest.approx(expected[what], rel=1e-4), (name, what)


def test_it_is_refused_where_documents_are_kept_apart_with_the_names_of_others(
    forge_plugins: Installed, run_forge: RunForge, tmp_path: Path
) -> None:
    forge_plugins.restore()
    forge_plugins.add(kernels.Everything)
    forge_plugins.add(kernels.Wide)
    with pytest.raises(ConfigError) as error:
        run_forge([kernels.Plain], folder=tmp_path / "runs")
    able = [one.name for one in discover() if (has := Source(one).kernel_capabilities) and has.documents]
    assert {"everything", "sdpa", "wide"} <= {*able}
    assert str(error.value) == (
        "Plugin 'plain' (under-test 0) computes attention without document masks. Plugin 'text' asks for it. "
        f"Installed kernels that have it: {', '.join(able)}; enable one with --plugins."
    )
    with pytest.raises(ConfigError, match=r"without sliding windows\. Plugin 'local' .* everything, .*sdpa, varlen;"):
        run_forge([kernels.Plain, kernels.Local], {"text.isolate": False}, folder=tmp_path / "runs")
    assert not [path for path in (tmp_path / "runs").iterdir() if not path.name.startswith(".")]


def test_what_layers_and_the_device_ask_for_is_refused_too(run_forge: RunForge) -> None:
    with pytest.raises(
        ConfigError, match=r"'wide' .* without heads of 8 features\. A layer asks for it\. Inst.*: .*sdpa, varlen;"
    ):
        run_forge([kernels.Wide])
    with pytest.raises(
        ConfigError,
        match=r"Plugin 'elsewhere' runs on cuda only; this run's device is cpu\.",
    ):
        run_forge([kernels.Elsewhere])


def test_a_window_is_the_same_window_whichever_kernel_computes_it(run_forge: RunForge) -> None:
    one, other = run_forge([kernels.Local]), run_forge([kernels.Local, kernels.Everything])
    assert one.losses == pytest.approx(other.losses, rel=1e-5)
    whole = run_forge([kernels.Local], {"train.sequence": 5})
    assert whole.finished.outcome == "done"


def test_every_declared_capability_is_tried_against_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "imports_lazily", lambda found: "")  # the other checks that take long are not read
    monkeypatch.setattr(practice, "_trained", lambda *given: iter(()))
    name = "attention_kernel: agrees with the formula"
    found = {
        plugin: next(one for one in check(plugin, folder=tmp_path).checks if one.name == name)
        for plugin in (kernels.Plain, kernels.Everything, kernels.Boasting)
    }
    assert [one.status for one in found.values()] == ["ok", "ok", "fail"]
    assert found[kernels.Plain].detail == "all heads apart, grouped heads, one key head, another scale"
    tried = found[kernels.Everything].detail.split(", ")
    assert {"a soft cap", "sinks", "the log-sum-exp", "a block before the queries", "dropout"} <= {*tried}
    assert found[kernels.Boasting].detail.startswith("a window: output: off by")


def test_text_is_generated_without_a_cache_where_the_kernel_can_not_continue_one(run_forge: RunForge) -> None:
    texts = []
    for plugins in ([], [kernels.Plain]):
        run = run_forge(plugins, {"text.isolate": False, "adamw.lr": 1e-2}, steps=4)
        texts.append("".join(Completion(run.job, run.model, "the ", Sampling(tokens=12, temperature=0))))
    assert texts[0] == texts[1]


@pytest.mark.unit
@pytest.mark.parametrize("plugin", [kernels.Everything, kernels.Wide, kernels.Elsewhere, kernels.Boasting])
def test_capabilities_are_read_without_importing(plugin: type[Plugin], forge_plugins: Installed) -> None:
    assert Source(find(forge_plugins.add(plugin))).kernel_capabilities == plugin.kernel_capabilities
    assert Source(find(forge_plugins.add(kernels.Plain))).kernel_capabilities is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("KernelCapabilities(windows=True)", KernelCapabilities(windows=True)),
        ("KernelCapabilities(window=True)", None),
        ("KernelCapabilities(windows=WINDOWS)", None),
        ("KernelCapabilities(True)", None),
        ("EVERYTHING", None),
    ],
)
def test_capabilities_are_read_from_a_file_with_one_plugin(
    written: str, found: KernelCapabilities | None, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"class Mine(Plugin):\n    kernel_capabilities = {written}\n", encoding="utf-8")
    assert Source(PluginRef("mine", "", "", str(file))).kernel_capabilities == found


@pytest.mark.unit
def test_what_a_kernel_lacks() -> None:
    able = KernelCapabilities(documents=True, head_dims=(64, 128))
    asked = KernelCapabilities(documents=True, windows=True, sinks=True, head_dims=(80,))
    assert [*able.lacks(asked)] == ["sliding windows", "sinks", "heads of 80 features"]
    assert not [*able.lacks(KernelCapabilities(head_dims=(64,)))]
