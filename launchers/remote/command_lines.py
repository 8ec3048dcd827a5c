"""Command lines for the shell of another machine. Pure.

sshd passes one string to the account's login shell, which may be any (also csh or fish), so it contains no user input
directly: a program's input is encoded in characters that are not special in any shell.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Sequence
from typing import Any

OLDEST = (3, 10)
"""The oldest Python that ortflow runs with."""
TOO_OLD = "ortflow-python-too-old"
"""First word of the message for an older one; its version follows."""
START = (
    "import sys;sys.path[:]=[p for p in sys.path if p];import base64,os;os.environ.pop('PYTHONSAFEPATH',0);"
    f"v=sys.version_info[:2];v<{OLDEST!r} and sys.exit('{TOO_OLD} %d.%d'%v);"
    "exec(base64.urlsafe_b64decode(sys.argv[1]))"
)
"""Valid in every Python, so that an old one can report its version. `-c` puts the current folder, the user's home, on
the path: it is removed before any import."""
SAFE = ("env", "PYTHONSAFEPATH=1")
"""CPython 3.13 imports `linecache` before the first line of `-c`, from the current folder without this variable."""


def word(text: str) -> str:
    """Quote one word; a leading `~/` is the home folder there."""
    if text == "~":
        return '"$HOME"'
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def line(arguments: Sequence[str]) -> str:
    """Return a command line."""
    return " ".join(map(word, arguments))


def python_line(python: str, source: str, wish: Any = None) -> str:
    """The line with which a Python there runs `source`, with `wish` as JSON in `packed` form after it."""
    arguments = [*SAFE, python, "-c", START, base64.urlsafe_b64encode(source.encode()).decode()]
    return line([*arguments, pack(wish)] if wish is not None else arguments)


def pack(wish: Any) -> str:
    """Encode plain data as one word of letters, digits, `-`, `_` and `=`."""
    return base64.urlsafe_b64encode(json.dumps(wish).encode()).decode()
