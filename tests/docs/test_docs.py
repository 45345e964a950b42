"""The documentation says what the code does: every hook has its page, every example works, the site builds."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

from forge_train import Job, Plugin
from forge_train.plugin.hookspecs import SPECS
from forge_train.plugin.plugin import PROJECT
from forge_train.registry.declared import Specs

ROOT = Path(__file__).parents[2]
HOOKS = Specs([])
"""Those that Forge's own packages declare."""
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(language: str, folder: str = "") -> list[tuple[str, str]]:
    """`page:line` and text of every code block in a language."""
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text(encoding='utf-8')[: match.start()].count(chr(10)) + 1}", match[3])
        for page in sorted([*(DOCS / folder).rglob("*.md"), *ROOT.glob("README.md")])
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
        if match[2] == language
    ]


def signature(hook: str) -> str:
    """`def hook(…) -> …` as it stands in its module."""
    source = ast.parse(inspect.getsource(sys.modules[HOOKS[hook].function.__module__]))
    (node,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == hook)
    returns = re.sub(r"Annotated\[(\w+), '.*?'\]", r"\1", ast.unparse(node.returns or ast.Constant(None)))
    return f"def {hook}({ast.unparse(node.args)}) -> {returns}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_page_with_its_signature_and_kind(hook: str) -> None:
    page = (DOCS / "hooks" / f"{hook}.md").read_text(encoding="utf-8").replace('"', "'")
    assert signature(hook) in page
    assert f"**{HOOKS[hook].kind}**" in page
    assert (", may stay empty" in page) == (HOOKS[hook].optional and HOOKS[hook].kind == "slot")
    assert "## What goes wrong" in page


def test_every_picture_is_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    assert [file.name for file in (DOCS / "assets").iterdir() if f"assets/{file.name})" not in pages] == []


def test_no_page_of_a_hook_that_does_not_exist() -> None:
    assert {page.stem for page in (DOCS / "hooks").glob("*.md")} == {"index", *HOOKS}


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_used_by_a_test(hook: str) -> None:
    used = re.compile(rf"def {hook}\(self|hooks\.{hook}\b|[\"']{hook}[\"']")
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert any(used.search(path.read_text(encoding="utf-8")) for path in tests), f"no test mentions the hook {hook!r}"


@pytest.mark.parametrize(("where", "text"), blocks("toml"))
def test_toml_parses(where: str, text: str) -> None:
    tomllib.loads(text)


