"""The files of a package that `forge plugins new` writes, apart from the plugin."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "forge-train-{dashed}"
version = "0.1.0"
description = "Say here what it does."
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["forge-train>={version},<{next}"]

[project.optional-dependencies]
test = ["pytest>=8"]

[project.entry-points."forge_train.plugins"]
{dashed} = "{module}:{cls}"

[tool.hatch.build]
only-include = ["{module}.py", "{module}.forge-plugin.json", "tests"]
dev-mode-dirs = ["."]

[tool.hatch.build.targets.wheel] # with the report of `forge plugins check`, if there is one
only-include = ["{module}.py", "{module}.forge-plugin.json"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""

TEST = '''\
"""The plugin keeps the contract, and trains. The fixture `run_forge` comes with forge."""

from __future__ import annotations

from pathlib import Path

{imports}

def test_it_conforms(tmp_path: Path) -> None:
    assert_conforms({cls}, folder=tmp_path)


def test_it_trains(run_forge: RunForge) -> None:
    run = run_forge([{cls}], steps=4)
    assert run.finished.outcome == "done"
    assert len(run.losses) == 4
'''

WORKFLOW = """\
name: test
on:
  push:
  pull_request:
  schedule:
    - cron: "0 6 * * 1" # a new Forge may be out
jobs:
  test:
    name: the ${{{{ matrix.forge }}}} Forge
    runs-on: ubuntu-latest
    strategy:
      fail-fast: false
      matrix:
        include: # both ends of the range of forge-train in pyproject.toml
          - {{ forge: oldest, resolution: lowest-direct, python: "3.11" }}
          - {{ forge: newest, resolution: highest, python: "3.12" }}
    steps:
      - uses: actions/checkout@v4
      - uses: astral-sh/setup-uv@v6
        with:
          python-version: ${{{{ matrix.python }}}}
          activate-environment: true
      - run: uv pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: uv pip install --resolution ${{{{ matrix.resolution }}}} -e '.[test]'
      - run: pytest
      - run: forge plugins check {name} --report {module}.forge-plugin.json
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: report-${{{{ matrix.forge }}}}
          path: {module}.forge-plugin.*
"""

README = """\
# forge-train-{dashed}

Say here what it does, with the paper it comes from.

```
pip install forge-train-{dashed}
forge train --plugins {dashed}
```

`forge plugins info {dashed}` lists its options, which stand in the section `[{name}]`.

## Work on it

```
pip install -e '.[test]'
pytest
forge plugins check {dashed}
```

## Before it is published

- [ ] The class's first line and this file say what it does, and cite the paper.
- [ ] Every option has its range and its unit, and a line about what it does.
- [ ] The module imports without torch: torch is imported inside the hooks.
- [ ] State that decides how a run continues is in `state_dict`, and `forge plugins check` resumes exactly.
- [ ] A test compares it with a computation by hand, or with another implementation.
- [ ] What it needs beyond forge is in `dependencies`, or in `needs` with the command that installs it.
- [ ] `api` is the plugin API it was written for. CI tests both ends of the range of `forge-train` in pyproject.toml.
- [ ] `forge plugins check {dashed} --report {module}.forge-plugin.json` wrote the report that the package ships, and a
  badge for this page: `![Forge plugin API]({module}.forge-plugin.svg)`.
- [ ] There is a licence, in a file and in pyproject.toml.
- [ ] `python -m build && twine check dist/*`; then `twine upload dist/*`.
"""

AGENTS = """\
# For coding agents

A plugin of Forge (`forge-train`): the class `{cls}` in `{module}.py`, whose options stand in the section `[{name}]`.

## Commands

```
pip install -e '.[test]'
pytest -q
forge plugins check {dashed} --json                 # the contract; after every change
forge train -p {dashed} -s train.steps=20 --json    # a small run on the CPU
forge verify -p {dashed} --nproc 2 --json           # two processes compute what one does
forge plugins info {dashed} --json                  # hooks and options, as Forge reads them
forge describe --json                               # every command, hook, plugin, and the JSON Schema of configurations
```

With `--json`, stdout is one JSON value; messages go to stderr.

| exit code | meaning | what to do |
|---|---|---|
| 0 | done | |
| 1 | a check or the run failed | read `error` or the failed `checks`; `FORGE_TRACEBACK=1` adds the traceback |
| 2 | the input is wrong | fix what the message names |
| 3 | training diverged | change the configuration |
| 75 | interrupted after a checkpoint | the same command again |

## The contract

- A method is a hook if `@hookimpl` stands above it. It names those of the hook's arguments that it needs:
  `forge plugins hooks --json` lists hooks.
- Every option has a type, a range and a docstring below it. An option without effect is an error, not a comment.
- The module does not import torch at its top; hooks import it.
- State that decides how a run continues is in `state_dict` and `load_state_dict`.
- Do not read a tensor's value in every step, as `.item()` does: each step would wait for the device.
- Permuting plugins, other layouts, and a stop and resume change no number beyond rounding.
- `api` is raised when the plugin uses something newer; the range of `forge-train` in pyproject.toml follows.

## Do not

- loosen a tolerance, skip a check, or catch an error to get green
- import another plugin; declare in `requires` what must be enabled beside this one
"""
