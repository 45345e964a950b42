"""A shard that was damaged after its header was written: told where rows are read, with the file and the position."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest

from forge_train import ConfigError, ForgeError
from forge_train_kit.data.documents import Documents
from forge_train_kit.data.prepare import Preparation, Report, prepare
from forge_train_kit.data.shard import Shard
from forge_train_kit.data.store import START
from forge_train_kit.data.tokens import rows_of
from forge_train_tools.testing import run_forge

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize("packing", ["split", "best_fit", "pad"])
@pytest.mark.parametrize("at", [0, 40, 63, 64, 99])
def test_every_place_is_found(packing: str, at: int) -> None:
    """Also a label beyond a row, and the last token of all; whatever is not read is not looked at."""
    shards = []
    for part in range(2):
        ids = np.arange(50, dtype=np.uint16)
        if at // 50 == part:
            ids[at % 50] = 300
        shards.append(Shard(Path(f"part-{part}"), ids, np.array([30, 50], np.int64)))
    documents = Documents(shards, vocabulary=300)
    rows = rows_of(documents, 20, packing=packing, isolate=True, pad=0)
    message = f"part-{at // 50}: is damaged: token {at % 50} is 300, and the tokenizer has 300 ids."
    with pytest.raises(ConfigError, match=re.escape(message)):
        rows.read(np.arange(rows.count))
    read = 0
    for row in range(rows.count):
        with contextlib.suppress(ConfigError):
            assert rows.read(np.array([row])).inputs.max() < 300
            read += 1
    assert read >= rows.count - 2
    sound = rows_of(Documents(shards, vocabulary=301), 20, packing=packing, isolate=True, pad=0)
    assert sound.read(np.arange(sound.count)).inputs.max() in (49, 300)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [pytest.param(0.0, marks=pytest.mark.extended), 0.3])
def test_a_run_names_the_file(tmp_path: Path, held_out: float) -> None:
    """Of the held-out part, too, whose first token is not the file's."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 20)
    prepare(Preparation((str(tmp_path),), tmp_path / "out", tokenizer="bytes"), Report(), key="x")
    (shard,) = (tmp_path / "out").glob("train-*.tokens")
    content = bytearray(shard.read_bytes())
    content[START + 2 * 5999 : START + 2 * 6000] = (40_000).to_bytes(2, "little")
    shard.write_bytes(content)
    config = {"tokens.path": str(tmp_path / "out"), "tokens.held_out": held_out, "tokens.shuffle": False}
    config |= {"train.sequence": 32, "train.global_batch": 8, "train.micro_batch": 8, "train.evaluate_every": 1}
    config |= {"train.evaluate_batches": 40}
    says = rf"^sample [\d,]+ can't be read: \S*{shard.name}: is damaged: token 5,999 is 40,000, .* has 257 ids"
    with pytest.raises(ForgeError, match=says):
        run_forge(["tokens"], config, without=["text"], steps=40, folder=tmp_path / "runs")


def test_a_mixture_names_the_item_of_its_list(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one.txt").write_text("text " * 400)
    prepare(Preparation((str(tmp_path / "one.txt"),), tmp_path / "one", tokenizer="bytes"), Report(), key="x")
    config = {"mixture.sources": [{"path": str(tmp_path / name)} for name in ("one", "two")]}
    with pytest.raises(ConfigError, match=re.escape(f"mixture.sources[1].path: {tmp_path}/two has no manifest")):
        run_forge(["mixture"], config, without=["text"], folder=tmp_path / "runs")
