"""A process that calls one function for its parent: `python -c …`, so that it shares nothing with the parent's threads
and devices, and imports what the function needs and no more.

What the function holds is written once for all children, and mapped by each: arrays that map a file are opened there
again, and others lie in one temporary file.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_train import ConfigError
from forge_train.base.errors import ForgeError, describe

_ALIGNED = 64
_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals sent by a terminal or a scheduler to all processes of a run; the parent needs data until it has saved."""
_START = (
    "import signal, sys; [signal.signal(one, signal.SIG_IGN) for one in {ignored}]; sys.path[:] = {path!r}; "
    "from forge_train_kit.data.child import serve; serve({connection}, {payload}, {parent})"
)


class DiedError(Exception):
    """The process is gone; says how."""

    def __init__(self, pid: int, code: int) -> None:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        super().__init__(f"{how}{' (was memory short?)' if code == -signal.SIGKILL else ''}")
        self.pid = pid


class Payload:
    """A function, written to a file that children map.

    Raises:
        ConfigError: it can't be pickled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        buffers: list[pickle.PickleBuffer] = []
        try:
            pickler = _Pickler(self._file, 5, buffer_callback=buffers.append)
            pickler.dump(function)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            self._file.close()
            raise _unfit(error) from error
        spans = []
        for one in buffers:
            self._file.write(bytes(-self._file.tell() % _ALIGNED))
            spans.append((self._file.tell(), self._file.write(one.raw())))
            one.release()
        about = pickle.dumps(spans)
        self._file.write(about + len(about).to_bytes(8, "little"))
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()


class Child:
    """A process; started by its first call, and again by the first one after it died.

    Args:
        payload: the function that it calls.
    """

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def call(self, *arguments: Any) -> Any:
        """Return the function's result, or raise its exception as a `ForgeError` with the traceback as a note.

        Raises:
            DiedError: if the process is gone.
        """
        try:
            if self._process is None:
                self._start()
            assert self._connection is not None
            self._connection.send_bytes(pickle.dumps(arguments))
            kind, value, trace = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise self._gone() from error
        if kind == "value":
            return value
        value.add_note(trace)
        raise value

    def close(self) -> None:
        """End the process, and wait for that."""
        if self._process is not None:
            self._gone()

    def stop(self) -> None:
        """End the process; no other is started."""
        self._stopped = True
        self.kill()

    def kill(self) -> None:
        """End the process, whatever it does; the call that waits for it raises `DiedError`."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _start(self) -> None:
        mine, its = Pipe()
        command = _START.format(
            ignored=[int(one) for one in _IGNORED],
            path=sys.path,
            connection=its.fileno(),
            payload=self._payload.fileno(),
            parent=os.getpid(),
        )
        files = its.fileno(), self._payload.fileno()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # a worker is one of many
        with self._lock, its:
            if self._stopped:
                raise DiedError(0, -signal.SIGKILL)
            self._process = subprocess.Popen(
                [sys.executable, "-c", command], pass_fds=files, stdin=subprocess.DEVNULL, env=environment
            )
            self._connection = mine

    def _gone(self) -> DiedError:
        with self._lock:
            process, self._process = self._process, None
            assert process is not None
            process.kill()  # it may have closed its end and live on
            code = process.wait()
            assert self._connection is not None
            self._connection.close()
        return DiedError(process.pid, code)


def serve(connection: int, payload: int, parent: int) -> None:
    """Be the process: do what comes, until the parent is gone or closes the connection."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        return
    with Connection(connection) as asked:
        function: Callable[..., Any] | None = None
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                arguments = pickle.loads(asked.recv_bytes())
                try:
                    function = function or _opened(payload)
                    answer: tuple[Any, ...] = "value", function(*arguments), ""
                except Exception as error:
                    answer = "error", _portable(error), traceback.format_exc()
                asked.send_bytes(pickle.dumps(answer, protocol=5))


def _portable(error: Exception) -> ForgeError:
    """An error that the parent can read, whatever its class is made of."""
    if isinstance(error, ForgeError):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            error.__cause__ = error.__context__ = None
            return error
    return ForgeError(describe(error))


def _unfit(error: Exception) -> ConfigError:
    return ConfigError(
        f"prefetch.kind = 'processes': the source can't be sent to a process ({describe(error)}); choose 'threads'."
    )


def _opened(payload: int) -> Callable[..., Any]:
    try:
        return _read(payload)
    except (ImportError, AttributeError) as error:  # a class that only the parent can import
        raise _unfit(error) from error


def _read(payload: int) -> Callable[..., Any]:
    whole = memoryview(mmap.mmap(payload, 0, access=mmap.ACCESS_READ))
    about = int.from_bytes(whole[-8:], "little")
    views = [whole[start : start + size] for start, size in pickle.loads(whole[-8 - about : -8])]
    function: Callable[..., Any] = pickle.loads(whole, buffers=views)
    return function


class _Pickler(pickle.Pickler):
    """Writes arrays that map a file as the file's name and their place in it."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, np.ndarray) and (place := _place(value)) is not None:
            return _map, place
        return NotImplemented


def _place(array: NDArray[Any]) -> tuple[str, str, int, tuple[int, ...]] | None:
    """File, dtype, first byte and shape of an array that maps a file for reading; None for another."""
    base: object = array
    root: np.memmap[Any, Any] | None = None
    while isinstance(base, np.ndarray):
        root = base if isinstance(base, np.memmap) else root
        base = base.base
    if root is None or not isinstance(base, mmap.mmap) or root.mode != "r":
        return None
    if not (array.size and array.flags.c_contiguous):
        return None
    return str(root.filename), array.dtype.str, root.offset + array.ctypes.data - root.ctypes.data, array.shape


def _map(path: str, dtype: str, offset: int, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype, mode="r", offset=offset, shape=shape))
