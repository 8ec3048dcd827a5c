"""Sends one message, read as JSON from standard input: `python -m ortflow.launchers.supervision.notice_sender`.

A separate process, so that a sink that hangs is ended without the supervisor. Reports a failure as one line on
standard error, with exit status 1. It contains neither the address, which may be a secret, nor what a command printed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ortflow.launchers.supervision.unsent import PAUSE, TRY, NotSent

_VARIABLE = re.compile(r"\$\{(\w+)\}", re.ASCII)


def main() -> int:
    """Send the message; the exit status."""
    order = json.load(sys.stdin)
    try:
        if order["command"] is not None:
            run_command(order["command"], order["message"], order["seconds"])
        elif order["mail"] is not None:
            from ortflow.launchers.supervision.notice_mail import send_mail

            send_mail(order["mail"], order["message"], order["seconds"])
        else:
            post(order["webhook"], order["message"], order["seconds"])
    except NotSent as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run_command(command: list[str], message: Mapping[str, Any], seconds: float) -> None:
    """Run a command in the run directory, with the message on its standard input. Raises NotSent."""
    folder = str(message.get("directory", ""))
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Supervisors work in /, so that they hold no folder.
            cwd=folder if os.path.isdir(folder) else None,
        )
    except OSError as error:
        raise NotSent(f"{command[0]}: {error.strerror}") from None
    try:
        child.communicate(json.dumps(message).encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        # What the command started is in this process's group.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        child.kill()
        raise NotSent(f"{command[0]} did not end within {seconds:g} s") from None
    if child.returncode:
        raise NotSent(f"{command[0]} ended with exit status {child.returncode}")


def post(webhook: str, message: Mapping[str, Any], seconds: float) -> None:
    """Post the message, again after a failure while time is left. Raises NotSent."""
    import urllib.request

    address = resolved(webhook, os.environ)
    body = json.dumps(message).encode()
    end = time.monotonic() + seconds
    while True:
        try:
            headers = {"Content-Type": "application/json", "User-Agent": "ortflow"}
            request = urllib.request.Request(address, data=body, headers=headers, method="POST")
            with urllib.request.urlopen(request, timeout=max(0.1, min(TRY, end - time.monotonic()))):
                return
        except ValueError:
            raise NotSent("the webhook is not a URL once its variables are filled in") from None
        except OSError as error:
            if time.monotonic() + PAUSE >= end or 400 <= getattr(error, "code", 0) < 500:
                raise NotSent(f"the webhook failed: {_reason(error)}") from None
        time.sleep(PAUSE)


def resolved(webhook: str, environment: Mapping[str, str]) -> str:
    """The address with the environment's variables filled in. Raises NotSent if one is missing. Pure."""
    missing = [name for name in _VARIABLE.findall(webhook) if name not in environment]
    if missing:
        raise NotSent(f"the environment variable {missing[0]} is not set")
    return _VARIABLE.sub(lambda match: environment[match[1]], webhook)


def _reason(error: OSError) -> str:
    code = getattr(error, "code", None)
    if code is not None:
        return f"HTTP {code}"
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    return str(getattr(reason, "strerror", None) or type(reason).__name__)


if __name__ == "__main__":
    sys.exit(main())
