"""The trainer is composed of parts: none inherits from another, and the page has the table of layouts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ortflow.workflow.trainer.opening import LAYOUTS

ROOT = Path(__file__).resolve().parents[2]
DERIVED = {"SlotStep"}
"""Classes that derive from one of the folder: the step of a pipeline on memory that stays where it is."""


def classes() -> dict[str, ast.ClassDef]:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "workflow/trainer").rglob("*.py")]
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def test_no_part_inherits_from_another() -> None:
    found = classes()
    derived = {
        name
        for name, node in found.items()
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in found and not is_protocol(found[base.id])
    }
    assert derived == DERIVED
    assert not [name for name, node in found.items() if len(node.bases) > 1]


def test_the_page_has_the_table_of_layouts() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("| layout | passes | reduction | update |\n")[1].split("\n\n")[0]
    rows = [tuple(cell.strip() for cell in re.split(r"\s*\|\s*", row)[1:-1]) for row in section.splitlines()[1:]]
    assert rows == [(name, parts.passes, parts.reduction, parts.update) for name, parts in LAYOUTS.items()]
