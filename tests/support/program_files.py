"""Programs outside the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType


def module_of(path: Path) -> ModuleType:
    """The file as a module, whatever its suffix."""
    loader = SourceFileLoader(f"program_{path.stem}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses and annotations look there
    loader.exec_module(module)
    return module
