"""Processes that begin with torch imported: forked by one that has it, which spares three seconds of CPU each.

`Popen` is subprocess's, for `python -m MODULE …`. Its process is a child of the caller's, with a number, streams, a
session and an environment of its own, and it dies, is waited for and gets signals like any other; only the modules that
`PRELOADED` names are there when it begins, and the seed of Python's hashes is the session's. A launcher that is
started so starts its ranks so. Where one process can't be had this way, it is started anew.

How: `_serve` forks twice, and the one in between ends, by which the second becomes a child of the caller, who is a
"subreaper" for that moment. See prctl(2), PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed._tools", "torch.distributed.tensor.debug"),
    *("torch.utils.tensorboard", "tensorboard.plugins.custom_scalar.summary", "pydantic.dataclasses", "tomlkit"),
    *("forge_train.engine", "forge_train_kit.data.plugin", "forge_train_kit.data.tokenizers.added"),
    *("forge_train_kit.data.items", "forge_train_kit.data.loader", "forge_train_kit.tracking"),
    *("forge_train_kit.model", "forge_train_kit.optim", "forge_train_cli.app", "forge_train_tools.configuration.setup"),
    *("forge_train_tools.saver", "forge_train_tools.launching.training"),
    *("forge_train_tools.launching.agent", "forge_train_tools.offline.opening", "forge_train_tools.verification"),
    *("forge_train_cli.train", "forge_train_cli.runs", "rich.console", "pydantic.type_adapter", "pydantic.main"),
    *("torch.nn.attention.bias", "torch._subclasses.schema_check_mode", "encodings.idna"),
    *("forge_train_kit.activations", "forge_train_kit.peaks", "forge_train_kit.data.tokenizers.byte"),
    *("forge_train_plugins.models._decoder.build", "forge_train_plugins.models._decoder.heads"),
    *("forge_train_plugins.models._decoder.huggingface", "forge_train_plugins.models._decoder.families.quantised"),
    *("forge_train_plugins.data._text.corpus", "forge_train_plugins.data._text.ordered"),
    *("forge_train_plugins.tasks._cross_entropy", "forge_train_plugins.attention._gqa"),
    *("forge_train_plugins.attention._sdpa", "forge_train_plugins.feed_forward._swiglu"),
    *("forge_train_plugins.models._lm_head", "forge_train_plugins.parallel._sequential"),
    *("forge_train_plugins.schedules.curves", "forge_train_plugins.resilience._out_of_memory"),
    *("forge_train_plugins.observers._tensorboard", "forge_train_plugins.optimizers.adamw"),
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
FORKS = sys.platform == "linux"
"""Elsewhere no process can take over another's child."""
THREADS = "OMP_NUM_THREADS"
"""What torch has read by the time that a process is forked."""

_lock = threading.Lock()


class _Parent:
    """The process that forks, from outside."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    @classmethod
    def started(cls) -> _Parent:
        ours, theirs = socket.socketpair()
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env=own, pass_fds=(theirs.fileno(),))
        return cls(ours)

    def fork(self, asked: dict[str, Any], files: list[int]) -> int:
        """The number of the new process, a child of this one.

        Raises:
            OSError: if the process that forks is gone.
        """
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(self._control, [json.dumps(asked).encode()], files)
            answer = self._control.recv(64)
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise ConnectionError("the process that forks has ended")
        return int(answer)


_parent: _Parent | None = None


def started() -> _Parent:
    """Return the process that forks; whoever calls this holds `_lock`, or is the only one."""
    global _parent  # noqa: PLW0603
    if _parent is None:
        _parent = _Parent.started()
    return _parent


def preload(*names: str) -> None:
    """Have what begins from here on begin with more modules: for tests whose processes all import them."""
    if FORKS:
        with _lock:
            started().fork({"import": names}, [])


class Popen(subprocess.Popen[Any]):
    """As subprocess's, for `python -m MODULE …` with an environment."""

    def _execute_child(self, *given: Any) -> None:
        """What subprocess's calls to have the process, with the ends of its pipes; since Python 3.11 with `given`."""
        arguments, _executable, _first, _close, passed, cwd, environment, *_windows, shell = given[:10]
        pipes, session = given[10:16], given[21]
        module = _module(arguments, environment) if FORKS and not (passed or shell) else None
        if module is None or not self._forked(module, environment, cwd, pipes, session):
            super()._execute_child(*given)  # type: ignore[misc]

    def _forked(
        self, module: dict[str, Any], environment: dict[str, str], cwd: Any, pipes: tuple[int, ...], session: bool
    ) -> bool:
        global _parent  # noqa: PLW0603
        files = [own if pipe == -1 else pipe for own, pipe in enumerate((pipes[0], pipes[3], pipes[5]))]
        asked = {**module, "environment": dict(environment), "cwd": os.fspath(cwd or Path.cwd()), "session": session}
        with _lock:
            try:
                pid = started().fork(asked, files)
            except OSError:
                _parent = None
                return False
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        return True


