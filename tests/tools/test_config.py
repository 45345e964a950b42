"""Layers of configuration, their precedence, what `--set` means, strict validation, and TOML written as it is read."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

import toys
from forge_train import ConfigError, Ge, Gt, Lt, Plugin, PluginError, Volatile, section
from forge_train.config import Config, differences
from forge_train.config.tree import Origin, Tree, Value
from forge_train.config.validate import validate
from forge_train.loop.describe import to_toml
from forge_train_tools.configuration.comments import commented
from forge_train_tools.configuration.presets import presets
from forge_train_tools.configuration.request import Request, lay, lay_file
from forge_train_tools.configuration.setup import resolve
from forge_train_tools.configuration.toml import read
from forge_train_tools.configuration.typed import read_text
from forge_train_tools.launching.claim import digest
from forge_train_tools.testing import Installed, installed

pytestmark = pytest.mark.unit


@section
class Inner:
    """A table inside a section."""

    theta: Annotated[float, Gt(1)] = 10.0
    kind: Literal["none", "linear"] = "none"


@section
class Item:
    """A table in a list."""

    match: str
    lr: Annotated[float, Gt(0)] = 1.0
    decay: float | None = None


@section
class Deep:
    high: Annotated[float, Gt(0)] = float("inf")


class Odd(toys.Bare):
    """Its defaults are no values that it would take."""

    @section
    class Config:
        rate: float = float("nan")
        count: Annotated[int, Ge(1)] = 0
        kind: Literal["a", "b"] = "c"  # type: ignore[assignment]
        deep: Deep = Deep()


class Wide(toys.Bare):
    """A plugin with a field of every kind."""

    @section
    class Config:
        count: Annotated[int, Ge(0)] = 1
        """How many."""
        ratio: Annotated[float, Gt(0), Lt(1)] = 0.5
        flag: bool = False
        text: str = ""
        path: str | tuple[str, ...] = ""
        pair: tuple[float, float] = (0.5, 0.75)
        names: tuple[str, ...] = ()
        table: Inner = Inner()
        after_table: Annotated[int, Volatile()] = 7
        maybe: int | None = None
        mapping: dict[str, int] = field(default_factory=dict)
        items: tuple[Item, ...] = ()


def asked(folder: Path, text: str = "", **more: Any) -> Request:
    file = folder / "my.toml"
    file.write_text(text, encoding="utf-8")
    return Request(config=str(file), **more)


def wide(folder: Path, text: str = "", **more: Any) -> Any:
    """The section [wide] that a file of this text gives."""
    with installed([Wide, toys.ToyModel, toys.ToyData]):
        top = 'plugins = ["wide", "toy_model", "toy_data"]\nwithout = ["console", "tensorboard"]\n'
        more.setdefault("set", ())
        request = asked(folder, top + text, **{**more, "set": ("train.steps=1", *more["set"])})
        return resolve(request).config.sections["wide"]


def mistakes(folder: Path, text: str, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        wide(folder, text, **more)
    return str(caught.value).replace(f"{folder}/", "").splitlines()


# -- layers ---------------------------------------------------------------------------------------


def test_weaker_layers_lie_beneath_stronger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[wide]\ncount = 2\nratio = 0.2\nflag = true\ntext = 'preset'\n", encoding="utf-8")
    known = presets()
    monkeypatch.setattr("forge_train_tools.configuration.request.presets", lambda: {**known, "mine": preset})
    request = asked(
        tmp_path,
        "preset = 'mine'\n[wide]\nratio = 0.3\nflag = true\ntext = 'file'\n",
        environment="wide.flag=false; wide.text=environment",
        set=("wide.text=first", "wide.text=set"),
    )
    values = lay(request).below(("wide",))
    assert {key[0]: value.value for key, value in values.items()} == {
        "count": 2,
        "ratio": 0.3,
        "flag": "false",
        "text": "set",
    }
    assert {key[0]: (value.origin.kind, str(value.origin)) for key, value in values.items()} == {
        "count": ("preset", "mine.toml:2"),
        "ratio": ("file", f"{tmp_path}/my.toml:3"),
        "flag": ("FORGE_SET", "FORGE_SET"),
        "text": ("--set", "--set wide.text=set"),
    }


def test_lists_of_plugins_add_up_and_other_lists_are_replaced(tmp_path: Path) -> None:
    tree = Tree()
    for number, text in enumerate(("plugins = ['a', 'b']\nx.y = [1]", "plugins = ['b', 'c']\nx.y = [2]")):
        file = tmp_path / f"{number}.toml"
        file.write_text(text, encoding="utf-8")
        lay_file(tree, read(file), Origin("file", file.name))
    assert tree.values["plugins",].value == ["a", "b", "c"]
    assert tree.values["x", "y"].value == [2]


def test_a_value_replaces_a_table_and_a_table_a_value() -> None:
    tree, origin = Tree(), Origin("--set")
    tree.put(("a", "b", "c"), Value(1, origin))
    tree.put(("a", "b"), Value(2, origin))
    assert tree.below(("a",)) == {("b",): Value(2, origin)}
    tree.put(("a", "b", "d"), Value(3, origin))
    assert tree.below(("a",)) == {("b", "d"): Value(3, origin)}


def test_a_hyphen_is_an_underscore_in_the_names_of_sections(tmp_path: Path) -> None:
    class CrossEyed(Wide):
        """Its name has two words."""

    with installed([CrossEyed, toys.ToyModel, toys.ToyData]):
        request = asked(
            tmp_path,
            "plugins = ['cross-eyed', 'toy-model', 'toy-data']\ntrain.steps = 1\n[cross-eyed]\ncount = 3\n",
            set=("cross-eyed.text=a",),
            environment="cross_eyed.flag=true",
        )
        made = resolve(request).config.sections["cross_eyed"]
        assert (made.count, made.text, made.flag) == (3, "a", True)
        with pytest.raises(ConfigError, match=r"my\.toml:6: section \[cross_eyed\] is section \[cross-eyed\]"):
            resolve(asked(tmp_path, "plugins = []\n\n[cross-eyed]\ncount = 3\n\n[cross_eyed]\ntext = 'b'\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plugins = 'lion'", "my.toml:1: plugins: expected a list of names, found 'lion'."),
        ("plugins = [[]]", "my.toml:1: plugins: expected a list of names, found [[]]."),
        ("plugins = [1]", "my.toml:1: plugins: expected a list of names"),
        ("\n[plugins]\nlion = true", "my.toml:2: plugins: expected a list of names, found {'lion': True}."),
        ("without.lion = 1", "my.toml:1: without: expected a list of names"),
        ("preset = 5", "my.toml:1: preset: expected a preset's name, found 5."),
        (
            "\npreset = 'quickstrt'",
            "my.toml:2: There is no preset 'quickstrt' and no file or model of that name. Did you mean 'q",
        ),
        ("defaults = 'adamw'", "my.toml:1: defaults: expected a table of slots and plugins, found 'adamw'."),
        ("[defaults]\noptimiser = 'adamw'", "my.toml:2: defaults.optimiser: there is no such slot. Did you mean 'opt"),
        ("[defaults]\noptimizer = 3", "my.toml:2: defaults.optimizer: expected a plugin's name, found 3."),
        ("[defaults]\nattention = 'cosine'", "my.toml:2: defaults.attention: plugin 'cosine' does not fill the slot"),
        (
            "[defaults]\noptimizer = 'admw'",
            "defaults.optimizer: there is no plugin named 'admw'. Did you mean 'adamw'?",
        ),
        ("[defaults.optimizer]\nadamw = 1", "my.toml:2: defaults.optimizer.adamw: there is no such slot."),
    ],
)
def test_what_stands_at_the_top_is_checked_too(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(asked(tmp_path, text, set=("train.steps=1",)))
    assert says in str(caught.value).replace(f"{tmp_path}/", "")


@pytest.mark.parametrize(
    ("assignment", "says"),
    [
        ("train.steps", "--set 'train.steps': expected key=value, like train.steps=200."),
        ("=5", "expected key=value"),
        ("train.=5", "expected key=value"),
        ("steps=5", "--set 'steps=5': expected section.key=value, like train.steps=200."),
        ("plugins=lion", "Use --plugins and --without."),
        ("plugins.lion=1", "Use --plugins and --without."),
        ("preset.x=1", "expected section.key=value"),
        ("trian.steps=1", "there is no section [trian]. Did you mean 'train'?"),
        ("lion.lr=1", "section [lion] belongs to a plugin that is not enabled: add --plugins lion."),
    ],
)
def test_assignments_that_are_none(assignment: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Request(set=("train.steps=1", assignment)))
    assert says in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        resolve(Request(set=("train.steps=1",), environment=f" ; {assignment};"))
    assert says.replace("--set", "FORGE_SET") in str(caught.value)


# -- the type of text -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "5", 5),
        ("count", "5.0", 5.0),
        ("count", "many", "many"),
        ("count", "5\nflag = true", "5\nflag = true"),
        ("count", "9" * 5000, "9" * 5000),
        ("ratio", "1e-3", 1e-3),
        ("ratio", ".5", 0.5),
        ("ratio", "3.", 3.0),
        ("flag", "true", True),
        ("flag", "True", "True"),
        ("text", "5", "5"),
        ("text", "true", "true"),
        ("text", '["a"]', '["a"]'),
        ("path", "", ""),
        ("path", "a,b", "a,b"),
        ("path", '["a", "b"]', ["a", "b"]),
        ("path", "[abc].txt", "[abc].txt"),
        ("pair", "0.9,0.95", [0.9, 0.95]),
        ("pair", "[0.9, 0.95]", [0.9, 0.95]),
        ("names", "a,b", ["a", "b"]),
        ("names", "1,2", ["1", "2"]),
        ("table.theta", "5", 5),
        ("table.kind", "linear", "linear"),
        ("unknown", "x y", "x y"),
        ("maybe", "3", 3),
    ],
)
def test_text_is_read_as_the_field_then_as_toml_then_as_a_string(key: str, text: str, value: object) -> None:
    found = read_text(Wide.Config, tuple(key.split(".")), text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("quoted", ['"there/x.txt"', "'there/x.txt'"])
def test_quotation_marks_around_a_path_are_refused_where_the_shell_has_left_them(tmp_path: Path, quoted: str) -> None:
    """A text is taken as it is, with its marks; a path never has any."""
    said = "train.init_from: a path has no quotation marks around it here: there/x.txt."
    for more in ({"set": ("train.steps=1", f"train.init_from={quoted}")}, {"environment": f"train.init_from={quoted}"}):
        assert [line.partition(": ")[2] for line in mistakes(tmp_path, "", **more)] == [said]
    assert wide(tmp_path, "", set=(f"wide.text={quoted}",)).text == quoted
    assert wide(tmp_path, "", set=('wide.text="',)).text == '"'


def test_a_list_whose_quotation_marks_the_shell_has_taken_is_refused(tmp_path: Path) -> None:
    """A text without brackets is split at its commas; a pattern may begin with a bracket."""
    said = (
        "wide.names: expected a list, found '[<a>,</a>]'. If the shell took its quotation marks, put ' around the "
        "argument."
    )
    assert [line.partition(": ")[2] for line in mistakes(tmp_path, "", set=("wide.names=[<a>,</a>]",))] == [said]
    assert wide(tmp_path, "", set=("wide.names=[ab].c,d",)).names == ("[ab].c", "d")


def test_set_reaches_every_kind_of_field(tmp_path: Path) -> None:
    made = wide(
        tmp_path,
        "[wide.table]\ntheta = 3.0\n",
        set=("wide.count=3", "wide.pair=0.25,1", "wide.path=a b", "wide.table.kind=linear", "wide.names=x"),
    )
    assert made == Wide.Config(  # type: ignore[call-arg]
        count=3, pair=(0.25, 1.0), path="a b", table=Inner(theta=3.0, kind="linear"), names=("x",)
    )


# -- validation -----------------------------------------------------------------------------------


def test_every_mistake_is_named_at_once_with_where_it_stands(tmp_path: Path) -> None:
    text = """
