"""Where samples are: URLs among the paths of the run file and of the command line. Pure."""

from __future__ import annotations

import re
from pathlib import Path

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+")


def url_of(text: str) -> str | None:
    """A path as a URL, if it is one; a path object has lost one of the slashes behind the scheme."""
    match = _SCHEME.match(text)
    if match is None:
        return None
    scheme, rest = match[1], text[match.end() :]
    return f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def without_secrets(text: str) -> str:
    """A path for messages and records: of a URL without user, password and query, which may be a key."""
    url = url_of(text)
    if url is None:
        return text
    scheme, _, rest = url.partition("://")
    if scheme in ("http", "https"):  # for others, ? is part of a pattern
        rest = re.sub(r"\?.*", "?…", rest)
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def absolute(path: Path) -> Path:
    """A path of the command line behind the current folder; a URL has none."""
    return path if url_of(str(path)) is not None else path.absolute()


def title_of(path: Path) -> str:
    """A path of the command line as it was typed, also if it is a URL, of which secrets are left out."""
    return without_secrets(str(path))
