"""KTO against the formula of its paper, and what a run refuses, logs and learns."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fakes
import forge_cli
from forge_train import MASKED, Batch, ConfigError, CurrentStep, Job, Model, Plugin, Update, hookimpl
from forge_train_kit.data.mismatched import DESIRABLE, split_mismatched, with_mismatched
from forge_train_kit.metrics import Mean
from forge_train_kit.model import Linear
from forge_train_plugins.tasks._kto import POINT, Difference, JudgedAnswers, ReferencePoint, make_metrics
from forge_train_plugins.tasks.kto import KTO
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import RunForge, TinyRun, runs
from poison import Poison
from test_dpo import DIM, WORDS, Reference, answers

pytestmark = [pytest.mark.unit]

LABELS = (1, 0, 1, 1, 0, -1)
"""Of six rows, of which the last one is padding."""
LENGTHS = (5, 3, 1, 4, 7, 6)


def kto(
    ratios: Sequence[Tensor],
    labels: Sequence[int],
    point: float,
    beta: float,
    good: float,
    bad: float,
    wrong: float = 0.0,
) -> Tensor:
    """arXiv:2402.01306, eq. 8, summed: λ_y − v(x, y), of r = log π(y|x) / π_ref(y|x), if that share of the labels is
    wrong."""
    if wrong:
        other = [1 - label if label >= 0 else label for label in labels]
        right = kto(ratios, labels, point, beta, good, bad)
        return (1 - wrong) * right + wrong * kto(ratios, other, point, beta, good, bad)
    total = torch.zeros((), dtype=torch.float64)
    for ratio, label in zip(ratios, labels, strict=True):
        if label == 1:
            total = total + good - good / (1 + torch.exp(-beta * (ratio - point)))
        elif label == 0:
            total = total + bad - bad / (1 + torch.exp(-beta * (point - ratio)))
    return total


def case() -> tuple[nn.ModuleDict, Tensor, Batch]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 12, DIM, generator=generator).requires_grad_()
    inputs, labels = (torch.randint(0, WORDS, (6, 12), generator=generator) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        labels[row, :3] = labels[row, 3 + length :] = MASKED
    targets = {DESIRABLE: torch.tensor(LABELS), POINT: torch.tensor(0.8)}
    return (
        nn.ModuleDict({"head": fakes.initialised(Linear(DIM, WORDS), 2)}),
        hidden,
        Batch(inputs, labels, targets=targets),
    )


@pytest.mark.parametrize("chunk", [0, 6, 1000])
@pytest.mark.parametrize(("beta", "good", "bad"), [(0.1, 1.0, 1.0), (0.4, 1.3, 0.7)])
@pytest.mark.parametrize(
    ("per_token", "sft", "wrong"), [(False, 0.0, 0.0), (True, 0.0, 0.0), (True, 0.3, 0.0), (False, 0.3, 0.2)]
)
def test_losses_gradients_and_metrics_are_those_of_the_paper(
    beta: float, good: float, bad: float, chunk: int, per_token: bool, sft: float, wrong: float
) -> None:
    part, hidden, batch = case()
    job: Any = SimpleNamespace(models={"reference": Reference()}, dist=SimpleNamespace(layout=SimpleNamespace(cp=1)))
    config = KTO.Config(
        beta=beta,
        desirable_weight=good,
        undesirable_weight=bad,
        chunk=chunk,
        length_normalised=per_token,
        label_smoothing=wrong,
        sft_weight=sft,
    )
    metrics = make_metrics()
    task = JudgedAnswers(job, config, lambda: metrics)
    loss = task.loss(part, hidden, batch)
    found = torch.autograd.grad(loss, [hidden, *part.parameters()])
    mine, reference = answers(part["head"], hidden, batch.labels), Reference()
    theirs = answers(reference.parts[0]["head"], reference(batch.inputs), batch.labels)
    ratios = [one - other.detach() for (one, _), (other, _) in zip(mine, theirs, strict=True)]
    if per_token:
        ratios = [ratio / length for ratio, length in zip(ratios, LENGTHS, strict=True)]
    expected = kto(ratios, LABELS, 0.8, beta, good, bad, wrong)
    expected = expected - sft * sum(mine[at][0] / LENGTHS[at] for at in range(6) if LABELS[at] == 1)
    wanted = torch.autograd.grad(expected, [hidden, *part.parameters()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())
    assert not found[0][5].any()  # padding
    assert task.weight(batch) == 5
    rewards = [beta * ratio.item() for ratio in ratios]
    chosen, rejected = sum(rewards[at] for at in (0, 2, 3)) / 3, (rewards[1] + rewards[4]) / 2
    values = {name: one.value(one.sums, one.maxima) for name, one in metrics.items()}
    seen = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected, "kl": 0.8}
    assert values == pytest.approx(seen, rel=1e-5)


def test_a_margin_needs_both_kinds() -> None:
    margin, mean = Difference(), Mean()
    margin.update(torch.ones(2), torch.ones(2), torch.zeros(2))
    assert margin.value(margin.sums, margin.maxima) == {}, "it is left out of the line"
    margin.update(torch.full((2,), 0.25), torch.zeros(2), torch.ones(2))
    assert margin.value(margin.sums, margin.maxima) == 0.75
    mean.update(torch.ones(2), weights=torch.zeros(2))
    assert not mean.sums.any()


@pytest.mark.parametrize(("sums", "point"), [((3.0, -1.0), 0.4), ((-3.0, 1.0), 0.0)])
def test_the_reference_point_is_the_mean_of_all_that_count_and_at_least_0(
    monkeypatch: pytest.MonkeyPatch, sums: tuple[float, float], point: float
) -> None:
    """Of two micro-batches, with 2 and 3 rows that count."""
    given = iter(sums)
    executor = SimpleNamespace(evaluate=lambda batch: torch.tensor(next(given)))
    monkeypatch.setattr("forge_train.plugin.hookspecs.executor", lambda model, task, job: executor)
    hooks = SimpleNamespace(prepare_batch=lambda: list)
    dist = SimpleNamespace(world=1)
    job: Any = SimpleNamespace(device=torch.device("cpu"), step=CurrentStep(), hooks=hooks, dist=dist)
    ids = torch.zeros(3, 4, dtype=torch.int64)
    batches = [
        with_mismatched(Batch(ids, ids, targets={DESIRABLE: torch.tensor(labels)}), Batch(ids, ids, ids, ids))
        for labels in ([1, 0, -1], [0, 0, 1])
    ]
    found = ReferencePoint(job)
    model: Any = SimpleNamespace(free_gathered=lambda: None)
    found.bind(model, JudgedAnswers(job, KTO.Config(), lambda: None))
    for made in found(batches):
        assert made.targets.keys() == {DESIRABLE, POINT}
        assert float(made.targets[POINT]) == pytest.approx(point)
        assert not made.problem()
    assert job.step.batches == ()


# -- runs -------------------------------------------------------------------------------------------------------------

SMALL = {"train.sequence": 48, "train.global_batch": 8, "train.micro_batch": 2, "train.evaluate_every": 0}


class Gradients(Plugin):
    """Keeps weights, gradients and batches of a step, before the update."""

    api = (1, 0)
    at = 3
    seen: dict[str, Any]

    @hookimpl
    def on_start(self, job: Job, model: Model) -> None:
        self.job, self.model = job, model

    @hookimpl
    def on_gradients(self, update: Update) -> None:
        if update.step != self.at:
            return
        named = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        Gradients.seen = {
            "weights": {name: one.detach().clone() for name, one in named},
            "gradients": {name: one.grad.clone() for name, one in named if one.grad is not None},
            "loss": float(update.loss),
            "batches": list(self.job.step.batches),
        }


def records(folder: Path, count: int = 64) -> dict[str, Any]:
    """Answers of which those with `yes` are desirable, and settings that read them."""
    found = [
        {"prompt": f"say {n}", "completion": f"yes, {n}" if n % 3 else f"no {n}", "label": bool(n % 3)}
        for n in range(count)
    ]
    (folder / "feedback.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    section = {"path": str(folder / "feedback.jsonl"), "cache": str(folder / "cache"), "template": "plain"}
    return {"text_feedback": {**section, "held_out": 0.2}, **SMALL}


def trained(run_forge: RunForge, folder: Path, **more: Any) -> TinyRun:
    plugins = ["kto", "text_feedback", *more.pop("plugins", ())]
    options = {name: more.pop(name) for name in ("steps", "name", "stop_at") if name in more}
    settings = {**records(folder), **{key.replace("__", "."): value for key, value in more.items()}}
    return run_forge(plugins, settings, without=["text"], folder=folder / "runs", **options)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"train.sequence": 48, "decoder.vocabulary": 320}
    return runs.run_forge([], shape, steps=2, folder=tmp_path_factory.mktemp("base")).run


@pytest.fixture
def base(begun: Path, tmp_path: Path) -> str:
    """A copy of the test's own, which may be moved."""
    return str(shutil.copytree(begun, tmp_path / "base"))


