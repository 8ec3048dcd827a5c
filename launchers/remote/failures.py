"""Errors from ssh's messages when a connection fails, with the fix. Pure."""

from __future__ import annotations

import re

from ortflow.workflow.errors import OrtflowError, UserError

SSH_FAILED = 255
"""ssh's own exit code; all others are the command's."""

_CHANGED = re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*has (?:changed|just been changed)", re.I)
_UNKNOWN = re.compile(r"Host key verification failed|authenticity of host|host key is known for", re.I)
_NO_NAME = re.compile(r"Could not resolve hostname", re.I)
_AWAY = re.compile(
    r"timed out|Connection refused|No route to host|Network is unreachable|Connection (?:closed|reset)|"
    r"kex_exchange_identification|Broken pipe|not responding|port \d+: ",
    re.I,
)
_REFUSED = re.compile(r"Permission denied|Too many authentication failures|No more authentication methods", re.I)
_NOISE = re.compile(r"^(?:@+|Warning: .*|\*\* .*|debug\d: .*)$")


def explain(host: str, output: str) -> OrtflowError:
    """The error for an ssh that ended with its own exit code."""
    last = last_line(output)
    if _CHANGED.search(output):
        return UserError(
            f"{host} shows another host key than before: it was reinstalled, or the connection is intercepted",
            fix=f"ask its administrators; if the new key is right, `ssh-keygen -R {bare(host)}`, then `ssh {host}`",
        )
    if _UNKNOWN.search(output):
        return UserError(
            f"the host key of {host} is not known here",
            fix=f"connect once with `ssh {host}` and compare what it shows with what the site publishes",
        )
    if _REFUSED.search(output):
        return UserError(
            f"{host} rejects your login ({last})",
            fix=f"`ssh {host}` must work without a prompt: `ssh-add` your key, or `ssh-copy-id {host}`",
        )
    if _NO_NAME.search(output):
        return UserError(f"there is no host {bare(host)} ({last})", fix="correct --host, or your ~/.ssh/config")
    if _AWAY.search(output):
        return OrtflowError(f"{host} cannot be reached ({last}); is the network or the VPN up? Try again")
    return OrtflowError(f"ssh to {host} failed: {last or 'no output'}")


def no_python(host: str, python: str, code: int, output: str) -> OrtflowError:
    """The error for a Python command that ended in this way."""
    if code in (126, 127):
        return UserError(
            f"there is no {python} on {host} ({last_line(output)})",
            fix="give a Python of its own with --host-python, or resources.python in the run file",
        )
    return UserError(
        f"{python} on {host} does not work as a Python interpreter: {last_line(output) or f'exit code {code}'}"
    )


def last_line(output: str) -> str:
    """The relevant line of ssh's or a shell's output: the last one that is not empty."""
    lines = [line.strip() for line in output.splitlines()]
    return next((line for line in reversed(lines) if line and not _NOISE.match(line)), "").rstrip(".")


def bare(host: str) -> str:
    """The host without its user."""
    return host.rpartition("@")[2]