def _module(arguments: Any, environment: Any) -> dict[str, Any] | None:
    """What `python -m` is to run; None if that is not what was asked for, or torch would differ there."""
    python, *rest = map(str, arguments)
    safe = rest[:1] == ["-P"]
    rest = rest[safe:]
    if python != sys.executable or rest[:1] != ["-m"] or environment is None:
        return None
    if environment.get(THREADS) != os.environ.get(THREADS):
        return None
    return {"module": rest[1], "arguments": rest[2:], "safe": safe}


@contextmanager
def ranks() -> Iterator[None]:
    """While it lasts, the ranks that torch's elastic agent starts in this process begin so."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    before, subprocess_handler.Popen = subprocess_handler.Popen, Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess_handler.Popen = before  # type: ignore[misc]


@contextmanager
def program(folder: Path) -> Iterator[Path]:
    """A folder for PATH, whose `forge` begins so: for what starts it by itself, such as a notebook.

    It hands its streams, arguments, folder and environment to this process by a socket, and ends as that command did;
    a signal ends it and not the command.
    """
    place = folder / "socket"
    started()  # by this thread: what a thread has started ends with it, see prctl(2), PR_SET_PDEATHSIG
    (folder / "forge").write_text(PROGRAM.format(python=sys.executable, place=place), encoding="utf-8")
    (folder / "forge").chmod(0o700)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(place))
        door.listen()
        threading.Thread(target=_admit, args=(door,), daemon=True).start()
        yield folder
        door.shutdown(socket.SHUT_RDWR)


PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
caller = socket.socket(socket.AF_UNIX)
caller.connect("{place}")
asked = {{"arguments": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(caller, [json.dumps(asked).encode()], [0, 1, 2])
sys.exit(int(caller.recv(64) or 1))
"""


def _admit(door: socket.socket) -> None:
    while True:
        try:
            caller, _ = door.accept()
        except OSError:  # it was shut
            return
        threading.Thread(target=_attend, args=(caller,), daemon=True).start()


def _attend(caller: socket.socket) -> None:
    with caller:
        got = socket.recv_fds(caller, 1 << 20, 3)
        asked, files = json.loads(got[0]), got[1]
        command = [sys.executable, "-m", "forge_train_cli", *asked["arguments"]]
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        process = Popen(command, cwd=asked["cwd"], env=asked["environment"], **streams)
        for file in files:
            os.close(file)
        caller.sendall(str(process.wait()).encode())


# -- the process that forks --------------------------------------------------------------------------------------------


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for as long as somebody asks; in a process that was forked, what it is to do."""
    while (got := socket.recv_fds(control, 1 << 20, 3))[0]:
        asked, files = json.loads(got[0]), got[1]
        if "import" in asked:
            _import(asked["import"])
            control.sendall(b"0")
            continue
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            own = os.getpid()
            if (process := os.fork()) != 0:
                os.write(write, str(process).encode())
                os._exit(0)
            while os.getppid() == own:
                time.sleep(0.001)
            for file in (read, write):
                os.close(file)
            control.close()
            for place, file in enumerate(files):
                os.dup2(file, place)
            for file in files:
                os.close(file)
            return dict(asked)
        os.waitpid(between, 0)  # from here on the process is the caller's
        control.sendall(os.read(read, 64))
        for file in (read, write, *files):
            os.close(file)
    return None


def _run(asked: dict[str, Any] | None, base: list[str]) -> None:
    """Do in this process what `python -m` would do in a new one."""
    global _parent  # noqa: PLW0603
    if asked is None:
        os._exit(0)
    if asked["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*([] if asked["safe"] else [asked["cwd"]]), *more, *base]
    importlib.invalidate_caches()
    sys.argv = [asked["module"], *asked["arguments"]]
    launches = "--nproc" in sys.argv
    if launches:
        ours, theirs = socket.socketpair()
        launcher = os.getpid()
        if os.fork() == 0:
            ours.close()
            _keep_apart(launcher)
            _run(_serve(theirs), base)
            return
        theirs.close()
        _parent = _Parent(ours)
    code: Any = 0
    try:
        with ranks() if launches else nullcontext():
            runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    if code is None or isinstance(code, int):
        _end(code or 0)
    sys.exit(code)


def _end(code: int) -> None:
    """End this process as multiprocessing ends its own: to take apart what was forked cost a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads any more
        code = 120
    os._exit(code & 0xFF)


def _keep_apart(launcher: int) -> None:
    """Hold none of the launcher's pipes and folders open, and end with it."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for place in range(3):
        os.dup2(null, place)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(0)


def _import(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # half a million objects, which no collection has to look at again


def main() -> None:
    """Be the process that forks."""
    control, caller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    _keep_apart(caller)
    _import(PRELOADED)
    importlib.import_module("torch._dynamo.utils").compile_times()  # which every end asks for, and imports for it
    importlib.import_module("forge_train_tools.launching.agent").hasten_rendezvous()  # of torchrun, too
    _run(_serve(control), list(sys.path))


if __name__ == "__main__":
    main()
