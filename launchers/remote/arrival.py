"""On the login node: the environment of a command that was typed elsewhere, and the code that a run is started with.

`settle` is called first in the copied code.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

CODE = "ORTFLOW_CODE"
"""The folder of the copied code; its name is the code's hash."""
HOST = "ORTFLOW_HOST"
"""On the user's machine: the login node for every verb."""
SEEN_AS = "ORTFLOW_SEEN_AS"
"""On the login node: its name as the user typed it."""
_MARK = "ortflow-environment:"
_PRINT = f"import json,os;print({_MARK!r}+json.dumps(dict(os.environ)))"
_PROFILE = 30.0
"""Seconds that a login shell may take to start."""


def settle(code: str, wish: Mapping[str, Any]) -> None:
    """Set up this process as if the command had been typed here, in the folder of the runs."""
    _leave_when_left()
    if shutil.which("sbatch") is None:
        os.environ.update(login_environment(os.environ))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([code, *([before] if before else [])])
    os.environ[CODE] = code
    os.environ[SEEN_AS] = wish["host"]
    os.environ.pop(HOST, None)
    folder = os.path.expanduser(wish["folder"])
    try:
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        print(f"error: {folder} on {wish['host']}: {error.strerror}; --host-dir names another folder", file=sys.stderr)
        sys.exit(1)


def shipped_code(environment: Mapping[str, str] = os.environ) -> str | None:
    """The folder of the copied code that this process runs, if it was started from elsewhere."""
    return environment.get(CODE) or None


def submit_record(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The code's entry in the record of a submission: its hash, if it was copied from elsewhere."""
    code = shipped_code(environment)
    return {"code": os.path.basename(code)} if code else {}


def as_typed(environment: Mapping[str, str] = os.environ) -> str:
    """The prefix of a run's name in commands that messages suggest."""
    host = environment.get(SEEN_AS)
    return f"--host {shlex.quote(host)} " if host else ""


def location_text(environment: Mapping[str, str] = os.environ) -> str:
    """The name of this machine, for the user who typed the command."""
    host = environment.get(SEEN_AS)
    return f"on {host}" if host else "here"


def login_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a login shell."""
    # Many sites put Slurm on the PATH there, which a command by ssh does not get.
    shell = environment.get("SHELL", "/bin/sh")
    try:
        answer = subprocess.run(
            # In the folder of a login, `-c` would import modules of that folder.
            [shell, "-l", "-c", f"cd /; {shlex.quote(sys.executable)} -c {shlex.quote(_PRINT)}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_PROFILE,
        )  # fmt: skip
        variables: dict[str, str] = json.loads(answer.stdout.rpartition(_MARK)[2].splitlines()[0])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError, RecursionError):
        return {}
    return {name: value for name, value in variables.items() if name not in ("_", "PWD", "OLDPWD", "SHLVL")}


def _leave_when_left() -> None:
    """Exit as on Ctrl-C when standard input ends: ssh passes on neither the key nor the end of the connection."""
    main, line = threading.main_thread().ident or 0, os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        try:
            while os.read(line, 4096):
                pass
        except OSError:
            pass
        # To the main thread: a signal to the process may reach another one, and the main one's system call would go on.
        signal.pthread_kill(main, signal.SIGINT)

    # Where the parent ignores SIGINT, Python installs no handler, and KeyboardInterrupt would never come.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=wait, daemon=True).start()
