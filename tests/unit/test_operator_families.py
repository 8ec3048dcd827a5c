"""What is known of operators: the tables are read full, and from one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

GRAPH = Path(__file__).resolve().parents[2] / "workflow/graph"
TABLES = {
    *("COMPOSITIONS", "COSTS", "EXACT", "HALF_PRODUCTS", "POSSIBLE_WEIGHTS", "RULES", "SIZES", "UNCOUNTED", "WEIGHTS"),
    "having",
}


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    return done.stdout


def test_every_family_is_imported() -> None:
    names = {path.stem for path in (GRAPH / "operators").glob("*.py")} - {"__init__", "composed", "families"}
    code = (
        "import sys; import ortflow.workflow.graph.operators.families\n"
        f"print(sorted(n for n in {names} if 'ortflow.workflow.graph.operators.' + n not in sys.modules))"
    )
    assert output_of(code) == "[]\n"


def test_ranks_have_the_compositions_of_all_families() -> None:
    code = (
        "from ortflow.workflow.graph.operators.composed import COMPOSITIONS\n"
        "before = set(COMPOSITIONS)\n"
        "import ortflow.workflow.graph.operators.families\n"
        "print(sorted(set(COMPOSITIONS) - before))"
    )
    assert output_of(code) == "[]\n"


def test_passes_read_no_table_that_may_not_be_full() -> None:
    readers = []
    for path in GRAPH.parent.rglob("*.py"):
        if path.parent.name in ("operators", "rules"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ortflow.workflow.graph.rules"):
                readers += [f"{path}: {alias.name}" for alias in node.names if alias.name in TABLES]
    assert not readers
