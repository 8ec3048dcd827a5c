"""What is the user's among the modules and functions of a process: neither Python's, nor a package's, nor ortflow's.

Called by `living`, in the user's program. Standard library only.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from functools import cache
from typing import Any

OWN = "ortflow."
_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_LIBRARIES = tuple(
    {os.path.realpath(path) + os.sep for key, path in sysconfig.get_paths().items() if key.endswith(("lib",))}
)


@cache
def is_users(file: str | None, module: str | None = None) -> bool:
    """Whether a source file is the user's: neither of Python, nor of an installed package, nor of ortflow.

    `module` is the name of its module, by which the folders of an ortflow installed from a checkout are known.
    """
    if not file or file.startswith("<") or (module or "").startswith(OWN):
        return False
    path = os.path.realpath(file)
    if f"{os.sep}site-packages{os.sep}" in path or f"{os.sep}dist-packages{os.sep}" in path:
        return False
    return not path.startswith((*_LIBRARIES, _OWN_FOLDER))


def user_frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The functions of the user that are being executed, the innermost first."""
    while frame is not None:
        if is_users(frame.f_code.co_filename, frame.f_globals.get("__name__")):
            yield frame
        frame = frame.f_back


def user_modules() -> Iterator[types.ModuleType]:
    """The modules of the user, the program itself first."""
    modules = [module for name, module in sorted(sys.modules.items()) if name != "__main__" and _has_users_file(module)]
    main = sys.modules.get("__main__")
    yield from ([main] if main is not None and _has_users_file(main) else []) + modules


def _has_users_file(module: Any) -> bool:
    return isinstance(module, types.ModuleType) and is_users(module.__dict__.get("__file__"), module.__name__)


def roots(frame: types.FrameType | None) -> Iterator[tuple[str, Any, str, str]]:
    """Variables: name, value, function (empty for a module) and file."""
    for caller in user_frames(frame):
        if caller.f_locals is not caller.f_globals and caller.f_code.co_name != "<module>":
            for name, value in list(caller.f_locals.items()):
                yield name, value, caller.f_code.co_name, caller.f_code.co_filename
    for module in user_modules():
        for name, value in list(module.__dict__.items()):
            if not (name.startswith("__") and name.endswith("__")):
                yield name, value, "", str(module.__file__)


def is_users_class(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return module is not None and is_users(getattr(module, "__file__", None), kind.__module__)
