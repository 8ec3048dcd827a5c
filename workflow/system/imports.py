"""Imports a library without a package that it would import.

Some libraries import PyTorch wherever it is installed, without needing it: seconds and half a gigabyte per rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def without_package(name: str) -> Iterator[None]:
    """Make `import name` fail inside the block, as if it were not installed. An already imported module stays."""
    # In sys.modules, None means that the module does not exist.
    modules = cast("dict[str, Any]", sys.modules)
    modules.setdefault(name, None)
    try:
        yield
    finally:
        if modules[name] is None:
            del modules[name]
