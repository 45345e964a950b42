"""The page “See what each rank does”, each command typed as it stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_cli import forge
from pages import typed

pytestmark = [pytest.mark.e2e]


@pytest.mark.slow
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended = [forge(*words, environment={"FORGE_SET": "run.device=cpu"}) for words in typed("trace.md")]
    assert [one.code for one in ended] == [0] * 4, ended
    assert "all_gather      dp_shard     10  5.26 MiB" in ended[0].out
    found = ended[2].json
    assert {(one["rank"], one["kind"]) for one in found["collectives"] if one["plugin"] == "pp"} >= {
        (0, "send"),
        (0, "recv"),
        (1, "send"),
        (1, "recv"),
    }
    assert found["step"] == 2
    call = next(one for one in found["calls"] if one["rank"] == 1 and one["kind"] == "recv")
    assert (call["ranks"], call["axis"], call["places"][0].partition(":")[0]) == (
        [0, 1],
        "pp",
        "forge_train_plugins/parallel/_pp/channel.py",
    )
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert {file.name for file in tmp_path.iterdir()} == {"cache", "trace.html", "tp.html", "trace.json"}
