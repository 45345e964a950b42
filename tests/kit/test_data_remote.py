"""Files behind addresses: a server that drops connections, one without ranges, and `memory://`."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forge_train import ConfigError
from forge_train_kit.data.files import File, find
from forge_train_kit.data.formats import lookup
from forge_train_kit.stores import remote

pytestmark = [pytest.mark.unit]


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends parts of files if `ranges`, and hangs up after `bytes_each` bytes of an answer."""

    files: ClassVar[dict[str, bytes]] = {}
    ranges: ClassVar = True
    sized: ClassVar = True
    protocol_version = "HTTP/1.1"
    bytes_each: ClassVar = 1 << 40
    drops: ClassVar = 10**9
    broken: ClassVar = 0
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _listing(self, folder: str) -> bytes:
        names = {name[len(folder) + 1 :].partition("/") for name in self.files if name.startswith(f"{folder}/")}
        links = sorted(first + slash for first, slash, _ in names)
        return "".join(f'<a href="{name}">{name}</a>\n' for name in links).encode()

    def _answer(self, *, body: bool) -> None:
        kind = type(self)
        if body:
            kind.asked.append(self.headers.get("Range", ""))
        content = self.files.get(self.path.partition("?")[0])
        if content is None:
            content = self._listing(self.path.rstrip("/"))
        if not content:
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if self.ranges else None
        if asked:
            start, stop = int(asked[1]), int(asked[2] or len(content) - 1) + 1
            piece = content[start:stop]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{start + len(piece) - 1}/{len(content)}")
        else:
            piece = content
            self.send_response(200)
        size = ("Content-Length", str(len(piece))) if self.sized else ("Transfer-Encoding", "chunked")
        self.send_header(*size)
        self.send_header("ETag", f'"{hash(content)}"')
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if body:
            if len(piece) > self.bytes_each and kind.broken < self.drops:
                kind.broken += 1
                piece = piece[: self.bytes_each]
                self.close_connection = True
            if self.sized:
                self.wfile.write(piece)
                return
            for start in range(0, len(piece), 1 << 16):
                chunk = piece[start : start + (1 << 16)]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if not self.close_connection:
                self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Handler]]]:
    class Own(Handler):
        files: ClassVar[dict[str, bytes]] = {}
        asked: ClassVar[list[str]] = []

    monkeypatch.setattr(remote, "_PAUSE", 0.001)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as served:
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_address[1]}", Own
        served.shutdown()
        thread.join()


LINES = [{"text": f"line {n} " + "x" * (n % 97), "n": n} for n in range(40_000)]
JSONL = "".join(json.dumps(line) + "\n" for line in LINES).encode()


def records(file: File) -> list[Any]:
    form = lookup(file.suffix, file.label)
    return [dict(record) for part in form.parts(file) for _, record in form.read(file, part)]


@pytest.mark.parametrize("packed", [False, True])
def test_reading_goes_on_where_the_connection_broke(server: tuple[str, type[Handler]], packed: bool) -> None:
    address, handler = server
    handler.files["/a.jsonl"], handler.bytes_each = JSONL, 100_000
    handler.files["/a.jsonl.gz"] = gzip.compress(JSONL, 1)
    file = File(f"{address}/a.jsonl.gz" if packed else f"{address}/a.jsonl")
    assert records(file) == LINES
    assert handler.broken > 0
    assert sum("bytes=0-" in asked for asked in handler.asked) <= 5 < len(handler.asked), "it does not start over"
    with file.open(12_345) as stream:
        assert stream.read(1000) == JSONL[12_345:13_345]


@pytest.mark.parametrize("sized", [True, False])
def test_a_server_that_sends_no_parts(server: tuple[str, type[Handler]], sized: bool) -> None:
    address, handler = server
    handler.sized = sized
    handler.files["/a.jsonl"], handler.ranges = JSONL * 4, False
    handler.bytes_each, handler.drops = 3_000_000, 3
    with File(f"{address}/a.jsonl").open(7) as stream:
        assert stream.read() == (JSONL * 4)[7:]
    assert handler.broken == 3
    if not sized:
        assert File(f"{address}/a.jsonl").size() == 0
        handler.files["/a.parquet"] = JSONL
        with pytest.raises(ConfigError, match=r"/a\.parquet can't be entered in the middle: its server does not tell"):
            records(File(f"{address}/a.parquet"))


