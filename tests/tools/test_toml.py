"""The line index of TOML files, and what is said of files that can't be read."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from forge_train import ConfigError
from forge_train_tools.configuration.toml import index_lines, read

pytestmark = pytest.mark.unit


def lines(text: str) -> dict[str, int]:
    tomllib.loads(text)  # the index is promised for valid TOML only
    return {".".join(key): line for key, line in index_lines(text).items()}


def test_tables_and_keys_are_counted_from_one() -> None:
    assert lines("# a comment\n\na = 1\n[train]\nsteps = 5\n\n[decoder.rope]\ntheta = 1.0\n") == {
        "a": 3,
        "train": 4,
        "train.steps": 5,
        "decoder.rope": 7,
        "decoder.rope.theta": 8,
    }


@pytest.mark.parametrize(
    ("value", "height"),
    [
        ("[1, 2]", 1),
        ("[\n  1,\n  # b = 3 and ] in a comment\n  2,\n]", 5),
        ("[[1,\n2], [3,\n4]]", 3),
        ('["]", \'[\',\n"]"]', 2),
        ('"""\nb = 2\n[table]\n"""', 4),
        ('"""one line"""', 1),
        ('"""ends with four quotes""""', 1),
        ('"""\nescaped \\""" = 3\n"""', 3),
        ('"""\nends with a backslash \\\\"""', 2),
        ("'''\nb = 2 # no\n'''", 3),
        ("'''\n'' \\'''", 2),
        ('"a # b" # [', 1),
        ('"an escaped \\" [ quote"', 1),
        ("{ x = 1, y = [2, 3] }", 1),
        ("{ x = [\n1,\n2] }", 3),
        ("1979-05-27T07:32:00Z", 1),
        ("3 # it's a comment with [ in it", 1),
    ],
)
def test_a_value_may_go_on_over_lines(value: str, height: int) -> None:
    found = lines(f"a = {value}\nlast = 1\n")
    assert found == {"a": 1, "last": 1 + height}


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("a.b.c", ("a", "b", "c")),
        ("a . b", ("a", "b")),
        ('"a.b".c', ("a.b", "c")),
        ("'a b'", ("a b",)),
        ("cross-entropy", ("cross-entropy",)),
        ("1", ("1",)),
    ],
)
def test_keys_dotted_and_quoted(written: str, key: tuple[str, ...]) -> None:
    assert index_lines(f"\n{written} = 1\n") == {key: 2}
    assert index_lines(f"\n[ {written} ] # table\n") == {key: 2}


def test_of_an_array_of_tables_the_first_counts() -> None:
    assert lines("[[a]]\nx = 1\n[[a]]\nx = 2\n[a.b]\ny = 3\n") == {"a": 1, "a.x": 2, "a.b": 5, "a.b.y": 6}


def test_line_separators_that_toml_does_not_know_do_not_count() -> None:
    assert lines("# \u2028 \x85\na = '\u2029'\nb = 1\n") == {"a": 2, "b": 3}


def document(folder: Path, text: str) -> Path:
    file = folder / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_line_of_what_stands_inside_a_value_or_is_only_implied(tmp_path: Path) -> None:
    found = read(document(tmp_path, "\nx = { y = 1 }\n\n\ntrain.steps = 5\nlog.every = 1\n[decoder.rope]\nlow = 1.0\n"))
    assert found.line(("x", "y")) == 2
    assert found.line(("train",)) == 5
    assert found.line(("decoder",)) == 7
    assert found.line(("not", "there")) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[train]\nsteps = \n", "my.toml:2: not valid TOML: Invalid value"),
        ("a = 1\na = 2\n", "my.toml:2: not valid TOML: "),
        ("a = [1,\n", "my.toml:2: not valid TOML: "),
        ("a = " + "9" * 5000, "my.toml: not a configuration: ValueError"),
        ("a = " + "[" * 5000, "my.toml: not a configuration: "),
    ],
)
def test_what_is_not_toml_is_named_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(document(tmp_path, text))
    assert says in str(caught.value)
    assert caught.value.code == 2


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: can't read the configuration: No such file"):
        read(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read(tmp_path / "binary.toml")
    with pytest.raises(ConfigError):
        read(Path("a\0b.toml"))


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "windows.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 2\r\n")
    assert read(file).data == {"train": {"steps": 2}}
