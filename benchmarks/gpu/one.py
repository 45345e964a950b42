"""The process of one case: `python -m gpu.one ORDER` prints its rows as one line of JSON."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

from .case import LacksError, Size


def main() -> int:
    order = json.loads(sys.argv[1])
    module, _, name = order["function"].partition(":")
    size = Size(**order["size"])
    try:
        rows = [
            asdict(row) for row in getattr(importlib.import_module(f"gpu.{module}"), name)(size, **order["arguments"])
        ]
    except LacksError as error:
        print("RESULT " + json.dumps({"lacks": str(error), "rows": []}), flush=True)
        return 0
    print("\nRESULT " + json.dumps({"lacks": "", "rows": rows}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
