"""Lines of metrics and events: what is written, what is refused, and what a crash leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge_train import ConfigError, PluginError
from forge_train.run.records import EVENTS, METRICS_VERSION, EventSchema, Records, read

pytestmark = pytest.mark.unit


def lines(file: Path) -> list[dict[str, object]]:
    return list(read(file))


def test_floats_are_read_back_as_the_same_double(tmp_path: Path) -> None:
    records = Records(tmp_path)
    values = [0.1, 1 / 3, 1e-310, 2**53 + 1.0, -0.0, 3.0]
    for value in values:
        records.metrics({"step": 1, "loss": value})
    assert [repr(line["loss"]) for line in lines(records.metrics_file)] == [repr(value) for value in values]


def test_events_have_the_fields_of_their_schema(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.event("anomaly", 3, kind="loss", reason="nan")
    (line,) = lines(records.events_file)
    assert {**line, "time": 0} == {
        "event": "anomaly",
        "version": 1,
        "time": 0,
        "step": 3,
        "kind": "loss",
        "reason": "nan",
    }
    for fields in ({"kind": "loss"}, {"kind": "loss", "reason": "x", "more": 1}):
        with pytest.raises(PluginError, match=r"Event 'anomaly' has the fields \['kind', 'reason'\], found"):
            records.event("anomaly", 1, **fields)
    with pytest.raises(PluginError, match="'kind': 5 is not of the registered type"):
        records.event("anomaly", 1, kind=5, reason="x")
    with pytest.raises(
        PluginError, match=r"The event 'mine' is not registered: job\.run\.register\(EventSchema\('mine'"
    ):
        records.event("mine", 1)


def test_a_plugin_registers_its_own_events(tmp_path: Path) -> None:
    records = Records(tmp_path)
    schema = EventSchema("mine", {"size": int}, version=3)
    records.register(schema)
    records.register(EventSchema("mine", {"size": int}, version=3))
    records.event("mine", 1, size=5)
    assert lines(records.events_file)[0]["version"] == 3
    for other in (EventSchema("mine", {"size": str}, version=3), EventSchema("anomaly", {})):
        with pytest.raises(PluginError, match="is registered already, with other fields"):
            records.register(other)
    assert "mine" not in EVENTS


def test_the_lines_after_a_step_are_cut(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.cut(5)
    assert not records.metrics_file.exists()
    for step in (1, 2, 3, 4):
        records.metrics({"step": step, "loss": 0.1 * step})
    before = records.metrics_file.read_text(encoding="utf-8").splitlines()
    records.cut(2)
    assert records.metrics_file.read_text(encoding="utf-8").splitlines() == before[:2]
    records.metrics({"step": 3, "loss": 1.0})
    assert [line["step"] for line in lines(records.metrics_file)] == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_last_event_of_a_name_is_retracted_though_others_follow_it(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for reason in ("first", "second"):
        records.event("interrupted", 1, reason=reason)
    records.event("anomaly", 1, kind="loss", reason="after it")
    records.retract("restarted", 0.0)
    records.retract("interrupted", float(str(lines(records.events_file)[1]["time"])))
    assert [line["reason"] for line in lines(records.events_file)] == ["first", "after it"]
    records.retract("interrupted", float(str(lines(records.events_file)[1]["time"])))
    assert [line["reason"] for line in lines(records.events_file)] == ["first", "after it"], "it is older"


@pytest.mark.parametrize("rest", ['{"step": 2, "lo', "{", '{"step": 2, "loss": 1.0}', '\n{"step"'])
def test_a_line_that_a_crash_cut_off_is_never_read_and_never_in_the_way(tmp_path: Path, rest: str) -> None:
    records = Records(tmp_path)
    records.metrics({"step": 1, "loss": 1.0})
    with records.metrics_file.open("a", encoding="utf-8") as file:
        file.write(rest)
    assert [line["step"] for line in lines(records.metrics_file)] == [1]
    records.metrics({"step": 3, "loss": 1.0})
    records.metrics({"step": 4, "loss": 1.0})
    assert [line["step"] for line in lines(records.metrics_file)] == [1, 3, 4]
    for line in records.metrics_file.read_text(encoding="utf-8").split("\n"):
        assert not line or json.loads(line)


def test_a_file_that_is_nothing_but_a_torn_line(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.events_file.write_text('{"event": "run_st', encoding="utf-8")
    records.event("interrupted", 1, reason="x")
    assert [line["event"] for line in lines(records.events_file)] == ["interrupted"]


def test_every_event_of_a_run_is_in_the_schemas(tmp_path: Path) -> None:
    import toys

    run = toys.run(tmp_path, steps=4, config={"train.evaluate_every": 2, "checkpoint.every": 1, "checkpoint.keep": 1})
    names = [str(event["event"]) for event in run.events]
    assert set(names) == {"run_started", "evaluation", "checkpoint_saved", "checkpoint_pruned", "run_finished"}
    assert names[0] == "run_started"
    assert names[-1] == "run_finished"
    for event in run.events:
        fields = EVENTS[str(event["event"])].fields
        assert event.keys() == {"event", "version", "time", "step", *fields}


def test_every_line_has_the_version_of_its_schema_and_newer_ones_are_refused(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.metrics({"step": 1, "loss": 1.0})
    assert lines(records.metrics_file) == [{"version": METRICS_VERSION, "step": 1, "loss": 1.0}]
    newer = {
        records.metrics_file: {"version": METRICS_VERSION + 1, "step": 2},
        records.events_file: {"event": "anomaly", "version": EVENTS["anomaly"].version + 1, "step": 2},
    }
    for file, line in newer.items():
        file.write_text(json.dumps(line) + "\n", encoding="utf-8")
        with pytest.raises(ConfigError, match=r"jsonl: was written by a newer forge: (metrics|anomaly) of version 2"):
            lines(file)
    records.events_file.write_text(json.dumps({"event": "a plugin's", "version": 9}) + "\n", encoding="utf-8")
    assert len(lines(records.events_file)) == 1