@pytest.mark.parametrize(("where", "text"), blocks("python", "hooks"))
def test_examples_implement_hooks_as_they_are(where: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example is code; its classes are plugins whose hooks take arguments that the hooks have."""
    if text.startswith("def ") and text.count("\n") == 1:  # the signature itself
        return
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)
    exec(compile(text, where, "exec", dont_inherit=True), vars(module))
    for plugin in vars(module).values():
        if not isinstance(plugin, type) or not issubclass(plugin, Plugin) or plugin is Plugin:
            continue
        hooks = {name: value for name, value in vars(plugin).items() if hasattr(value, f"{PROJECT}_impl")}
        assert hooks.keys() <= HOOKS.keys()
        for name, implementation in hooks.items():
            given = set(HOOKS[name].arguments)
            assert set(inspect.signature(implementation).parameters) <= {"self"} | given, name


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "hooks" / "parallelize" / "index.html").is_file()
    assert '<pre class="mermaid">' in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


# -- what pages say about the code ------------------------------------------------------------------------------------


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def texts() -> list[str]:
    """Every string in the sources, a formatted one with `\\0` for what is filled in."""
    found = []
    for folder in ("core", "plugins", "cli", "contrib"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[srd]", "\0", node.value))
    return found


MESSAGES = re.findall(r"^### `(.+)`$", page("troubleshooting.md"), re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    return "\n\n".join(texts())


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_in_troubleshooting_is_one_that_the_code_says(message: str, said: str) -> None:
    pieces = [re.escape(piece) for piece in re.split("…", message.strip("… "))]
    assert re.search(r"[^\n]*?\0[^\n]*?".join(pieces), said), "no string in the code reads like this"


def test_the_reference_has_the_class_of_every_attribute_of_a_job() -> None:
    page = (DOCS / "api" / "forge_train.md").read_text(encoding="utf-8")
    named = {str(field.type) for field in dataclasses.fields(Job) if str(field.type).isidentifier()}
    assert {"Config", "Control", "Hooks", "Run"} <= named
    assert named <= {*re.findall(r"^### `(?:[\w.]+\.)?(\w+)`", page, re.MULTILINE)}


def test_the_architecture_page_has_every_room_of_the_kernel() -> None:
    table = page("architecture.md").partition("<!-- write: rooms -->")[2].partition("<!-- end -->")[0]
    folders = {path.parent.name for path in (ROOT / "core" / "forge_train").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == folders | {"engine"}


def test_every_option_is_described() -> None:
    pages = [*(DOCS / "plugins").glob("*.md"), DOCS / "configuration.md"]
    bare = {
        f"{file.name}: {row}"
        for file in pages
        for row in file.read_text(encoding="utf-8").splitlines()
        if re.fullmatch(r"\| `.*\|  \|", row)
    }
    assert not bare


def test_the_architecture_page_stays_a_story_and_a_map() -> None:
    assert len((DOCS / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_reading_tour_leads_to_code() -> None:
    rows = page("architecture.md").partition("## A reading tour")[2].partition("\nTo read")[0].splitlines()
    places = [
        re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", row.rpartition(" | ")[2]) for row in rows if row[:1] == "|"
    ]
    assert len(places[2:]) == 5
    for file, names in (place for row in places[2:] for place in row):
        code = (ROOT / "core" / "forge_train" / file).read_text(encoding="utf-8")
        defined = {node.name for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert set(re.findall(r"\w+", names)) <= defined, file
    assert all(places[2:])


def test_the_order_of_phases_is_that_of_the_code() -> None:
    from forge_train import Phase

    named = re.findall(r"^\| \d \| `([A-Z0-9]+)` \|", page("parallelism-order.md"), re.MULTILINE)
    assert named == [phase.name for phase in Phase]


def test_the_observers_are_those_of_the_code() -> None:
    sentence = re.search(r"implements only (.+?) watches", page("hooks/index.md"), re.DOTALL)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {name for name, spec in SPECS.items() if spec.observes}


def test_the_guarantees_name_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", page("guarantees.md"))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_command_line_page_has_every_command_and_option() -> None:
    from click import Context, Group, Option

    from forge_train_cli.app import forge

    text = page("cli.md")

    def missing(group: Group, prefix: str) -> list[str]:
        context = Context(group)
        lacking = []
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            if isinstance(command, Group):
                lacking += missing(command, f"{prefix} {name}")
            elif f"`{prefix} {name}" not in text:
                lacking.append(f"{prefix} {name}")
        return lacking

    assert missing(forge, "forge") == []
    train = forge.get_command(Context(forge), "train")
    assert train is not None
    options = {name for one in train.params if isinstance(one, Option) for name in one.opts if name.startswith("--")}
    assert [name for name in sorted(options) if name not in text] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_the_links_of_a_page_at_the_top_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", (ROOT / name).read_text(encoding="utf-8"))
    assert len(links) > 2
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_page_for_agents_is_short_and_names_what_is_there() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80
    laws = re.findall(r"^\d+\. ", text, re.MULTILINE)
    assert len(laws) == len(
        re.findall(r"^\| \d+ \| ", page("guarantees.md").partition("## What proves")[0], re.MULTILINE)
    )
    rooms = re.search(r"`(base [a-z_ ]+)`", text)
    assert rooms
    folders = {path.name for path in (ROOT / "core" / "forge_train").iterdir() if (path / "__init__.py").is_file()}
    assert set(rooms[1].split()) == folders
    known = page("cli.md").partition("## Exit codes")[2].partition("## ")[0]
    codes = re.compile(r"^\| (\d+|128 \+ n) \|", re.MULTILINE)
    assert codes.findall(text) == codes.findall(known)


def test_the_first_page_has_three_to_five_steps_for_each_kind_of_reader() -> None:
    parts = page("index.md").partition("## Where to start")[2].partition("\n## ")[0].split("### ")[1:]
    assert [part.partition("\n")[0] for part in parts] == [
        "I have a model and data",
        "I write a paper's idea as a plugin",
        "I run a cluster",
        "I teach",
    ]
    for part in parts:
        steps = re.findall(r"^\d\. .*\]\([\w/.#-]+\)", part, re.MULTILINE)
        assert 3 <= len(steps) <= 5, part


def test_how_to_pages_are_in_four_groups() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("  - How to:\n")[2]
    groups = re.findall(r"^      - (\w+):$", nav.partition("\n  - ")[0], re.MULTILINE)
    assert groups == ["Data", "Train", "Scale", "Extend"]


@pytest.mark.parametrize("name", ["add-an-axis.md", "add-a-phase.md"])
def test_names_on_pages_for_those_who_change_the_kernel_are_in_the_code(name: str) -> None:
    from forge_train.mesh.axes import Axis

    text = page(f"how-to/{name}")
    files = re.findall(r"`((?:core|tests|mesh|config|contract|compose|forge_train_tools)/[\w/]+\.py)`", text)
    assert files
    homes = (ROOT, ROOT / "core", ROOT / "core" / "forge_train")
    assert [file for file in files if not any((home / file).is_file() for home in homes)] == []
    if name == "add-an-axis.md":
        fields = set(Axis.__dataclass_fields__)
        assert fields <= set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) | {"name"}
