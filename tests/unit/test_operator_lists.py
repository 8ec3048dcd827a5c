"""The lists of operators in the documentation are those of the rules."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_lists_are_those_of_the_rules() -> None:
    spec = importlib.util.spec_from_file_location("operator_lists", DOCS / "operator_lists.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert generator.updated(page) == page, "run: python docs/operator_lists.py"
