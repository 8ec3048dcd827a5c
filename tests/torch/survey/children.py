"""A model of a survey in a separate process, so that a crash does not end the survey."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def row_of(name: str, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """The JSON object in the last line of a command's output; `crashed` if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"case": name, "result": "crashed", "why": f"not done after {seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        return {"case": name, "result": "crashed", "why": " ".join(done.stderr.splitlines()[-3:])[-400:]}
    row: dict[str, Any] = json.loads(lines[-1])
    return row
