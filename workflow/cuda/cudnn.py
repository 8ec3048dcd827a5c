"""cuDNN's Python package, whether it can be used here, and its handle."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

OLDEST = 90500
"""The first version of cuDNN that has everything used here, including the deterministic gradient."""
CAPABILITY = (8, 0)


def cudnn() -> Any:
    """cuDNN's Python package."""
    return importlib.import_module("cudnn")


def available(capability: tuple[int, int] | None = None, what: str = "attention") -> str | None:
    """Why `what` cannot be computed by cuDNN here, as a sentence; None if it can."""
    try:
        version = int(cudnn().backend_version())
    except ImportError:
        return f"{what} in half precision needs the package nvidia-cudnn-frontend, which is not installed"
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{what} in half precision needs cuDNN, which cannot be loaded ({' '.join(str(error).split())[:200]})"
    if version < OLDEST:
        return f"{what} in half precision needs cuDNN 9.5 at least, and its version is {version}"
    if capability is not None and capability < CAPABILITY:
        return (
            f"{what} in half precision needs a GPU of compute capability 8.0 at least, and this one has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


def handle_on(stream: int) -> Any:
    """The handle of this process, which queues on the stream."""
    return _handle().on(stream)


class _Handle:
    def __init__(self) -> None:
        self._handle = cudnn().create_handle()
        self._stream: int | None = None

    def on(self, stream: int) -> Any:
        if self._stream != stream:
            cudnn().set_stream(self._handle, stream)
            self._stream = stream
        return self._handle


@cache
def _handle() -> _Handle:
    return _Handle()
