"""Twenty-seven faults, each planted on the layout alone: `forge verify` finds it, says where, and what it is.

CI takes sixteen of them, and `make test-all` the others, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import compositions
from crossed import marked
from forge_train_tools.configuration.request import Request
from forge_train_tools.testing import Verifier

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(300),
]

BATCH = {"train.global_batch": 12, "train.micro_batch": 2}
WARM = {"train.steps": 10_000, "cosine.warmup": 2000}
"""The learning rates of the first steps are next to nothing: what the optimizer does shows at the peak alone."""
EXPERTS = {"moe.experts": 8, "moe.hidden": 16, "moe.balance": 0, "train.global_batch": 8}
TP2, EP2 = {"parallel.tp": 2, "train.micro_batch": 6}, {"parallel.ep": 2}
FSDP, TP, EP = ("fsdp2",), ("tp",), ("moe", "ep")


@dataclass(frozen=True)
class Fault:
    """A plugin that does one thing wrong, on two ranks."""

    plugin: str
    parts: set[str]
    """What differs, and nothing else does."""
    says: str
    """What the first sentence says."""
    layout: tuple[str, ...] = FSDP
    settings: Mapping[str, Any] = field(default_factory=dict)
    instead: str = ""
    """The plugin whose place it takes."""

    def request(self, file: Path) -> Request:
        plugins = tuple(self.plugin if one == self.instead else one for one in self.layout)
        own = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.plugin.partition(":")[2]).lower()
        settings = {re.sub(f"^{self.instead}[.]", f"{own}.", key): value for key, value in self.settings.items()}
        if self.plugin not in plugins:
            plugins = (*plugins, self.plugin)
        if self.instead == "text":  # which the file itself asks for
            text = file.read_text(encoding="utf-8").replace('"text"', f'"{self.plugin}"').replace("[text]", f"[{own}]")
            file = file.with_name(f"{own}.toml")
            file.write_text(text, encoding="utf-8")
            plugins = self.layout
        return compositions._request(file, plugins, {**BATCH, **settings})


FAULTS: dict[str, Fault] = {
    # Gradients, from the first step on.
    "a factor": Fault(
        "sabotage:DoubledFSDP",
        {"gradients", "grad_norm", "later gradients"},
        "Every gradient is 2 times what it should be: an averaging factor. .*dp_shard is 2",
        instead="fsdp2",
    ),
    "a factor of experts": Fault(
        "expert_sabotage:Unscaled",
        {"gradients", "grad_norm", "later gradients"},
        r"routed\.experts.* \(6\) are 2 times what they should be, and no others: an averaging factor of that group",
        EP,
        {**EXPERTS, **EP2},
        instead="ep",
    ),
    "norms left unsummed": Fault(
        "sabotage:ForgetfulTP",
        {"gradients", "grad_norm", "replicas", "checkpoint"},
        r"norm\.weight \(5\) are wrong, and differ between ranks along tp: they are not reduced over tp",
        TP,
        TP2,
        instead="tp",
    ),
    "a lost micro-batch": Fault(
        "sabotage:LostMicroBatch",
        {"gradients", "grad_norm", "loss", "later gradients"},
        "those of its 6 micro-batches, but micro-batch 3 of 3 of data rank 1 is missing",
    ),
    "a balance loss twice": Fault(
        "expert_sabotage:Unbalanced",
        {"gradients", "grad_norm", "routing", "later gradients"},
        r"Losses that the model attaches \(attach_loss\) weigh 2 times what they should",
        EP,
        {**EXPERTS, **EP2, "moe.balance": 0.1},
        instead="moe",
    ),
    "a router that learns nothing": Fault(
        "expert_sabotage:Deaf",
        {"gradients", "grad_norm", "routing", "later gradients"},
        r"No gradient arrives at layers\.\*\.feed_forward\.routed\.router\.weight \(2\)",
        EP,
        {**EXPERTS, **EP2},
        instead="moe",
    ),
    "a router that sums over its own tokens alone": Fault(
        "expert_sabotage:Unsummed",
        {"gradients", "grad_norm", "routing", "later gradients"},
        r"router\.weight \(2\) are not reduced over the data-parallel ranks: each rank's shard is what its own micro",
        ("moe", "fsdp2"),
        EXPERTS,
        instead="fsdp2",
    ),
    "a linear in bf16": Fault(
        "sabotage:Rounded",
        {"gradients", "later gradients"},
        r"differ by 3e-03, as rounding does: .* narrower dtype.* is at layers\.1\.feed_forward",
    ),
    # Gradients of later steps.
    "a factor from the second step on": Fault(
        "sabotage:LaterNorms",
        {"grad_norm", "later gradients"},
        r"of a later step of .*norm\.weight \(5\) are 1\.5 times what they should be.* first step are right",
        instead="fsdp2",
    ),
    # Data, choices, buffers, the start, an evaluation.
    "data by rank": Fault(
        "sabotage:RankText",
        {"peers", "loss", "grad_norm", "gradients", "replicas"},
        r"were fed different batches \(rank 1 and rank 0 \(data-parallel rank 0\)\)",
        TP,
        TP2,
        instead="text",
    ),
    "a capacity of each rank": Fault(
        "expert_sabotage:OwnCapacity",
        {"routing", "grad_norm", "gradients", "later gradients"},
        "choices of tokens within the capacity of .* each rank chooses among its own tokens instead of all tokens",
        ("moe", "tp"),
        {**EXPERTS, **TP2, "moe.capacity": 1.0},
        instead="moe",
    ),
    "biases by the load of each rank": Fault(
        "expert_sabotage:Selfish",
        {"routing", "loss", "grad_norm", "buffers", "replicas"},
        r"A persistent buffer ends otherwise .*router\.bias.* along dp_shard: each rank moves it by its own tokens",
        EP,
        {**EXPERTS, **EP2, "moe.bias_speed": 0.01},
        instead="moe",
    ),
    "another start on rank 1": Fault(
        "sabotage:OtherStart",
        {"initial weights", "grad_norm", "gradients", "replicas", "checkpoint"},
        r"initial weights differ on rank 1 only \(embedding\.weight, .*: a plugin changes them there before the first",
        ("ddp",),
    ),
    "another start on rank 0": Fault(
        "sabotage:OtherStart",
        {"initial weights", "grad_norm", "gradients", "replicas", "checkpoint"},
        "The initial weights differ on rank 0 only",
        ("ddp",),
        {"other_start.rank": 0},
    ),
    "evaluation in training mode": Fault(
        "sabotage:TrainedEvaluation",
        {"evaluation"},
        "The layout evaluates in training mode: its held-out loss 5.518.* is what one process gives in training mode",
        ("fsdp2", "sabotage:InTraining"),
    ),
    # The optimizer, with gradients that are right.
    "gradients doubled after their norm": Fault(
        "sabotage:AfterNorm",
        {"updates", "optimizer"},
        "The optimizer's state is that of gradients 2 times as large: they are changed after their global norm",
    ),
    "no clipping": Fault(
        "optimizer_sabotage:Unclipped",
        {"updates", "optimizer"},
        "the layout does not clip gradients to train.clip_norm",
        settings={**WARM, "train.clip_norm": 0.1},
    ),
    "clipping by rank": Fault(
        "optimizer_sabotage:OwnNorm",
        {"updates", "optimizer"},
        "each rank clips by a norm of its own. Clip by the norm over all ranks",
        settings={**WARM, "train.clip_norm": 0.1},
    ),
    "no weight decay": Fault(
        "optimizer_sabotage:NoDecay",
        {"updates", "grad_norm"},
        "Weight decay is missing for .*attention.*: they differ by a multiple of themselves, though gradients",
        settings=WARM,
    ),
    "no weight decay on rank 1": Fault(
        "optimizer_sabotage:LessDecay",
        {"updates"},
        "Weight decay is missing for .*, in what rank 1 holds",
        settings=WARM,
    ),
    "another β2": Fault(
        "optimizer_sabotage:OtherBeta",
        {"updates", "optimizer"},
        r"exp_avg_sq differs and exp_avg agrees, from the same gradients: .* such as its decay \(betas\), is another",
        settings=WARM,
    ),
    "one percent more learning rate": Fault(
        "optimizer_sabotage:Faster",
        {"updates", "loss", "grad_norm"},
        "The weights move 1.01 times as far as they should .* the learning rate is 1.01 times what it should be",
        settings=WARM,
    ),
    # A resume in the middle, and what plugins keep.
    "a data position saved a batch ahead": Fault(
        "resume_sabotage:SavedAhead",
        {"resume"},
        r"checkpoint says that training has used 48 sequences, and it has used 36: .* the loader's state_dict",
        ("fsdp2",),
        instead="text",
    ),
    "a data position resumed a batch ahead": Fault(
        "resume_sabotage:ResumedAhead",
        {"resume"},
        "A resumed run trains on other sequences .* the loader's load_state_dict does not go there",
        ("fsdp2",),
        instead="text",
    ),
    "weights saved as their average": Fault(
        "resume_sabotage:SavedWeights",
        {"plugin states"},
        r"state of plugin 'saved_weights' \(average.* same steps: it is the weights themselves\. .* its state_dict",
    ),
    "an average over other steps": Fault(
        "resume_sabotage:Hasty",
        {"plugin states", "evaluation"},
        "The state of plugin 'hasty' .* is not what it is on one process after the same steps",
    ),
    "an average that is not resumed": Fault(
        "resume_sabotage:Forgetful",
        {"resume"},
        "After a resume, the last step leaves plugin forgetful in another state: state_dict leaves out",
    ),
}


EXTENDED = (
    *("a factor of experts", "a router that learns nothing", "a capacity of each rank", "another start on rank 0"),
    *("no clipping", "no weight decay on rank 1", "another β2", "one percent more learning rate"),
    *("a data position resumed a batch ahead", "weights saved as their average", "an average over other steps"),
)
"""CI plants a fault of the same kind."""


def test_there_are_twenty_seven() -> None:
    assert (len(FAULTS), len(EXTENDED)) == (27, 11)


@pytest.mark.parametrize("name", marked(FAULTS, EXTENDED))
def test_a_planted_fault_is_found_and_named(verify: Verifier, composition_file: Path, name: str) -> None:
    fault = FAULTS[name]
    verdict = verify(fault.request(composition_file), 2, steps=3)
    assert verdict.failed == fault.parts, verdict
    assert re.search(fault.says, verdict.advice[0]), verdict.advice


def test_other_settings_of_the_optimizer_are_read_out(verify: Verifier, composition_file: Path) -> None:
    """Where parameter groups show them; the first step of Adam does not depend on β2, but its state does."""
    verdict = verify(Fault("optimizer_sabotage:OtherGroups", set(), "").request(composition_file), 2, steps=1)
    assert verdict.failed == {"optimizer"}
    assert (
        verdict.advice[0]
        == "The optimizer's setting betas is (0.9, 0.95) on one process and (0.9, 0.999) on the layout."
    )


def test_a_norm_that_a_plugin_changes_is_found_where_clipping_hides_it(
    verify: Verifier, composition_file: Path
) -> None:
    fault = Fault("sabotage:Halved", set(), "", settings={"train.clip_norm": 0.01})
    verdict = verify(fault.request(composition_file), 2, steps=2)
    assert verdict.failed == {"grad_norm"}
    assert "changes the gradients' global norm in on_gradients, to " in verdict.advice[0]


@pytest.mark.parametrize(
    ("plugin", "layout", "settings", "says"),
    [
        ("sabotage:MaxOfSums", FSDP, {}, r"\(max_of_sums\.tokens: 192 and 96\)"),
        pytest.param(
            *("sabotage:SummedTwice", FSDP, {}, r"\(summed_twice\.tokens: 192 and 384\)"), marks=pytest.mark.extended
        ),
        ("sabotage:ReplicasTwice", TP, TP2, r"\(replicas_twice\.tokens: 192 and 384\)"),
        ("sabotage:OneRank", FSDP, {}, r"\(one_rank\.rank_one: nan and 1\)"),
    ],
)
def test_a_metric_that_is_not_added_up_is_found(
    verify: Verifier, composition_file: Path, plugin: str, layout: Any, settings: Any, says: str
) -> None:
    verdict = verify(Fault(plugin, set(), "", layout, settings).request(composition_file), 2, steps=2)
    assert verdict.failed == {"metrics"}, verdict
    assert re.search(f"^A plugin's metric is not that of one process {says}, though loss", verdict.advice[0])


def test_metrics_that_are_right_agree(verify: Verifier, composition_file: Path) -> None:
    plugins, settings = ("tp", "statistics", "resources", "metric_cases:Observing"), {**BATCH, **TP2}
    settings |= {"statistics.activations": ["layers.*.attention"], "statistics.attention_logits": True}
    verdict = verify(compositions._request(composition_file, plugins, settings), 2, steps=2)
    assert verdict.agree, verdict
    assert "metrics" in {check.name for check in verdict.checks}


def test_a_plugin_that_spoils_checkpoints_is_found(verify: Verifier, composition_file: Path) -> None:
    verdict = verify(Fault("sabotage:SavedTwice", set(), "").request(composition_file), 2, steps=1)
    assert verdict.failed == {"checkpoint"}
    assert "One process does not load what the layout saved" in verdict.advice[0]


RIGHT: dict[str, tuple[tuple[str, ...], int, Mapping[str, Any]]] = {
    "a key bias, whose gradient is rounding alone": (FSDP, 3, {"decoder.qkv_bias": True, "adamw.lr": 0.01}),
    "signs of gradients": (("tp", "lion"), 2, {**TP2, "decoder.qkv_bias": True, "lion.lr": 0.003}),
    "free runs that part by rounding": (FSDP, 2, {"adamw.lr": 0.3, "train.clip_norm": 0.0}),
    "weights that hardly move": (FSDP, 2, {**WARM, "adamw.lr": 1e-6}),
}


@pytest.mark.parametrize(
    "name", marked(RIGHT, ["a key bias, whose gradient is rounding alone", "weights that hardly move"])
)
def test_what_is_right_is_not_called_wrong(verify: Verifier, composition_file: Path, name: str) -> None:
    """Where an optimizer makes much of little."""
    plugins, world, settings = RIGHT[name]
    verdict = verify(compositions._request(composition_file, plugins, {**BATCH, **settings}), world, steps=6)
    assert verdict.agree, verdict
    assert ("free runs" in name) == any("free runs part" in check.says for check in verdict.checks), verdict
