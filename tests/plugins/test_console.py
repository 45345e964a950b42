"""The console: what it shows on a terminal of any width and in a file, and that it takes next to no time."""

from __future__ import annotations

import io
import itertools
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console as Terminal

from forge_train import CheckpointEvent, Evaluation, Finished, LogRecord
from forge_train_kit.format import format_count
from forge_train_plugins.models.decoder import Decoder
from forge_train_plugins.observers._console.board import KEPT, Board, changed
from forge_train_plugins.observers._console.lines import Lines
from forge_train_plugins.observers._console.live import PAUSE, LiveView, render
from forge_train_plugins.observers.console import Console
from forge_train_tools.testing import run_forge

STEPS = 100


def board(**more: Any) -> Board:
    return Board(
        name="tiny-128d557f-20261120-171232",
        folder="runs/tiny-128d557f-20261120-171232",
        size="cpu · 32.9k parameters · 100 steps of 64 tokens",
        plugins=["decoder dim=32", "gqa", "adamw lr=0.003"],
        phases=["recompute ac (2)", "shard fsdp2 (3)"],
        steps=STEPS,
        **more,
    )


def record(step: int, loss: float = 2.5, **more: float) -> LogRecord:
    line = {
        "step": step,
        "tokens": 64 * step,
        "loss": loss,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "tokens_per_second": 12_345.0,
        "step_seconds": 0.5,
        "mfu": None,
        "memory_gib": 0.75,
        **more,
    }
    return LogRecord(step, STEPS, line)


def evaluation(step: int) -> Evaluation:
    found = Evaluation(step, 2.25, 640)
    found.metrics |= {"text.bits_per_byte": 3.14159, "text.trigram_bits_per_byte": 2.7}
    return found


def drawn(shown: Board, width: int) -> list[str]:
    out = io.StringIO()
    Terminal(file=out, width=width, force_terminal=False).print(render(shown, width))
    return out.getvalue().splitlines()


def trained() -> Board:
    shown = board()
    for step in range(1, 41):
        shown.log(record(step, 6 - step / 10, **{"moe.balance": 0.5}))
    shown.evaluation = evaluation(40)
    shown.saved = 30
    return shown


# -- the live view ------------------------------------------------------------------------------------------------


def test_everything_worth_knowing_is_there() -> None:
    text = "\n".join(drawn(trained(), 100))
    for words in (
        *("forge training", "tiny-128d557f", "32.9k parameters", "adamw lr=0.003", "shard fsdp2 (3)", "40/100"),
        *("█", "▁", "3.142 bits per byte", "2.7 trigram", "1.25", "3.00e-04", "12.3k tokens/s", "0.75 GiB"),
        *("step 30", "moe.balance 0.5"),
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [1, 5, 10, 20, 40, 63, 80, 100, 300])
@pytest.mark.parametrize("shown", [board(), trained()], ids=["at the start", "in the middle"])
def test_no_line_is_wider_than_the_terminal(shown: Board, width: int) -> None:
    lines = drawn(shown, width)
    assert max(map(len, lines)) <= max(width, 8)
    assert len({len(line) for line in lines if line.startswith(("│", "╭", "╰"))}) <= 1


def test_the_parts_of_the_model_come_first(tmp_path: Path) -> None:
    done = run_forge([], steps=1, folder=tmp_path)
    assert [line.split()[0] for line in Board.of(done.job, done.model).plugins] == [
        *("decoder", "gqa", "swiglu", "sdpa", "lm_head"),
        *("text", "next_token", "sequential", "adamw", "cosine", "tokenizer", "cross_entropy"),
    ]


def test_frozen_parameters_are_not_counted_as_trained(tmp_path: Path) -> None:
    done = run_forge([], steps=1, folder=tmp_path)
    count = sum(parameter.numel() for parameter in done.model.parameters())
    assert f" · {format_count(count)} parameters · " in Board.of(done.job, done.model).size
    first, *others = done.model.parameters()
    for parameter in others:
        parameter.requires_grad_(False)
    size = Board.of(done.job, done.model).size
    assert f" · {format_count(count)} parameters, {format_count(first.numel())} trained · " in size


def test_what_thaws_later_and_rows_that_stay_are_not_counted_as_trained_at_first(tmp_path: Path) -> None:
    thaw = {"freeze.parameters": ["*"], "freeze.but": ["head.*"], "freeze.thaw": [{"match": "layers.*", "steps": 2}]}
    done = run_forge(["freeze"], thaw, steps=3, folder=tmp_path / "freeze")
    head = dict(done.model.named_parameters())["head.weight"].numel()
    assert f" parameters, {format_count(head)} trained at first · " in Board.of(done.job, done.model).size
    done = run_forge(["new_rows"], {"new_rows.ids": [3, 5]}, steps=1, folder=tmp_path / "rows")
    rows = 2 * 2 * dict(done.model.named_parameters())["head.weight"].shape[1]
    assert f" parameters, {format_count(rows)} trained · " in Board.of(done.job, done.model).size


def test_names_with_brackets_are_no_markup() -> None:
    shown = trained()
    shown.plugins = ["text path=[/tmp/x]"]
    assert "text path=[/tmp/x]" in "\n".join(drawn(shown, 100))


def test_values_are_shown_as_they_are_set() -> None:
    section = Decoder.Config(dim=32, unit_offset=True, window_layers=(True, False), soft_cap=5.0)
    assert list(changed(section)) == ["dim=32", "unit_offset=true", "window_layers=true,false", "soft_cap=5"]


