"""The command line: thin click commands that parse, call core and render."""

from __future__ import annotations

import sys


def main() -> None:
    """The `forge` command."""
    if sys.argv[1:] == ["--version"]:  # importing click alone would take longer than everything else here
        from forge_train import __version__

        sys.stdout.write(f"forge-train {__version__}\n")
        return
    from .app import run

    code = run(sys.argv[1:])
    if code and "torch.distributed" in sys.modules:
        from .parting import part

        part(code)
    sys.exit(code)
