"""A Slurm of one machine: sbatch, srun, squeue, scontrol and scancel, as their manual pages describe them.

The programs on the PATH are `_PROGRAM`, which sends its arguments to `Slurm` in the test's process and prints the
answer. Jobs run when `Slurm.work` is called, one after the other; tasks begin with torch imported (see `warm`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import warm
from forge_train import Plugin, Volatile, hookimpl, section

PARTITIONS = ("cpu", "gpu")
_KNOWN = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "mem", "time", "partition", "account"),
    *("array", "signal", "requeue", "no-requeue", "open-mode", "output", "parsable"),
}
_SRUN = ("kill-on-bad-exit", "wait")
_PROGRAM = """\
#!{python} -SE
import json, os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect({address!r})
told = [os.path.basename(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]
s.sendall(json.dumps(told).encode() + b"\\n")
out, err, code = json.loads(s.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class RefusedError(Exception):
    """What a program says before it ends with 1."""


@dataclass
class Job:
    """A job, from its submission on."""

    id: int
    options: dict[str, str]
    script: Path
    folder: Path
    environment: dict[str, str]
    state: str = "PENDING"
    restarts: int = 0
    history: list[str] = field(default_factory=list)
    """Each attempt's end."""
    tasks: list[warm.Popen] = field(default_factory=list)
    batch: Any = None
    requeued: bool = False


class Slurm:
    """Controller, nodes and programs.

    Args:
        folder: for the programs and scripts.
    """

    def __init__(self, folder: Path) -> None:
        self.jobs: dict[int, Job] = {}
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._folder, self._lock = folder, threading.RLock()
        slurm, address = self, str(folder / "s")

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                program, *told = json.loads(self.rfile.readline())
                try:
                    answer = getattr(slurm, f"_{program}")(*told)
                except RefusedError as error:
                    answer = ("", f"{program}: error: {error}\n", 1)
                with contextlib.suppress(BrokenPipeError):  # srun's job was killed
                    self.wfile.write(json.dumps(answer).encode())

        self._server = socketserver.ThreadingUnixStreamServer(address, Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        for name in ("sbatch", "srun", "squeue", "scontrol", "scancel", "limit"):
            (self.bin / name).write_text(_PROGRAM.format(python=sys.executable, address=address), encoding="utf-8")
            (self.bin / name).chmod(0o755)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def work(self) -> None:
        """Run jobs until none is pending."""
        while job := next((one for one in self.jobs.values() if one.state == "PENDING"), None):
            self._attempt(job)

    def _attempt(self, job: Job) -> None:
        job.state, job.requeued, job.tasks = "RUNNING", False, []
        name = (
            job.options.get("output", "slurm-%j.out").replace("%x", job.options["job-name"]).replace("%j", str(job.id))
        )
        own = {"SLURM_JOB_ID": str(job.id), "SLURM_JOB_NAME": job.options["job-name"], "SLURM_NTASKS": "2"}
        if job.restarts:
            own["SLURM_RESTART_COUNT"] = str(job.restarts)
        mode = "a" if job.options.get("open-mode") == "append" else "w"
        with (job.folder / name).open(mode, encoding="utf-8") as log:
            job.batch = subprocess.Popen(
                ["bash", job.script], cwd=job.folder, env={**job.environment, **own}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            code = job.batch.wait()
        if job.state == "NODE_FAIL":
            job.requeued = "requeue" in job.options
        elif job.state == "RUNNING":
            job.state = "COMPLETED" if code == 0 else "FAILED"
        job.history.append("REQUEUED" if job.requeued and job.state != "NODE_FAIL" else job.state)
        if job.requeued:
            job.state, job.restarts = "PENDING", job.restarts + 1

    def _sbatch(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        """Options on the command line go before those of the script's head, which ends at the first command."""
        words = [word for word in arguments if word.startswith("--")]
        (script,) = (Path(cwd, word) for word in arguments if not word.startswith("--"))
        head = []
        for line in script.read_text(encoding="utf-8").splitlines()[1:]:
            if line.startswith("#SBATCH"):
                head += shlex.split(line.removeprefix("#SBATCH"), comments=True)
            elif line.strip() and not line.startswith("#"):
                break
        options = {}
        for word in [*head, *words]:
            name, _, value = word.removeprefix("--").partition("=")
            if name not in _KNOWN or not word.startswith("--"):
                raise RefusedError(f"unrecognized option '{word}'")
            options[name] = value
        if options.get("partition", "cpu") not in PARTITIONS:
            raise RefusedError(
                f"invalid partition specified: {options['partition']}\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified"
            )
        with self._lock:
            number = 40 + len(self.jobs)
            kept = self._folder / f"script-{number}"  # Slurm keeps the script as it was submitted
            kept.write_bytes(script.read_bytes())
            self.jobs[number] = Job(number, options, kept, Path(cwd), environment)
        return (f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n"), "", 0

    def _srun(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        """Run a step on two nodes with a task each; the code is the highest of its tasks'."""
        job = self.jobs[int(environment["SLURM_JOB_ID"])]
        while arguments[0].startswith("--"):
            if (word := arguments.pop(0)).removeprefix("--").partition("=")[0] not in _SRUN:
                return "", f"srun: unrecognized option '{word}'\n", 255
        nodes = int(job.options["nodes"])
        step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost,node[2-9]", "SLURM_NTASKS": str(nodes)}
        step |= {"SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})", "MASTER_PORT": str(_free_port())}
        tasks = job.tasks
        for rank in range(nodes):
            own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
            tasks.append(
                warm.Popen(
                    arguments,
                    env={**environment, **step, **own},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            )
        watched = [threading.Thread(target=self._watch, args=(job, tasks, task)) for task in tasks]
        for one in watched:
            one.start()
        said = "".join(task.stdout.read() for task in tasks)
        for one in watched:
            one.join()
        return said, "", max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)

    def _watch(self, job: Job, tasks: list[warm.Popen], task: warm.Popen) -> None:
        """A task that is gone without a word takes its node with it, and the job ends at once."""
        if task.wait() != -signal.SIGKILL:
            return
        with self._lock:
            if job.state != "RUNNING" or job.tasks is not tasks:  # it was killed because of another one
                return
            job.state = "NODE_FAIL"
            for other in tasks:
                if other.poll() is None:
                    other.kill()
            os.killpg(job.batch.pid, signal.SIGKILL)

    def _limit(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        """The time limit of the caller's job is as near as its --signal says: the tasks get that signal."""
        job = self.jobs[int(environment["SLURM_JOB_ID"])]
        number = signal.Signals[f"SIG{job.options['signal'].partition('@')[0]}"]
        for task in job.tasks:
            task.send_signal(number)
        return "", "", 0

    def _squeue(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        """Pending and running jobs; others with --states=all."""
        given = shlex.join(arguments).replace("-j ", "--jobs=")
        chosen = [
            job
            for job in self.jobs.values()
            if ("--states=all" in arguments or job.state in ("PENDING", "RUNNING"))
            and ("--jobs=" not in given or f"--jobs={job.id}" in given.split())
            and all(word == f"--name={job.options['job-name']}" for word in arguments if word.startswith("--name="))
        ]
        form = arguments[arguments.index("-o") + 1]
        rows = [form.replace("%i", str(job.id)).replace("%T", job.state) for job in chosen]
        return "".join(f"{row}\n" for row in rows), "", 0

    def _scontrol(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        """requeue: the job ends, and is pending again; one that was submitted with --no-requeue stays."""
        what, number = arguments
        job = self.jobs[int(number)]
        if what != "requeue" or "requeue" not in job.options:
            raise RefusedError(f"Requested operation is presently disabled for job {number}")
        job.requeued = True
        job.batch.send_signal(signal.SIGTERM)
        return "", "", 0

    def _scancel(self, arguments: list[str], environment: dict[str, str], cwd: str, pid: int) -> tuple[str, str, int]:
        job = self.jobs.get(int(arguments[0]))
        if job is None:
            raise RefusedError(f"Kill job error on job id {arguments[0]}: Invalid job id specified")
        job.state = "CANCELLED"
        return "", "", 0


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Limit(Plugin):
    """In an attempt of its job, the time limit comes near after a step."""

    api = (1, 0)

    @section
    class Config:
        at: Annotated[int, Volatile()] = 4
        attempt: Annotated[int, Volatile()] = 1

    @hookimpl
    def on_step(self, step: Any) -> None:
        here = (os.environ.get("RANK"), os.environ.get("SLURM_RESTART_COUNT"), step.step)
        if here == ("0", str(self.config.attempt), self.config.at):
            subprocess.run(["limit"], check=True)
