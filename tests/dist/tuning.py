"""Every way to tune a model that exists, on layouts of ranks, for the tests and `make verify-all`."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import compositions
import forge_cli
import hf_models
from forge_train_tools.configuration.request import Request
from forge_train_tools.verification import Verdict
from forge_train_tools.verification.later import SHARE

Settings = Mapping[str, Any]
VOCABULARY = 320
TASKS: Mapping[str, tuple[tuple[str, ...], Settings]] = {
    "sft": (("sft",), {"sft.template": "plain", "sft.long": "left"}),
    "dpo": (("dpo", "text_pairs"), {"dpo.beta": 0.5, "dpo.label_smoothing": 0.1, "dpo.sft_weight": 0.2}),
    "orpo": (("dpo", "text_pairs"), {"dpo.loss": "orpo"}),
    "kto": (("kto", "text_feedback"), {"kto.beta": 0.5, "kto.undesirable_weight": 1.3}),
    "distil": (("distill", "sft"), {"sft.template": "plain", "sft.long": "left", "distill.share": 0.7}),
}
ADAPTERS: Mapping[str, Settings] = {
    "lora": {"lora.dropout": 0.2, "lora.lr_ratio": 4.0},
    "dora": {"lora.dora": True},
    "qlora": {"lora.base": "nf4", "lora.base_block": 8, "lora.dropout": 0.2},
}
OF_STACKS: Mapping[str, Settings] = {
    "lora": {"lora.dropout": 0.0},
    "qlora": {"lora.dropout": 0.0},
    "dora": {"lora.modules": ["*att*"]},
}
"""What an adapter of a model with experts does without: stacks have neither masks nor magnitudes."""
MODELS: Mapping[str, tuple[tuple[str, ...], Settings]] = {
    "decoder": (("decoder",), {"decoder.layers": 2}),
    "decoder, experts": (("decoder", "moe"), {"decoder.layers": 2, "moe.experts": 4, "moe.hidden": 16}),
    "arcee": (("hf",), {"hf.type": "arcee"}),
    "qwen2_moe": (("hf",), {"hf.type": "qwen2_moe"}),
}
DENSE, EXPERTS = ("decoder", "arcee"), ("decoder, experts", "qwen2_moe")
LAYOUTS: Mapping[str, tuple[int, tuple[str, ...], Settings]] = {
    "fsdp2×2": (2, ("fsdp2",), {"train.micro_batch": 2}),
    "tp2": (2, ("tp",), {"parallel.tp": 2}),
    "pp2": (2, ("pp",), {"parallel.pp": 2, "train.micro_batch": 2}),
    "cp2": (2, ("cp",), {"parallel.cp": 2}),
    "ac": (2, ("ddp", "ac"), {"ac.mode": "full", "train.micro_batch": 2}),
    "compile": (2, ("fsdp2", "compile"), {"compile.backend": "aot_eager", "train.micro_batch": 2}),
    "ep2": (2, ("ep",), {"parallel.ep": 2, "train.micro_batch": 2}),
    "ep2×tp2": (4, ("ep", "tp"), {"parallel.ep": 2, "parallel.tp": 2, "train.micro_batch": 2}),
    "etp2": (2, ("ep", "tp"), {"parallel.tp": 2, "parallel.etp": 2}),
    "fsdp2×2, bf16": (2, ("fsdp2",), {"train.micro_batch": 2, "train.precision": "bf16"}),
}
WHOLE = {
    "dpo": "dpo.loss: 'sigmoid' needs a reference",
    "kto": "kto.stored: the loss needs a reference",
    "distil": "The extra model 'teacher' runs whole",
}
"""Tasks that a pipeline refuses, and the start of the sentence."""
OF_EXPERTS = ("ep2", "ep2×tp2", "etp2")
"""Layouts of models with experts; they also run on those of `fsdp2`, whose ranks share the data."""
NUMBERS = ("loss", "gradients", "later gradients", "evaluation")
"""Checks that a figure is of; gradients are compared by their Frobenius norms."""
BOUND = 1e-5
"""In bf16 too: with the same micro-batches, a layout rounds as one process does."""
OWN = 5e-3
"""Largest tolerance of `forge verify` in bf16, at least a tenth of one process's own distance from fp32: what has no
effect in bf16, on a layout and on one process, is far from fp32 on both."""
TEXT = (
    "Each column is a layout; a figure is the largest relative difference of losses, of held-out losses and of a "
    f"parameter's gradient (in the Frobenius norm). It is at most {BOUND:.0e}; in bf16 with the same micro-batches on "
    f"one process, whose own gradients are at most {OWN / SHARE:.0e} from those in fp32. A number in brackets is the "
    "sentence below that refuses the layout before training starts."
)
"""Of the table."""


@dataclass(frozen=True)
class Tuned:
    """An adapter that a task trains, on a model and a layout."""

    adapter: str
    task: str
    model: str
    layout: str

    def __str__(self) -> str:
        return ", ".join((self.adapter, self.task, self.model, self.layout))

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def row(self) -> tuple[str, str]:
        return f"{self.adapter}, {self.task}, {self.model}", self.layout

    def request(self, file: Path) -> Request:
        """What `forge verify` is asked for it."""
        _, plugins, settings = LAYOUTS[self.layout]
        return self._request(file, plugins, settings)

    @property
    def narrow(self) -> bool:
        return "train.precision" in LAYOUTS[self.layout][2]

    def reference(self, file: Path) -> Request:
        """The same on one process. Experts of transformers keep the transport, which decides what they are given; in
        bf16, gradients are rounded once for each micro-batch, and it takes the layout's."""
        transport = ("ep",) if self.model == "qwen2_moe" and self.layout.startswith("ep") else ()
        return self._request(file, transport, LAYOUTS[self.layout][2] if self.narrow else {})

    def failed(self, verdict: Verdict) -> list[str]:
        """Names of what is not equal, by a bound that is narrower than those of `forge verify`."""
        found = verdict.failed | _beyond(verdict)
        if not self.narrow:
            return sorted(found | ({"routing"} if verdict.undecided else set()))
        own = {"precision" for check in verdict.checks if "gradients" in check.name and check.tolerance > OWN}
        return sorted(found | own)

    @property
    def refused(self) -> str:
        """The start of the sentence that refuses it, or nothing."""
        if self.layout == "pp2" and self.task in WHOLE:
            return WHOLE[self.task]
        if self.layout == "etp2" and self.model == "qwen2_moe":
            return "hf: the experts of Qwen2MoeModel of transformers can't be split within"
        return ""

    def _request(self, file: Path, plugins: tuple[str, ...], settings: Settings) -> Request:
        folder = file.parent
        base = trained(folder, self.model)
        tasks, own = TASKS[self.task]
        data = {"sft": "chats", "text_pairs": "pairs", "text_feedback": "feedback"}[tasks[-1]]
        if tasks[-1] != "sft":
            own = {f"{tasks[-1]}.template": "plain", f"{tasks[-1]}.long": "left", **own}
        if self.task == "distil":
            own = {"distill.weights": str(trained(folder, self.model, seed=4)), **own}
        values = {
            f"{tasks[-1]}.path": str(folder / f"{data}.jsonl"),
            f"{tasks[-1]}.cache": str(folder / "cache"),
            f"{tasks[-1]}.held_out": 0.1,
            "train.init_from": str(base),
            "lora.rank": 4,
            **own,
            **ADAPTERS[self.adapter],
            **(OF_STACKS[self.adapter] if self.model in EXPERTS else {}),
        }
        return _request(file, self.model, (*tasks, *plugins, "lora"), {**values, **settings})


