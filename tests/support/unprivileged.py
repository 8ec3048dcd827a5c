"""Work by a process for which the modes of files hold, also where tests run as root, as on CI."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable

_CAPABILITY_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: three sets of two 32-bit words."""


def unprivileged(work: Callable[[], str]) -> str:
    """What `work` returns in a forked process without capabilities; the traceback if it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _drop_capabilities()
            text = work()
        except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
            text = traceback.format_exc()
        with os.fdopen(writing, "w") as file:
            file.write(text)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def _drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    library = ctypes.CDLL(None, use_errno=True)
    if library.capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset")
