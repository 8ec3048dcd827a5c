"""Commands of tests in forks of one Python process that has imported what they need, instead of new interpreters.

An interpreter and the imports of a command cost 0.4 s of a core, a fork 0.05 s. A fork has the arguments, folder,
environment, streams and end of a separate process. It does not have its command line in /proc, and does not show that
a module lacks an import: commands that a test watches from outside are started again.

python forks.py SOCKET MODULE…      # the process that forks, for `Forks`
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

LARGEST = 1 << 17
"""Bytes of a request: arguments and environment."""
FREE = ("MPIR_", "ORTFLOW_", "XDG_", "OMP_", "PYTEST_", "SLURM_", "KUBE", "PATH", "FAKE_")
"""Beginnings of the variables that no interpreter and no module looks at when it starts."""
MOST = 4
"""Processes that fork, at most, for commands under different environments."""


class Ended(subprocess.CompletedProcess[str]):
    """How a fork ended."""

    def __init__(self, args: list[str], code: int, out: str, err: str, peak: int) -> None:
        super().__init__(args, code, out, err)
        self.peak = peak
        """Bytes of memory at most, of the fork or a process it waited for."""


class Forks:
    """A process that forks, with some modules; it ends with this one."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules], pass_fds=[theirs.fileno()],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        atexit.register(self.end)

    def end(self) -> None:
        self.socket.close()
        self.process.wait()

    def run(
        self, program: str, *arguments: str, folder: Path, environment: Mapping[str, str], timeout: float,
        merged: bool = False,
    ) -> Ended:  # fmt: skip
        """As `subprocess.run` with a script, or with the name of a module, and its output captured.

        With `merged`, standard error goes where the output does.

        Raises
        ------
        subprocess.TimeoutExpired
            If it has not ended, or something that it started has not closed its output. It is killed.
        """
        request = {"program": program, "arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        with contextlib.ExitStack() as ends:
            pairs = [os.pipe() for _ in range(3)]
            out, err, status = (ends.enter_context(os.fdopen(end, "rb", buffering=0)) for end, _ in pairs)
            ends_of_fork = [end for _, end in pairs]
            if merged:
                ends_of_fork[1] = ends_of_fork[0]
            socket.send_fds(self.socket, [json.dumps(request).encode()], ends_of_fork)
            for _, end in pairs:
                os.close(end)
            pid = int(status.readline())
            try:
                texts = read_all([out, err, status], time.monotonic() + timeout)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired([program, *arguments], timeout) from None
        code, seconds, peak = texts[2].split()
        SPENT[0] += float(seconds)
        return Ended([program, *arguments], int(code), texts[0], texts[1], int(peak))


def run_command(
    *arguments: str, folder: Path, environment: Mapping[str, str], timeout: float, modules: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run `ortflow ARGUMENTS`: in a fork, unless a new interpreter would start in a way of its own there.

    The process that forks has `modules` besides what most commands import.
    """
    forks = None if any(folder.glob("*.py")) else _forks_for(environment, (*COMMAND, *modules))
    if forks is not None:
        return forks.run("ortflow", *arguments, folder=folder, environment=environment, timeout=timeout)
    return subprocess.run(
        [sys.executable, "-m", "ortflow", *arguments], cwd=folder, env=dict(environment), capture_output=True,
        text=True, timeout=timeout, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def run_merged(
    *arguments: str, folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str] | None:
    """As `run_command`, in a folder whose Python files no command imports, with one stream; None without a fork."""
    forks = _forks_for(environment, COMMAND)
    if forks is None:
        return None
    return forks.run("ortflow", *arguments, folder=folder, environment=environment, timeout=timeout, merged=True)


COMMAND = (
    "ortflow.cli.app", "ortflow.cli.runs", "ortflow.launchers.starting", "ortflow.launchers.supervision.supervisor",
    "ortflow.workflow.spec.file.load",
)  # fmt: skip
_KNOWN: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], Forks | None] = {}
"""By modules and environment; None behind its first command."""


def _forks_for(environment: Mapping[str, str], modules: tuple[str, ...]) -> Forks | None:
    """None for the first command under an environment, and for what Python itself reads."""
    fixed = frozenset((name, text) for name, text in environment.items() if not name.startswith(FREE))
    if any(name.startswith("PYTHON") and os.environ.get(name) != text for name, text in fixed - {WARNINGS}):
        return None
    key = (modules, fixed)
    if key not in _KNOWN:
        _KNOWN[key] = None
    elif _KNOWN[key] is None and sum(forks is not None for forks in _KNOWN.values()) < MOST:
        # Without the free variables: tests look for what stays of a run or of a testbed by the variables of processes.
        _KNOWN[key] = Forks(*modules, environment={**dict(fixed), "PATH": os.environ["PATH"]})
    return _KNOWN[key]


WARNINGS = ("PYTHONWARNINGS", "default")
"""Of every command of a test."""
SPENT = [0.0]
"""Processor seconds of forks that have ended, and of what they waited for. They are not children of this process."""


def read_all(files: list, deadline: float) -> list[str]:  # type: ignore[type-arg]
    """Each file's content to its end."""
    contents = {file: bytearray() for file in files}
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                contents[key.fileobj].extend(part)  # type: ignore[index]
                if not part:
                    selector.unregister(key.fileobj)
    return [contents[file].decode() for file in files]


def main(number: int, modules: list[str]) -> None:
    """Fork for each request, until the process of tests has ended."""
    for module in modules:
        __import__(module)
    if (run := sys.modules.get("ortflow.workflow.spec.run")) is not None:
        for kind in (run.TrainerRunSpec, run.ProgramRunSpec):  # built for the first run file, in each fork again
            kind.model_rebuild()
    gc.freeze()  # else each fork looks through all modules, which copies their pages
    # Not ignored: the kernel would take them away too, but with their processor time, which .ci/run lists by lane.
    signal.signal(signal.SIGCHLD, take_away)
    with socket.socket(fileno=number) as requests:
        while True:
            content, files, *_ = socket.recv_fds(requests, LARGEST, 3)
            if not content:
                end_with_children(time.monotonic() + 60)
                return
            if os.fork() == 0:
                break
            for file in files:
                os.close(file)
    out, err, status = files
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        os.close(status)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
        begin(json.loads(content))
    os.close(out)
    os.close(err)
    os.write(status, f"{child}\n".encode())
    _, ending, usage = os.wait4(child, 0)
    os.write(
        status,
        f"{os.waitstatus_to_exitcode(ending)} {usage.ru_utime + usage.ru_stime} {usage.ru_maxrss * 1024}".encode(),
    )
    os._exit(0)


def take_away(*_: object) -> None:
    """Wait for all children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_with_children(deadline: float) -> None:
    """Wait for those that are about to end: they have reported what their command printed, and not yet ended."""
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.005)


def begin(request: dict) -> None:  # type: ignore[type-arg]
    """Become the process of a request."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv[1:] = request["arguments"]
    if request["program"].endswith(".py"):
        sys.argv[0] = request["program"]
        sys.path[0] = str(Path(request["program"]).parent)
        runpy.run_path(request["program"], run_name="__main__")
    else:
        sys.path[0] = request["folder"]
        runpy.run_module(request["program"], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
