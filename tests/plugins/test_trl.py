"""A step of `dpo` and of `kto` against TRL: the same random Llama and answers, the same loss, gradients and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models
from forge_train import MASKED, Batch
from forge_train_kit.data.mismatched import DESIRABLE, split_mismatched
from forge_train_tools.offline.opening import open_model
from forge_train_tools.testing import TinyRun, run_forge
from test_kto import Gradients

pytestmark = [pytest.mark.unit]

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

CONFIG = {**hf_models.GROUPED, "vocab_size": 320}
MODEL = {"hf.type": "llama", "hf.set": CONFIG, "train.sequence": 64}
STEP = {
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.evaluate_every": 0,
    "train.clip_norm": 0,
    "adamw.lr": 3e-3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs and judged answers of unlike lengths, and the run `base`, which is the reference."""
    made = tmp_path_factory.mktemp("trl")
    answers = [("yes, " * (1 + n % 3) + str(n), f"no {n}" + "!" * (n % 5)) for n in range(48)]
    pairs = [{"prompt": f"say {n}", "chosen": yes, "rejected": no} for n, (yes, no) in enumerate(answers)]
    judged = [
        {"prompt": f"say {n}", "completion": both[n % 3 == 0], "label": n % 3 > 0} for n, both in enumerate(answers)
    ]
    for name, records in (("text_pairs", pairs), ("text_feedback", judged)):
        (made / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    run_forge(["hf"], MODEL, without=["decoder"], steps=2, folder=made, name="base")
    return made


def third_step(folder: Path, task: str, data: str, options: Mapping[str, Any]) -> TinyRun:
    """Its weights, gradients and batches are in `Gradients.seen`; by then the model is away from the reference."""
    files = {"path": str(folder / f"{data}.jsonl"), "cache": str(folder / "cache"), "template": "plain"}
    values = {**MODEL, **STEP, data: files, task: options, "train.init_from": str(folder / "base")}
    plugins = ["hf", task, data, Gradients]
    return run_forge(plugins, values, without=["decoder", "text"], steps=3, folder=folder / "runs")


def theirs(weights: Mapping[str, Tensor]) -> Any:
    """A model of transformers with the weights of one of ours."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    model.load_state_dict({name.removeprefix("head."): one for name, one in weights.items()})
    return model


def trainer(folder: Path, name: str, home: Any = trl, **options: Any) -> Any:
    """A trainer of TRL for the model at the third step. What it makes of a record of its own is not looked at."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<end>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    record = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "b", "label": True}
    known = ("prompt", "completion", "label") if name == "KTO" else ("prompt", "chosen", "rejected")
    there = dict(open_model(folder / "base", text=False).model.parts[0].named_parameters())
    return getattr(home, f"{name}Trainer")(
        theirs(Gradients.seen["weights"]),
        **({"ref_model": theirs(there)} if home is trl else {}),
        args=getattr(home, f"{name}Config")(
            output_dir=str(folder / "trl"), report_to="none", use_cpu=True, bf16=False, **options
        ),
        train_dataset=Dataset.from_list([{key: record[key] for key in known}] * 2),
        processing_class=tokenizer,
    )


def split(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row's prompt and answer."""
    found = []
    for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        answer = [one for one in labels if one != MASKED]
        found.append((inputs[: labels.index(answer[0]) + 1], answer))
    return found


def pairs() -> list[dict[str, Any]]:
    """The step's pairs, as TRL keeps tokenised records."""
    rows = [row for batch in Gradients.seen["batches"] for row in split(batch)]
    both = zip(rows[0::2], rows[1::2], strict=True)
    return [{"prompt_ids": prompt, "chosen_ids": one, "rejected_ids": other} for (prompt, one), (_, other) in both]


def labelled() -> list[dict[str, Any]]:
    """The same, as its older trainers keep them."""
    records = []
    for pair in pairs():
        record = {"prompt_input_ids": pair["prompt_ids"], "prompt_attention_mask": [1] * len(pair["prompt_ids"])}
        for kind in ("chosen", "rejected"):
            answer, masked = pair[f"{kind}_ids"], [MASKED] * len(pair["prompt_ids"])
            record[f"{kind}_input_ids"] = [*pair["prompt_ids"], *answer]
            record[f"{kind}_attention_mask"] = [1] * len(record[f"{kind}_input_ids"])
            record[f"{kind}_labels"] = [*masked, *answer]
        records.append(record)
    return records


def expect_equal(model: Any, loss: Tensor) -> None:
    """Compare with the loss and the gradients of the step."""
    loss.backward()
    assert Gradients.seen["loss"] == pytest.approx(loss.item(), rel=1e-5)
    wanted = {name: one.grad for name, one in model.named_parameters()}
    found = {name.removeprefix("head."): one for name, one in Gradients.seen["gradients"].items()}
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        assert float(wanted[name].norm()) > 0
        assert float((one - wanted[name]).norm()) <= 1e-5 * float(wanted[name].norm()), name


def expect_metrics(run: TinyRun, task: str, theirs: Mapping[str, float]) -> None:
    """Compare what the step logs, where both have it."""
    mine = {name.removeprefix(f"{task}."): value for name, value in run.metrics[-1].items() if name.startswith(task)}
    both = {name: theirs[other] for name, other in METRICS.items() if name in mine and other in theirs}
    assert len(both) >= 4
    assert {name: mine[name] for name in both} == pytest.approx(both, rel=1e-5)


DPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}),
    "sigmoid per token": ({"beta": 2.0, "length_normalised": True}, {"loss_type": ["sigmoid_norm"], "beta": 2.0}),
    "ipo": ({"loss": "ipo", "beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.3}),
}
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.5, "simpo_gamma": 1.4}
METRICS = {
    "chosen_reward": "rewards/chosen",
    "rejected_reward": "rewards/rejected",
    "margin": "rewards/margins",
    "accuracy": "rewards/accuracies",
    "chosen_log_probability": "logps/chosen",
    "rejected_log_probability": "logps/rejected",
    "kl": "kl",
}
"""Names of ours and TRL's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DPO)
def test_losses_with_a_reference(folder: Path, name: str) -> None:
    mine, options = DPO[name]
    run = third_step(folder, "dpo", "text_pairs", mine)
    made = trainer(folder, "DPO", **options)
    expect_equal(made.model, made.compute_loss(made.model, made.data_collator(pairs())))
    if name == "sigmoid":  # TRL gives the log-probabilities of whole answers with every loss
        expect_metrics(run, "dpo", {one: values[-1] for one, values in made._metrics["train"].items()})


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_simpo(folder: Path, smoothing: float) -> None:
    mine = {"loss": "simpo", "beta": 2.5, "target_margin": 1.4, "label_smoothing": smoothing}
    run = third_step(folder, "dpo", "text_pairs", mine)
    cpo = pytest.importorskip("trl.experimental.cpo")
    made = trainer(folder, "CPO", cpo, **SIMPO, label_smoothing=smoothing)
    loss, metrics = made.get_batch_loss_metrics(made.model, made.data_collator(labelled()))
    expect_equal(made.model, loss)
    expect_metrics(run, "dpo", metrics)


def test_orpo(folder: Path) -> None:
    """The loss of the paper, of TRL's own terms: its own loss adds up another one, that of the prompt's tokens too."""
    run = third_step(folder, "dpo", "text_pairs", {"loss": "orpo", "beta": 0.2})
    home = pytest.importorskip("trl.experimental.orpo")
    made = trainer(folder, "ORPO", home, beta=0.2)
    batch = made.data_collator(labelled())
    chosen, rejected, _, _, likelihood = made.concatenated_forward(made.model, batch)
    loss = -chosen.mean() - made.odds_ratio_loss(chosen, rejected)[0].mean()
    expect_equal(made.model, loss)
    with torch.no_grad():
        other, metrics = made.get_batch_loss_metrics(made.model, batch)
        assert float(other - loss) == pytest.approx(float(likelihood + chosen.mean()), rel=1e-4)
        assert abs(float(other - loss)) > 0.01
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    expect_metrics(run, "dpo", metrics)


def test_kto(folder: Path) -> None:
    mine = {"beta": 0.3, "desirable_weight": 0.7, "undesirable_weight": 1.2}
    run = third_step(folder, "kto", "text_feedback", mine)
    made = trainer(folder, "KTO", **mine)
    loader = run.job.hooks.build_data("train")
    records = []
    for own, other in [split_mismatched(next(loader)) for _ in range(12)][8:]:
        labels = own.targets[DESIRABLE].tolist()
        for (prompt, answer), (_, mismatched), label in zip(split(own), split(other), labels, strict=True):
            one = {"prompt_ids": prompt, "completion_ids": answer, "KL_completion_ids": mismatched}
            records.append({**one, "label": bool(label)})
    expect_equal(made.model, made.compute_loss(made.model, made.data_collator(records)))
    metrics = {one: values[-1] for one, values in made._metrics["train"].items()}
    assert metrics["kl"] > 0.1
    expect_metrics(run, "kto", metrics)