def ratios(model: Any, reference: Any, batch: Batch, per_token: bool) -> list[Tensor]:
    """Log-probability of each row's answer, or of a token of it, less the reference's, in fp64."""
    found = []
    for one in (model, reference):
        hidden = one(batch.inputs, **batch.model_inputs())
        found.append([sum_ / (len_ if per_token else 1) for sum_, len_ in answers(one.head, hidden, batch.labels)])
    return [mine - other.detach() for mine, other in zip(*found, strict=True)]


@pytest.mark.parametrize("per_token", [False, True])
def test_a_step_of_a_run_is_that_of_the_paper(run_forge: RunForge, base: str, tmp_path: Path, per_token: bool) -> None:
    """The third step, by then away from the reference: z0, loss and gradients in fp64, from all rows at once."""
    more = {"train__init_from": base, "adamw__lr": 3e-3, "plugins": [Gradients], "kto__beta": 0.3}
    weighed = {"kto__desirable_weight": 0.7, "kto__undesirable_weight": 1.2, "train__clip_norm": 0}
    run = trained(run_forge, tmp_path, steps=3, **more, **weighed, kto__length_normalised=per_token)
    seen = Gradients.seen
    reference = copy.deepcopy(open_model(Path(base), text=False).model.parts[0]).double()
    model = copy.deepcopy(reference).requires_grad_(True)
    model.load_state_dict({**model.state_dict(), **{name: one.double() for name, one in seen["weights"].items()}})
    loader = run.job.hooks.build_data("train")
    views = [split_mismatched(next(loader)) for _ in range(12)][8:]
    for (own, _), used in zip(views, seen["batches"], strict=True):
        assert own.inputs.equal(used.inputs)
    with torch.no_grad():
        mismatched = [ratio for _, other in views for ratio in ratios(model, reference, other, per_token)]
    point = max(0.0, float(torch.stack(mismatched).mean()))
    assert point > (0.002 if per_token else 0.1)
    for used in seen["batches"]:
        assert float(used.targets[POINT]) == pytest.approx(point, rel=1e-5)
    assert run.metrics[-1]["kto.kl"] == pytest.approx(point, rel=1e-5)
    losses = [
        kto(ratios(model, reference, own, per_token), own.targets[DESIRABLE].tolist(), point, 0.3, 0.7, 1.2)
        for own, _ in views
    ]
    loss = torch.stack(losses).sum() / 8
    loss.backward()
    assert seen["loss"] == pytest.approx(loss.item(), rel=1e-5)
    wanted = dict(model.named_parameters())
    assert seen["gradients"].keys() == wanted.keys()
    for name, one in seen["gradients"].items():
        other = wanted[name].grad
        assert other is not None
        assert float((one - other).norm()) <= 1e-5 * float(other.norm()), name