[wide]
cuont = 3
ratio = 2.0
flag = 1
pair = [
  0.5,
]
names = "a"
[wide.table]
kind = "liner"
thta = 3.0
[train]
steps = -1
sequence = 2.5
"""
    assert mistakes(tmp_path, text, set=("wide.count=x", "train.steps=-1"), environment="wide.text=5") == [
        "--set wide.count=x: wide.count: expected an integer, found 'x'.",
        "my.toml:6: wide.ratio: expected a number less than 1.0, found 2.0.",
        "my.toml:7: wide.flag: expected true or false, found 1.",
        "my.toml:8: wide.pair: expected a list of 2 values, found [0.5].",
        "my.toml:11: wide.names: expected a list, found 'a'.",
        "my.toml:13: wide.table.kind: expected 'none' or 'linear', found 'liner'. Did you mean 'linear'?",
        "my.toml:14: wide.table.thta: there is no such key. Did you mean 'theta'?",
        "my.toml:5: wide.cuont: there is no such key. Did you mean 'count'?",
        "--set train.steps=-1: train.steps: expected a number at least 0, found -1.",
        "my.toml:17: train.sequence: expected an integer, found 2.5.",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wide.count = 1.0", "my.toml:3: wide.count: expected an integer, found 1.0."),
        ("wide.count = true", "wide.count: expected an integer, found True."),
        ("wide.count = '1'", "wide.count: expected an integer, found '1'."),
        ("wide.count = inf", "wide.count: expected "),
        ("wide.ratio = nan", "wide.ratio: expected a finite number"),
        ("wide.ratio = 1", "wide.ratio: expected a number less than 1.0, found 1."),
        ("wide.text = 1", "wide.text: expected a string, found 1."),
        ("wide.text = 1979-05-27", "wide.text: dates and times are not used in configurations."),
        ("wide.text = [1979-05-27]", "wide.text: dates and times are not used in configurations."),
        ("wide.path = 1", "wide.path: expected a string, found 1."),
        ("wide.pair = [0.1, 0.2, 0.3]", "wide.pair: expected a list of 2 values, found [0.1, 0.2, 0.3]."),
        ("wide.table = 1", "wide.table: expected a table, found 1."),
        ("wide.table = {}\nwide.unknown = {}", "my.toml:4: wide.unknown: there is no such key."),
        ("[wide.tabel]", "my.toml:3: wide.tabel: there is no such key. Did you mean 'table'?"),
        ("[wide.count]", "my.toml:3: wide.count: expected an integer, found {}."),
        ("[wide.mapping]\na = 1.5", "wide.mapping.a: expected an integer, found 1.5."),
        ("[wid]\na = 1", "my.toml:3: there is no section [wid]. Did you mean 'wide'?"),
        ("[wid]", "my.toml:3: there is no section [wid]. Did you mean 'wide'?"),
        ("\nwid.a = 1", "my.toml:4: there is no section [wid]."),
        ("wide = 3", "my.toml:3: wide: expected a section [wide], found 3."),
        ("[[wide]]\ncount = 1", "my.toml:3: wide: expected a section [wide], found [{'count': 1}]."),
        ("train = []", "my.toml:3: train: expected a section [train], found []."),
        ("steps = 5", "my.toml:3: steps: expected a section [steps], found 5. Only plugins, without, preset, defaults"),
        (
            "plugin = ['lion']",
            "my.toml:3: plugin: expected a section [plugin], found ['lion']. Did you mean 'plugins'?",
        ),
        ("[train.deep]", "my.toml:3: train.deep: there is no such key."),
        (
            '[[wide.items]]\nmatch = "a"\nlr = 0',
            "my.toml:3: wide.items.0.lr: expected a number greater than 0.0, found 0.",
        ),
        ('[[wide.items]]\nmatch = "a"\nlr = nan', "wide.items.0.lr: "),
        ('[[wide.items]]\nmatch = "a"\n[[wide.items]]\nlr = 2.0', "my.toml:3: wide.items.1.match: is required."),
        ('[[wide.items]]\nmatch = "a"\nmach = 1', "wide.items.0.mach: there is no such key. Did you mean 'match'?"),
        ("[wide.items]\nlr = 1", "wide.items: expected a list, found {'lr': 1}."),
        ("wide.items = [1]", "wide.items: expected a table, found 1."),
    ],
)
def test_one_mistake(tmp_path: Path, text: str, says: str) -> None:
    found = mistakes(tmp_path, text)
    assert len(found) == 1
    assert says in found[0]


def test_a_table_that_stays_empty_leaves_what_lies_beneath() -> None:
    tree, origin = Tree(), Origin("file")
    tree.put(("a", "b", "c"), Value(1, origin))
    tree.tables["a", "b"] = origin
    assert tree.below(("a",)) == {("b", "c"): Value(1, origin)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[log]\nevery = 0", "log.every: expected a number greater than 0, found 0."),
        ("[parallel]\ndp_shard = -2", "parallel.dp_shard: expected a number at least -1, found -2."),
        ("[run]\ndevice = 'gpu'", "run.device: expected 'auto' or 'cpu' or 'cuda' or 'mps', found 'gpu'."),
        ("[train]\nprecision = 'bf61'", "Did you mean 'bf16'?"),
        ("[train]\nglobal_batch = 6\nmicro_batch = 4", "my.toml:4: train.global_batch: 6 is not a multiple of micro"),
        ("[train]\ntokens = 5", "say how long to train, in either steps, tokens or epochs; found steps and tokens."),
        ("[parallel]\ntp = 2", "= 1 × 1 × 1 × 1 × 2 = 2, but there is 1 process."),
        ("[parallel]\ndp_shard = 0", "parallel.dp_shard: must be at least 1, or -1 for what is left over; it is 0."),
        ("[run]\nname = 'a/b'", "my.toml:4: run.name: expected the name of a folder, found the path 'a/b'"),
    ],
)
def test_the_sections_of_core(tmp_path: Path, text: str, says: str) -> None:
    assert any(says in line for line in mistakes(tmp_path, text))


def test_without_steps_or_tokens_there_is_no_run() -> None:
    with pytest.raises(
        ConfigError, match="train.steps: say how long to train, in either steps, tokens or epochs; found none"
    ):
        resolve(Request())


def test_a_config_that_is_no_section_is_its_plugins_fault(tmp_path: Path) -> None:
    import dataclasses

    class Plain(toys.Bare):
        class Config:
            a = 1

    class Undecorated(toys.Bare):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Config:
            a: int = 1

    @dataclasses.dataclass(frozen=True)
    class Loose:
        b: int = 1

    class Nested(toys.Bare):
        @section
        class Config:
            inner: Loose | None = None

    Nested.Config.__annotations__["inner"] = Loose | None  # what it was written as can't be seen from here
    for cls, which in ((Undecorated, "Undecorated.Config"), (Nested, "Loose"), (Plain, "Plain.Config")):
        says = (
            rf"Plugin '\w+' \(under-test 0\): its Config is not a section: class \S*{which} \(.*test_config.py:\d+\) "
        )
        with pytest.raises(ConfigError, match=says + "lacks @section; write @section above it"):
            toys.setup(cls, folder=tmp_path)


def test_a_default_that_is_no_valid_value_is_its_plugins_fault(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        toys.setup(Odd, folder=tmp_path)
    assert str(caught.value).splitlines() == [
        "odd.rate: the default that its section declares: expected a finite number, found nan.",
        "odd.count: the default that its section declares: expected a number at least 1, found 0.",
        "odd.kind: the default that its section declares: expected 'a' or 'b', found 'c'.",
        "odd.deep: the default that its section declares: expected a finite number, found inf.",
    ]
    assert toys.setup(Odd, folder=tmp_path, config={"odd": {"rate": 1.0, "count": 1, "kind": "a", "deep.high": 1.0}})


def test_a_value_of_a_section_without_a_type_is_no_option() -> None:
    with pytest.raises(PluginError, match=r"Config\.rate has no type, so it is no option: write rate: float = 0\.1"):

        @section
        class Config:
            rate = 0.1

    @section
    class Fine:
        _private = 3

        @property
        def double(self) -> int:
            return 2

        def method(self) -> None: ...


def test_a_rule_of_a_section_itself_is_told_in_its_own_words(tmp_path: Path) -> None:
    class Ruled(toys.Bare):
        @section
        class Config:
            low: int = 1
            high: int = 2

            def __post_init__(self) -> None:
                if self.low > self.high:
                    raise ValueError(f"low ({self.low}) is above high ({self.high}).")

    with pytest.raises(ConfigError, match=r"tiny\.toml:\d+: ruled: low \(3\) is above high \(2\)\."):
        toys.setup(Ruled, folder=tmp_path, config={"ruled.low": 3})


def test_validate_gives_a_frozen_section() -> None:
    found: list[str] = []
    made = validate("wide", Wide.Config, {("pair",): Value([1, 2], Origin("file"))}, found)
    assert not found
    assert made.pair == (1.0, 2.0)
    with pytest.raises(AttributeError):
        made.count = 2


# -- written and read -----------------------------------------------------------------------------


@pytest.mark.parametrize("comments", [False, True])
def test_what_is_written_is_read_again(tmp_path: Path, forge_plugins: Installed, comments: bool) -> None:
    forge_plugins.restore()
    for plugin in (Wide, toys.ToyModel, toys.ToyData):
        forge_plugins.add(plugin)
    request = Request(
        plugins=("wide", "toy_model", "toy_data", "lion"),
        without=("tensorboard",),
        set=(
            *("train.steps=7", "run.name=mine", "checkpoint.allow_changes=a,b", "defaults.loss_scale="),
            *("wide.table.theta=5.5", "wide.names=x,y", "wide.text=a \"quoted\" 'text' # é\\", "wide.after_table=8"),
            *(
                "wide.ratio=1e-30",
                "wide.mapping={a = 1}",
                'wide.items=[{match="a*"}, {match="b", decay=0.5}]',
                "lion.lr=0.1",
                "cosine.warmup=2",
            ),
        ),
    )
    first = resolve(request)
    file = tmp_path / "written.toml"
    file.write_text((commented if comments else to_toml)(first.config, first.hooks), encoding="utf-8")
    second = resolve(Request(config=str(file)))
    assert second.config.run.name == ""
    assert second.config.sections == first.config.sections
    assert second.config.enabled() == first.config.enabled()
    assert second.config.values(volatile=False) == first.config.values(volatile=False)
    assert digest(second.config) == digest(first.config)
    assert list(differences(first.config.values(), second.config.values())) == [("run.name", "mine", "")]
    if comments:
        assert "# How many.\ncount = 1 # integer ≥ 0\n" in file.read_text(encoding="utf-8")


def test_an_optional_slot_that_was_emptied_stays_empty(tmp_path: Path) -> None:
    first = toys.setup(folder=tmp_path, config={"defaults.attention": "", "defaults.attention_kernel": ""})
    assert first.hooks.provider("attention_kernel") is None
    with installed([toys.ToyModel, toys.ToyData]):
        file = tmp_path / "written.toml"
        file.write_text(to_toml(first.config, first.hooks), encoding="utf-8")
        second = resolve(Request(config=str(file)))
    assert second.hooks.provider("attention_kernel") is None


# -- the digest -----------------------------------------------------------------------------------


def test_the_digest_knows_what_can_change_a_number(tmp_path: Path) -> None:
    def of(*plugins: Any, **config: Any) -> str:
        values = {key.replace("__", "."): value for key, value in config.items()}
        return digest(toys.setup(*plugins, folder=tmp_path, config=values).config)

    class Watcher(Plugin):
        @section
        class Config:
            size: int = 1

        from forge_train import hookimpl

        @hookimpl
        def on_log(self, record: Any) -> None: ...

    plain = of()
    for volatile in ({"log__every": 5}, {"run__name": "x"}, {"checkpoint__keep": 5}, {"train__evaluate_every": 2}):
        assert of(**volatile) == plain
    for changed in ({"run__seed": 1}, {"train__steps": 5}, {"adamw__lr": 0.1}, {"toy_model__layers": 3}):
        assert of(**changed) != plain
    assert of(Watcher) == plain
    assert of(Watcher, watcher__size=2) == plain
    assert of("lion") != plain
    assert of(toys.Average) != plain


def test_values_and_their_origins(tmp_path: Path) -> None:
    config: Config = toys.setup(folder=tmp_path, config={"toy_model.layers": 3}).config
    assert config.values()["toy_model.layers"] == 3
    assert config.values()["checkpoint.allow_changes"] == []
    assert config.origin(("toy_model", "layers")).kind == "file"
    assert str(config.origin(("toy_model", "tied"))) == "default"


def test_a_path_in_a_file_starts_at_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    file = tmp_path / "there" / "my.toml"
    file.write_text('[train]\nsteps = 1\ninit_from = "./"\n')
    monkeypatch.chdir(tmp_path)
    kept = resolve(Request(config="there/my.toml"), training=False).config.train.init_from
    typed = resolve(Request(config="there/my.toml", set=("train.init_from=here",)), training=False).config
    assert (kept, typed.train.init_from) == (str(tmp_path / "there"), str(tmp_path / "here"))


def test_no_configuration_changes_the_preset_beneath_all() -> None:
    before = lay(Request()).values
    laid = lay(Request(set=("train.steps=7", "own.key=1")))
    laid.drop("train")
    laid.mistakes.append("wrong")
    after = lay(Request())
    assert after.values == before
    assert ("own",) not in after.tables
    assert after.mistakes == []
