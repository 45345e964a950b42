"""Weights of messages: how much the loss of their tokens counts, from the record to the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import chat_model
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.data.chats import Template, conversation, open_template, preference, render, tokenise
from forge_train_kit.data.store import ShardWriter, open_shard
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.losses import LABEL_WEIGHTS, batch_weight
from forge_train_plugins.tasks._cross_entropy import ChunkedCrossEntropy
from forge_train_plugins.tasks.next_token import NextTokenTask
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.unit]

MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bb", "weight": 0.5},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "ddd"},
]


def roles(tagged: bool) -> Template:
    """Writes `role:words;` for each message."""
    words = "{% generation %}{{ m.content }};{% endgeneration %}" if tagged else "{{ m.content }};"
    return Template(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}" + words + "{% else %}{{ m.content }};"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )


@pytest.mark.parametrize("tagged", [False, True])
def test_tokens_have_the_weight_of_their_message(tagged: bool) -> None:
    template = roles(tagged)
    segments = render(template, conversation({"messages": MESSAGES}))
    assert segments.weights == (0.5, 1.0)
    ids, learned = tokenise(ByteTokenizer(), segments)
    assert learned.dtype == np.float32
    assert "".join(chr(id) for id, one in zip(ids, learned, strict=True) if one == 0.5) == "bb;"
    assert "".join(chr(id) for id, one in zip(ids, learned, strict=True) if one == 1) == "ddd;"
    plain = [{key: value for key, value in one.items() if key != "weight"} for one in MESSAGES]
    assert tokenise(ByteTokenizer(), render(template, conversation({"messages": plain})))[1].dtype == np.uint8


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("weight", [0.5, 0])
def test_messages_keep_their_weight_where_all_is_learned(tagged: bool, weight: float) -> None:
    messages = [MESSAGES[0], {**MESSAGES[1], "weight": weight}, *MESSAGES[2:]]
    ids, learned = tokenise(ByteTokenizer(), render(roles(tagged), conversation({"messages": messages}), learn="all"))
    text = "user:a;assistant:bb;user:c;assistant:ddd;"
    assert bytes(ids.tolist()).decode() == text
    expected = np.ones(len(text))
    expected[text.index("bb;") : text.index("bb;") + 3] = weight
    assert learned.tolist() == expected.tolist()
    assert learned.dtype == (np.float32 if weight else np.uint8)
    plain = [*MESSAGES[2:]]
    assert render(roles(tagged), conversation({"messages": plain}), learn="all").learned == ((0, 21),)


def test_a_user_that_is_learned_against_its_weight_is_refused() -> None:
    found = conversation({"messages": [{**MESSAGES[0], "train": False}, MESSAGES[3]]}, "a.jsonl, line 3")
    with pytest.raises(
        ConfigError, match=r"^a.jsonl, line 3: messages\[0\] \(user\) has a weight of 0, but learn = 'all'"
    ):
        render(roles(False), found, learn="all")
    assert render(roles(False), found).learned


def test_a_shard_keeps_weights_exactly(tmp_path: Path) -> None:
    ids = [np.arange(3, dtype=np.uint32), np.arange(2, dtype=np.uint32)]
    masks = [np.array([0, 1, 0.1], np.float32), np.array([1, 0], np.uint8)]
    with ShardWriter(tmp_path / "w.tokens", 9, "d", trained=True) as writer:
        writer.add(ids, 5, masks)
        writer.close()
    shard, header = open_shard(tmp_path / "w.tokens")
    assert header.weighted
    assert shard.trained is not None
    assert shard.trained.tolist() == [0, 1, np.float32(0.1), 1, 0]
    with ShardWriter(tmp_path / "u.tokens", 9, "d", trained=True) as writer:
        writer.add(ids, 5, [np.array([0, 1, 1], np.uint8), masks[1]])
        writer.close()
    assert (tmp_path / "u.tokens").read_bytes()[8] == 1, "a file without weights is one that an older forge reads"
    assert b"weighted" not in (tmp_path / "u.tokens").read_bytes()
    shard, header = open_shard(tmp_path / "u.tokens")
    assert shard.trained is not None
    assert (shard.trained.dtype, shard.trained.tolist()) == (np.uint8, [0, 1, 1, 1, 0])


@pytest.mark.parametrize(("z_loss", "smoothing", "chunk"), [(0.0, 0.0, 0), (1e-2, 0.1, 3)])
def test_the_loss_is_the_sum_of_weighted_losses(z_loss: float, smoothing: float, chunk: int) -> None:
    torch.manual_seed(0)
    function = ChunkedCrossEntropy(z_loss, chunk, smoothing)
    head, hidden = torch.nn.Linear(4, 7), torch.randn(2, 5, 4, requires_grad=True)
    labels = torch.randint(0, 7, (2, 5))
    labels[0, :2] = MASKED
    weights = torch.rand(2, 5)
    batch = Batch(labels, labels, targets={LABEL_WEIGHTS: weights})
    part = torch.nn.Module()
    part.head = head
    task = NextTokenTask(function)
    expected: Any = 0
    for row in range(2):
        for at in range(5):
            only = torch.full_like(labels, MASKED)
            only[row, at] = labels[row, at]
            expected = expected + weights[row, at] * function(hidden, head, only)
    found = task.loss(part, hidden, batch)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, hidden, retain_graph=True)[0] for one in (found, expected)))
    assert task.weight(batch) == pytest.approx(float(weights.sum() - weights[0, :2].sum()))
    rows = function.weighted(hidden, head, labels, weights)[1]
    torch.testing.assert_close(rows.sum(), expected.detach())


def chats(folder: Path, weight: object = 0.5) -> dict[str, Any]:
    record = {"messages": [MESSAGES[0], {**MESSAGES[1], "weight": weight}, *MESSAGES[2:]]}
    (folder / "chats.jsonl").write_text(f"{json.dumps(record)}\n" * 4, encoding="utf-8")
    return {
        "sft": {"path": str(folder / "chats.jsonl"), "cache": str(folder / "cache"), "template": "plain"},
        "sft.held_out": 0,
        "train.evaluate_every": 0,
        "train.sequence": 64,
    }


@pytest.mark.parametrize("packing", ["best_fit", "pad", "buckets"])
def test_a_run_learns_with_weights(tmp_path: Path, packing: str) -> None:
    more = {"sft.packing": packing, **({"train.micro_batch": 1} if packing == "buckets" else {})}
    half, whole, none = (
        run_forge(["sft"], {**chats(tmp_path, weight), **more}, steps=1, folder=tmp_path / str(weight)).losses[0]
        for weight in (0.5, 1, 0)
    )
    assert half != whole != none
    assert min(whole, none) < half < max(whole, none)


def test_pairs_have_no_weights_between() -> None:
    answers = {name: [{"role": "assistant", "content": name, "weight": 0.5}] for name in ("chosen", "rejected")}
    with pytest.raises(ConfigError, match="a message of a pair has a weight of 0 or 1"):
        preference({"prompt": "a", **answers})


def test_weights_count_labels() -> None:
    labels = torch.tensor([[1, MASKED, 2]])
    assert batch_weight(Batch(labels, labels)) == 2
    assert batch_weight(Batch(labels, labels, targets={LABEL_WEIGHTS: torch.tensor([[0.5, 9, 2.0]])})) == 2.5


def test_the_template_of_a_folder(tmp_path: Path) -> None:
    chat_model.write_tokenizer(tmp_path)
    segments = render(open_template("", tmp_path), conversation({"messages": MESSAGES}))
    assert [segments.text[start:stop] for start, stop in segments.learned] == ["bb<|im_end|>", "ddd<|im_end|>"]
    assert segments.weights == (0.5, 1.0)
