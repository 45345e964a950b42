"""Prefixes of documents that see all of themselves: where they end, what sees what, generation, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import prompted
import tiny_models
from forge_train import MASKED, Batch, ConfigError
from forge_train_kit.model import Slots
from forge_train_plugins.models._decoder.prefix import Ends, goes_on, prefix_ends, with_ends

pytestmark = [pytest.mark.unit]

SETTINGS = ("decoder.prefix=true", "decoder.window=5", "decoder.window_layers=[true, false]")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_models.composed(*SETTINGS)[1].parts[0].eval()


def tokens(rows: int = 3, length: int = 24) -> Tensor:
    return torch.randint(20, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def test_a_prefix_ends_at_the_first_learned_token_of_its_document() -> None:
    no = MASKED
    labels = torch.tensor([[no, no, 5, no, 6, no, no, no, 7, no, no, no], [1, 2, no, no, no, no, 3, 4, 5, 6, 7, 8]])
    documents = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [3, 3, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4]])
    ends = [[3, 3, 3, 0, 0, 9, 9, 9, 9, 0, 0, 0], [1, 0, 0, 0, 7, 7, 7, 0, 0, 0, 0, 0]]
    assert prefix_ends(labels, documents).tolist() == ends
    assert prefix_ends(labels[:1], None).tolist() == [[3, 3, 3, *[0] * 9]]
    batch = with_ends(Batch(torch.zeros_like(labels), labels, document_ids=documents))
    cut = batch.slice("sequence", (0, 2), (10, 12))
    assert cut.extras["prefix_ends"].tolist() == [[3, 3, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("labels", "documents", "expected"),
    [
        ([[0, 0, 5, 6, 0, 7]], None, True),
        ([[0, 0, 5, 6, 7, 0]], None, False),
        ([[5, 6, 0, 7, 0, 0]], None, True),
        ([[0, 5, 0, 0, 6, 0]], [[0, 0, 0, 1, 1, 1]], False),
        ([[0, 5, 0, 6, 0, 6]], [[0, 0, 1, 1, 1, 1]], True),
        ([[5, 5, 0, 6, 6, 6]], [[0, 0, 1, 1, 1, 1]], False),
    ],
)
def test_a_document_that_goes_on_after_an_answer_is_warned_of_once(
    labels: Any, documents: Any, expected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A chat's later prompt is asked as a prefix as a whole, and trained as one up to the first answer."""
    learned = torch.tensor(labels).masked_fill(torch.tensor(labels) == 0, MASKED)
    ids = None if documents is None else torch.tensor(documents)
    batch, ends = Batch(torch.zeros_like(learned), learned, document_ids=ids), Ends(tell=True)
    assert goes_on(batch) is expected
    for _ in range(2):
        (found,) = ends([batch])
        assert found.extras["prefix_ends"].equal(prefix_ends(learned, ids))
    assert caplog.text.count("a document goes on after an answer") == expected
    Ends(tell=False)([batch])
    assert caplog.text.count("goes on") == expected


def test_a_prefix_sees_all_of_itself_and_nothing_of_the_answer(model: Any) -> None:
    ids, size = tokens(1), 15
    labels = ids.roll(-1, 1).index_fill(1, torch.arange(size - 1), MASKED)
    given = with_ends(Batch(ids, labels))
    whole = model(given.inputs, **given.model_inputs())
    for place in (size - 1, size, 20):
        changed = given.inputs.clone()
        changed[0, place] += 1
        differs = (model(changed, **given.model_inputs()) != whole).any(-1)[0].tolist()
        assert differs == ([True] * 24 if place < size else [False] * place + [True] * (24 - place))


def test_a_packed_document_is_the_same_alone(model: Any) -> None:
    ids = tokens()
    packed = with_ends(prompted.prompted(Batch(ids, ids.roll(-1, 1))))
    assert int((packed.extras["prefix_ends"] > 1).sum()) > 20
    hidden = model(packed.inputs, **packed.model_inputs())
    assert packed.document_ids is not None
    for row, second in enumerate(packed.document_ids.sum(1).tolist()):
        for span in ((0, 24 - second), (24 - second, 24)):
            part = packed.slice("batch", (row, row + 1)).slice("sequence", span)
            own = with_ends(replace(part, document_ids=None, positions=None, extras={}, axes={}))
            torch.testing.assert_close(
                model(own.inputs, **own.model_inputs()), hidden[row : row + 1, slice(*span)], rtol=1e-4, atol=1e-5
            )


def test_a_prompt_is_a_prefix_while_text_is_generated(model: Any) -> None:
    ids, size = tokens(2, 12), 8
    labels = ids.roll(-1, 1).index_fill(1, torch.arange(size - 1), MASKED)
    batch = with_ends(Batch(ids, labels))
    whole = model(batch.inputs, **batch.model_inputs())
    cache = model.new_cache(2, 12)
    pieces = [model(ids[:, :size], cache=cache), *(model(ids[:, at : at + 1], cache=cache) for at in range(size, 12))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-5)

    slots = Slots(2, 16, torch.device("cpu"), joint=True)
    cache = model.new_slots(slots)
    for row in range(2):
        slots.begin(row, size)
        found = model(ids[row : row + 1, :size], position_ids=torch.arange(size)[None], cache=cache)
        torch.testing.assert_close(found, whole[row : row + 1, :size], rtol=1e-4, atol=1e-5)
    for at in range(size, 12):
        slots.advance(2)
        last = torch.cat((ids[:, at : at + 1], torch.zeros(2, 1, dtype=torch.int64)))
        found = model(last, position_ids=torch.tensor([[at], [at], [0], [0]]), cache=cache)[:2]
        torch.testing.assert_close(found, whole[:, at : at + 1], rtol=1e-4, atol=1e-5)


def test_a_text_whose_prefix_nobody_knows_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="nothing says where the prefix of this text ends"):
        model(tokens())
    cache = model.new_cache(3, 30)
    model(tokens(), cache=cache)
    with pytest.raises(ConfigError, match="nothing says where the prefix of this text ends"):
        model(tokens(3, 2), cache=cache)
    with pytest.raises(ConfigError, match=r"labels are \[2\], and tokens \[2, 3\]"):
        with_ends(Batch(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("plugins", "settings", "says"),
    [
        (("varlen",), (), "attention without prefixes that see all of themselves.*auto, eager, flex, sdpa"),
        (("mla",), ("decoder.kv_heads=4",), "decoder.prefix: the attention .* does not support it"),
        (("mtp",), (), "decoder.prefix: the tail of plugin 'mtp' is called without prefixes"),
        ((), ("decoder.rope.scaling=dynamic", "decoder.rope.original_sequence=64"), "prefix: can't be used with"),
    ],
)
def test_what_has_no_prefixes_is_refused(plugins: tuple[str, ...], settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        tiny_models.composed("decoder.prefix=true", *settings, plugins=plugins)
