"""docs/architecture.md: its pictures of imports match the code."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/architecture.md"
SINGLE_FILES = {"trainer/__init__.py", "trainer/builder.py"}
"""Files of workflow/ that the pictures show apart from their folder."""
EVERYWHERE = {"run", "system"}
"""Folders of workflow/ that every other one may import; a contract in pyproject.toml says what they import."""
NESTED = {"graph", "spec"}
"""Folders of workflow/ whose folders the pictures show."""


def room(module: Path) -> str | None:
    """The name in the pictures of a module's folder; None for modules that they do not show."""
    path = module.relative_to(ROOT / "workflow")
    if str(path) in SINGLE_FILES:
        return str(path)
    first, *rest = path.parts
    if not rest or first in EVERYWHERE:
        return None
    if first in NESTED and len(rest) > 1:
        return rest[0] if first == "graph" else f"{first}/{rest[0]}"
    return None if first == "graph" else first


def module_file(name: str) -> Path:
    """The file of a module, or of the module that defines a name."""
    path = ROOT.joinpath(*name.split(".")[1:])
    files = [file for each in (path, path.parent) for file in (each.with_suffix(".py"), each / "__init__.py")]
    return next(file for file in files if file.is_file())


def imports() -> dict[str, set[str]]:
    """Folder -> the other folders that its modules import, functions included."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in (ROOT / "workflow").rglob("*.py"):
        source = room(file)
        if source is None:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ortflow.workflow"):
                names = {room(module_file(f"{node.module}.{alias.name}")) for alias in node.names}
                found[source] |= {name for name in names if name not in (None, source)}
    return found


def edges(page: str) -> Iterator[tuple[str, str]]:
    """The arrows of the section's pictures, by label where a node has one."""
    section = page.split("## Imports between folders\n")[1].split("\n## ")[0]
    for picture in re.findall(r"```mermaid\n(.*?)```", section, re.DOTALL):
        labels = dict(re.findall(r'(\w+)\["([^"]+)"\]', picture))
        for line in re.sub(r'\["[^"]+"\]', "", picture).splitlines():
            groups = [[name.strip() for name in group.split("&")] for group in line.split("-->")]
            for sources, targets in itertools.pairwise(groups):
                yield from ((labels.get(a, a), labels.get(b, b)) for a in sources for b in targets)


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that arrows lead to from a node."""
    found: set[str] = set()
    pending = [start]
    while pending:
        new = graph.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


def test_the_pictures_show_every_import_between_folders() -> None:
    picture: dict[str, set[str]] = defaultdict(set)
    for source, target in edges(PAGE.read_text()):
        picture[source].add(target)
    actual = imports()
    hidden = {(a, b) for a, targets in actual.items() for b in targets - reached(picture, a)}
    unreal = {(a, b) for a, targets in picture.items() for b in targets - actual.get(a, set())}
    assert not hidden, "imports that docs/architecture.md does not show"
    assert not unreal, "arrows of docs/architecture.md without an import"
    assert not [name for name in picture if name in reached(picture, name)], "a cycle"
