"""The documentation's pages, and the programs that generate parts of them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def writer_of(name: str) -> ModuleType:
    """The program docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(heading: str) -> str:
    """The first program below a heading of docs/programs.md."""
    section = (DOCS / "programs.md").read_text().partition(f"### {heading}\n")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1]
