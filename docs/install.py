"""Stands in for pip while a page is typed: `pip install -e DIR` makes a plugin known, and changes no environment."""

import sys
import tomllib
from pathlib import Path

folder, site = Path(sys.argv[-1]), Path(__file__).parents[1]
project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
info.mkdir()
lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {project['version']}", ""]
(info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
groups = project["entry-points"].items()
points = [line for group, all_ in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in all_.items()))]
(info / "entry_points.txt").write_text("\n".join([*points, ""]), encoding="utf-8")
for file in folder.glob("*.py"):
    (site / file.name).symlink_to(file.resolve())
