"""Print the test files that a change can reach by imports, the nearest first, as many as fit into a time.

    .ci/reach.py BASE --seconds 240 --durations FILE    # BASE: the commit before the change

A file of the change is at distance 0, what imports it at distance 1, and so on. A test without a way to the change is
not printed. Tests that start processes reach more than they import: they run with everything else.
Run it where `ortflow` is the built wheel: in a checkout, `ortflow.workflow` is not a folder of `ortflow`.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "ortflow": "ortflow",
    "workflow": "ortflow.workflow",
    "launchers": "ortflow.launchers",
    "manifests": "ortflow.manifests",
}
"""By top-level folder, the package that it is."""
FAST = ("tests/unit", "tests/plain")
DEFAULT_SECONDS = 4.0
"""Of a test file whose duration is not recorded."""

Importers = Mapping[str, set[str]]


def module_of(path: Path) -> str:
    """The name under which a file of the checkout is imported; of a file that is not Python, that of its folder."""
    room, *rest = path.parts
    if room == "tests":
        return path.stem
    folders = [ROOMS[room], *rest[:-1]]
    return ".".join(folders if path.suffix != ".py" or path.stem == "__init__" else [*folders, path.stem])


def is_page(path: Path) -> bool:
    """Whether a file is neither a module nor compiled into one."""
    return path.parts[0] not in {*ROOMS, "tests"} or (path.parts[0] == "tests" and path.suffix != ".py")


def distances(changed: Iterable[str], importers: Importers) -> dict[str, int]:
    """How many imports lead from a module to the nearest changed one, of each module that a change reaches."""
    steps = dict.fromkeys(changed, 0)
    queue = deque(steps)
    while queue:
        module = queue.popleft()
        for importer in sorted(importers.get(module, ())):
            if importer not in steps:
                steps[importer] = steps[module] + 1
                queue.append(importer)
    return steps


def imported_names(source: str) -> set[str]:
    """Modules that a source may import; of `from a import b` both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def product_importers() -> dict[str, set[str]]:
    """Which modules of ortflow import which."""
    import grimp

    graph = grimp.build_graph("ortflow", cache_dir=None)
    return {module: graph.find_modules_that_directly_import(module) for module in graph.modules}


def importers_of_all() -> dict[str, set[str]]:
    """Which modules and tests import which, tests by the name of their file."""
    importers = defaultdict(set, product_importers())
    for path in (ROOT / "tests").rglob("*.py"):
        for name in imported_names(path.read_text()):
            importers[name].add(path.stem)
    return importers


def changed_files(base: str) -> list[Path]:
    """Files that differ from a commit, also those that git does not know yet; relative to the checkout."""
    listings = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    lines = [
        subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
        for words in listings
    ]
    return sorted({Path(line) for listing in lines for line in listing})


def nearest_tests(changed: Iterable[Path], importers: Importers) -> list[tuple[int, Path]]:
    """Test files that the change reaches, with their distance. A page or a script reaches the tests that name it.

    A script without an ending, as `.ci/run`, has a name of everyday words: it reaches those that name its path.
    """
    modules = {module_of(path) for path in changed if not is_page(path)}
    reached = distances(modules, importers)
    names = {path.name if path.suffix else path.as_posix() for path in changed if is_page(path)}
    tests: list[tuple[int, Path]] = []
    for folder in FAST:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            if path.stem in reached:
                tests.append((reached[path.stem], path.relative_to(ROOT)))
            elif names and mentions(path.read_text(), names):
                tests.append((1, path.relative_to(ROOT)))
    return tests


def mentions(source: str, names: Iterable[str]) -> bool:
    """Whether a source has one of the names."""
    return any(name in source for name in names)


def within(tests: Iterable[tuple[int, Path]], seconds: float, durations: Mapping[str, float]) -> list[Path]:
    """The nearest tests, of the same distance the quickest first, whose durations together are at most `seconds`."""
    chosen: list[Path] = []
    for _, spent, path in sorted((near, durations.get(str(path), DEFAULT_SECONDS), path) for near, path in tests):
        seconds -= spent
        if seconds < 0:
            break
        chosen.append(path)
    return chosen


def main() -> None:
    """Print the chosen files, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--durations", type=Path, help="JSON: seconds by test file")
    options = parser.parse_args()
    durations = json.loads(options.durations.read_text()) if options.durations and options.durations.exists() else {}
    for path in within(nearest_tests(changed_files(options.base), importers_of_all()), options.seconds, durations):
        print(path)


if __name__ == "__main__":
    main()
