"""The documentation's pages, and the programs that generate parts of them."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from program_files import module_of

DOCS = Path(__file__).parents[2] / "docs"


def writer_of(name: str) -> ModuleType:
    """The program docs/NAME.py as a module."""
    return module_of(DOCS / f"{name}.py")


def example(heading: str) -> str:
    """The first program below a heading of docs/programs.md."""
    section = (DOCS / "programs.md").read_text().partition(f"### {heading}\n")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    return block[1]
