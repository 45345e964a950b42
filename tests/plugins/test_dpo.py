"""Preference losses against the formulas of their papers, and what a run refuses, logs and learns."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakes
import forge_cli
from forge_train import MASKED, Applied, Batch, ConfigError, Job, Phase, Plugin, Transform, hookimpl
from forge_train_kit.metrics import Mean
from forge_train_kit.model import Linear
from forge_train_plugins.tasks._dpo import METRICS, AnswerPairs
from forge_train_plugins.tasks.dpo import DPO
from forge_train_tools import plan
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import RunForge, TinyRun, runs
from lora_models import logits

pytestmark = [pytest.mark.unit]

WORDS, DIM, LENGTHS = 19, 8, ((5, 3), (1, 4), (7, 7))
"""Tokens of the chosen and the rejected answer of each pair."""


class Unfrozen(Plugin):
    """Trains a parameter beside what an adapter adds."""

    api = (1, 0)
    name = "norm.weight"

    @hookimpl
    def parallelize(self, job: Job) -> Transform:
        def apply(part: nn.Module) -> Applied:
            part.get_parameter(self.name).requires_grad_(True)
            return Applied(part, (self.name,))

        return Transform(Phase.RECOMPUTE, "unfrozen", apply)


class Reference:
    """Another model of the same vocabulary."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.embedding = nn.Embedding(WORDS, 2 * DIM)
        head: nn.Module = fakes.initialised(Linear(2 * DIM, WORDS))
        self.parts = [nn.ModuleDict({"head": head}).requires_grad_(False).eval()]

    def __call__(self, inputs: Tensor) -> Any:
        return self.embedding(inputs)


def case() -> tuple[nn.ModuleDict, Tensor, Batch]:
    """Three pairs after a prompt of three tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 10, DIM, generator=generator).requires_grad_()
    inputs, labels = (torch.randint(0, WORDS, (6, 10), generator=generator) for _ in range(2))
    for row, length in enumerate(length for pair in LENGTHS for length in pair):
        labels[row, :3] = labels[row, 3 + length :] = MASKED
    batch = Batch(inputs, labels, targets={"member": torch.tensor([0, 1, 0, 1, 0, 1])})
    return nn.ModuleDict({"head": fakes.initialised(Linear(DIM, WORDS), 2)}), hidden, batch


def answer_pairs(observed: Mapping[str, Any] | None = None, **options: Any) -> Any:
    compares = options.get("loss", "sigmoid") in ("sigmoid", "ipo")
    dist = SimpleNamespace(layout=SimpleNamespace(cp=1))
    job: Any = SimpleNamespace(models={"reference": Reference()} if compares else {}, dist=dist)
    return AnswerPairs(job, DPO.Config(**options), lambda: observed)


def answers(head: nn.Module, hidden: Tensor, labels: Tensor) -> list[tuple[Tensor, int]]:
    """The log-probability of each row's answer in fp64, and its number of tokens."""
    found = []
    for states, row in zip(head.double()(hidden.double()), labels, strict=True):
        terms = [states[at].log_softmax(-1)[token] for at, token in enumerate(row.tolist()) if token != MASKED]
        found.append((torch.stack(terms).sum(), len(terms)))
    return found


def sigmoid(w: Tensor, r: Tensor, ref_w: Tensor, ref_r: Tensor, beta: float = 0.1, smoothing: float = 0.0) -> Tensor:
    """arXiv:2305.18290, eq. 7; smoothed as if that share of the pairs were swapped (cDPO)."""
    delta = beta * (w - ref_w) - beta * (r - ref_r)
    p = 1 / (1 + torch.exp(-delta))
    return -(1 - smoothing) * p.log() - smoothing * (1 - p).log()


def ipo(w: Tensor, r: Tensor, ref_w: Tensor, ref_r: Tensor, tau: float, swapped: float = 0.0) -> Tensor:
    """arXiv:2310.12036, eq. 17, of pairs of which that share is swapped."""
    both = [((w + ref_r - r - ref_w) - 1 / (2 * tau)) ** 2, ((r + ref_w - w - ref_r) - 1 / (2 * tau)) ** 2]
    return (1 - swapped) * both[0] + swapped * both[1]


