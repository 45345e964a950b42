"""A teacher's likeliest tokens in a folder: the divergence over them, and what a run that finds them does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fakes
from forge_train import MASKED, Batch, ConfigError
from forge_train.contract.batch import TOKENS
from forge_train_kit.metrics import Ratio
from forge_train_kit.model import Linear
from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy
from forge_train_plugins.tasks._distill import folder as folders
from forge_train_plugins.tasks._distill import stored as storing
from forge_train_plugins.tasks._distill.divergence import top_of
from forge_train_plugins.tasks._distill.task import Distillation
from forge_train_tools import plan
from forge_train_tools.testing import RunForge, TinyRun

pytestmark = [pytest.mark.unit]

WORDS, DIM = 19, 8
KINDS = ("forward", "reverse", "jensen_shannon")


def case(k: int, temperature: float) -> tuple[nn.ModuleDict, Tensor, Batch, Tensor]:
    """A student, a batch with what a teacher says in it, and the teacher's logits."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 10, DIM, generator=generator).requires_grad_()
    inputs, labels = (torch.randint(0, WORDS, (3, 10), generator=generator) for _ in range(2))
    labels[0, :4] = labels[-1, -1] = MASKED
    logits = 3 * torch.randn(3, 10, WORDS, generator=generator)
    tokens, values = top_of(nn.Identity(), logits, k, temperature, 4)
    targets = {storing.TOKENS_OF: tokens, storing.VALUES_OF: values}
    head: nn.Module = fakes.initialised(Linear(DIM, WORDS), 2)
    return nn.ModuleDict({"head": head}), hidden, Batch(inputs, labels).with_targets(targets, TOKENS), logits


def distillation(kind: Any, temperature: float, chunk: int = 0, **more: Any) -> Any:
    stored: Any = SimpleNamespace(vocabulary=WORDS)
    return Distillation(ChunkedCrossEntropy(), {}, 0.6, temperature, chunk, kind, stored=stored, **more)


