"""The order of test files in `.ci/run`: the longest first, so that no worker of pytest-xdist has one left at the end.

ORTFLOW_DURATIONS=FILE pytest -n 3 --dist loadfile --no-loadscope-reorder    # FILE: JSON, seconds by test file
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

DEFAULT_SECONDS = 4.0
"""Of a file that is not recorded."""


def recorded_seconds() -> dict[str, float]:
    """Seconds by test file; none without the variable or the file."""
    path = os.environ.get("ORTFLOW_DURATIONS")
    return dict(json.loads(Path(path).read_text())) if path and Path(path).exists() else {}


def order(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Sort tests by the seconds of their files; tests of one file stay together and in their order."""
    if seconds:
        items.sort(key=lambda item: (-seconds.get(file_of(item), DEFAULT_SECONDS), file_of(item)))


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
