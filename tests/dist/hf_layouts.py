"""Models of transformers on layouts of ranks, for the tests and `make verify-all`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hf_models
from forge_train_tools.configuration.request import Request

HALVES = {"train": {"micro_batch": 2}}
LAYOUTS: Mapping[str, tuple[tuple[str, ...], Mapping[str, Mapping[str, Any]]]] = {
    "dp2": (("fsdp2",), {}),
    "dp2, ddp, bf16": (("ddp",), {"train": {"precision": "bf16", **HALVES["train"]}}),
    "dp2, ac, compile": (("fsdp2", "ac", "compile"), {"compile": {"backend": "aot_eager"}}),
    "hsdp2×2": (("fsdp2",), {"parallel": {"dp_replicate": 2}}),
    "tp2": (("tp",), {"parallel": {"tp": 2}}),
    "tp2, whole sequences": (("tp",), {"parallel": {"tp": 2}, "tp": {"sequence_parallel": False}}),
    "cp2": (("cp",), {"parallel": {"cp": 2}}),
    "pp2": (("pp",), {"parallel": {"pp": 2}, **HALVES}),
    "pp2, zbv, ac": (("pp", "ac"), {"parallel": {"pp": 2}, "pp": {"schedule": "zbv"}, **HALVES}),
    "pp2×dp2": (("pp", "fsdp2"), {"parallel": {"pp": 2}, "train": {"micro_batch": 1}}),
    "pp2×tp2": (("pp", "tp"), {"parallel": {"pp": 2, "tp": 2}, **HALVES}),
    "ep2": (("ep",), {"parallel": {"ep": 2}}),
    "ep2, zero1, ac": (("ep", "zero1", "ac"), {"parallel": {"ep": 2}, "ac": {"mode": "full"}}),
    "ep3": (("ep",), {"parallel": {"ep": 3}, "train": {"global_batch": 6}}),
    "ep2×cp2": (("ep", "cp"), {"parallel": {"ep": 2, "cp": 2}}),
    "ep2×pp2": (("ep", "pp"), {"parallel": {"ep": 2, "pp": 2}, "train": {"micro_batch": 1}}),
    "ep2×tp2": (("ep", "tp"), {"parallel": {"ep": 2, "tp": 2}}),
    "ep2×tp2, whole sequences": (
        ("ep", "tp"),
        {"parallel": {"ep": 2, "tp": 2}, "tp": {"sequence_parallel": False}},
    ),
    "ep2 over tp2, 11 tokens": (("ep", "tp"), {"parallel": {"ep": 2, "tp": 2}, "train": {"sequence": 11}}),
    "ep2 over tp2×pp2": (("ep", "tp", "pp"), {"parallel": {"ep": 2, "tp": 2, "pp": 2}, **HALVES}),
    "ep2×dp2": (("ep",), {"parallel": {"ep": 2}, "train": {"micro_batch": 1}}),
}
"""Name → plugins and sections, on two ranks, on three or, of two axes, on four."""
SPREAD = frozenset({"deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe"})
"""Types whose class declares a plan of expert parallelism."""
PLANNED = (SPREAD - {"gpt_oss"}) | frozenset(
    {"arcee", "cohere", "cohere2", "exaone4", "glm", "gpt_neox", "helium", "nemotron", "phi", "starcoder2"}
)
"""Types whose class declares a plan of tensor parallelism."""
CUT = (PLANNED | {"gpt_oss"}) - {"nemotron", "olmoe"}
"""Types whose class declares where a pipeline can cut it."""


@dataclass(frozen=True)
class Foreign:
    """A model type on a layout."""

    kind: str
    layout: str
    documents: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    """Keys of the configuration."""

    @property
    def world(self) -> int:
        return 3 if "ep3" in self.layout else 4 if "×" in self.layout else 2

    def __str__(self) -> str:
        return f"{self.kind}, {self.layout}{', documents' if self.documents else ''}"

    @property
    def row(self) -> tuple[str, str]:
        return self.layout, "documents" if self.documents else "one text"

    def request(self, file: Path | None = None) -> Request:
        """What `forge verify` is asked for it."""
        plugins, more = LAYOUTS[self.layout]
        return self._request(plugins, more)

    def reference(self, file: Path | None = None) -> Request:
        """The same on one process. Experts go through the same transport, which decides what they are given."""
        plugins, more = LAYOUTS[self.layout]
        train = more.get("train", {})
        same = {key: one for key, one in train.items() if key != "micro_batch" or "precision" in train}  # it rounds
        return self._request(tuple({"ep"} & {*plugins}), {"train": same})

    def _request(self, plugins: tuple[str, ...], more: Mapping[str, Mapping[str, Any]]) -> Request:
        train = {"global_batch": 4, **more.get("train", {})}
        model = {"set": {**hf_models.MODELS[self.kind], **dict(self.changes)}}
        sections = hf_models.sections(
            self.kind, **{**more, "synthetic": {"isolate": self.documents}, "train": train, "hf": model}
        )
        return Request(plugins=(*hf_models.PLUGINS, *plugins), without=hf_models.WITHOUT, sections=sections)


def product() -> Iterator[Foreign]:
    """Every type on every layout that its class allows."""
    for kind in hf_models.MODELS:
        isolates = kind not in hf_models.JOINED
        for layout in LAYOUTS:
            planned = (kind in PLANNED or "tp" not in layout) and (kind in CUT or "pp" not in layout)
            planned = planned and (kind in SPREAD or "ep" not in layout) and layout != "ep3"  # of 4 experts
            kernel = kind not in hf_models.OWN_ATTENTION or "cp" not in layout
            if planned and kernel:
                yield from (
                    Foreign(kind, layout, documents) for documents in (False, True) if isolates or not documents
                )
