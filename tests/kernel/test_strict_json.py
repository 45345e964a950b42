"""What forge writes is JSON to every parser, also where a number is not finite."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest

import toys
from forge_train import DivergedError, ForgeError, Plugin, hookimpl
from forge_train.base.strict_json import dumps, loads
from forge_train.contract.events import Evaluation
from forge_train.run.records import read
from forge_train.run.run import Run

pytestmark = [pytest.mark.unit]
ROOT = Path(__file__).parents[2]
NAN, INF = math.nan, math.inf


def strict(text: str) -> Any:
    """Parse as strictly as any other parser does."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_number_that_is_not_finite_is_null_and_readable_beside_it() -> None:
    assert strict(dumps({"step": 3, "loss": NAN, "grad_norm": -INF})) == {
        "step": 3, "loss": None, "grad_norm": None, "not_finite": {"loss": "nan", "grad_norm": "-inf"},
    }  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1.0, "b": None, "text": "NaN"},
        {"a": NAN, "none": None},
        {"a.b": INF, "metrics": {"c.d": NAN, "e": 1}},
        {"curve": [1.0, INF, [NAN, 2]], "rows": [{"x": -INF}, {"x": 1}]},
        {"a[0]": NAN, "b": [INF]},
        [{"x": NAN}, {"y": [INF]}],
    ],
)
def test_it_is_read_back_as_it_was(value: Any) -> None:
    strict(dumps(value))
    assert repr(loads(dumps(value))) == repr(value)


class Spoils(Plugin):
    """Adds metrics that are not finite, and makes the loss of step 3 one."""

    @hookimpl
    def on_gradients(self, update: Any) -> None:
        if update.step == 3:
            update.loss.fill_(NAN)

    @hookimpl
    def on_step(self, step: Any) -> None:
        step.add("best", INF)

    @hookimpl
    def on_log(self, record: Any) -> None:
        if isinstance(record, Evaluation):
            record.add("worst", -INF)

    def state_dict(self) -> dict[str, Any]:
        return {"best": INF, "history": [NAN, 1.0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def test_every_file_of_a_run_is_json(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        toys.run(tmp_path, Spoils, name="a", steps=4, config={"train.evaluate_every": 2, "checkpoint.every": 2})
    run = tmp_path / "a"
    files = [*run.rglob("*.json"), *run.rglob("*.jsonl")]
    assert {"metrics.jsonl", "events.jsonl", "outcome.json", "state.json"} <= {file.name for file in files}
    for file in files:
        for text in file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text()]:
            strict(text)
    written = [strict(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written[0]["spoils.best"] is None
    assert written[0]["not_finite"] == {"spoils.best": "inf"}
    assert strict((run / "outcome.json").read_text(encoding="utf-8"))["not_finite"] == {"loss": "nan"}
    assert math.isnan(Run(run).outcome()["loss"])
    assert [line["spoils.best"] for line in read(run / "metrics.jsonl")] == [INF, INF]
    (evaluation,) = [event for event in read(run / "events.jsonl") if event["event"] == "evaluation"]
    assert evaluation["metrics"] == {"spoils.worst": -INF}


def test_a_plugin_s_state_comes_back_as_it_was(tmp_path: Path) -> None:
    class Keeps(Spoils):
        """Spoils nothing but its state."""

        @hookimpl
        def on_gradients(self, update: Any) -> None: ...

    toys.run(tmp_path, Keeps, name="a", steps=4, stop_at=2)
    run = toys.run(tmp_path, Keeps, name="a", steps=4)
    assert repr(run.plugin("keeps").loaded) == repr({"best": INF, "history": [NAN, 1.0]})
    assert [line["keeps.best"] for line in run.metrics] == [INF] * 4, "the lines that were cut and kept as well"


@pytest.mark.slow
def test_nothing_else_writes_json() -> None:
    """`json.dumps` writes bare NaN; it is left to what is read back at once, or is for the screen."""
    allowed = {
        "config/validate.py",
        "launching/claim.py",
        "base/strict_json.py",
        "checkpoint/state.py",
        "offline/hf_files.py",
        "evaluation/harness.py",
    }
    wrong = []
    for folder in (ROOT / "core/forge_train", ROOT / "core/forge_train_tools", ROOT / "cli/forge_train_cli"):
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder).as_posix()
            if name in allowed or name.startswith("testing/"):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dumps", "json.dump"):
                    screen = any(keyword.arg == "ensure_ascii" for keyword in node.keywords)
                    wrong += [] if screen else [f"{name}:{node.lineno}"]
    assert wrong == []


def test_a_run_that_diverged_can_be_looked_at(tmp_path: Path) -> None:
    from forge_cli import forge

    with pytest.raises(ForgeError):
        toys.run(tmp_path, Spoils, name="a", config={"train.evaluate_every": 2})
    toys.run(tmp_path, name="b")
    details = strict(forge("runs", "show", tmp_path / "a", "--json").out)
    assert details["metrics"][0]["not_finite"] == {"spoils.best": "inf"}
    strict(forge("runs", "list", "--run-dir", tmp_path, "--json").out)
    strict(forge("runs", "compare", tmp_path / "a", tmp_path / "b", "--json").out)
    assert "inf" in forge("runs", "show", tmp_path / "a").out
    assert "inf" in forge("runs", "compare", tmp_path / "a", tmp_path / "b").out
