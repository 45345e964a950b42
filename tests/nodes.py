"""Several machines on this one: each has a network, a host name, a disk and a clock of its own; a switch joins them.

A machine is a process in new namespaces of network, mounts and host names (see unshare(1)), and so is the switch, in
which there is a bridge. Nothing of it is in the network of this machine, so nothing is left there: a namespace ends
with its last process, and these end with the test, whose end of a pipe they read.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import forge_cli
import warm

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
TOOLS = ("unshare", "nsenter", "ip", "tc", "mount", "hostname")
PORT = 29500
"""Where ranks meet: free, as every machine has all ports."""


def missing() -> str:
    """What this machine lacks to be several; empty if nothing."""
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)} here"
    made = (
        "ip link add name a-b type bridge && ip link add name a-c type veth peer name a-d && mount -t tmpfs none /mnt"
        " && tc qdisc add dev a-c root tbf rate 1mbit burst 32kb latency 50ms"
    )
    tried = subprocess.run(["unshare", "-n", "-u", "-m", "sh", "-c", made], capture_output=True, text=True, check=False)
    return tried.stderr.strip().partition("\n")[0] if tried.returncode else ""


class Namespaces:
    """A process in namespaces of its own, which last until the pipe to it is closed."""

    def __init__(self, flags: str, prepare: str = "true") -> None:
        command = ["unshare", *flags.split(), "sh", "-c", f"set -e; {prepare}; echo made; exec cat >&2"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "made\n", "see what it said"
        self.pid = self.process.pid

    def entering(self, *command: object) -> list[str]:
        """A command that does another one in there."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", f"--wd={Path.cwd()}", *map(str, command)]

    def does(self, command: str) -> str:
        """Have a line of shell done in there."""
        done = subprocess.run(self.entering("sh", "-ec", command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        self.process.communicate()


class Node(Namespaces):
    """A machine.

    Args:
        number: from 0 on.
        switch: where its cable ends.
        disk: a folder that has other files on each machine.
        hosts: the file /etc/hosts.
    """

    def __init__(self, number: int, switch: Namespaces, disk: Path, hosts: Path) -> None:
        self.name, self.address = f"node-{number}", f"10.77.0.{number + 1}"
        super().__init__(
            "-n -u -m",
            f"hostname {self.name}; mount -t tmpfs none '{disk}'; mount --bind '{hosts}' /etc/hosts",
        )
        self.disk, self.clock = disk, 0.0
        """Seconds by which its clock is fast."""
        self._switch, self._port = switch, f"port-{number}"
        self._processes: list[subprocess.Popen[Any]] = []
        switch.does(f"ip link add name {self._port} type veth peer name eth0 netns {self.pid}")
        switch.does(f"ip link set {self._port} up master bridge0")
        self.does(f"ip address add {self.address}/24 dev eth0; ip link set eth0 up; ip link set lo up")

    def sees(self, path: Path) -> Path:
        """A path on its disk, as this process can open it."""
        return Path(f"/proc/{self.pid}/root{path}")

    def start(self, *arguments: object, preloaded: bool = False, **more: Any) -> subprocess.Popen[Any]:
        """Start `python -m …` on it; what is preloaded costs no import of torch."""
        popen, options = (warm.Popen if preloaded else subprocess.Popen), {"env": forge_cli.environment(), **more}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "nodes", str(self.pid), str(self.clock), *map(str, arguments)]
        self._processes.append(popen(command, **{**pipes, **options}))
        return self._processes[-1]

    def unplug(self) -> None:
        """Cut it off from the others, without a word to anybody."""
        self._switch.does(f"ip link set {self._port} nomaster")

    def plug_in(self) -> None:
        self._switch.does(f"ip link set {self._port} master bridge0")

    def narrow(self, megabits: int) -> None:
        """Let its cable pass so many megabits in a second, to it and from it."""
        rate = f"root tbf rate {megabits}mbit burst 128kb latency 400ms"
        self._switch.does(f"tc qdisc add dev {self._port} {rate}")
        self.does(f"tc qdisc add dev eth0 {rate}")

    def worsen(self, seconds: float, loss: float) -> None:
        """Let its cable take so long for each packet, and lose such a part of them."""
        far = f"{self._port}-far"
        self._switch.does(f"ip link set {self._port} nomaster; ip link add name {far} type veth peer name {far}-end")
        self._switch.does(f"ip link set {far} up; ip link set {far}-end up master bridge0")
        command = [sys.executable, str(Path(__file__).with_name("bad_cable.py"))]
        passing = self._switch.entering(*command, self._port, far, seconds, loss)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes.append(subprocess.Popen(passing, **pipes))
        assert self._processes[-1].stdout.readline() == "passes on\n"

    def sends_whole_packets(self) -> None:
        """See `bad_cable`; for every machine, before any cable is worsened."""
        subprocess.run(self.entering(sys.executable, Path(__file__).with_name("bad_cable.py"), "eth0"), check=True)

    def lose(self, *, silently: bool = True) -> None:
        """End all that runs on it at once. The others hear nothing of it if the machine is gone, too."""
        if silently:
            self.unplug()
        for one in self._processes:
            one.kill()
        for one in self._processes:
            one.communicate()
        self._processes.clear()
        if silently:
            self.plug_in()

    def close(self) -> None:
        self.lose(silently=False)
        super().close()


@contextmanager
def machines(count: int, folder: Path) -> Iterator[Sequence[Node]]:
    """So many machines, which share all of the disk but `folder / "disk"`."""
    (disk := folder / "disk").mkdir()
    lines = ["127.0.0.1 localhost", *(f"10.77.0.{number + 1} node-{number}" for number in range(count))]
    (hosts := folder / "hosts").write_text("\n".join([*lines, ""]), encoding="utf-8")
    with ExitStack() as stack:
        switch = Namespaces("-n -u -m", "ip link add name bridge0 type bridge; ip link set bridge0 up")
        stack.callback(switch.close)
        nodes = []
        for number in range(count):
            nodes.append(Node(number, switch, disk, hosts))
            stack.callback(nodes[-1].close)
        yield nodes


def main() -> None:
    """python -m nodes PID SECONDS MODULE …: that module, on the machine of a process, whose clock is so fast."""
    pid, seconds, (module, *rest) = sys.argv[1], float(sys.argv[2]), sys.argv[3:]
    here, libc = Path.cwd(), ctypes.CDLL(None, use_errno=True)
    for name, kind in (("net", CLONE_NEWNET), ("uts", CLONE_NEWUTS), ("mnt", CLONE_NEWNS)):
        with Path(f"/proc/{pid}/ns/{name}").open("rb") as namespace:
            if libc.setns(namespace.fileno(), kind):
                raise OSError(ctypes.get_errno(), f"can't enter {name} of {pid}")
    os.chdir(here)
    if seconds:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() + seconds
        time.time_ns = lambda: now_ns() + int(seconds * 1e9)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
