"""Command lines for the shell of another machine. Pure.

sshd hands one string to the login shell of the account, whichever that is (csh and fish among them), so nothing of the
user's stands in it as such: what a program there needs comes in an alphabet that no shell knows anything about.
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
"""First word of what an older one says; its version follows."""
_START = (
    f'import base64,sys;v=sys.version_info[:2];v<{OLDEST!r} and sys.exit("{TOO_OLD} %d.%d"%v);'
    "exec(base64.urlsafe_b64decode(sys.argv[1]))"
)
"""Understood by every Python, so that an old one can say what it is."""


def word(text: str) -> str:
    """One word; a leading `~/` is the home folder there."""
    if text == "~":
        return '"$HOME"'
    if text.startswith("~/"):
        return '"$HOME"/' + shlex.quote(text[2:])
    return shlex.quote(text)


def line(words: Sequence[str]) -> str:
    """A command line."""
    return " ".join(map(word, words))


def python_line(python: str, source: str, wish: Any = None) -> str:
    """The line that has a Python there run `source`, with `wish` as JSON in `packed` form behind it."""
    words = [python, "-c", _START, base64.urlsafe_b64encode(source.encode()).decode()]
    return line([*words, pack(wish)] if wish is not None else words)


def pack(wish: Any) -> str:
    """Plain data as one word of letters, digits, `-`, `_` and `=`."""
    return base64.urlsafe_b64encode(json.dumps(wish).encode()).decode()
