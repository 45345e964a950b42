"""Several machines by hand: ssh starts the processes of each, and this process waits for them.

python -m forge_train_tools.launchers.ssh FILE
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

from forge_train.base.errors import INTERRUPTED, ConfigError
from forge_train.base.strict_json import dumps
from forge_train.config.schema import FilePath, Ge, section

from .job import ClusterJob
from .launcher import MARK, Launcher, file_name

_HOST = re.compile(r"[\w.:@%\[\]-]+", re.ASCII)
GRACE = 30.0
"""Seconds that the other nodes have to end by themselves once one has failed."""
SAVING = 300.0
"""Seconds that the other nodes have to end once one has ended well."""
POLL = 0.05
LOST = 255
"""Exit code of ssh where it could not connect, or lost the connection."""


@section
class SSHOptions:
    """The table `[launch.ssh]`."""

    hosts: tuple[str, ...] = ()
    """The nodes, as ssh names them; rank 0 is on the first."""
    address: str = ""
    """Address of the first node, for the others; empty takes its name."""
    port: Annotated[int, Ge(0)] = 0
    """Port on the first node at which the processes meet; 0 derives one from the job's name."""
    ssh_config: Annotated[str, FilePath()] = ""
    """Configuration file for ssh, with users, ports and keys; empty takes ssh's own."""


class SSH(Launcher):
    """Writes `NAME.ssh`, a list of commands, and runs them on this terminal."""

    Options = SSHOptions
    options: SSHOptions
    rest = "hosts"
    attached = True

    def files(self, job: ClusterJob) -> Mapping[str, str]:
        self._check(job)
        commands = [self._on(job, node, host) for node, host in enumerate(self.options.hosts)]
        told = {"": f"{MARK} ssh.", "hosts": list(self.options.hosts), "commands": commands}
        return {f"{file_name(job.name)}.ssh": dumps(told, indent=1) + "\n"}

    def submit(self, job: ClusterJob, file: Path) -> Sequence[str]:
        return (sys.executable, "-m", __name__, str(file.absolute()))

    def _check(self, job: ClusterJob) -> None:
        hosts, machines = self.options.hosts, job.machines
        if not hosts:
            raise ConfigError("forge launch ssh: name the hosts after CONFIG, the first of them with rank 0.")
        if machines.nodes not in (1, len(hosts)):
            raise ConfigError(f"--nodes {machines.nodes}: {len(hosts)} hosts are named; leave --nodes out.")
        for host in (*hosts, *filter(None, [self.options.address])):
            if not _HOST.fullmatch(host) or host.startswith("-"):
                raise ConfigError(f"{host!r} is no host: expected a name or an address, as in user@node-1.")
        if twice := sorted({host for host in hosts if hosts.count(host) > 1}):
            raise ConfigError(f"{twice[0]} is named twice; a node is started once, with --nproc processes.")
        for key in ("queue", "account", "image", "cpus", "memory", "gpu"):
            if getattr(machines, key):
                raise ConfigError(f"--{key}: has no effect with ssh, which starts processes on hosts as they are.")

    def _on(self, job: ClusterJob, node: int, host: str) -> list[str]:
        """The command that starts a node. ssh passes its last argument to the other side's shell."""
        first = self.options.hosts[0].rpartition("@")[2].strip("[]")
        variables = {
            **job.machines.env,
            "PET_NNODES": str(len(self.options.hosts)),
            "PET_NODE_RANK": str(node),
            "PET_NPROC_PER_NODE": str(job.machines.nproc),
            "PET_MASTER_ADDR": self.options.address or first,
            "PET_MASTER_PORT": str(self.options.port or job.port),
        }
        limit = ["--set", f"train.max_hours={job.seconds / 3600}"] if job.seconds else []
        python, *rest = job.node_command
        module = rest.index("--")
        words = [python, *rest[:module], "--follow-stdin", *rest[module:], *limit]
        given = [f"{name}={value}" for name, value in variables.items()]
        remote = f"cd {shlex.quote(str(job.folder))} && exec {shlex.join(['env', *given, *words])}"
        config = ["-F", self.options.ssh_config] if self.options.ssh_config else []
        return ["ssh", *config, "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "--", host, remote]


class Nodes:
    """Nodes that ssh started.

    Args:
        hosts: their names.
        commands: what starts each.
    """

    def __init__(self, hosts: Sequence[str], commands: Sequence[Sequence[str]]) -> None:
        self._hosts, self._commands = hosts, commands
        self._started: list[subprocess.Popen[str]] = []
        self._signals: list[int] = []
        """Signals that arrived and were not passed on."""
        self._asked = False
        self._kill_at = math.inf

    def run(self) -> int:
        """Start all and wait; returns the code of the one that failed first, or 75, or 0."""
        for command in self._commands:  # Ctrl-C reaches this process alone, which passes it on
            self._started.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True))
        first, deadline = -1, math.inf
        while (codes := [one.poll() for one in self._started]).count(None):
            while self._signals:
                self._pass_on(self._signals.pop(0))
            bad = [at for at, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
            if bad and first < 0:
                first, deadline = bad[0], time.monotonic() + GRACE
                self._say(first)
            elif deadline == math.inf and codes.count(None) < len(codes):
                deadline = time.monotonic() + SAVING
            if time.monotonic() > deadline and self._kill_at == math.inf:
                self._end()
            if time.monotonic() > self._kill_at:
                for one in self._started:
                    one.kill()
            time.sleep(POLL)
        if first < 0 and (bad := [at for at, code in enumerate(codes) if code not in (0, INTERRUPTED)]):
            first = bad[0]
            self._say(first)
        code = max(code or 0 for code in codes) if first < 0 else codes[first] or 0
        return 1 if code == LOST or code < 0 else code

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Keep a signal for the loop: it may arrive in the middle of a write."""
        self._signals.append(number)

    def _pass_on(self, number: int) -> None:
        """Pass a signal on; the second one ends the nodes."""
        self._tell(signal.Signals(number).name)
        if self._asked:
            self._end()
        self._asked = True

    def _tell(self, line: str) -> None:
        for one in self._started:
            with contextlib.suppress(BrokenPipeError):  # that node has ended
                assert one.stdin is not None
                one.stdin.write(f"{line}\n")
                one.stdin.flush()

    def _end(self) -> None:
        self._kill_at = time.monotonic() + GRACE
        self._tell("SIGTERM\nSIGTERM")

    def _say(self, at: int) -> None:
        code = self._started[at].returncode
        why = "ssh could not connect, or lost the connection" if code == LOST else f"ended with exit code {code}"
        sys.stderr.write(f"{self._hosts[at]}: {why}.\n")


def main() -> int:
    """Run the commands of a file."""
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    nodes = Nodes(told["hosts"], told["commands"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, nodes.handle)
    return nodes.run()


if __name__ == "__main__":
    sys.exit(main())