def divergence(kind: str, teacher: Tensor, student: Tensor) -> Tensor:
    """By the definition, of probabilities; a class of no probability counts nothing."""
    middle = (student + teacher) / 2
    if kind == "jensen_shannon":
        return (divergence("forward", teacher, middle) + divergence("forward", student, middle)) / 2
    p, q = (teacher, student) if kind == "forward" else (student, teacher)
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "temperature", "chunk"), [(1, 1.0, 0), (4, 2.0, 4), (18, 0.5, 1000)])
def test_loss_and_gradients_are_those_of_classes_and_the_rest(
    kind: str, k: int, temperature: float, chunk: int
) -> None:
    part, hidden, batch, logits = case(k, temperature)
    loss = distillation(kind, temperature, chunk).loss(part, hidden, batch)
    found = torch.autograd.grad(loss, [hidden, *part.parameters()])
    kept = batch.labels != MASKED
    mine = part["head"].double()(hidden.double())[kept]
    teacher, student = ((one.double() / temperature).softmax(-1) for one in (logits[kept], mine))
    top = teacher.topk(k, -1).indices
    few = [
        torch.cat([one.gather(-1, top), one.scatter(-1, top, 0.0).sum(-1, keepdim=True)], -1)
        for one in (teacher, student)
    ]
    labels = F.cross_entropy(mine, batch.labels[kept], reduction="sum")
    expected = 0.6 * temperature**2 * divergence(kind, *few) + 0.4 * labels
    wanted = torch.autograd.grad(expected, [hidden, *part.parameters()])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_tokens_as_the_vocabulary_has_give_the_whole_divergence(kind: str) -> None:
    part, hidden, batch, logits = case(WORDS, 2.0)
    found = torch.autograd.grad(distillation(kind, 2.0).loss(part, hidden, batch), [hidden, *part.parameters()])
    kept = batch.labels != MASKED
    mine = part["head"].double()(hidden.double())[kept]
    both = [(one.double() / 2).softmax(-1) for one in (logits[kept], mine)]
    labels = F.cross_entropy(mine, batch.labels[kept], reduction="sum")
    wanted = torch.autograd.grad(0.6 * 4 * divergence(kind, *both) + 0.4 * labels, [hidden, *part.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=1e-4, atol=1e-5)


def test_certain_models_give_finite_gradients() -> None:
    """Neither leaves anything to the other tokens that fp32 could hold."""
    part, hidden, batch, _ = case(2, 1.0)
    next(part.parameters()).data.mul_(5000)
    tokens, values = top_of(part["head"], hidden.detach(), 2, 1.0, 0)
    assert values[..., 2].max() < -80
    batch = batch.with_targets({storing.TOKENS_OF: tokens, storing.VALUES_OF: values.detach().flip(-2)}, TOKENS)
    for kind in KINDS:
        loss = distillation(kind, 1.0).loss(part, hidden, batch)
        assert all(one.isfinite().all() for one in torch.autograd.grad(loss, [hidden, *part.parameters()]))


def test_an_evaluation_says_how_far_the_student_is() -> None:
    part, hidden, batch, logits = case(WORDS, 1.0)
    logits = (part["head"](hidden) + logits / 9).detach()
    said = top_of(nn.Identity(), logits, WORDS, 1.0, 0)
    batch = batch.with_targets(dict(zip((storing.TOKENS_OF, storing.VALUES_OF), said, strict=True)), TOKENS)
    metrics = {"divergence": Ratio(), "agreement": Ratio()}
    loss = distillation("forward", 1.0, 4, observed=lambda: metrics).loss(part.eval(), hidden, batch)
    assert loss.item() == pytest.approx(ChunkedCrossEntropy()(hidden, part["head"], batch.labels).item())
    kept = batch.labels != MASKED
    mine = part["head"](hidden)[kept]
    found = [one.value(one.sums, one.maxima) for one in metrics.values()]
    mean = divergence("forward", logits[kept].softmax(-1), mine.softmax(-1)) / kept.sum()
    share = (mine.argmax(-1) == logits[kept].argmax(-1)).double().mean()
    assert found == pytest.approx([mean.item(), share.item()], rel=1e-4)
    assert 0 < found[1] < 1


# -- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    from forge_train_tools.testing import run_forge

    wide = {"decoder.layers": 3, "decoder.vocabulary": 320, "adamw.lr": 1e-2}
    return str(run_forge([], wide, steps=12, folder=tmp_path_factory.mktemp("teacher")).run)


def settings(teacher: str, **more: Any) -> dict[str, Any]:
    values = {"distill__weights": teacher, "distill__teacher": {"decoder": {"layers": 3}}, **more}
    values.setdefault("decoder__vocabulary", 320)
    return {key.replace("__", "."): value for key, value in values.items()}


def tokens(folder: Path) -> int:
    return sum(len(load_file(one)["tokens"]) for one in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_a_run_that_finds_the_folder_learns_the_same_without_a_teacher(
    run_forge: RunForge, teacher: str, tmp_path: Path
) -> None:
    """With all tokens of the vocabulary, what is learned is what a teacher beside the student says."""
    base: dict[str, Any] = {"train__evaluate_every": 3, "checkpoint__every": 3, "distill__temperature": 2.0}
    live = run_forge(["distill"], settings(teacher, **base), steps=6, folder=tmp_path / "live")
    whole: dict[str, Any] = {"distill__top_k": 320, "distill__stored_dtype": "fp32"}
    base |= whole | {"distill__stored": str(tmp_path / "logits")}
    first = run_forge(["distill"], settings(teacher, **base), steps=6, folder=tmp_path / "a", name="first")
    assert set(first.job.models) == {"teacher"}
    run_forge(["distill"], settings(teacher, **base), steps=6, folder=tmp_path / "a", name="second", stop_at=3)
    second = run_forge(["distill"], settings(teacher, **base), steps=6, folder=tmp_path / "a", name="second")
    assert not second.job.models
    assert second.losses == first.losses
    for run in (first, second):
        assert run.losses == pytest.approx(live.losses, rel=1e-5)
        for name in ("divergence", "agreement"):
            key = f"distill.{name}"
            got, wanted = (
                [one["metrics"][key] for one in lines.events if one["event"] == "evaluation"] for lines in (run, live)
            )
            assert len(wanted) == 2
            assert got == pytest.approx(wanted, rel=1e-4)
    for one, other in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_plan_neither_reads_nor_fills_the_folder(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    run = run_forge(["distill"], settings(teacher), steps=1, folder=tmp_path / "a")
    more = {"distill.stored": str(tmp_path / "logits"), "distill.top_k": 4}
    made = plan(run.run / "config.toml", more)
    assert made.memory.activations
    assert not made.memory.notes
    assert not (tmp_path / "logits").exists()


@pytest.mark.slow
def test_one_folder_serves_many_students_in_any_order(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 4, "train__evaluate_every": 2}
    run_forge(["distill"], settings(teacher, **base), steps=1, folder=tmp_path / "a")
    changed = {"run__seed": 9, "decoder__layers": 1, "train__micro_batch": 4, "distill__divergence": "reverse"}
    for more in (changed, {"train__global_batch": 2, "text__shuffle": False}):
        run = run_forge(["distill"], settings(teacher, **base, **more), steps=3, folder=tmp_path / "b")
        assert not run.job.models


def test_only_learned_tokens_are_stored_in_few_bytes(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": f"a long question {n}", "completion": f"so {n}"}) + "\n" for n in range(100))
    )
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 8, "train__evaluate_every": 0}
    chats = {"path": str(tmp_path / "chats.jsonl"), "template": "plain", "held_out": 0, "cache": str(tmp_path / "c")}
    base |= {f"sft__{key}": value for key, value in chats.items()} | {"train__sequence": 48}
    done = run_forge(["distill", "sft"], settings(teacher, **base), without=["text"], steps=3, folder=tmp_path / "a")
    loader = done.job.hooks.build_data("train")
    learned, every = (
        sum(int(kept.sum()) for kept in found)
        for found in zip(*((b.labels != MASKED, b.inputs >= 0) for b in (next(loader) for _ in range(50))), strict=True)
    )
    assert tokens(tmp_path / "logits") == learned < every / 2
    files = [load_file(one) for one in (tmp_path / "logits").glob("*.safetensors")]
    held = sum(one[name].nbytes for one in files for name in ("tokens", "log_probabilities"))
    assert held / learned == 8 * (4 + 2) + 2
    again = run_forge(["distill", "sft"], settings(teacher, **base), without=["text"], steps=3, folder=tmp_path / "b")
    assert again.losses == done.losses


@pytest.mark.slow
def test_a_killed_process_is_continued(
    run_forge: RunForge, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished is not computed again, and a part that was being written is gone."""
    monkeypatch.setattr(folders, "PART_BYTES", 10_000)
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 4, "train__evaluate_every": 2}
    whole = run_forge(["distill"], settings(teacher, **base), steps=3, folder=tmp_path / "a")
    passes = counted(monkeypatch, kill_after=9)
    base["distill__stored"] = str(tmp_path / "killed")
    with pytest.raises(KeyboardInterrupt):
        run_forge(["distill"], settings(teacher, **base), steps=3, folder=tmp_path / "b")
    before = tokens(tmp_path / "killed")
    assert before > 0
    assert not json.loads((tmp_path / "killed" / "logits.json").read_text())["covers"]
    (tmp_path / "killed" / ".part-000009.safetensors.partial").write_bytes(b"half")
    passes.clear()
    again = run_forge(["distill"], settings(teacher, **base), steps=3, folder=tmp_path / "b")
    assert again.losses == whole.losses
    assert tokens(tmp_path / "killed") == tokens(tmp_path / "logits")
    assert 0 <= sum(passes) - (tokens(tmp_path / "killed") - before) < 64  # some rows of one micro-batch were known
    assert not list((tmp_path / "killed").glob(".*"))


def counted(monkeypatch: pytest.MonkeyPatch, kill_after: int) -> list[int]:
    """The learned tokens of each pass of a teacher, of which one is the last."""
    passes: list[int] = []
    said = storing.StoredLogits._said

    def counting(self: Any, batch: Batch, length: int) -> Any:
        nonlocal kill_after
        if not (kill_after := kill_after - 1):
            raise KeyboardInterrupt
        passes.append(int((batch.labels != MASKED).sum()))
        return said(self, batch, length)

    monkeypatch.setattr(storing.StoredLogits, "_said", counting)
    return passes


def test_data_without_an_end_are_stored_as_far_as_asked(
    run_forge: RunForge, teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 4, "train__evaluate_every": 0}
    words = {"synthetic__vocabulary": 250}

    def run(steps: int, **more: Any) -> TinyRun:
        values = settings(teacher, **base, **words, **more)
        return run_forge(["distill", "synthetic"], values, without=["text"], steps=steps, folder=tmp_path / "a")

    with pytest.raises(
        ConfigError, match=r"distill\.stored: these data don't say where they end; set distill\.stored_"
    ):
        run(2)
    with pytest.raises(
        ConfigError, match=r"distill\.stored_sequences: this run takes 12 sequences, and 8 are stored; "
    ):
        run(3, distill__stored_sequences=8)
    first = run(2, distill__stored_sequences=8)
    passes = counted(monkeypatch, kill_after=100)
    more = run(3, distill__stored_sequences=12)
    assert len(passes) == 2  # of 6 micro-batches
    assert more.losses[:2] == pytest.approx(first.losses, rel=1e-6)
    assert not run(3, distill__stored_sequences=12).job.models


def test_another_order_of_few_sequences_is_added(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 4, "train__evaluate_every": 0}
    base |= {"distill__stored_sequences": 8}
    for seed, models in ((1, 1), (1, 0), (2, 1), (2, 0)):
        run = run_forge(["distill"], settings(teacher, **base, run__seed=seed), steps=2, folder=tmp_path / "runs")
        assert len(run.job.models) == models
    assert 8 * 32 < tokens(tmp_path / "logits") <= 16 * 32


@pytest.mark.slow
def test_a_folder_of_something_else_is_refused(run_forge: RunForge, teacher: str, tmp_path: Path) -> None:
    base = {"distill__stored": str(tmp_path / "logits"), "distill__top_k": 4, "train__evaluate_every": 0}

    def run(**more: Any) -> TinyRun:
        return run_forge(["distill"], settings(teacher, **{**base, **more}), steps=1, folder=tmp_path / "runs")

    run()
    other = run_forge(
        [], {"decoder.layers": 3, "decoder.vocabulary": 320, "run.seed": 8}, steps=1, folder=tmp_path / "other"
    ).run
    refused: Mapping[str, dict[str, Any]] = {
        r"was computed with another teacher; name a new folder\.": {"distill__weights": str(other)},
        r"was computed with distill\.top_k = 4; name a new folder\.": {"distill__top_k": 5},
        r"was computed with distill\.temperature = 1\.0; name": {"distill__temperature": 2.0},
        r"was computed with distill\.stored_dtype = fp16; name": {"distill__stored_dtype": "fp32"},
        r"was computed from other train data, or with another template, tokenizer or": {"text__held_out": 0.5},
        r"was computed from other train data, or with .* train\.sequence; name": {"train__sequence": 16},
        r"is not complete, and a pipeline can't run the teacher beside the model; let a run with par": {
            "parallel__pp": 2,
            "train__evaluate_every": 1,
        },
    }
    for message, more in refused.items():
        with pytest.raises(ConfigError, match=rf"distill\.stored: .*logits {message}"):
            run(**more)
    (part,) = (tmp_path / "logits").glob("*.safetensors")
    held = load_file(part)
    held["log_probabilities"][0, 0] += 1
    save_file(held, part)
    with pytest.raises(ConfigError, match=r"distill\.stored: files of .*logits were changed, or some processes lack "):
        run()
    part.unlink()
    with pytest.raises(ConfigError, match=r"distill\.stored: files of .*logits were changed, or some processes lack "):
        run()
    (tmp_path / "logits" / "logits.json").write_text("[]")
    with pytest.raises(
        ConfigError, match=r"distill\.stored: .*logits holds no log-probabilities of a teacher; name a "
    ):
        run()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"distill__stored": "FOLDER"}, r"distill\.top_k: is required with distill\.stored: how many tokens"),
        ({"distill__top_k": 3}, r"distill\.top_k: has no effect without distill\.stored"),
        ({"distill__stored_dtype": "fp32"}, r"distill\.stored_dtype: has no effect without distill\.stored"),
        ({"distill__stored_sequences": 3}, r"distill\.stored_sequences: has no effect without distill\.stored"),
        ({"distill__top_k": 3, "distill__stored": "FILE"}, r"distill\.stored: .*file is a file; name a folder\."),
        (
            {"distill__top_k": 3, "distill__stored": "NOWHERE"},
            r"distill\.stored: there is no folder .*nowhere; make it first\.",
        ),
        (
            {"distill__top_k": 9999, "distill__stored": "FOLDER"},
            r"distill\.top_k: is 9,999, and the teacher's vocabulary has \d+ tokens\.",
        ),
        (
            {"distill__top_k": 3, "distill__stored": "OTHER"},
            r"distill\.stored: .*other holds no log-probabilities of a",
        ),
    ],
)
def test_mistakes_are_told(
    run_forge: RunForge, teacher: str, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    named = {"FOLDER": "logits", "FILE": "file", "NOWHERE": "nowhere/logits", "OTHER": "other"}
    more = {key: str(tmp_path / named[value]) if value in named else value for key, value in more.items()}
    with pytest.raises(ConfigError, match=message):
        run_forge(["distill"], settings(teacher, **more), steps=1, folder=tmp_path / "runs")
