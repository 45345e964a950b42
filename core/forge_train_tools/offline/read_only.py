"""The folder of a run that a command only reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from forge_train.base.errors import ForgeError
from forge_train.run.run import Run


class ReadOnlyRun(Run):
    """The folder of a run that is opened read-only."""

    def artifact(self, name: str) -> NoReturn:
        self._refuse(f"artifacts/{name}")

    def open(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("its description")

    def event(self, name: str, step: int, **fields: Any) -> NoReturn:
        self._refuse("events.jsonl")

    def metrics(self, line: Mapping[str, Any]) -> NoReturn:
        self._refuse("metrics.jsonl")

    def end(self, outcome: Mapping[str, Any]) -> NoReturn:
        self._refuse("outcome.json")

    def _refuse(self, what: str) -> NoReturn:
        raise ForgeError(f"{self.dir} is open read-only; {what} can't be written.")
