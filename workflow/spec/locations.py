"""Where samples are: URLs among the paths of the run file. Pure."""

from __future__ import annotations

import re

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):/+")


def url_of(text: str) -> str | None:
    """A path as a URL, if it is one; a path object has lost one of the slashes behind the scheme."""
    match = _SCHEME.match(text)
    if match is None:
        return None
    scheme, rest = match[1], text[match.end() :]
    return f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"
