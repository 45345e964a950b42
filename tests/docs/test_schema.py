"""The JSON Schema of configurations accepts what Forge accepts, and refuses wrong keys and types as Forge does."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forge_train.base.errors import ConfigError
from forge_train_tools.configuration.json_schema import schema
from forge_train_tools.configuration.presets import presets
from forge_train_tools.configuration.request import Request
from forge_train_tools.configuration.setup import resolve
from test_examples import CONFIGURATIONS

PRESETS = {name: file for name, file in presets().items() if name != "base"}
FILE = '''
from forge_train import Plugin, hookimpl, section


class Mine(Plugin):
    """Watches."""

    api = (1, 0)

    @section
    class Config:
        path: str
        """A file."""
        width: int | None = None
        """Columns."""

    @hookimpl
    def on_step(self, step):
        pass
'''


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    built, problems = schema()
    assert problems == []
    jsonschema.Draft202012Validator.check_schema(built)
    return built


def mistakes(found: dict[str, Any], text: str) -> list[str]:
    """`key: message` of everything that the schema refuses in a TOML text."""
    validator = jsonschema.Draft202012Validator(found)
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("name", PRESETS)
def test_accepts_every_preset(found: dict[str, Any], name: str) -> None:
    assert mistakes(found, PRESETS[name].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(("page", "text"), CONFIGURATIONS)
def test_accepts_every_configuration_of_the_pages(found: dict[str, Any], page: str, text: str) -> None:
    assert mistakes(found, text) == []


@pytest.mark.parametrize(
    "text",
    [
        'plugins = ["hf-datasets"]\n[hf-datasets]\npath = "x"',
        'plugins = ["hf_datasets"]\n[hf_datasets]\npath = "x"',
        '[text]\ntokenizer = "bytes"',
        "[train]\nbatch_warmup = [{ steps = 1, global_batch = 4 }]\nepochs = 1",
        '[defaults]\noptimizer = "lion"\n[defaults.distributed]\ndata_parallel = ""',
        'preset = "quickstart"\nwithout = ["mfu"]',
        'plugins = ["torch-optimizer"]\n[torch-optimizer]\nlr = 0.1',  # whose required name comes with --set
    ],
)
def test_accepts_what_forge_accepts(found: dict[str, Any], text: str, tmp_path: Path) -> None:
    file = tmp_path / "right.toml"
    file.write_text(text, encoding="utf-8")
    sets = ("torch_optimizer.name=torch.optim:SGD",) if "[torch-optimizer]" in text else ()
    resolve(Request(config=str(file), set=sets), training=False)
    assert mistakes(found, text) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[train]\nstesp = 3", "$.train"),
        ("[train]\nsteps = 1.5", "$.train.steps"),
        ("[train]\nsteps = true", "$.train.steps"),
        ('[train]\nprecision = "fp64"', "$.train.precision"),
        ("[train]\nbatch_warmup = [{ steps = 1 }]", "$.train.batch_warmup[0]"),
        ("[parallel]\ntp = 0", "$.parallel.tp"),
        ("[parallel]\nxp = 2", "$.parallel"),
        ('plugins = ["lion"]\n[lion]\nlr = "high"', "$.lion.lr"),
        ('plugins = ["lion"]\n[lion]\nlr = 0', "$.lion.lr"),
        ('plugins = ["lion"]\n[lion]\nbetas = [0.9]', "$.lion.betas"),
        ('plugins = ["lion"]\n[lion]\nbetas = [0.9, 2]', "$.lion.betas[1]"),
        ('plugins = ["lion"]\n[lion.state]\nfrist = "fp32"', "$.lion.state"),
        ('plugins = ["hf-datasets"]\n[hf-datasets]\npaht = "x"', "$['hf-datasets']"),
        ('plugins = ["lino"]', "$.plugins[0]"),
        ('plugins = "lion"', "$.plugins"),
        ('preset = "quick"', "$.preset"),
        ('[defaults]\noptimiser = "lion"', "$.defaults"),
        ("[lionn]\nlr = 1", "$"),
        ("steps = 3", "$"),
    ],
)
def test_refuses_what_forge_refuses(found: dict[str, Any], text: str, where: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        resolve(Request(config=str(file)), training=False)
    assert [line.partition(": ")[0] for line in mistakes(found, text)] == [where]


def test_every_default_fits_its_own_option(found: dict[str, Any]) -> None:
    """And every option is described."""
    tables = {**found["properties"], **found["$defs"]}
    options = {(name, key): one for name, table in tables.items() for key, one in table.get("properties", {}).items()}
    assert len(options) > 600
    for (name, key), option in options.items():
        if name != "defaults":
            assert option["description"], f"{name}.{key}"
        if "default" in option:
            jsonschema.Draft202012Validator({**option, "$defs": found["$defs"]}).validate(option["default"])


def test_a_plugin_in_a_file_has_its_section_where_the_schema_is_told_of_it(
    found: dict[str, Any], tmp_path: Path
) -> None:
    from forge_train_kit.plugins import find

    (tmp_path / "mine.py").write_text(FILE, encoding="utf-8")
    text = 'plugins = ["./mine.py"]\n[mine]\npath = "x"\n'
    assert mistakes(found, text) == [], "its section may say anything"
    own, _ = schema([find(str(tmp_path / "mine.py"))])
    section = own["properties"]["mine"]
    assert section["description"] == "Watches. (no distribution)"
    assert section["properties"]["path"] == {"type": "string", "description": "A file. Required."}
    assert section["properties"]["width"]["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert mistakes(own, text + "width = 3") == []
    assert mistakes(own, 'plugins = ["./mine.py"]\n[mine]\nwidth = 3') == [], "--set may bring what is required"
    assert mistakes(own, text + 'width = "3"') != []
    assert mistakes(own, text + "wdith = 3") != []
