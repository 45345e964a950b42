"""Published measurements of training (`benchmarks/published`): rows, their sources, and models as configurations."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from forge_train_tools.configuration.request import Request

FOLDER = Path(__file__).parent / "published"
GIB = 2**30
RECOMPUTE = {
    "none": (),
    "full": ("ac.mode=full",),
    "selective": ("ac.mode=selective", 'ac.save=["attention", "alternate_matmul"]'),
    "selective-layer": ("ac.mode=full", "ac.every=2"),
}
"""What is computed again: nothing; all but each layer's input; also not what attention and every second product have
computed; every second layer."""


@dataclass(frozen=True)
class Row:
    """One measurement. Empty fields are unknown."""

    name: str
    source: str
    model: str
    device: str
    devices: int
    node: int
    """Devices of a node."""
    precision: str
    data: str
    """Way of data parallelism, as Forge names it."""
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int
    schedule: str
    parts: int | None
    """Of the model, on each rank of a pipeline."""
    flushes: int
    """Times that a pipeline is filled and emptied in a step."""
    micro_batch: int | None
    global_batch: int
    sequence: int
    recompute: str
    """One of `RECOMPUTE`."""
    fused: str
    """`yes` where torch.compile or fused kernels join what lies between products."""
    tokens_per_second: float | None
    """Of a device."""
    step_seconds: float | None
    tflops: float | None
    """Of the model, of a device, as the source counts them."""
    memory_gib: float | None
    note: str

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence

    def seconds(self, flops_per_token: float) -> float:
        """The step's time; where the source has FLOP/s alone, by the model's operations."""
        if self.step_seconds is not None and self.source != "kempnerforge":
            return self.step_seconds
        if self.tokens_per_second is not None:
            return self.tokens / self.devices / self.tokens_per_second
        assert self.tflops is not None
        return self.tokens * flops_per_token / (self.devices * self.tflops * 1e12)

    @cached_property
    def fitted(self) -> bool:
        """True for the half on which constants are fitted: the SHA-256 of source, model, devices, layout and precision
        is even. Rows that differ in nothing but their batches are in one half."""
        key = (self.source, self.model, self.device, self.devices, self.cp, self.tp, self.pp, self.ep, self.precision)
        return hashlib.sha256(" ".join(map(str, key)).encode()).digest()[-1] % 2 == 0

    @property
    def key(self) -> str:
        """What a plan sees: the request, where it runs, and on how many devices."""
        request = self.request
        words = (request.config, *request.plugins, *(f"--without {one}" for one in request.without), *request.set)
        return f"{self.devices} {self.device} by {self.node}: {' '.join(words)}"

    @property
    def missing(self) -> str:
        """Why there is no forecast; empty if there is one."""
        model = models()[self.model]
        if "missing" in model:
            return str(model["missing"])
        if self.device == "h800":
            return "Forge has no data sheet of an H800"
        if self.micro_batch is None:
            return "the source does not say the micro-batch"
        return "" if self.recompute in RECOMPUTE else "the source does not say what is recomputed"

    @property
    def request(self) -> Request:
        """Forge's configuration of the row. Products in 8 bits are planned as if in bf16."""
        model, source = models()[self.model], sources()[self.source]
        axes = {name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")}
        used = [name for name in ("cp", "tp", "pp", "ep") if axes[name] > 1]
        data = [self.data] if self.dp_shard * self.dp_replicate * self.cp > 1 else []
        recompute = RECOMPUTE[self.recompute]
        plugins = (
            *model.get("plugins", ()),
            *source.get("plugins", ()),
            "synthetic",
            *data,
            *used,
            *(["ac"] if recompute else []),
        )
        unused = [name for name in model.get("laid_out", ()) if name not in plugins]
        pipeline = [f"pp.schedule={self.schedule}"] if self.pp > 1 else []
        pipeline += [f"pp.parts={self.parts}"] if self.parts else []
        pipeline += [f"pp.cuts={self._cuts(model)}"] if self.pp > 1 and "layers" in model else []
        own = [one for axis in ("cp", "tp") if axis in used for one in source.get(axis, ())]
        own += source.get("tp_pp", ()) if {"tp", "pp"} <= set(used) else ()
        batches = (f"train.global_batch={self.global_batch // self.flushes}", f"train.micro_batch={self.micro_batch}")
        return Request(
            config=model["preset"],
            plugins=plugins,
            without=(*model.get("without", ()), *unused),
            set=(
                *model.get("set", ()),
                *source.get("set", ()),
                *own,
                *recompute,
                *pipeline,
                *batches,
                "train.batch_warmup=[]",
                "synthetic.isolate=false",
                f"train.sequence={self.sequence}",
                f"decoder.max_sequence={max(self.sequence, 131072)}",
                *(f"parallel.{axis}={size}" for axis, size in axes.items()),
            ),
        )

    def _cuts(self, model: dict[str, Any]) -> str:
        """The first layer of each stage: equally many in each."""
        stages = self.pp * (self.parts or 1)
        return json.dumps([f"layers.{stage * model['layers'] // stages}" for stage in range(1, stages)])


@cache
def models() -> dict[str, dict[str, Any]]:
    """Model → its configuration, or what is missing."""
    return tomllib.loads((FOLDER / "models.toml").read_text(encoding="utf-8"))


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Source → where it is."""
    return tomllib.loads((FOLDER / "sources.toml").read_text(encoding="utf-8"))


def rows() -> list[Row]:
    """All measurements."""
    found = []
    for file in sorted(FOLDER.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            found += [_row(line) for line in csv.DictReader(lines)]
    return found


def _row(line: dict[str, str]) -> Row:
    """A row from its texts.

    Raises:
        ValueError: for a number that is none, or a column that is missing.
    """
    made: dict[str, Any] = {}
    for one in dataclasses.fields(Row):
        kind, text = str(one.type), line[one.name]
        if kind == "str":
            made[one.name] = text
        elif not text and "None" in kind:
            made[one.name] = None
        else:
            made[one.name] = int(text) if kind.startswith("int") else float(text)
    return Row(**made)