def test_a_table_of_many_entries_is_counted() -> None:
    from forge_train_plugins.models.hf import HF

    few, many = {"use_cache": False, "n_layer": 2}, {f"key{at}": at for at in range(4)}
    assert list(changed(HF.Config(type="gpt2", set=few, extra=many))) == [
        "type=gpt2",
        "set={use_cache=false, n_layer=2}",
        "extra={4 keys}",
    ]


def test_values_that_are_not_finite_are_drawn() -> None:
    shown = board()
    for step, loss in enumerate((1.0, float("nan"), float("inf"), 2.0), 1):
        shown.log(record(step, loss))
    assert "▁××█" in "\n".join(drawn(shown, 100))


def test_the_end_is_seen(tmp_path: Path) -> None:
    shown = trained()
    shown.finished = Finished("interrupted", 41, 2.0, 75, tmp_path)
    assert "forge interrupted" in drawn(shown, 100)[0]
    shown.failed = True
    assert "forge failed" in drawn(shown, 100)[0]


def test_drawing_pauses_a_hundred_times_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown = board()
    view = LiveView(shown, Terminal(file=io.StringIO(), force_terminal=True, width=80))
    draws = []

    def refresh(*args: Any, **more: Any) -> None:
        draws.append(now[0])
        now[0] += 0.01

    monkeypatch.setattr(view._live, "update", refresh)
    for step in range(1, 301):
        now[0] += 0.05
        shown.log(record(step))
        view.log()
    assert 2 <= len(draws) <= now[0] / (0.01 * PAUSE) + 2
    assert all(later - sooner > 0.01 * PAUSE for sooner, later in itertools.pairwise(draws))
    view.close()
    assert len(draws) <= now[0] / (0.01 * PAUSE) + 3


def test_a_terminal_that_breaks_leaves_no_view_behind() -> None:
    shown = board()
    view = LiveView(shown, Terminal(file=io.StringIO(), force_terminal=True, width=80))
    shown.size = None  # type: ignore[assignment]  # whatever makes drawing fail
    with pytest.raises(AttributeError):
        view.close()
    assert not view._live.is_started


def test_the_cursor_stays_visible() -> None:
    out = io.StringIO()
    view = LiveView(board(), Terminal(file=out, force_terminal=True, width=80))
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
    view.close()


# -- what is known ------------------------------------------------------------------------------------------------


def test_the_curve_keeps_its_shape_and_its_size() -> None:
    shown = board()
    for step in range(1, 10 * KEPT + 1):
        shown.log(record(step, float(step)))
    assert KEPT / 2 <= len(shown.losses) < KEPT
    assert shown.losses == sorted(shown.losses)


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown = board()
    shown.log(record(10))
    assert shown.left == 0.5 * 90
    now[0] += 20
    shown.log(record(20))
    assert shown.left == 2.0 * 80
    shown.resume(10)
    shown.log(record(11))
    assert shown.left == 0.5 * 89


# -- plain lines, and the plugin ----------------------------------------------------------------------------------


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, job, model: board()))
    made = Console(Console.Config())
    made.on_start(SimpleNamespace(dist=SimpleNamespace(main=True)), None)  # type: ignore[arg-type]  # stand-ins
    return made


def test_plain_lines(plugin: Console, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.on_log(record(10, 4.13649))
    plugin.on_log(evaluation(10))
    plugin.on_checkpoint(CheckpointEvent("saving", 10, tmp_path / "step-00000010"))
    plugin.on_checkpoint(CheckpointEvent("saved", 10, tmp_path / "step-00000010"))
    plugin.on_end(Finished("done", 100, 2.0, 0, tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 10/100 · loss 4.136 · grad norm 1.25 · lr 3.00e-04 · 12.3k tokens/s · 0.75 GiB · 0:45 left"
    assert lines[1] == "step 10/100 · held out: loss 2.25, bits per byte 3.142, trigram bits per byte 2.7"
    assert lines[2] == "step 10/100 · saved step-00000010"
    assert lines[3].startswith("done · 100 steps in 0:00 · loss 2 · held out: loss 2.25")
    assert len(lines) == 4


def test_a_reader_that_leaves_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forge train | head`: the run continues, and nothing is said of it."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        lines = Lines(board())
        lines.board.step = 1
        lines.resume(Path("runs/a"))
        assert Path(f"/proc/self/fd/{write}").readlink() == Path(os.devnull)


def test_resumed_runs_say_so(plugin: Console, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin.on_checkpoint(CheckpointEvent("loaded", 40, tmp_path / "step-00000040"))
    plugin.on_end(Finished("done", 100, 2.0, 0, tmp_path))
    out = capsys.readouterr().out
    assert f"step 40/100 · resumed from {tmp_path / 'step-00000040'}" in out
    assert "60 more steps" in out


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    silent = Console(Console.Config())
    silent.on_start(SimpleNamespace(dist=SimpleNamespace(main=False)), None)  # type: ignore[arg-type]  # stand-ins
    silent.on_log(record(1))
    silent.on_log(evaluation(1))
    silent.on_end(Finished("failed", 1, None, 1, Path(), error=RuntimeError()))
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_the_view_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "of", classmethod(lambda cls, job, model: board()))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    job: Any = SimpleNamespace(dist=SimpleNamespace(main=True))
    kinds = []
    for live in (True, False):
        made = Console(Console.Config(live=live))
        made.on_start(job, None)  # type: ignore[arg-type]
        kinds.append(type(made._face).__name__)
        made.on_end(Finished("failed", 1, None, 1, Path(), error=RuntimeError()))
    assert kinds == ["LiveView", "Lines"]
