"""From files to tokens: what is read, how it is divided, tokenised and cached, and what goes wrong."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import tokenizers

from forge_train import ConfigError
from forge_train_kit.data import progress
from forge_train_kit.data.tokenizers.byte import ByteTokenizer
from forge_train_kit.data.tokenizers.pretrained import PretrainedTokenizer
from forge_train_plugins.data._text import cache, documents
from forge_train_plugins.data._text.corpus import Corpus, Split
from forge_train_plugins.data.text import Text
from text_fakes import Shown, job, plugin, prose, write

pytestmark = pytest.mark.unit


def corpus(cache: Path, path: Path | str | tuple[str, ...], tokenizer: Any = None, **options: Any) -> Corpus:
    return plugin(cache, path, **options)._open(job(tokenizer=tokenizer))


def texts(part: Split) -> list[str]:
    """Documents of a byte-tokenised split."""
    starts = [0, *part.ends[:-1].tolist()]
    decoded = []
    for start, end in zip(starts, part.ends.tolist(), strict=True):
        ids = part.tokens[start:end]
        assert ids[-1] == 256
        decoded.append(ByteTokenizer().decode(ids.tolist()))
    return decoded


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, {"e.jsonl": '{"text": "one"}\n\n{"text": "two", "id": 2}\n{"text": ""}\n'})
    return write(
        tmp_path / "data",
        {
            "b.txt": "bee",
            "a.md": "ay",
            "sub/c.py": "see",
            "sub/d.rst": "dée",
            "empty.txt": "",
            "image.png": b"\x89PNG\0",
            "__pycache__/f.py": "no",
            ".git/g.txt": "no",
        },
    )


class TestReading:
    def test_a_folder_gives_its_text_files_in_order_of_their_names(self, store: Path, folder: Path) -> None:
        found = corpus(store, folder, held_out=0.0)
        assert texts(found.train) == ["ay", "bee", "see", "dée"]
        assert found.train.bytes == len("aybeeseedée".encode())
        assert len(found.validation.tokens) == 0

    def test_files_globs_and_lists(self, store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder)
        assert texts(corpus(store, "b.txt", held_out=0.0).train) == ["bee"]
        assert texts(corpus(store, "**/*.[mpr][dys]*", held_out=0.0).train) == ["no", "ay", "see", "dée"]
        assert texts(corpus(store, ("sub", "b.txt", "sub/c.py", "../e.jsonl"), held_out=0.0).train) == [
            "see", "dée", "bee", "one", "two",
        ]  # fmt: skip

    def test_a_named_file_is_read_whatever_it_is_called(self, store: Path, tmp_path: Path) -> None:
        write(tmp_path, {"notes.log": "hello"})
        assert texts(corpus(store, tmp_path / "notes.log", held_out=0.0).train) == ["hello"]

    @pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
    def test_a_byte_order_mark_is_no_text(self, store: Path, tmp_path: Path, name: str) -> None:
        write(tmp_path, {name: b"\xef\xbb\xbf" + (b"hi" if name == "x.txt" else b'{"text": "hi"}')})
        assert texts(corpus(store, tmp_path / name, held_out=0.0).train) == ["hi"]

    def test_a_field_that_no_file_has_lines_for(self, tmp_path: Path) -> None:
        write(tmp_path, {"x.txt": "hi", "y.jsonl": '{"body": "hi"}'})
        config: Any = SimpleNamespace(train=SimpleNamespace(init_from=""))
        for path in (tmp_path / "x.txt", ""):
            (problem,) = plugin(store, path, field="body").check_config(config)
            assert (problem.key, problem.message[:14]) == ("text.field", "has no effect:")
        assert not [*plugin(store, tmp_path / "*", field="body").check_config(config)]

    def test_another_field(self, store: Path, tmp_path: Path) -> None:
        write(tmp_path, {"x.jsonl": '{"body": "hi"}'})
        assert texts(corpus(store, tmp_path / "x.jsonl", field="body", held_out=0.0).train) == ["hi"]

    def test_a_folders_files_that_are_no_text_are_counted_and_left_out(
        self, store: Path, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(folder, {"latin.py": "é".encode("latin-1"), "nul.txt": b"a\0b"})
        with caplog.at_level(logging.WARNING, "forge_train"):
            found = corpus(store, folder, held_out=0.0)
        assert len(found.train.ends) == 4
        assert [record.getMessage().split(" that")[0] for record in caplog.records] == ["text: left out 2 of 7 files"]

    def test_the_default_is_pythons_library(self) -> None:
        from forge_train_plugins.data._text.sources import find

        paths = [Path(file.address) for file in find("")]
        assert any(path.name == "argparse.py" for path in paths)
        assert find("") == find(())
        assert not any({"site-packages", "__pycache__", "test"} & set(path.parts) for path in paths)


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x.txt", b"a\0b", r"x\.txt is not plain text: a NUL byte at 1"),
            ("x.txt", b"ab\xff", r"x\.txt is not plain text: byte 0xff at 2"),
            ("x.txt", b"", r"x\.txt' is empty"),
            ("x.jsonl", b"\n\n", r"x\.jsonl' is empty"),
            ("x.jsonl", b'{"text": "a"}\n{"text": \n', r"x\.jsonl, line 2: not JSON"),
            ("x.jsonl", b'{"text": "a"}\n\n{"txt": "b"}\n', r"x\.jsonl, line 3: no string under 'text'.*has 'txt'"),
            ("x.jsonl", b'{"text": 5}\n', r"x\.jsonl, line 1: no string under 'text'.*has 5 there"),
            ("x.jsonl", b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"x\.jsonl, line 1: not JSON"),
            (
                "x.txt",
                b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
                r"x\.txt only points .*git lfs pull",
            ),
            ("x.jsonl", b"version https://git-lfs.github.com/spec/v1\n", r"x\.jsonl only points .*git lfs pull"),
            ("x.jsonl", b"[1]\n", r"x\.jsonl, line 1: not an object but a list"),
            ("x.jsonl", b'{"text": "\xff"}\n', r"x\.jsonl, line 1: not UTF-8"),
            ("x.jsonl", b'{"text": "\\ud800"}\n', r"x\.jsonl, line 1: 'text' has half a surrogate pair"),
        ],
    )
    def test_names_the_file_and_line(
        self, store: Path, tmp_path: Path, name: str, content: bytes, message: str
    ) -> None:
        write(tmp_path, {name: content})
        with pytest.raises(ConfigError, match=message):
            _ = corpus(store, tmp_path / name)
        left = [path for path in store.glob("*") if path.is_dir() and ".tmp-" in path.name]
        assert not left, "a failed build leaves nothing behind"

    def test_missing_paths(self, store: Path, tmp_path: Path) -> None:
        for path, message in (("gone.txt", "no such file or folder"), ("*.none", "the pattern matches no file")):
            with pytest.raises(ConfigError, match=message):
                _ = corpus(store, str(tmp_path / path))
        with pytest.raises(
            ConfigError, match=r"no file of a known kind in that folder \(.*\.parquet.*\.txt\); it has 1 \.png"
        ):
            _ = corpus(store, write(tmp_path / "other", {"x.png": b"1"}))
        with pytest.raises(ConfigError, match="one of the entries is empty"):
            _ = corpus(store, ("", str(tmp_path)))
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ConfigError, match="pipe is not a regular file"):
            _ = corpus(store, tmp_path / "pipe")

    def test_nothing_but_binaries(self, store: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="none of the 1 files is UTF-8 text"):
            _ = corpus(store, write(tmp_path / "x", {"a.txt": b"\0"}))

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_permission(self, store: Path, tmp_path: Path) -> None:
        write(tmp_path, {"x.txt": "hello"})
        (tmp_path / "x.txt").chmod(0)
        with pytest.raises(ConfigError, match=r"x\.txt can't be read"):
            _ = corpus(store, tmp_path / "x.txt")

    def test_a_cache_that_is_no_folder(self, tmp_path: Path) -> None:
        write(tmp_path, {"x.txt": "hello", "cache": ""})
        with pytest.raises(ConfigError, match=r"text\.cache: .*cache can't be written"):
            _ = corpus(tmp_path / "cache", tmp_path / "x.txt")

    def test_too_short(self, store: Path, tmp_path: Path) -> None:
        write(tmp_path, {"x.txt": "hello\n" * 10})
        with pytest.raises(
            ConfigError, match=r"training part of '.*x\.txt' has \d+ tokens, and one sequence takes 512"
        ):
            plugin(store, tmp_path / "x.txt").build_data(job(sequence=512), "train")
        with pytest.raises(ConfigError, match=r"held-out part of .* has \d+ tokens.*raise text\.held_out"):
            plugin(store, tmp_path / "x.txt").build_data(job(sequence=40), "validation")

    def test_check_config_finds_what_needs_no_reading(self, store: Path, tmp_path: Path) -> None:
        found = list(plugin(store, tmp_path / "gone").check_config(asked()))
        assert [(problem.key, problem.message.split(": ")[-1].split(" (")[0]) for problem in found] == [
            ("text.path", "no such file or folder"),
        ]
        assert not list(Text(Text.Config()).check_config(asked()))

    def test_a_run_that_starts_from_weights_needs_its_own_text(self, store: Path, tmp_path: Path) -> None:
        (found,) = Text(Text.Config()).check_config(asked("base"))
        assert (found.key, found.message.split(";")[0]) == (
            "text.path",
            "a run that starts from weights (train.init_from) needs a text of its own",
        )
        write(tmp_path, {"x.txt": "hello"})
        assert not list(plugin(store, tmp_path / "x.txt").check_config(asked("base")))


def asked(init_from: str = "") -> Any:
    return SimpleNamespace(train=SimpleNamespace(init_from=init_from))


class TestOtherData:
    """What is cloned from a hub is not what a person means to train on."""

    HUB: ClassVar[dict[str, str | bytes]] = {
        "README.md": "# A data set",
        "LICENSE": "Do what you like.",
        "dataset_info.json": "{}",
        ".gitattributes": "*.parquet filter=lfs",
    }

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"train.jsonl.xz": b"\xfd7zXZ"}, r"holds 1 \.xz, which is not read: unpack it first"),
            (
                {"x.arrow": b"", "y.arrow": b"", "notes.txt": "a"},
                r"several kinds: 2 \.arrow, 1 \.txt\. Name .* text\.path = '.*/\*\*/\*\.arrow'",
            ),
            ({"x.jsonl.gz": b"", "y.json": b""}, r"several kinds: .* text\.path = '.*/\*\*/\*\.jsonl\.gz'"),
            ({"model.safetensors": b"", "config.json": "{}"}, r"several kinds: 1 \.\w+, 1 \.\w+"),
            ({}, r"no file of a known kind in that folder .*; it has .* is about the folder: name it"),
        ],
    )
    def test_a_folder_from_a_hub_is_refused(
        self, store: Path, tmp_path: Path, files: dict[str, str | bytes], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            _ = corpus(store, write(tmp_path / "hub", {**self.HUB, **files}))

    def test_what_is_about_a_folder_is_not_its_text(self, store: Path, tmp_path: Path) -> None:
        root = write(tmp_path / "hub", {**self.HUB, "train.jsonl": '{"text": "one"}\n', "LICENSE-MIT.txt": "licence"})
        assert texts(corpus(store, root, held_out=0.0).train) == ["one"]
        for path in (root / "README.md", f"{root}/README*"):
            assert texts(corpus(store, path, held_out=0.0).train) == ["# A data set"]
        write(root, {"a.md": "ay"})
        assert texts(corpus(store, f"{root}/*.md", held_out=0.0).train) == ["ay"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x.JSON", '{"text": "a"}\n{"text": "b"}', r"x\.JSON: not an array: .* an object on each line is \.jsonl"),
            ("x.jsonl.bz2", b"BZh", r"x\.jsonl\.bz2: \.bz2 files are not read: unpack it first"),
            ("dump", b"\x1f\x8b\x08", "dump is not plain text: it is in gzip format"),
            ("dump", b"PAR1\x15\x04", "it is in Parquet format"),
            ("dump", '[{"text": "a"}]', r"it is JSON: give it a name that ends in \.json$"),
            ("dump", '{"text": "a"}\n{"text": "b"}', r"it is JSON: give it a name that ends in \.jsonl"),
        ],
    )
    def test_a_named_file_of_another_kind_is_refused(
        self, store: Path, tmp_path: Path, name: str, content: str | bytes, message: str
    ) -> None:
        write(tmp_path, {name: content})
        for path in (tmp_path / name, f"{tmp_path}/{name[0]}*"):
            with pytest.raises(ConfigError, match=message):
                _ = corpus(store, path)

    def test_json_is_text_where_its_name_says_so(self, store: Path, tmp_path: Path) -> None:
        write(tmp_path, {"x.txt": '[{"text": "a"}]', "code": "{ not json }"})
        assert texts(corpus(store, tmp_path / "x.txt", held_out=0.0).train) == ['[{"text": "a"}]']
        assert texts(corpus(store, tmp_path / "code", held_out=0.0).train) == ["{ not json }"]


class TestHeldOut:
    def test_documents_are_divided_by_content(self, store: Path, tmp_path: Path) -> None:
        lines = [prose(seed) for seed in range(300)]
        lines += lines[:100]
        write(tmp_path, {"x.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in lines)})
        found = corpus(store, tmp_path / "x.jsonl", held_out=0.1)
        train, held_out = texts(found.train), texts(found.validation)
        assert sorted(train + held_out) == sorted(lines)
        assert not set(train) & set(held_out), "equal documents fall on the same side"
        assert 15 <= len(held_out) <= 70

    def test_the_choice_does_not_depend_on_the_other_documents(self) -> None:
        many = [prose(seed).encode() for seed in range(200)]

        def held_out(chosen: list[bytes]) -> set[bytes]:
            return {text for side, text in documents.split(chosen, 0.2, len(chosen)) if side == "validation"}

        assert held_out(many[50:150]) == held_out(many) & set(many[50:150])

    @pytest.mark.parametrize("text", [prose(3, 400), "no line end " * 300, "é" * 3001])
    def test_of_few_documents_the_last_part_is_held_out(self, store: Path, tmp_path: Path, text: str) -> None:
        write(tmp_path, {"book.txt": text})
        found = corpus(store, tmp_path / "book.txt", held_out=0.1)
        (train,), (held_out,) = texts(found.train), texts(found.validation)
        assert train + held_out == text
        assert len(held_out.encode()) == pytest.approx(0.1 * len(text.encode()), abs=60)


class TestCache:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        calls: list[int] = []
        encode = ByteTokenizer.encode_documents

        def counted(self: ByteTokenizer, documents: Any) -> Any:
            calls.append(len(documents))
            return encode(self, documents)

        monkeypatch.setattr(ByteTokenizer, "encode_documents", counted)
        return calls

    @pytest.fixture
    def old(self, folder: Path) -> Path:
        """The folder, unchanged for long enough to be known by its files' times."""
        for path in folder.rglob("*"):
            os.utime(path, (1_700_000_000, 1_700_000_000))
        return folder

    def test_is_used_again_without_reading_the_files(
        self, store: Path, old: Path, calls: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = corpus(store, old)
        done = len(calls)
        monkeypatch.setattr("forge_train_plugins.data._text.corpus.survey", None)
        again = corpus(store, old)
        assert len(calls) == done
        assert again.key == first.key
        assert np.array_equal(again.train.tokens, first.train.tokens)

    def test_is_used_for_equal_content_elsewhere(self, store: Path, old: Path, calls: list[int]) -> None:
        first = corpus(store, old)
        done = len(calls)
        moved = old.rename(old.with_name("moved"))
        assert corpus(store, moved).key == first.key
        assert len(calls) == done

    def test_a_changed_file_is_seen(self, store: Path, folder: Path) -> None:
        first = corpus(store, folder, held_out=0.0)
        write(folder, {"b.txt": "eeb"})
        assert texts(corpus(store, folder, held_out=0.0).train)[1] == "eeb"
        assert texts(first.train)[1] == "bee", "what is mapped stays"

    def test_keys_differ_by_settings(self, store: Path, folder: Path) -> None:
        keys = {corpus(store, folder, held_out=share).key for share in (0.0, 0.1, 0.2)}
        assert len(keys) == 3

    @pytest.mark.parametrize("damage", ["cut", "flip", "gone", "meta", "meta type", "no meta"])
    def test_damage_is_repaired(self, store: Path, old: Path, calls: list[int], damage: str) -> None:
        first = corpus(store, old)
        expected = first.train.tokens.tolist()
        done = len(calls)
        tokens, meta = first.folder / "train.tokens", first.folder / "meta.json"
        content = tokens.read_bytes()
        if damage == "cut":
            os.truncate(tokens, len(content) - 2)
        elif damage == "flip":
            tokens.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif damage == "gone":
            tokens.unlink()
        elif damage == "meta":
            meta.write_text(meta.read_text()[:20])
        elif damage == "meta type":
            meta.write_text("[]")
        else:
            meta.unlink()
        again = corpus(store, old)
        assert len(calls) > done
        assert again.train.tokens.tolist() == expected
        done = len(calls)
        assert corpus(store, old).train.tokens.tolist() == expected
        assert len(calls) == done
        assert not list(store.glob("*.tmp-*"))
        assert not (first.folder / "damaged").exists()

    def test_a_copied_cache_is_used(self, store: Path, old: Path, calls: list[int]) -> None:
        first = corpus(store, old)
        done = len(calls)
        for path in first.folder.iterdir():
            os.utime(path)
        corpus(store, old)
        assert len(calls) == done

    def test_left_overs_of_a_killed_builder_are_removed(self, store: Path, old: Path) -> None:
        first = corpus(store, old)
        (first.folder / "meta.json").unlink()
        left = store / f"{first.key}.tmp-killed"
        left.mkdir()
        corpus(store, old)
        assert not left.exists()

    def test_without_locks_the_first_to_finish_wins(
        self, store: Path, old: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError("no locks")

        monkeypatch.setattr(cache.fcntl, "flock", refuse)
        target = store / "k"

        def fast(made: Path) -> dict[str, Any]:
            (made / "x").write_text("fast")
            return {"by": "fast"}

        def slow(made: Path) -> dict[str, Any]:
            (made / "x").write_text("slow")
            cache.obtain(target, fast)
            return {"by": "slow"}

        cache.obtain(target, slow)
        assert cache.obtain(target, slow) == {"by": "fast"}
        assert (target / "x").read_text() == "fast"
        assert not list(store.glob("*.tmp-*"))

    def test_processes_that_start_together_share_one_build(self, store: Path, tmp_path: Path) -> None:
        data = write(tmp_path / "many", {f"{seed}.txt": prose(seed) for seed in range(50)})
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        workers = [context.Process(target=_build, args=(store, data, results)) for _ in range(4)]
        for worker in workers:
            worker.start()
        answers = [results.get(timeout=600) for _ in workers]
        for worker in workers:
            worker.join()
        assert len({total for total, _ in answers}) == 1
        assert sum(built for _, built in answers) == 1

    def test_lives_in_the_users_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.folder("") == tmp_path / "forge-train" / "text"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache.folder("") == tmp_path / ".cache" / "forge-train" / "text"
        assert cache.folder("~/here") == tmp_path / "here"


def _build(store: Path, data: Path, results: Any) -> None:
    built = False
    encode = ByteTokenizer.encode_documents

    def noted(self: ByteTokenizer, documents: Any) -> Any:
        nonlocal built
        built = True
        return encode(self, documents)

    ByteTokenizer.encode_documents = noted  # type: ignore[method-assign]
    found = corpus(store, data)
    results.put((int(found.train.tokens.sum()), built))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE of 400 tokens, saved with truncation and padding as many on the Hub are."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<|im_end|>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([prose(seed) for seed in range(50)], trainer)
    trained.enable_truncation(5)
    trained.enable_padding(length=10)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    trained.save(str(path))
    return path


class TestTokenizers:
    def test_bytes(self) -> None:
        vocabulary = ByteTokenizer()
        assert (vocabulary.vocabulary, vocabulary.end) == (257, 256)
        assert vocabulary.encode("dé") == [100, 0xC3, 0xA9]
        assert vocabulary.decode([100, 0xC3, 0xA9, 256]) == "dé"
        assert vocabulary.decode([0xC3, 100]) == "�d"

    def test_json(self, bpe: Path) -> None:
        vocabulary = PretrainedTokenizer(bpe)
        assert vocabulary.vocabulary == 400
        assert vocabulary.end == 2
        ids = vocabulary.encode(prose(1))
        assert len(ids) > 10, "not truncated"
        assert vocabulary.decode([*ids, 2]) == prose(1)

    def test_tokens_of_a_corpus(self, store: Path, tmp_path: Path, bpe: Path) -> None:
        data = write(tmp_path / "d", {"a.txt": prose(1), "b.txt": prose(2)})
        found = corpus(store, data, tokenizer=PretrainedTokenizer(bpe), held_out=0.0)
        vocabulary = PretrainedTokenizer(bpe)
        expected = [id for seed in (1, 2) for id in [*vocabulary.encode(prose(seed)), 2]]
        assert found.train.tokens.tolist() == expected
        assert found.train.tokens.dtype == np.uint16
        assert found.train.bytes == len(prose(1)) + len(prose(2))

    def test_no_end_no_separator(self, store: Path, tmp_path: Path) -> None:
        levels = tokenizers.models.WordLevel({"?": 0, "hello": 1, "you": 2}, unk_token="?")
        words = tokenizers.Tokenizer(levels)
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        words.save(str(tmp_path / "w.json"))
        data = write(tmp_path / "d", {"a.txt": "hello you", "b.txt": "  \n", "c.txt": "you there"})
        found = corpus(store, data, tokenizer=PretrainedTokenizer(tmp_path / "w.json"), held_out=0.0)
        assert found.train.tokens.tolist() == [1, 2, 2, 0]
        assert found.train.ends.tolist() == [2, 4], "a document without a token is none"
        assert found.train.tokens.dtype == np.uint8

    @pytest.mark.parametrize("content", [b"{}", b"\xff", b"hello"])
    def test_a_file_that_is_no_tokenizer(self, tmp_path: Path, content: bytes) -> None:
        write(tmp_path, {"t.json": content})
        with pytest.raises(ConfigError, match=r"tokenizer\.path: .*t\.json is no tokenizer"):
            PretrainedTokenizer(tmp_path / "t.json")
        with pytest.raises(ConfigError, match=r"none\.json can't be read"):
            PretrainedTokenizer(tmp_path / "none.json")


# -- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lines", [False, True])
def test_tokenising_tells_how_far_it_is(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lines: bool
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    written = (
        {"a.jsonl": "".join(json.dumps({"text": "x" * 1000}) + "\n" for _ in range(4))}
        if lines
        else {f"{n}.txt": "x" * 1000 for n in range(4)}
    )
    folder = write(tmp_path / "data", written)
    shown, log = Shown(), logging.getLogger(progress.LOGGER)
    monkeypatch.setattr(log, "handlers", [shown])
    monkeypatch.setattr(log, "propagate", False)
    with caplog.at_level(logging.INFO):
        log.setLevel(logging.INFO)
        corpus(store, folder)
    *passing, (last_passes, last) = shown.lines
    assert [re.findall(r"[\d,]+ documents?", text) for _, text in passing] == [
        ["1 document"],
        *([f"{n} documents"] for n in (2, 3, 4)),
    ]
    assert all(is_passing and re.search(r"MB/s, (\d+:\d\d) left$", text) for is_passing, text in passing)
    assert not last_passes
    assert last.startswith("text: tokenised 4 documents, 0.0 MB, ")
    assert [one.getMessage() for one in caplog.records if "tokenised" in one.getMessage()] == [last]
    shown.lines.clear()
    corpus(store, folder)
    assert shown.lines == [], "it is taken from the cache"
