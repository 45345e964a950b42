"""Which files an entry stands for, and which format reads them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_train import ConfigError
from forge_train_kit.data import formats
from forge_train_kit.data.files import File, find

pytestmark = [pytest.mark.unit]


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    return root


def names(root: Path, *entries: str) -> list[str]:
    return [str(Path(file.address).relative_to(root)) for file in find([str(root / one) for one in entries], key="k")]


def test_order_depends_on_names_only_and_each_file_comes_once(tmp_path: Path) -> None:
    make(tmp_path, "b/z.jsonl", "b/a.jsonl.gz", "b/c/y.jsonl", "a/x.jsonl", "d.ndjson")
    assert names(tmp_path, "") == ["d.ndjson", "a/x.jsonl", "b/a.jsonl.gz", "b/z.jsonl", "b/c/y.jsonl"]
    assert names(tmp_path, "b", "a", "b/z.jsonl") == ["b/a.jsonl.gz", "b/z.jsonl", "b/c/y.jsonl", "a/x.jsonl"]
    assert names(tmp_path, "**/*.jsonl*", "d.ndjson") == [
        "a/x.jsonl",
        "b/a.jsonl.gz",
        "b/c/y.jsonl",
        "b/z.jsonl",
        "d.ndjson",
    ]


def test_named_is_what_a_name_or_a_pattern_asks_for(tmp_path: Path) -> None:
    make(tmp_path, "a.txt", "b.txt")
    by_folder = find(str(tmp_path), key="k")
    assert [file.named for file in by_folder] == [False, False]
    assert [file.named for file in find([str(tmp_path), str(tmp_path / "b*")], key="k")] == [False, True]
    assert find(f"file://{tmp_path}/a.txt", key="k")[0].address == str(tmp_path / "a.txt")


@pytest.mark.parametrize("entry", ["file:///{}/sub", "{}/sub", "{}/sub/"])
def test_a_folder_with_several_kinds_lists_them_and_how_to_choose(tmp_path: Path, entry: str) -> None:
    make(tmp_path / "sub", "1.parquet", "2.parquet", "x/3.parquet", "a.jsonl", "b.jsonl", "README.md")
    with pytest.raises(ConfigError) as error:
        find(entry.format(tmp_path), key="text.path")
    whole = entry.format(tmp_path)
    assert str(error.value) == (
        f"text.path: {whole!r} holds data of several kinds: 3 .parquet, 2 .jsonl. Name the files that you mean, as in "
        f"text.path = {whole.rstrip('/') + '/**/*.parquet'!r}."
    )
    pattern = str(error.value).rpartition("= ")[2].strip(".'")
    assert len(find(pattern, key="k")) == 3, "the advice works"


def test_what_is_packed_is_never_overlooked(tmp_path: Path) -> None:
    make(tmp_path, "dump.log.gz", "other.gz")
    with pytest.raises(ConfigError, match=r"several kinds: 1 \.(log\.)?gz, 1 \.(log\.)?gz\. Name"):
        names(tmp_path, "")
    (tmp_path / "other.gz").unlink()
    with pytest.raises(ConfigError, match=r"holds 1 \.log\.gz, which is not read: .*name a file to read it as plain"):
        names(tmp_path, "")
    assert names(tmp_path, "dump.log.gz") == ["dump.log.gz"]


def test_plain_text_is_one_kind(tmp_path: Path) -> None:
    assert len(names(make(tmp_path, "a.txt", "b.md", "c.rst", "d.py", "e.TXT", "image.png"), "")) == 5


def test_suffixes(tmp_path: Path) -> None:
    for address, suffix, packed in (
        ("/a/b.JSONL.GZ", "jsonl", "gz"),
        ("s3://b/c.parquet", "parquet", ""),
        ("https://h/c.csv.zst?x=a.txt", "csv", "zst"),
        ("/a/b", "", ""),
        ("/a/b.gz", "", "gz"),
    ):
        assert (File(address).suffix, File(address).packed) == (suffix, packed)


def test_a_stamp_tells_a_changed_file(tmp_path: Path) -> None:
    file = File(str(make(tmp_path, "a.txt") / "a.txt"))
    before = file.stamp()
    assert file.size() == before[0] == 2
    os.utime(file.address, ns=(0, 0))
    assert file.stamp() != before
    for act in (File(str(tmp_path / "gone"), key="k").stamp, File(str(tmp_path / "gone"), key="k").open):
        with pytest.raises(ConfigError, match=r"^k: .*gone can't be read: No such file or directory$"):
            act()


def test_a_packed_file_is_entered_in_the_middle_of_its_content(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(bytes(range(256)) * 9000))
    with File(str(tmp_path / "a.txt.gz")).open(1_500_001) as stream:
        assert stream.read(3) == bytes(range(256))[(1_500_001 % 256) :][:3]
    with File(str(tmp_path / "a.txt.gz")).anywhere() as stream:
        assert stream.seek(-2, os.SEEK_END) == 256 * 9000 - 2
        assert stream.read() == b"\xfe\xff"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.csv.gz", "a.json.zst", "a.txt"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    file = File(str(tmp_path / name), key="k")
    form = formats.lookup(file.suffix, file.label)
    with pytest.raises(ConfigError, match=rf"^k: .*{name} only points to a file .*run git lfs pull in its folder\.$"):
        [*form.read(file, form.parts(file)[0])]


# -- lookup ---------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path where distributions can be put."""
    monkeypatch.syspath_prepend(str(tmp_path))
    formats._points.cache_clear()
    yield tmp_path
    formats._points.cache_clear()


