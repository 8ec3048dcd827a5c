"""Caches the result of the check per runtime and machine, in a cache folder of the user's."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ortflow import __version__
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.run.rundir import write_atomically
from ortflow.workflow.sessions.settings import Outcome, Settings
from ortflow.workflow.system.cache_folders import cache_folders
from ortflow.workflow.system.runtimes import installed_runtime

VERSION = 1
"""Version of the table and of the normal form of graphs; a change makes every machine be checked again."""
_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "model name", "stepping", "flags"),
    *("Features", "CPU implementer", "CPU architecture", "CPU variant", "CPU part"),
)
"""Lines of /proc/cpuinfo that identify a processor's capabilities, on x86-64 and ARM."""


@dataclass(frozen=True)
class Found:
    """The runtime's check result."""

    outcome: Outcome
    package: str
    version: str
    seconds: float | None
    """Duration of the check; None if the result was cached."""


def verified() -> Outcome:
    """Run the check on this machine. Raises UserError if the runtime is unusable."""
    # A cached result needs neither the table nor ONNX.
    from ortflow.workflow.runtime_check.verify import needs, verify

    return verify(needs())


def runtime_here(*, afresh: bool = False, check: Callable[[], Outcome] = verified) -> Found:
    """The cached result of the check, or a new one.

    Parameters
    ----------
    afresh
        Ignore the cached result.
    check
        Runs the check.

    Raises
    ------
    UserError
        If the runtime is unusable. This is not cached.
    """
    package, version = installed_runtime(), onnxruntime.__version__
    name = f"{package}-{version}-{_key(package, version)[:16]}.json"
    places = list(cache_folders("runtimes"))
    if not afresh:
        for place in places:
            outcome = _read(place / name)
            if outcome is not None:
                return Found(outcome, package, version, None)
    start = time.perf_counter()
    outcome = check()
    seconds = time.perf_counter() - start
    for place in places:
        with suppress(OSError):
            write_atomically(place / name, _written(outcome))
            break
    return Found(outcome, package, version, seconds)


def _key(package: str, version: str) -> str:
    identity = [str(VERSION), __version__, package, version, platform.machine(), *processor_identity()]
    return hashlib.sha256("\n".join(identity).encode()).hexdigest()


def processor_identity() -> Iterator[str]:
    """The first processor's description of itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        yield platform.processor()
        return
    for line in text.split("\n\n", 1)[0].splitlines():
        if line.split(":")[0].strip() in _PROCESSOR:
            yield line


def _written(outcome: Outcome) -> bytes:
    settings = outcome.settings
    text = {
        "disabled": settings.disabled,
        "optimised": settings.optimised,
        "faults": dict(outcome.faults),
    }
    return (json.dumps(text, indent=2) + "\n").encode()


def _read(path: Path) -> Outcome | None:
    """Read what `_written` wrote; None if there is no such file, or it is damaged."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        disabled, optimised, faults = read["disabled"], read["optimised"], read["faults"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(disabled, list) or not isinstance(optimised, bool) or not isinstance(faults, dict):
        return None
    if not all(isinstance(text, str) for text in (*disabled, *faults, *faults.values())):
        return None
    return Outcome(Settings(tuple(disabled), optimised), faults)
