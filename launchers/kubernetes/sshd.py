"""The ssh daemon of a worker, by which mpirun comes in. Used by the worker."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from ortflow.workflow.errors import OrtflowError

SSHD = ("/usr/sbin/sshd", "/usr/local/sbin/sshd", "/sbin/sshd")
LOOKED = re.compile(r"(?:error: )?(?:kex_exchange_identification|banner exchange|Connection (?:closed|reset) by)\b")
"""Of the kubelet's probes and the keeper's looks, which say nothing and leave."""


def keys() -> Path:
    """Where the operator's ssh keys are mounted."""
    return Path.home() / ".ssh"


def start_sshd(port: int) -> int:
    """Start sshd on the port, with the keys that the operator has mounted; its process. Raises OrtflowError."""
    binary = next((path for path in SSHD if os.access(path, os.X_OK)), None)
    if binary is None:
        raise OrtflowError("the image has no sshd: mpirun cannot come in; `ortflow image check` shows what is missing")
    if not (keys() / "id_rsa").exists():
        where = "it must be where the operator mounts them (sshAuthMountPath)"
        raise OrtflowError(f"there are no keys in {keys()}: {where}")
    if os.getuid() == 0:
        with suppress(OSError):
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    config = Path(tempfile.mkdtemp(prefix="sshd-")) / "config"
    config.write_text(sshd_config(port, keys()))
    ours, its = os.pipe()
    words = [binary, "-D", "-e", "-f", str(config)]
    process = os.posix_spawn(binary, words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, its, 2)])
    os.close(its)
    threading.Thread(target=pass_on, args=(ours,), daemon=True).start()
    return process


def pass_on(source: int) -> None:
    """Print what sshd says, until it says no more, without the lines of connections that only looked."""
    with os.fdopen(source, errors="replace") as lines:
        for line in lines:
            if not LOOKED.match(line):
                print(line, end="", file=sys.stderr, flush=True)


def sshd_config(port: int, keys: Path) -> str:
    """Keys alone open the door. A mounted Secret has neither the owner nor the mode that StrictModes wants. Pure."""
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
            "MaxStartups 1000",
            "MaxSessions 1000",
            "LogLevel ERROR",
        )
    )