def distribution(root: Path, name: str, points: str) -> None:
    folder = root / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[forge_train.formats]\n{points}\n")


def test_an_outside_format_is_found_by_its_suffix(installed: Path) -> None:
    (installed / "mine_a.py").write_text(
        "from forge_train_kit.data.formats import Part\n"
        "class Words:\n"
        "    def parts(self, file):\n        return [Part(0, 1, file.size())]\n"
        "    def read(self, file, part):\n"
        "        with file.open() as stream:\n"
        "            for n, word in enumerate(stream.read().split()):\n"
        "                yield f'word {n + 1}', {'text': word.decode()}\n"
    )
    distribution(installed, "mine-a", "words = mine_a:Words")
    (installed / "data").mkdir()
    (installed / "data" / "x.words").write_text("a bc d")
    (file,) = find(str(installed / "data"), key="k")
    assert "mine_a" not in sys.modules, "a look at the folder imports nothing"
    form = formats.lookup(file.suffix, file.label)
    assert [record["text"] for _, record in form.read(file, form.parts(file)[0])] == ["a", "bc", "d"]


def test_what_a_lookup_refuses(installed: Path) -> None:
    distribution(installed, "mine-b", "words = nowhere_b:Words\njsonl = nowhere_b:Words")
    distribution(installed, "mine-c", "words = nowhere_c:Words\nodd = nowhere_c:Words")
    for suffix, message in (
        ("words", r"^x: \.words is read by mine-[bc] 1\.0 and mine-[bc] 1\.0; uninstall one\.$"),
        ("jsonl", r"^x: \.jsonl is read by .*forge-train .*; uninstall one\.$"),
        ("odd", r"^x: the format nowhere_c:Words of mine-c 1\.0 can't be loaded: ModuleNotFoundError: "),
        ("parquett", r"^x: no format is known for \.parquett \(there are \.arrow, .*\)\. Did you mean 'parquet'\? "),
        ("", r"^x: no format is known for a name without a suffix "),
    ):
        with pytest.raises(ConfigError, match=message):
            formats.lookup(suffix, "x")


def test_looking_for_files_imports_no_library() -> None:
    code = (
        "import sys; from forge_train_kit.data.files import find; find('/etc/hostname', key='k');"
        "print({'torch', 'numpy', 'pyarrow', 'fsspec', 'zstandard'} & set(sys.modules))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "set()"
