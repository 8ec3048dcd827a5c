"""The ssh daemon of a worker, through which mpirun connects. Used by the worker."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.ranks import HOST, NODE

SSHD = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/sbin/sshd")
PROBED = re.compile(r"(?:error: )?(?:kex_exchange_identification|banner exchange|Connection (?:closed|reset) by)\b")
"""Log lines of the kubelet's and the supervisor process's probes, which connect and disconnect."""


def keys() -> Path:
    """Where the operator's ssh keys are mounted."""
    folder = os.environ.get("ORTFLOW_SSH_FOLDER")
    return Path(folder) if folder else Path.home() / ".ssh"


def start_sshd(port: int, host: str, node: str = "") -> int:
    """Start sshd on the port, with the keys that the operator has mounted; returns its process. Raises OrtflowError.

    `host` is the name under which ranks report where they run, `node` that of the machine.
    """
    binary = next((path for path in SSHD if os.access(path, os.X_OK)), None)
    if binary is None:
        raise OrtflowError(
            "the image has no sshd, which mpirun connects to; `ortflow image check` shows what is missing"
        )
    if not (keys() / "id_rsa").exists():
        hint = "it must be where the operator mounts them (sshAuthMountPath)"
        raise OrtflowError(f"there are no keys in {keys()}: {hint}")
    if os.getuid() == 0:
        with suppress(OSError):
            # Debian's sshd does not start as root without its folder for privilege separation.
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    config = Path(tempfile.mkdtemp(prefix="sshd-")) / "config"
    config.write_text(sshd_config(port, keys(), host, node))
    read_end, its = os.pipe()
    command = [binary, "-D", "-e", "-f", str(config)]
    # Not by subprocess: the worker reaps all of its children itself, and Popen would lose this one's exit status.
    process = os.posix_spawn(binary, command, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, its, 2)])
    os.close(its)
    threading.Thread(target=pass_on, args=(read_end,), daemon=True).start()
    return process


def pass_on(source: int) -> None:
    """Print sshd's output until it ends, without the lines of probes."""
    with os.fdopen(source, errors="replace") as lines:
        for line in lines:
            if not PROBED.match(line):
                print(line, end="", file=sys.stderr, flush=True)


def sshd_config(port: int, keys: Path, host: str = "", node: str = "") -> str:
    """Only keys allow a login. A mounted Secret has neither the owner nor the mode that StrictModes requires. Pure."""
    return "".join(
        f"{line}\n"
        for line in (
            f"Port {port}",
            f"HostKey {keys}/id_rsa",
            f"AuthorizedKeysFile {keys}/authorized_keys",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            # By default sshd drops connections at random from ten unauthenticated ones on (sshd_config(5): 10:30:100).
            "MaxStartups 1000",
            "MaxSessions 1000",
            "LogLevel ERROR",
            # sshd takes the first SetEnv alone.
            *([f"SetEnv {HOST}={host}" + (f" {NODE}={node}" if node else "")] if host else []),
        )
    )
