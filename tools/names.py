"""Names that say nothing: the share of bare participles and pronouns among assigned names and parameters, by room.

    python tools/names.py                    # the share of each room; exit code 1 if one is above its ceiling
    python tools/names.py workflow/comm      # the places of such names in a folder or file
    python tools/names.py --lower            # after renaming: lower the ceilings to today's shares

The ceilings are in names.json beside this file. They may only fall, so that a change does not add such names to a room.
A name counts once for each place that binds it. Underscores around it do not count.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_suffix(".json")
PACKAGES = ("workflow", "launchers", "manifests", "ortflow")
VAGUE = frozenset({
    "alone", "around", "asked", "beside", "both", "chosen", "each", "found", "free", "further", "given", "held",
    "here", "how", "kept", "known", "left", "lent", "like", "made", "mine", "more", "named", "needed", "one",
    "others", "ours", "own", "placed", "reported", "same", "seen", "some", "such", "taken", "theirs", "there",
    "these", "those", "wanted", "what", "where", "who", "whole", "why", "written"
})  # fmt: skip
STEP = 0.5
"""Ceilings are multiples of this, in percent: a room may grow by a name or two."""
NEW = 1.0
"""Ceiling of a room that names.json does not have, and the lowest of all."""


@dataclass(frozen=True)
class Binding:
    """A place that binds a name."""

    name: str
    line: int

    @property
    def vague(self) -> bool:
        """Whether the name alone does not say what it is."""
        return self.name.strip("_") in VAGUE


def bindings(source: str) -> Iterator[Binding]:
    """The assigned names and the parameters of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Binding(node.id, node.lineno)
        elif isinstance(node, ast.arg):
            yield Binding(node.arg, node.lineno)


def modules(place: Path) -> list[Path]:
    """The modules in a folder, or the file."""
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def room_of(module: Path) -> str:
    """A folder of a package, or the package itself for the modules directly in it."""
    parts = module.relative_to(ROOT).parts
    return "/".join(parts[: 2 if len(parts) > 2 else 1])


def shares() -> dict[str, float]:
    """Room -> vague names, in percent of all names."""
    counts: dict[str, tuple[int, int]] = {}
    for package in PACKAGES:
        for module in modules(ROOT / package):
            room = room_of(module)
            names = [binding.vague for binding in bindings(module.read_text())]
            vague, total = counts.get(room, (0, 0))
            counts[room] = vague + sum(names), total + len(names)
    return {room: 100 * vague / total for room, (vague, total) in counts.items() if total}


def lowered(ceilings: Mapping[str, float], today: Mapping[str, float]) -> dict[str, float]:
    """The ceilings of today's rooms, none of them higher than before, and none below the one of a new room."""
    rounded = {room: max(NEW, math.ceil(share / STEP) * STEP) for room, share in today.items()}
    return {room: min(ceilings.get(room, math.inf), rounded[room]) for room in sorted(today)}


def places(folder: Path) -> Iterator[str]:
    """Each vague name below a folder, with its file and line."""
    for module in modules(folder):
        for binding in bindings(module.read_text()):
            if binding.vague:
                yield f"{module}:{binding.line}: {binding.name}"


def main() -> int:
    """The exit code: 1 if a room is above its ceiling."""
    parser = argparse.ArgumentParser(prog="tools/names.py", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="list the names below it")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to today's shares")
    options = parser.parse_args()
    if options.folder is not None:
        print(*places(options.folder), sep="\n")
        return 0
    ceilings: dict[str, float] = json.loads(CEILINGS.read_text())
    today = shares()
    if options.lower:
        ceilings = lowered(ceilings, today)
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
    above = [room for room, share in today.items() if share > ceilings.get(room, NEW)]
    for room, share in sorted(today.items()):
        mark = "  above" if room in above else ""
        print(f"{room:28} {share:5.1f}%  at most {ceilings.get(room, NEW):4.1f}%{mark}")
    if above:
        print("use nouns of the domain in new names: `python tools/names.py FOLDER` lists the vague ones")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main())