def test_parquet_is_entered_in_the_middle(server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    stored = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(LINES), stored, row_group_size=5_000)
    handler.files["/a.parquet"], handler.bytes_each, handler.drops = stored.getvalue(), 50_000, 3
    file = File(f"{address}/a.parquet?download=true")
    assert (file.suffix, file.name) == ("parquet", "a.parquet")
    assert records(file) == LINES
    assert handler.broken == 3


def test_a_connection_that_stays_broken_names_the_address(server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    handler.files["/a.jsonl"], handler.bytes_each = JSONL, 0
    file = File(f"{address}/a.jsonl", key="text.path")
    with pytest.raises(ConfigError, match=rf"^text\.path: {address}/a\.jsonl can't be read: .* \(6 tries\)$"):
        records(file)
    with pytest.raises(ConfigError, match=rf"^text\.path: {address}/none\.jsonl: no such file"):
        records(File(f"{address}/none.jsonl", key="text.path"))
    with pytest.raises(ConfigError, match=r"^http://127\.0\.0\.1:1/a\.jsonl can't be read: .* \(6 tries\)$"):
        records(File("http://127.0.0.1:1/a.jsonl"))


def test_etag_and_size_tell_the_content(server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    file = File(f"{address}/a.jsonl")
    handler.files["/a.jsonl"] = b"one"
    before = file.stamp()
    assert (before[0], bool(before[1])) == (3, True)
    assert file.stamp() == before
    handler.files["/a.jsonl"] = b"two"
    assert file.stamp() != before
    assert file.size() == 3


def test_a_folder_that_a_server_lists(server: tuple[str, type[Handler]]) -> None:
    address, handler = server
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "README.md"):
        handler.files[f"/d/{name}"] = b'{"text": "a"}\n'
    everything = [f"{address}/d/{name}" for name in ("a.jsonl", "b.jsonl", "sub/c.jsonl")]
    assert addresses(f"{address}/d/") == everything
    assert addresses(f"{address}/d/*.jsonl") == everything[:2]
    assert records(find(f"{address}/d/", key="k")[2]) == [{"text": "a"}]


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def put(system: Any, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        with closing(system.open(f"/{name}", "wb")) as file:
            file.write(content)


def addresses(entry: str) -> list[str]:
    return [file.address for file in find(entry, key="text.path")]


def test_folders_and_patterns_of_addresses(memory: Any) -> None:
    line = b'{"text": "a"}\n'
    put(
        memory,
        {"d/b.jsonl": line, "d/a/c.jsonl": line, "d/README.md": b"#", "d/.hidden/x.jsonl": line, "e/x.txt": b"e"},
    )
    assert addresses("memory://d") == ["memory:///d/b.jsonl", "memory:///d/a/c.jsonl"]
    assert addresses("memory://d/**/*.jsonl")[-1] == "memory:///d/a/c.jsonl"
    assert addresses("memory://d/*.jsonl") == ["memory:///d/b.jsonl"]
    assert addresses("memory://e/x.txt") == ["memory://e/x.txt"]
    assert records(find("memory://d", key="k")[0]) == [{"text": "a"}]
    put(memory, {"d/z.txt": b"z"})
    with pytest.raises(ConfigError, match=r"k: 'memory://d' holds data of several kinds: 2 \.jsonl, 1 \.txt\."):
        find("memory://d", key="k")
    with pytest.raises(ConfigError, match=r"k: 'memory://gone': no such file or folder"):
        find("memory://gone", key="k")
    with pytest.raises(ConfigError, match="the pattern matches no file"):
        find("memory://d/*.parquet", key="k")


def test_a_file_that_is_not_there_is_asked_for_once() -> None:
    asked = []

    def absent() -> None:
        asked.append(1)
        raise FileNotFoundError("x") from KeyError("x")  # as file systems of clouds do

    with pytest.raises(ConfigError, match=r"^s3://b/x: no such file or folder$"):
        remote.patiently("s3://b/x", absent)
    assert len(asked) == 1


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(ConfigError, match=r"k: 'nowhere://x' can't be read: Protocol not known: nowhere"):
        find("nowhere://x", key="k")