def _beyond(verdict: Verdict) -> set[str]:
    return {check.name for check in verdict.checks if check.name in NUMBERS and not check.worst <= BOUND}


def _request(file: Path, model: str, plugins: tuple[str, ...], settings: Settings) -> Request:
    own, shape = MODELS[model]
    request = compositions._request(file, (*own, *plugins), {**shape, **_configured(model), **settings})
    return replace(request, without=("decoder",) if "hf" in own else ())


def _configured(model: str) -> Settings:
    if "hf" not in MODELS[model][0]:
        return {}
    config = {**hf_models.MODELS[model], "vocab_size": VOCABULARY}
    return {"hf.set": "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in config.items()) + "}"}


def write(folder: Path) -> Path:
    """Chats, pairs and feedback of unlike lengths, and the configuration that every case shares."""
    chance, words = random.Random(0), compositions.WORDS.split()

    def said() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 4)))

    chats = [
        {"messages": [{"role": role, "content": said()} for role in ("user", "assistant") * chance.randint(1, 2)]}
        for _ in range(120)
    ]
    pairs = [{"prompt": said(), "chosen": said(), "rejected": f"{said()}!"} for _ in range(120)]
    feedback = [{"prompt": said(), "completion": said(), "label": chance.random() < 0.6} for _ in range(120)]
    for name, records in (("chats", chats), ("pairs", pairs), ("feedback", feedback)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return compositions.write_config(
        folder / "tuning.toml",
        (),
        run={"seed": 3},
        train={
            "steps": 3,
            "global_batch": 4,
            "micro_batch": 4,
            "sequence": 48,
            "evaluate_every": 2,
            "evaluate_batches": 2,
        },
        decoder={"max_sequence": 64, "vocabulary": VOCABULARY},
        adamw={"lr": 1e-2},
    )


@cache
def trained(folder: Path, model: str, seed: int = 3) -> Path:
    """A run of the model that is tuned, or of its teacher, by the seed."""
    settings = {"sft.path": str(folder / "chats.jsonl"), "sft.template": "plain", "sft.cache": str(folder / "cache")}
    settings |= {"sft.held_out": 0.1, "sft.long": "left", "train.steps": 2, "run.seed": seed}
    request, name = _request(folder / "tuning.toml", model, ("sft",), settings), f"{model.replace(', ', '-')}-{seed}"
    options = [part for one in request.set for part in ("-s", one)]
    options += [part for one in request.without for part in ("--without", one)]
    given = ("--plugins", ",".join(request.plugins), "--run-dir", folder, "--name", name)
    done = forge_cli.forge("train", folder / "tuning.toml", *given, *options)
    assert done.code == 0, done.err
    return folder / name


def product() -> Iterator[Tuned]:
    """Every adapter and task; models without experts on their layouts, and models with experts on theirs."""
    layouts = [(model, one) for model in DENSE for one in LAYOUTS if one not in OF_EXPERTS]
    layouts += [(model, one) for model in EXPERTS for one in ("fsdp2×2", "fsdp2×2, bf16", *OF_EXPERTS)]
    return (Tuned(adapter, task, *one) for adapter, task, one in itertools.product(ADAPTERS, TASKS, layouts))
