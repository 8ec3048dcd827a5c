"""Remembers what was last used on a host, so that it must be given only once: a small file of this user."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ortflow.workflow.run.rundir import write_atomically


@dataclass(frozen=True)
class Used:
    """A Python and a folder on the host; None if never given."""

    python: str | None = None
    folder: str | None = None


def recall(host: str) -> Used:
    """What was last used on a host."""
    entry = _read().get(host)
    entry = entry if isinstance(entry, dict) else {}
    python, folder = entry.get("python"), entry.get("folder")
    return Used(python if isinstance(python, str) else None, folder if isinstance(folder, str) else None)


def remember(host: str, used: Used) -> None:
    """Save it; if that fails, it must be given again."""
    if used == recall(host):
        return
    with suppress(OSError):
        write_atomically(_file(), json.dumps(_read() | {host: asdict(used)}, indent=2).encode())


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "ortflow" / "hosts.json"
