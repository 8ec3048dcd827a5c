"""A connection to another machine: the system's ssh, shared by all commands, with its socket in a private folder.

ssh's own checks stay unchanged: host keys, agents, jump hosts and second factors are as in ~/.ssh/config
(ORTFLOW_SSH_CONFIG names another file), whose settings take precedence.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ortflow.launchers.remote.failures import SSH_FAILED, explain
from ortflow.workflow.errors import OrtflowError, UserError

CONFIG = "ORTFLOW_SSH_CONFIG"
PERSIST = 300
"""Seconds for which the connection stays after the last command."""
ANSWERS = 120.0
"""Time-out in seconds of an unattended first command: ssh itself gives up long before, unless it hangs."""
LEAVES = 15.0
"""Seconds that a command there has to end when it is interrupted."""
LONGEST = 104 - 41 - 18
"""A socket's path may have 104 bytes on every system; ssh adds a name of 40 and, for a moment, 17 more."""
_HOST = re.compile(r"[^-\s\x00-\x1f][^\s\x00-\x1f]*")


@dataclass(frozen=True)
class Answer:
    """The output of a remote command."""

    code: int
    out: bytes
    err: str


@dataclass(frozen=True)
class Connection:
    """ssh to one host."""

    host: str
    options: tuple[str, ...] = ()
    apart: bool = False
    """ssh no longer needs to prompt, so the terminal's keys need not reach it."""

    def command(self, line: str) -> list[str]:
        """The whole local command for a line of the remote shell."""
        return ["ssh", *self.options, "--", self.host, line]

    def call(
        self, line: str, feed: Callable[[IO[bytes]], object] = lambda pipe: None, seconds: float | None = None
    ) -> Answer:
        """Run a line; `feed` writes its input. Raises OrtflowError if ssh itself fails."""
        # Not a pipe: the persistent connection would keep it open.
        with tempfile.TemporaryFile() as complaints:
            process = subprocess.Popen(
                self.command(line), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
            )
            try:
                assert process.stdin is not None
                # A command that ends before it has read everything reports why in its output.
                with suppress(BrokenPipeError), process.stdin as pipe:
                    feed(pipe)
                process.stdin = None
                out, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired as error:
                raise OrtflowError(f"{self.host} had no answer within {seconds:.0f} s; try again") from error
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            complaints.seek(0)
            err = complaints.read().decode(errors="replace")
        if process.returncode == SSH_FAILED:
            raise explain(self.host, err)
        return Answer(process.returncode, out, err)

    def stream(self, line: str) -> int:
        """Run a line with this process's output and error; returns its exit code.

        Its standard input stays open until Ctrl-C closes it: the command there then ends
        as if the key had been pressed there, and prints its last messages.
        """
        # In its own session ssh does not get the key, but cannot prompt for a password either. Without its own session,
        # the end of the connection has the same effect there, and the last messages are lost.
        process = subprocess.Popen(self.command(line), stdin=subprocess.PIPE, start_new_session=self.apart)
        assert process.stdin is not None
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.stdin.close()
            try:
                code = process.wait(LEAVES)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.kill()
                code = 130
            return 130 if code == SSH_FAILED else code
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            with suppress(OSError):
                process.stdin.close()
        if code == SSH_FAILED:
            raise OrtflowError(
                f"the connection to {self.host} broke; submitted runs continue there, and `ortflow list --host "
                f"{self.host}` shows it"
            )
        return code


def connect(host: str) -> Connection:
    """The connection to a host, not opened yet. Raises UserError if there is no ssh or its configuration is wrong."""
    if not _HOST.fullmatch(host):
        raise UserError(f"{host!r} is not a host", where="--host", fix="give it as ssh takes it: user@login")
    config = os.environ.get(CONFIG)
    config_options = ("-F", config) if config else ()
    try:
        answer = subprocess.run(
            ["ssh", "-G", *config_options, "--", host],
            capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=30,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise UserError("--host needs ssh, and there is none on the PATH", fix="install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise OrtflowError(f"`ssh -G {host}` had no answer within 30 s") from error
    if answer.returncode:
        raise UserError(f"ssh rejects its configuration: {answer.stderr.strip().splitlines()[-1]}")
    # `ssh -G` prints names in lower case, and no controlpath unless one is set.
    ssh_options = dict(line.partition(" ")[::2] for line in answer.stdout.splitlines())
    folder = socket_folder()
    attended = sys.stdin.isatty()
    added = settings(ssh_options, folder, attended=attended)
    apart = folder is not None or "controlpath" in ssh_options or not attended
    return Connection(host, (*config_options, *(part for option in added for part in ("-o", option))), apart)


def settings(ssh_options: Mapping[str, str], folder: Path | None, *, attended: bool) -> list[str]:
    """Options beside those of `ssh -G`: time-outs and a shared connection, unless the user has set them. Pure."""
    options = ["LogLevel=ERROR"]
    if ssh_options.get("connecttimeout", "none") in ("none", "0"):
        options.append("ConnectTimeout=10")
    if ssh_options.get("serveraliveinterval", "0") == "0":
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
    if not attended:
        # There is nobody to enter a password or confirm a key: fail instead of waiting.
        options.append("BatchMode=yes")
    if folder is not None and ssh_options.get("controlpath", "none") == "none":
        options += ["ControlMaster=auto", f"ControlPath={folder}/%C", f"ControlPersist={PERSIST}"]
    return options


def socket_folder() -> Path | None:
    """A folder that only this user can enter; None if its path is too long for sockets."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    bases = [runtime, "/tmp"] if runtime and os.path.isdir(runtime) else ["/tmp"]
    folders = [Path(base) / f"ortflow-ssh-{os.getuid()}" for base in bases]
    # ssh expands `%` and `$` in it.
    fitting = [
        candidate
        for candidate in folders
        if len(os.fsencode(candidate)) <= LONGEST and not re.search(r"[%$\s\"']", str(candidate))
    ]
    if not fitting:
        return None
    folder = fitting[0]
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(
            f"{folder} is not a folder that only you can enter, and connections are kept there", fix="remove it"
        )
    return folder
