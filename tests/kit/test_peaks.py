"""`mfu` without a setting: peaks by the exact names of devices."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_train_kit.peaks import PEAKS, peak_flops
from forge_train_plugins.observers.mfu import MFU
from forge_train_tools.planning import DEVICES

pytestmark = [pytest.mark.unit]


def share(monkeypatch: pytest.MonkeyPatch, name: str, *, configured: float = 0.0, precision: str = "bf16") -> float:
    """FLOPs of a token over the peak of 2 devices of this name."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    config = SimpleNamespace(
        log=SimpleNamespace(peak_tflops=configured), train=SimpleNamespace(sequence=8, precision=precision)
    )
    dist = SimpleNamespace(world=2, main=True, gather_stages=lambda value: [value])
    job: Any = SimpleNamespace(config=config, device=torch.device("cuda"), dist=dist)
    model: Any = SimpleNamespace(flops_per_token=lambda sequence: 1e6)
    plugin = MFU(None)
    plugin.on_start(job, model)
    return plugin.share


def test_the_peak_of_a_known_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(monkeypatch, "NVIDIA H100 80GB HBM3") == pytest.approx(1e6 / (2 * 989.4e12))
    assert share(monkeypatch, "NVIDIA H100 80GB HBM3", precision="fp32") == pytest.approx(1e6 / (2 * 66.9e12))


def test_fp32_counts_against_tf32_where_torch_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert share(monkeypatch, "NVIDIA H200", precision="fp32") == pytest.approx(1e6 / (2 * 494.7e12))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_setting_is_stronger(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(monkeypatch, "NVIDIA H100 80GB HBM3", configured=500) == pytest.approx(1e6 / 1e15)


def test_an_unknown_device_has_no_mfu_and_one_hint(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert share(monkeypatch, "NVIDIA H100 80GB") == 0
    (hint,) = caplog.records
    assert "'NVIDIA H100 80GB'" in hint.getMessage()
    assert "log.peak_tflops" in hint.getMessage()


def test_every_peak_has_its_document_and_makes_sense() -> None:
    for name, peak in PEAKS.items():
        assert peak.source.split()[0] in ("NVIDIA", "AMD"), name
        assert peak.fp32 <= peak.tf32 < peak.narrow, name
    assert peak_flops("cpu", "bf16") == 0


def test_the_peaks_are_those_of_the_plan() -> None:
    names = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
    for short, name in {**names, "b200": "NVIDIA B200", "mi300x": "AMD Instinct MI300X"}.items():
        assert peak_flops(name, "bf16") == DEVICES[short].narrow
        assert peak_flops(name, "fp32") == pytest.approx(DEVICES[short].single, rel=0.01)
