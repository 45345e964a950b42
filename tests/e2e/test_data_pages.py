"""Every command on the pages about data, typed as it stands there."""

from __future__ import annotations

import json
import re
import shlex
import sysconfig
from pathlib import Path

import pytest

from forge_cli import forge

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
LIBRARY = Path(sysconfig.get_path("stdlib"))
SMALL = ["-s", "decoder.dim=64", "-s", "decoder.layers=1", "-s", "decoder.heads=2", "-s", "sample.tokens=4"]
"""What a page leaves out, so that its commands are fast here."""


def commands(page: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("forge ")]


def typed(command: list[str]) -> None:
    more = SMALL if command[1] == "train" and "mixture.toml" not in command else []
    ended = forge(*command[1:], *more)
    assert ended.code == 0, f"{shlex.join(command)}\n{ended.out}{ended.err}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.extended
def test_prepare(tmp_path: Path) -> None:
    (tmp_path / "corpus").symlink_to(LIBRARY / "email")
    bodies = [json.dumps({"body": f"line {number} " * 20}) for number in range(200)]
    (tmp_path / "more.jsonl").write_text("\n".join(bodies))
    chats = [json.dumps({"prompt": f"say {number}", "completion": f"{number}."}) for number in range(300)]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    found = commands("prepare.md")
    assert len(found) == 7
    for command in found:
        typed(command)
    assert {path.name for path in tmp_path.iterdir()} >= {"tokens", "more-tokens", "long", "chat-tokens"}


def test_mixtures(tmp_path: Path) -> None:
    (tmp_path / "web").symlink_to(LIBRARY / "email")
    (tmp_path / "code").symlink_to(LIBRARY / "asyncio")
    (toml,) = re.findall(r"```toml\n(.*?)```", (PAGES / "mixtures.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mixture.toml").write_text(toml)
    first, second, train, resume = commands("mixtures.md")
    for command in (first, second, train):
        typed(command)
    (run,) = (tmp_path / "runs").iterdir()
    typed([str(run) if word == "RUN" else word for word in resume])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    evaluations = [event for event in events if event["event"] == "evaluation"]
    assert [event["step"] for event in evaluations] == [10, 20, 30, 40]
    assert all({"web.loss", "code.loss"} <= event["metrics"].keys() for event in evaluations)
