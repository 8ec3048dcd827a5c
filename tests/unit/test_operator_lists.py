"""The lists of operators in the documentation match the rules."""

from __future__ import annotations

from documentation import DOCS, writer_of


def test_the_lists_are_those_of_the_rules() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert writer_of("operator_lists").updated(page) == page, "run: python docs/operator_lists.py"