def simpo(w: Tensor, r: Tensor, beta: float, gamma: float) -> Tensor:
    """arXiv:2405.14734, eq. 6, of log-probabilities divided by lengths."""
    return -torch.log(1 / (1 + torch.exp(-(beta * w - beta * r - gamma))))


def orpo(w: Tensor, r: Tensor, lam: float, swapped: float = 0.0) -> Tensor:
    """arXiv:2403.07691, eq. 6 and 7, of log-probabilities divided by lengths; of pairs of which that share is swapped,
    but for the likelihood."""
    odds = [one.exp() / (1 - one.exp()) for one in (w, r)]
    ratios = [-torch.log(1 / (1 + torch.exp(-torch.log(a / b)))) for a, b in (odds, odds[::-1])]
    return -w + lam * ((1 - swapped) * ratios[0] + swapped * ratios[1])


NORMALISED = {"length_normalised": True}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "sigmoid": ({"beta": 0.4}, lambda w, r, ref_w, ref_r: sigmoid(w, r, ref_w, ref_r, 0.4)),
    "smoothed": ({"label_smoothing": 0.2}, lambda w, r, ref_w, ref_r: sigmoid(w, r, ref_w, ref_r, smoothing=0.2)),
    "sigmoid per token": ({"beta": 2.0, **NORMALISED}, lambda w, r, ref_w, ref_r: sigmoid(w, r, ref_w, ref_r, 2.0)),
    "ipo, sums": ({"loss": "ipo", "beta": 0.3}, lambda w, r, ref_w, ref_r: ipo(w, r, ref_w, ref_r, 0.3)),
    "ipo": ({"loss": "ipo", "beta": 0.3, **NORMALISED}, lambda w, r, ref_w, ref_r: ipo(w, r, ref_w, ref_r, 0.3)),
    "simpo": (
        {"loss": "simpo", "beta": 2.5, "target_margin": 1.4, **NORMALISED},
        lambda w, r, ref_w, ref_r: simpo(w, r, 2.5, 1.4),
    ),
    "orpo": ({"loss": "orpo", "beta": 0.2, **NORMALISED}, lambda w, r, ref_w, ref_r: orpo(w, r, 0.2)),
    "smoothed ipo": (
        {"loss": "ipo", "beta": 0.3, "label_smoothing": 0.2},
        lambda w, r, ref_w, ref_r: ipo(w, r, ref_w, ref_r, 0.3, 0.2),
    ),
    "smoothed simpo": (
        {"loss": "simpo", "beta": 2.5, "target_margin": 1.4, "label_smoothing": 0.2, **NORMALISED},
        lambda w, r, ref_w, ref_r: 0.8 * simpo(w, r, 2.5, 1.4) + 0.2 * simpo(r, w, 2.5, -1.4),
    ),
    "smoothed orpo": (
        {"loss": "orpo", "beta": 0.2, "label_smoothing": 0.2, **NORMALISED},
        lambda w, r, ref_w, ref_r: orpo(w, r, 0.2, 0.2),
    ),
}


