"""Peaks of devices by the exact names that torch gives them, so that a run has an `mfu` without a setting."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from forge_train import Job

log = logging.getLogger("forge_train")


@dataclass(frozen=True)
class Peak:
    """Dense matrix products of one device, in TFLOP/s, without sparsity."""

    fp32: float
    """Outside of tensor cores."""
    tf32: float
    """fp32 matrix products, where `torch.set_float32_matmul_precision` allows TF32."""
    narrow: float
    """bf16 and fp16, accumulated in fp32."""
    source: str
    """The vendor's document. Where it gives a number with sparsity, half of it stands here."""

    def flops(self, precision: str, *, tf32: bool) -> float:
        """FLOP/s in a precision of `train.precision`."""
        single = self.tf32 if tf32 else self.fp32
        return (single if precision == "fp32" else self.narrow) * 1e12


_AMPERE = Peak(19.5, 156, 312, "NVIDIA A100 Tensor Core GPU data sheet, 2021")
_H100 = Peak(66.9, 494.7, 989.4, "NVIDIA H100 Tensor Core GPU Architecture, V1.04, table 2 (SXM5)")
_NVL = "NVIDIA H100 Tensor Core GPU data sheet, 2024 (NVL)"
PEAKS = {
    "NVIDIA A100-SXM4-40GB": _AMPERE,
    "NVIDIA A100-SXM4-80GB": _AMPERE,
    "NVIDIA A100-PCIE-40GB": _AMPERE,
    "NVIDIA A100 80GB PCIe": _AMPERE,
    "NVIDIA H100 80GB HBM3": _H100,
    "NVIDIA H100 PCIe": Peak(51.2, 378, 756, "NVIDIA H100 Tensor Core GPU Architecture, V1.04, table 2 (PCIe)"),
    "NVIDIA H100 NVL": Peak(60, 417.5, 835.5, _NVL),
    "NVIDIA H200": Peak(66.9, 494.7, 989.4, "NVIDIA H200 Tensor Core GPU data sheet, 2024 (SXM)"),
    "NVIDIA H200 NVL": Peak(60, 417.5, 835.5, "NVIDIA H200 Tensor Core GPU data sheet, 2024 (NVL)"),
    "NVIDIA B200": Peak(75, 1125, 2250, "NVIDIA DGX B200 data sheet, 2024, an eighth of the system"),
    "NVIDIA L40S": Peak(91.6, 183, 362.05, "NVIDIA L40S data sheet, 2023"),
    "NVIDIA GeForce RTX 4090": Peak(82.6, 82.6, 165.2, "NVIDIA Ada GPU Architecture, V2.02, appendix A"),
    "AMD Instinct MI300X": Peak(163.4, 653.7, 1307.4, "AMD Instinct MI300X data sheet, 2023"),
}
"""Name, as `torch.cuda.get_device_name` gives it → peak."""


def peak_flops(name: str, precision: str, *, tf32: bool = False) -> float:
    """FLOP/s of a device in a precision; 0 for one that is not known."""
    return PEAKS[name].flops(precision, tf32=tf32) if name in PEAKS else 0.0


def device_peak(job: Job) -> float:
    """FLOP/s of this device at its peak: as configured, else by its name; 0 where neither is known."""
    if configured := job.config.log.peak_tflops:
        return configured * 1e12
    if job.device.type != "cuda":
        return 0.0
    import torch

    name = torch.cuda.get_device_name(job.device)
    peak = peak_flops(name, job.config.train.precision, tf32=torch.get_float32_matmul_precision() != "highest")
    if not peak and job.dist.main:
        log.warning("No mfu: the peak of %r is not known. Say it in TFLOP/s with -s log.peak_tflops=…", name)
    return peak
