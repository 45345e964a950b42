"""The guides in docs/learn: a source, its notebook with the outputs of a real run, and its page.

    python docs/guides.py              run all sources again, and write notebooks, pages and pictures
    python docs/guides.py fsdp2 tp     run these alone
    python docs/guides.py --keep       run none whose code is as recorded: only text has changed

A source is a script in jupytext's percent format. Its cell `setup` stands for the helpers in
`docs/learn/setup.py`, which each notebook contains. Outputs have names, counts and bytes, and no times, so
another machine prints the same; only lines of Forge's own files may have moved.

`tests/docs/test_guides.py` compares sources, notebooks and pages, and runs guides again.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parent))

import drawings  # beside this file

LEARN = Path(__file__).parent / "learn"
GUIDES = ("ddp", "fsdp2", "tp", "pp", "ep", "cp", "together", "memory", "checkpoints", "balance", "muon", "precision")
"""In the order in which they are read."""
SETUP = "setup"
LIMIT = 600
"""Seconds of one cell."""
LINE = re.compile(r"(?<=\.py:)\d+")


def source(name: str) -> Any:
    """The notebook that a source describes, without outputs."""
    import jupytext

    helpers = (LEARN / f"{SETUP}.py").read_text(encoding="utf-8")
    found = jupytext.reads((LEARN / f"{name}.py").read_text(encoding="utf-8"), fmt="py:percent")
    for at, cell in enumerate(found.cells):
        if cell.metadata.pop("title", "") == SETUP:
            cell.source = helpers.partition('"""\n\n')[2].rstrip("\n")
        cell.id, cell.metadata = f"cell-{at}", {}
    found.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return found


def recorded(name: str) -> Any:
    """The notebook in docs/learn, with the outputs of the run that it was written by."""
    import nbformat

    return nbformat.read(LEARN / f"{name}.ipynb", as_version=4)


def run(name: str, programs: Path = Path(sys.executable).parent) -> Any:
    """The notebook with the outputs of a run in an empty folder, by the `forge` in `programs`."""
    from nbclient import NotebookClient

    found = source(name)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", "")])
    environment = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, environment):
        os.environ |= {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        os.environ.pop("FORGE_SET", None)
        here = Path(folder, "run")
        here.mkdir()
        client = NotebookClient(found, timeout=LIMIT, resources={"metadata": {"path": str(here)}})
        kernel = client.create_kernel_manager()
        kernel.transport, kernel.ip = "ipc", str(Path(folder, "kernel"))
        client.execute()
    for cell in found.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            text = "".join(output.text if output.output_type == "stream" else _shown(output) for output in cell.outputs)
            cell.outputs = [_stream(text)] if text else []
            cell.execution_count = None
    return found


def kept(name: str) -> Any:
    """The notebook with the outputs that are recorded; None if the code has changed since."""
    found = source(name)
    if not (LEARN / f"{name}.ipynb").is_file():
        return None
    old = [cell for cell in recorded(name).cells if cell.cell_type == "code"]
    new = [cell for cell in found.cells if cell.cell_type == "code"]
    if [_meaning(cell) for cell in old] != [_meaning(cell) for cell in new]:
        return None
    for cell, before in zip(new, old, strict=True):
        cell.outputs = before.outputs
    return found


def _meaning(cell: Any) -> str:
    """The code of a cell, however it is formatted."""
    return ast.dump(ast.parse(cell.source))


def _shown(output: Any) -> str:
    return f"{output.data['text/plain']}\n"


def _stream(text: str) -> Any:
    from nbformat.v4 import new_output

    return new_output("stream", name="stdout", text=text)


def outputs(notebook: Any) -> list[str]:
    """Text that each cell of code prints, without the numbers of lines."""
    return [
        LINE.sub("…", "".join(one.text for one in cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"
    ]


def page(name: str, notebook: Any) -> str:
    """The page of a notebook."""
    parts = []
    for at, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        code = f"```python\n{cell.source}\n```"
        if at == 1:
            code = f"<details><summary>Model and helpers of this guide</summary>\n\n{code}\n\n</details>"
        parts.append(code)
        parts += [f"```text\n{one.text.rstrip()}\n```" for one in cell.outputs]
        if at == 1:
            parts.append(f"This page is also a [notebook]({name}.ipynb): run it, and change something.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the guides that are named, or all of them."""
    import nbformat

    for name, picture in drawings.PICTURES.items():
        (LEARN / f"{name}.svg").write_text(picture(), encoding="utf-8")
    names = [one for one in sys.argv[1:] if not one.startswith("-")]
    for name in names or GUIDES:
        notebook = ("--keep" in sys.argv and kept(name)) or run(name)
        nbformat.write(notebook, LEARN / f"{name}.ipynb")
        (LEARN / f"{name}.md").write_text(page(name, notebook), encoding="utf-8")
        print(f"learn/{name}.md")


if __name__ == "__main__":
    main()
