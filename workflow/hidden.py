"""Importing a library without a package that it would bring along.

Some libraries import PyTorch wherever it is installed, without needing it: seconds and half a gigabyte in each rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Make `import name` fail inside, as if it were not installed. A module that is imported already stays."""
    # In sys.modules, None means that there is no such module.
    modules = cast("dict[str, Any]", sys.modules)
    modules.setdefault(name, None)
    try:
        yield
    finally:
        if modules[name] is None:
            del modules[name]