@pytest.mark.slow
def test_no_micro_batch_changes_a_step(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    more = {"train__init_from": base, "adamw__lr": 3e-3, "kto__beta": 0.3, "train__evaluate_every": 4}
    runs = [
        trained(run_forge, tmp_path, name=str(size), steps=4, train__micro_batch=size, **more) for size in (8, 4, 1)
    ]
    assert runs[0].metrics[-1]["kto.kl"] > 0.1
    for name in ("loss", "grad_norm", "kto.kl", "kto.margin", "kto.chosen_reward"):
        expected = [line[name] for line in runs[0].metrics]
        for run in runs[1:]:
            assert [line[name] for line in run.metrics] == pytest.approx(expected, rel=2e-5, abs=1e-6), name
    evaluations = [next(one for one in run.events if one["event"] == "evaluation") for run in runs]
    assert evaluations[0]["metrics"]["kto.kl"] > 0
    for one in evaluations[1:]:
        assert one["loss"] == pytest.approx(evaluations[0]["loss"], rel=2e-5)
        assert one["metrics"] == pytest.approx(evaluations[0]["metrics"], rel=2e-5)


def test_what_is_kept_of_an_abnormal_step_says_which_answers_are_mismatched(
    run_forge: RunForge, base: str, tmp_path: Path
) -> None:
    more = {"train__init_from": base, "anomaly__not_finite": "skip", "poison__at": 2}
    run = trained(run_forge, tmp_path, steps=3, plugins=["anomaly", Poison], **more)
    (file,) = (run.run / "artifacts" / "anomaly").glob("*.safetensors")
    kept, loader = load_file(file), run.job.hooks.build_data("train")
    views = [split_mismatched(next(loader)) for _ in range(8)][4:]
    marked = [f"{at}.mismatched" in kept for at in range(8)]
    assert marked == [True] * 4 + [False] * 4
    for at, batch in enumerate([other for _, other in views] + [own for own, _ in views]):
        assert kept[f"{at}.inputs"].equal(batch.inputs)
        assert kept[f"{at}.desirable"].equal(batch.targets[DESIRABLE])


@pytest.mark.slow
def test_it_learns_and_a_stopped_run_continues_bit_for_bit(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    fast = {"adamw__lr": 5e-3, "train__init_from": base, "kto__beta": 0.5}
    run = trained(run_forge, tmp_path, steps=12, train__evaluate_every=12, checkpoint__every=6, **fast)
    first, last = run.metrics[0], run.metrics[-1]
    assert run.losses[0] == pytest.approx(0.5)
    assert (first["kto.margin"], first["kto.chosen_reward"], first["kto.kl"]) == (0, 0, 0)
    assert last["kto.margin"] > 1
    assert last["kto.margin"] == pytest.approx(last["kto.chosen_reward"] - last["kto.rejected_reward"], rel=1e-5)
    (evaluation,) = (event for event in run.events if event["event"] == "evaluation")
    assert evaluation["metrics"]["kto.margin"] > 1
    assert evaluation["loss"] < 0.4
    trained(run_forge, tmp_path, steps=12, name="r", stop_at=6, train__evaluate_every=12, **fast)
    resumed = trained(run_forge, tmp_path, steps=12, name="r", train__evaluate_every=12, **fast)
    assert resumed.numbers[6:] == run.numbers[6:]
    for (name, one), (_, other) in zip(run.model.named_parameters(), resumed.model.named_parameters(), strict=True):
        assert one.equal(other), name


@pytest.mark.slow
def test_the_reference_has_no_adapter_of_the_model(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    """The run's own model without its updates, or, if its weights are named, a second one: to the bit the same."""
    more = {"adamw__lr": 1e-2, "train__init_from": base, "kto__beta": 0.5, "plugins": ["lora"]}
    run = trained(run_forge, tmp_path, steps=6, **more)
    second = trained(run_forge, tmp_path, name="second", steps=6, **more, kto__weights=base)
    assert not run.job.models
    assert set(second.job.models) == {"reference"}
    assert run.numbers == second.numbers
    assert run.losses[0] == pytest.approx(0.5)
    assert run.metrics[-1]["kto.margin"] > 0.05
    assert run.metrics[-1]["kto.kl"] > 0


def test_a_reference_with_its_adapter_on_is_told(
    run_forge: RunForge, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"adamw__lr": 1e-2, "train__init_from": base}
    monkeypatch.setattr("forge_train_kit.reference.scores.without_updates", lambda part: torch.no_grad())
    monkeypatch.setattr("forge_train_kit.reference.plugin.DIFFERS_BY", 3)
    with pytest.raises(
        ConfigError, match="kto: after 3 steps the reference still scores every answer as the model does"
    ):
        trained(run_forge, tmp_path, steps=4, plugins=["lora"], **more)


@pytest.mark.slow
def test_dropout_leaves_the_reference_point_alone(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    """The updates are 0 in the first step, so that only noise could make z0 differ; the noise of a step is its own."""
    more = {"train__init_from": base, "plugins": ["lora"], "lora__dropout": 0.5, "kto__beta": 0.5, "adamw__lr": 1e-2}
    run = trained(run_forge, tmp_path, steps=4, **more)
    again = trained(run_forge, tmp_path, name="again", steps=4, train__micro_batch=8, **more)
    assert run.metrics[0]["kto.kl"] == 0
    for name in ("loss", "kto.kl"):
        expected = [line[name] for line in run.metrics]
        assert [line[name] for line in again.metrics] == pytest.approx(expected, rel=2e-5), name


@pytest.mark.slow
def test_a_stored_reference_gives_the_losses_of_a_live_one(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    more = {"adamw__lr": 1e-2, "train__init_from": base, "train__evaluate_every": 6, "checkpoint__every": 3}
    live = trained(run_forge, tmp_path, steps=6, **more)
    more["kto__stored"] = str(file)
    with pytest.raises(ConfigError, match=r"kto\.stored: the loss needs a reference, .* parallel\.pp = 1 and train\.s"):
        trained(run_forge, tmp_path, steps=6, plugins=["pp"], parallel__pp=2, **more)
    first = trained(run_forge, tmp_path, steps=6, name="first", **more)
    content = json.loads(file.read_text())
    assert len(content["log_probabilities"]) == 2 * 64  # mismatched ones and held-out ones too
    assert set(first.job.models) == {"reference"}
    stopped = trained(run_forge, tmp_path, steps=6, name="second", stop_at=3, **more)
    assert not stopped.job.models
    second = trained(run_forge, tmp_path, steps=6, name="second", **more)
    assert second.losses == first.losses
    for run in (first, second):
        assert run.losses == pytest.approx(live.losses, rel=1e-5)
        for name in make_metrics():
            got, expected = (one.metrics[-1][f"kto.{name}"] for one in (run, live))
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6)
    with pytest.raises(ConfigError, match=r"kto\.stored: .* was computed from other train data, or with another temp"):
        trained(run_forge, tmp_path, steps=1, **more, text_feedback__held_out=0.3)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"kto\.stored: .*reference\.json holds no log-probabilities of a reference"):
        trained(run_forge, tmp_path, steps=1, **more)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"kto\.weights: the run starts from random weights, which can't be its reference; name a model"),
        ({"kto__beta": 0}, r"kto\.beta: .*greater than 0"),
        ({"kto__desirable_weight": -1}, r"kto\.desirable_weight: .*greater than 0"),
        ({"kto__label_smoothing": 0.5}, r"kto\.label_smoothing: .*less than 0\.5"),
        (
            {"train__init_from": "BASE", "kto__label_smoothing": 0.2, "kto__undesirable_weight": 4},
            r"kto\.label_smoothing: must be less than 0\.2 with these weights: otherwise answers of the kind with the",
        ),
        (
            {"train__init_from": "BASE", "train__init_map": "m:M"},
            r"changes the model and not its reference; set kto\.w",
        ),
        ({"train__init_from": "BASE", "parallel__pp": 2, "plugins": ("pp",)}, r"kto\.stored: the loss needs a ref"),
        ({"train__init_from": "BASE", "plugins": ("text_pairs",)}, r"build_data"),
    ],
)
def test_mistakes_are_told(
    run_forge: RunForge, base: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    settings = {key: base if value == "BASE" else value for key, value in settings.items()}
    with pytest.raises(ConfigError, match=message):
        trained(run_forge, tmp_path, steps=1, **settings)


def test_it_takes_no_pairs(run_forge: RunForge, base: str, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    settings = {"text_pairs.path": str(tmp_path / "pairs.jsonl"), "train.init_from": base, **SMALL}
    with pytest.raises(ConfigError, match=r"'kto' .* takes 'feedback' .* 'text_pairs' .* gives 'pairs'"):
        run_forge(["kto", "text_pairs"], settings, without=["text"], folder=tmp_path / "runs")


def test_a_plan_needs_neither_answers_nor_weights() -> None:
    settings = ("-s", "decoder.layers=1", "-s", "train.sequence=32")
    memory = []
    for plugins in ("dpo,text_pairs", "kto,text_feedback"):
        done = forge_cli.forge("plan", "-p", plugins, "--without", "text", *settings, "--json")
        assert done.code == 0, done.err
        memory.append(done.json["memory"])
    assert memory[0]["parameters"] == memory[1]["parameters"]
    assert memory[0]["gradients"] == memory[1]["gradients"]
