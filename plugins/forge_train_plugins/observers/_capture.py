"""The files of the `capture` plugin."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from forge_train.base.files import disk_errors
from forge_train.base.strict_json import dumps
from forge_train_kit.activations import Recorded, Recorder

log = logging.getLogger("forge_train")
SAMPLES = "sample_ids"
AXES = {"tokens": ("sample", "token"), "rows": ("sample",), "micro_batch": ("micro-batch",)}


@contextmanager
def recording(recorder: Recorder | None, on: bool) -> Iterator[None]:
    """A span in which modules are recorded, or not."""
    if recorder is None:
        yield
        return
    recorder.recording = on
    try:
        yield
    finally:
        recorder.recording = False


def write(found: Recorded, job: Any, name: str, reduce: str) -> Path:
    """Write a file of the run's artifacts; it is whole or absent."""
    for key, reason in found.left_out.items():
        log.warning("capture: %s is left out of %s: %s.", key, name, reason)
    file: Path = job.run.artifact(f"capture/{name}.safetensors")
    tensors = {key: tensor.contiguous() for key, tensor in found.tensors.items()}
    tensors[SAMPLES] = torch.tensor(found.samples)
    about = {
        "format": "pt",
        "name": name,
        "reduce": reduce,
        "axes": dumps({key: AXES[kind] for key, kind in found.kinds.items()}),
        "left_out": dumps(found.left_out),
    }
    partial = file.with_suffix(".partial")
    try:
        with disk_errors(file):
            partial.write_bytes(save(tensors, about))
            partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return file