@pytest.mark.parametrize("chunk", [0, 6, 1000])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_papers(name: str, chunk: int) -> None:
    options, formula = CASES[name]
    sft_weight = 0.7 if name in ("smoothed", "simpo") else 0.0
    part, hidden, batch = case()
    task = answer_pairs(**options, chunk=chunk, sft_weight=sft_weight)
    loss = task.loss(part, hidden, batch)
    found = torch.autograd.grad(loss, [hidden, *part.parameters()])
    reference, expected = Reference(), torch.zeros((), dtype=torch.float64)
    mine = answers(part["head"], hidden, batch.labels)
    theirs = answers(reference.parts[0]["head"], reference(batch.inputs), batch.labels)
    for at in (0, 2, 4):
        rows = [*mine[at : at + 2], *theirs[at : at + 2]]
        assert [count for _, count in rows[:2]] == [*LENGTHS[at // 2]]
        expected = expected + formula(*(one / count if task.config.length_normalised else one for one, count in rows))
        expected = expected - sft_weight * rows[0][0] / rows[0][1]
    wanted = torch.autograd.grad(expected, [hidden, *part.parameters()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())
    assert task.weight(batch) == 3


@pytest.mark.parametrize("loss", ["sigmoid", "simpo"])
def test_metrics_are_of_the_pairs_that_count(loss: str) -> None:
    part, hidden, batch = case()
    batch.targets["member"][2:4] = -1  # padding
    metrics = {name: Mean() for name in (*METRICS, *(["kl"] if loss == "sigmoid" else []))}
    task = answer_pairs(metrics, loss=loss, beta=0.5)
    assert task.weight(batch) == 2
    value = task.loss(part, hidden, batch).item()
    reference = Reference()
    mine = [one.item() for one, _ in answers(part["head"], hidden, batch.labels)]
    theirs = [one.item() for one, _ in answers(reference.parts[0]["head"], reference(batch.inputs), batch.labels)]
    relative = [0.5 * (a - (b if loss == "sigmoid" else 0)) for a, b in zip(mine, theirs, strict=True)]
    margins = [relative[at] - relative[at + 1] for at in (0, 4)]
    expected = {
        "accuracy": sum(margin > 0 for margin in margins) / 2,
        "margin": sum(margins) / 2,
        "chosen_reward": (relative[0] + relative[4]) / 2,
        "rejected_reward": (relative[1] + relative[5]) / 2,
        "chosen_log_probability": (mine[0] + mine[4]) / 2,
        "rejected_log_probability": (mine[1] + mine[5]) / 2,
    }
    if loss == "sigmoid":
        expected["kl"] = sum((relative[at] / 0.5) ** 2 / 2 for at in (0, 1, 4, 5)) / 4
    assert {name: one.value(one.sums, one.maxima) for name, one in metrics.items()} == pytest.approx(expected, rel=1e-5)
    assert value == pytest.approx(-sum(F.logsigmoid(torch.tensor(one)).item() for one in margins), rel=1e-5)


def test_the_divergence_is_that_of_whole_answers() -> None:
    part, hidden, batch = case()
    kls = []
    for per_token in (False, True):
        metrics = {name: Mean() for name in (*METRICS, "kl")}
        answer_pairs(metrics, loss="ipo", length_normalised=per_token).loss(part, hidden, batch)
        kls.append(metrics["kl"].value(metrics["kl"].sums, metrics["kl"].maxima))
    assert kls[0] == kls[1] > 0


@pytest.mark.parametrize("name", ["smoothed", "ipo", "simpo", "orpo"])
def test_padding_changes_nothing(name: str) -> None:
    part, hidden, batch = case()
    batch.targets["member"][2:4], batch.labels[2:4] = -1, MASKED
    metrics = {one: Mean() for one in METRICS}
    options = {**CASES[name][0], "sft_weight": 0.0 if name == "orpo" else 0.3}
    loss = answer_pairs(metrics, **options).loss(part, hidden, batch)
    found = torch.autograd.grad(loss, hidden)[0]
    assert not found[2:4].any()
    assert all(math.isfinite(one.value(one.sums, one.maxima)) for one in metrics.values())
    rows = torch.tensor([0, 1, 4, 5])
    few = Batch(batch.inputs[rows], batch.labels[rows], targets={"member": batch.targets["member"][rows]})
    expected = answer_pairs(**options).loss(part, hidden[rows], few)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden)[0])


# -- runs -------------------------------------------------------------------------------------------------------------

SMALL = {"train.sequence": 48, "train.micro_batch": 2, "train.evaluate_every": 0}


def pairs(folder: Path, count: int = 64) -> dict[str, Any]:
    """Pairs whose chosen answer is `yes`, and settings that read them."""
    records = [{"prompt": f"say {n}", "chosen": "yes", "rejected": f"no {n}"} for n in range(count)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    section = {"path": str(folder / "pairs.jsonl"), "cache": str(folder / "cache"), "template": "plain"}
    return {"text_pairs": {**section, "held_out": 0.2}, **SMALL}


def trained(run_forge: RunForge, folder: Path, **more: Any) -> TinyRun:
    plugins = ["dpo", "text_pairs", *more.pop("plugins", ())]
    options = {name: more.pop(name) for name in ("steps", "name", "stop_at") if name in more}
    settings = {**pairs(folder), **{key.replace("__", "."): value for key, value in more.items()}}
    return run_forge(plugins, settings, without=["text"], folder=folder / "runs", **options)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"train.sequence": 48, "decoder.vocabulary": 320}
    return runs.run_forge([], shape, steps=2, folder=tmp_path_factory.mktemp("base")).run


@pytest.fixture
def base(begun: Path, tmp_path: Path) -> str:
    """A copy of the test's own, which may be moved."""
    return str(shutil.copytree(begun, tmp_path / "base"))


@pytest.mark.slow
def test_the_reference_is_where_the_run_started_and_stays_there(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    fast = {"adamw__lr": 1e-2, "train__init_from": base, "dpo__beta": 0.5}
    run = trained(run_forge, tmp_path, steps=12, train__evaluate_every=12, checkpoint__every=6, **fast)
    first, last = run.metrics[0], run.metrics[-1]
    assert run.losses[0] == pytest.approx(math.log(2))
    assert (first["dpo.margin"], first["dpo.chosen_reward"]) == (0, 0)
    assert last["dpo.accuracy"] == 1
    assert last["dpo.margin"] > 0.5
    assert last["dpo.margin"] == pytest.approx(last["dpo.chosen_reward"] - last["dpo.rejected_reward"], rel=1e-4)
    assert last["dpo.chosen_log_probability"] > first["dpo.chosen_log_probability"]
    (evaluation,) = (event for event in run.events if event["event"] == "evaluation")
    assert evaluation["metrics"]["dpo.accuracy"] == 1
    assert evaluation["loss"] < math.log(2) / 1.2
    trained(run_forge, tmp_path, steps=12, name="r", stop_at=6, **fast)
    resumed = trained(run_forge, tmp_path, steps=12, name="r", **fast)
    assert resumed.losses[6:] == run.losses[6:]
    moved = Path(base).rename(tmp_path / "moved")
    with pytest.raises(
        ConfigError, match=r"The weights of the extra model 'reference' \(dpo\..*\): .* there is no such run"
    ):
        trained(run_forge, tmp_path, steps=13, name="r", **fast)
    there = {"dpo__weights": str(moved), "checkpoint__allow_changes": ["dpo.weights"]}
    assert trained(run_forge, tmp_path, steps=13, name="r", **fast, **there).finished.step == 13


@pytest.mark.slow
def test_held_out_margins_grow_and_the_model_stays_near_its_reference(
    run_forge: RunForge, base: str, tmp_path: Path
) -> None:
    """How near, is for `beta` to say: `dpo.kl` of held-out pairs levels off, sooner with a larger one, and so does
    KL(model ‖ reference) of the next byte, over texts that no pair has."""
    texts = torch.tensor([[*f"a line of text, and {n:02} more"[:24].encode()] for n in range(8)])
    before = open_model(Path(base), text=False).model
    divergences, estimates = [], []
    for beta in (0.1, 1.0):
        (folder := tmp_path / str(beta)).mkdir()
        more = {"adamw__lr": 3e-3, "train__init_from": base, "train__evaluate_every": 8, "dpo__beta": beta}
        run = trained(run_forge, folder, steps=48, **more)
        margins, kls = (
            [one["metrics"][f"dpo.{name}"] for one in run.events if one["event"] == "evaluation"]
            for name in ("margin", "kl")
        )
        assert len(margins) == 6
        assert margins[0] > 0
        assert margins == sorted(margins)
        assert run.metrics[0]["dpo.kl"] == 0
        growth = [later - one for one, later in itertools.pairwise(kls)]
        assert 0 < growth[-1] < max(growth) / 2
        estimates.append(kls[-1])
        with torch.no_grad():
            mine, other = (logits(one, texts).log_softmax(-1) for one in (run.model, before))
        divergences.append(float((mine.exp() * (mine - other)).sum(-1).mean()))
    assert 0 < divergences[1] < divergences[0] < 1
    assert 1 < estimates[1] < estimates[0] / 4 < 100


@pytest.mark.slow
def test_a_reference_keeps_the_values_that_it_was_saved_with(
    run_forge: RunForge, base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the base of rotary positions, which changes no shape."""
    own = {"train.sequence": 48, "decoder.vocabulary": 320, "decoder.rope.theta": 50.0, "decoder.hidden": 96}
    other = str(run_forge([], own, steps=2, folder=tmp_path / "other").run)
    found = trained(run_forge, tmp_path, steps=1, train__init_from=base, dpo__weights=other)
    assert "keeps its own decoder.hidden, decoder.rope" in caplog.text
    given = {"decoder": {"rope": {"theta": 50.0}, "hidden": 96}}
    same = trained(
        run_forge, tmp_path, name="s", steps=1, train__init_from=base, dpo__weights=other, dpo__reference=given
    )
    assert found.losses == same.losses
    given = {"decoder": {"rope": {"theta": 10000.0}}}
    unlike = trained(
        run_forge, tmp_path, name="u", steps=1, train__init_from=base, dpo__weights=other, dpo__reference=given
    )
    assert unlike.losses != found.losses, "a value that is given counts more"


def test_a_reference_with_experts_keeps_its_values_too(
    run_forge: RunForge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two plugins make the feed-forwards, one those of some layers."""
    own = {"train.sequence": 48, "decoder.vocabulary": 320, "moe.experts": 4, "moe.top_k": 3}
    other = str(run_forge(["moe"], own, steps=2, folder=tmp_path / "other").run)
    trained(run_forge, tmp_path, steps=1, plugins=["moe"], moe__experts=4, moe__top_k=2, dpo__weights=other)
    assert f"The model of {other} keeps its own moe.top_k." in caplog.text


@pytest.mark.slow
def test_the_reference_has_no_adapter_of_the_model(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    """The run's own model without its updates, or, if its weights are named, a second one: to the bit the same."""
    more = {"adamw__lr": 1e-2, "train__init_from": base, "dpo__beta": 0.5}
    run = trained(run_forge, tmp_path, steps=6, plugins=["lora"], **more)
    second = trained(run_forge, tmp_path, name="second", steps=6, plugins=["lora"], **more, dpo__weights=base)
    assert not run.job.models
    assert not [name for name, _ in second.job.models["reference"].named_parameters() if "lora" in name]
    assert run.losses == second.losses
    keys = [f"dpo.{name}" for name in METRICS]
    assert [[line[key] for key in keys] for line in run.metrics] == [
        [line[key] for key in keys] for line in second.metrics
    ]
    assert run.losses[0] == pytest.approx(math.log(2))
    assert run.metrics[-1]["dpo.margin"] > 0.05
    assert {name.rpartition(".")[2] for name, one in run.model.named_parameters() if one.requires_grad} == {
        "lora_A",
        "lora_B",
    }


def test_a_reference_with_its_adapter_on_is_told(
    run_forge: RunForge, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers have trained like that, at a loss of ln 2."""
    more = {"adamw__lr": 1e-2, "train__init_from": base}
    monkeypatch.setattr("forge_train_kit.reference.scores.without_updates", lambda part: torch.no_grad())
    monkeypatch.setattr("forge_train_kit.reference.plugin.DIFFERS_BY", 3)
    with pytest.raises(ConfigError, match="after 3 steps the reference still scores every answer as the model does"):
        trained(run_forge, tmp_path, steps=4, plugins=["lora"], **more)


@pytest.mark.slow
def test_a_run_that_begins_with_updates_is_not_its_own_reference(
    run_forge: RunForge, base: str, tmp_path: Path
) -> None:
    """Without updates it is the base, and not the tuned model that it starts from."""
    more = {"adamw__lr": 1e-2, "train__init_from": base}
    first = trained(run_forge, tmp_path, steps=2, plugins=["lora"], **more, checkpoint__only=[]).run
    again = {"train__init_from": str(first), "train__init_missing": [], "checkpoint__only": []}
    with pytest.raises(
        ConfigError, match=r"dpo\.weights: the reference is the model without its updates, and the run be"
    ):
        trained(run_forge, tmp_path, name="again", steps=1, plugins=["lora"], **again)
    trained(run_forge, tmp_path, name="r", steps=4, stop_at=2, plugins=["lora"], **more)
    assert trained(run_forge, tmp_path, name="r", steps=4, plugins=["lora"], **more).finished.step == 4  # resumed


def test_an_optimizer_that_steps_in_the_backward_pass_is_fine(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    more = {"train__init_from": base, "train__clip_norm": 0, "dpo__loss": "simpo", "train__micro_batch": 0}
    trained(run_forge, tmp_path, steps=2, plugins=["optimizer_in_backward"], **more)


@pytest.mark.parametrize("what", ["embedding.weight", "layers.0.attention.q.weight"])
def test_a_weight_beneath_an_update_that_is_trained_too_needs_a_copy(
    run_forge: RunForge, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    more = {"train__init_from": base, "train__init_missing": ["*lora_*"], "checkpoint__only": []}
    modules = ["embedding", "*.q"]
    monkeypatch.setattr(Unfrozen, "name", what)
    message = rf"the reference is the model without its updates, and {what} is trained beside them; name"
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, tmp_path, steps=1, plugins=["lora", f"{__name__}:Unfrozen"], **more, lora__modules=modules)


@pytest.mark.slow
def test_a_plan_knows_a_model_that_is_its_own_reference(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    run = trained(run_forge, tmp_path, steps=1, plugins=["lora"], train__init_from=base)
    assert plan(run.run / "config.toml").memory.activations


def test_what_is_trained_beside_updates_needs_a_copy(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    more = {"train__init_from": base, "train__init_missing": ["*lora_*"], "checkpoint__only": []}
    message = (
        r"dpo\.weights: the reference is the model without its updates, and norm\.weight is trained beside them; name"
    )
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, tmp_path, steps=1, plugins=["lora", f"{__name__}:Unfrozen"], **more)


@pytest.mark.slow
def test_a_stored_reference_gives_the_losses_of_a_live_one(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    file, sums = tmp_path / "reference.json", {"dpo__loss": "ipo", "dpo__length_normalised": False}
    more = {"adamw__lr": 1e-2, "train__init_from": base, "train__evaluate_every": 6, "checkpoint__every": 3, **sums}
    live = trained(run_forge, tmp_path, steps=6, **more)
    more["dpo__stored"] = str(file)
    with pytest.raises(ConfigError, match=r"dpo\.stored: 'ipo' needs a reference, .* parallel\.pp = 1 and tr"):
        trained(run_forge, tmp_path, steps=6, plugins=["pp"], parallel__pp=2, **more)
    first = trained(run_forge, tmp_path, steps=6, name="first", **more)
    content = json.loads(file.read_text())
    assert len(content["log_probabilities"]) == 2 * 64  # held-out pairs too
    assert set(first.job.models) == {"reference"}
    stopped = trained(run_forge, tmp_path, steps=6, name="second", stop_at=3, **more)
    assert not stopped.job.models
    second = trained(run_forge, tmp_path, steps=6, name="second", **more)
    for run in (first, second):
        assert run.losses == pytest.approx(live.losses, rel=1e-6)
        for name in (*METRICS, "kl"):
            got, expected = (one.metrics[-1][f"dpo.{name}"] for one in (run, live))
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert second.losses == first.losses

    other = str(run_forge([], {"train.sequence": 48, "decoder.vocabulary": 320}, steps=1, folder=tmp_path / "o").run)
    changed = {**more, "train__init_from": other}
    with pytest.raises(ConfigError, match=r"dpo\.stored: .*reference\.json was computed with another reference; nam"):
        trained(run_forge, tmp_path, steps=1, **changed)
    with pytest.raises(ConfigError, match=r"dpo\.stored: .* was computed from other train data, or with another temp"):
        trained(run_forge, tmp_path, steps=1, **more, text_pairs__held_out=0.3)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"dpo\.stored: .*reference\.json holds no log-probabilities of a reference"):
        trained(run_forge, tmp_path, steps=1, **more)


def test_a_stored_reference_repeats_no_warning(
    run_forge: RunForge, base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The data is built twice, once to read all answers."""
    more = {"train__init_from": base, "train__evaluate_every": 1, "train__evaluate_batches": 9}
    trained(run_forge, tmp_path, steps=1, dpo__stored=str(tmp_path / "reference.json"), **more)
    assert len([one for one in caplog.messages if one.startswith("An evaluation takes")]) == 1


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_a_loss_without_a_reference_builds_no_second_model(run_forge: RunForge, tmp_path: Path, loss: str) -> None:
    run = trained(run_forge, tmp_path, steps=8, dpo__loss=loss, adamw__lr=1e-2)
    assert not run.job.models
    assert run.losses[-1] < run.losses[0]
    assert run.metrics[-1]["dpo.accuracy"] == 1
    assert "dpo.kl" not in run.metrics[-1]
    config = run.job.config.sections["dpo"]
    assert (config.beta, config.target_margin) == ((2.0, 1.0) if loss == "simpo" else (0.1, 0.0))
    assert config.length_normalised


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"dpo\.weights: the run starts from random weights, which can't be its reference; name a model"),
        ({"dpo__beta": 0}, r"dpo\.beta: .*greater than 0"),
        ({"dpo__beta": -1.5}, r"dpo\.beta: .*greater than 0"),
        ({"dpo__label_smoothing": 0.5}, r"dpo\.label_smoothing: .*less than 0\.5"),
        ({"dpo__target_margin": 1}, r"dpo\.target_margin: has no effect with dpo\.loss = 'sigmoid'"),
        ({"dpo__loss": "orpo", "dpo__sft_weight": 0.1}, r"dpo\.sft_weight: has no effect with .* contains this term"),
        ({"dpo__loss": "simpo", "dpo__weights": "x"}, r"dpo\.weights: has no effect with dpo\.loss = 'simpo'"),
        ({"train__init_from": "BASE", "train__init_map": "m:M"}, r"train\.init_map: changes the model and not its ref"),
        (
            {"dpo__weights": "FOLDER"},
            r"dpo\.weights: the reference is read .* Hugging Face folder; `forge train .*` or",
        ),
        (
            {"parallel__pp": 2, "plugins": ("pp",)},
            r"dpo\.loss: 'sigmoid' needs a reference, which a pipeline can't run",
        ),
        ({"dpo__weights": "BASE", "dpo__stored": "FOLDER"}, r"dpo\.stored: .*hf is a folder; name a file in it\."),
        ({"dpo__weights": "BASE", "dpo__stored": "FILE"}, r"dpo\.stored: there is no folder .*nowhere; make it first"),
        ({"dpo__weights": "FILE"}, r"'reference' \(dpo\.weights, dpo\.reference\): .*x\.json: there is no such run"),
        (
            {"dpo__weights": "BASE", "dpo__without": ["nobody"]},
            r"^In the extra model 'reference' \(dpo.*\): there is no plugin 'nobody'",
        ),
        (
            {"dpo__weights": "BASE", "dpo__reference": {"decoder": {"dim": 96}}},
            r"extra model 'reference' \(dpo\.weights, dpo\.reference\): .*holds another model",
        ),
    ],
)
def test_mistakes_are_told(
    run_forge: RunForge, base: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    named = {"BASE": base, "FOLDER": str(tmp_path / "hf"), "FILE": str(tmp_path / "nowhere" / "x.json")}
    settings = {key: named.get(value, value) if isinstance(value, str) else value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, tmp_path, steps=1, **settings)


def test_a_reference_of_another_vocabulary_is_refused(run_forge: RunForge, tmp_path: Path) -> None:
    wide = {"decoder.vocabulary": 300, "train.sequence": 48}
    other = str(run_forge([], wide, steps=1, folder=tmp_path / "other").run)
    with pytest.raises(ConfigError, match=r"reference's vocabulary has 300 tokens, but the model's has 320; they must"):
        trained(run_forge, tmp_path, steps=1, dpo__weights=other, dpo__reference={"decoder": {"vocabulary": 300}})


@pytest.mark.slow
def test_a_plan_reads_no_stored_reference(tmp_path: Path) -> None:
    (tmp_path / "reference.json").write_text("{}", encoding="utf-8")
    for task, data in (("dpo", "text_pairs"), ("kto", "text_feedback")):
        settings = ("-s", f"{task}.stored={tmp_path / 'reference.json'}", "-s", "train.sequence=32")
        done = forge_cli.forge("plan", "-p", f"{task},{data}", "--without", "text", *settings, "--json")
        assert done.code == 0, done.err
        assert done.json["memory"]["activations"]


def test_a_plan_needs_neither_pairs_nor_weights() -> None:
    memory = []
    for loss in ("simpo", "sigmoid"):
        settings = ("-s", f"dpo.loss={loss}", "-s", "decoder.layers=1", "-s", "train.sequence=32")
        done = forge_cli.forge("plan", "-p", "dpo,text_pairs", "--without", "text", *settings, "--json")
        assert done.code == 0, done.err
        memory.append(done.json["memory"])
    assert memory[1]["parameters"] == 2 * memory[0]["parameters"]
    assert memory[1]["gradients"] == memory[0]["gradients"]
