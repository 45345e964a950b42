"""What every test gets: an environment in which nothing from outside changes a run."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Before anything imports torch: two processes of a test would otherwise take every core twice.
os.environ["OMP_NUM_THREADS"] = "1"
# What would change a run from outside: an override, a launcher's world, the colours of a terminal, the network.
for name in (
    *("FORGE_SET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "FORCE_COLOR", "COLUMNS", "LINES"),
):
    os.environ.pop(name, None)
os.environ["HF_HUB_OFFLINE"] = "1"

MEMORY, ROOM = "/dev/shm", 4 << 30


def _lies_in_memory() -> bool:
    """Whether Linux has a folder in memory, with room for the files of all tests, and in which programs may be run."""
    if not (sys.platform == "linux" and os.access(MEMORY, os.W_OK)):
        return False
    there = os.statvfs(MEMORY)
    return there.f_bavail * there.f_frsize >= ROOM and not there.f_flag & os.ST_NOEXEC


# A disk took a third of the time of all tests, most of it for checkpoints that the next test does not read.
if "TMPDIR" not in os.environ and _lies_in_memory():
    os.environ["TMPDIR"] = tempfile.tempdir = MEMORY


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of the session: the user's own is left alone, and a corpus is tokenised once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Where two processes read the files, have each compile half of them, and take the rest as the other left them."""
    report = yield
    inside = isinstance(collector, pytest.Dir) and Path(__file__).parent in collector.path.parents
    if inside and getattr(collector.config, "workerinput", {}).get("workerid") == "gw1":
        report.result.reverse()
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where two processes share the files, begin with those that take longest, so that both end at once."""
    if not hasattr(config, "workerinput"):
        return
    weights: Counter[Path] = Counter()
    for item in items:
        seconds = item.get_closest_marker("slow") or item.get_closest_marker("e2e")
        weights[item.path] += 20 if seconds else 1
    items.sort(key=lambda item: (-weights[item.path], item.path))


_frozen: list[Path] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Spare garbage collections what lasts: a million objects of collected tests, and what files before this imported.

    A fifth of the time of all tests went into looking at them again and again. Some tests take it back.
    """
    if _frozen != [item.path]:
        _frozen[:] = [item.path]
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """forge's logger; what the command line sets there is taken back, so that the next test can read what is logged."""
    log = logging.getLogger("forge_train")
    level, propagate, handlers = log.level, log.propagate, list(log.handlers)
    yield log
    log.level, log.propagate, log.handlers[:] = level, propagate, handlers
    progress = logging.getLogger("forge_train.progress")
    progress.handlers.clear()
    progress.propagate = True  # pytest has a handler of its own at every logger that does not propagate
