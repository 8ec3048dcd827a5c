"""Faults that the tests must find: one in each room of the product (faults.py).

    python tools/planted_faults                         # all of them; about half an hour on a core
    python tools/planted_faults --only launchers        # those whose file contains a text
    python tools/planted_faults --tests tests/unit      # judge other tests than each fault's own

Each fault is made in a copy of the tree, one at a time, and the tests that should find it run there. A speed-up of the
tests must still find every fault that they found before. Tests that fail without any fault prove nothing: they run once
on the unchanged copy first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(1, str(ROOT / "tools" / "mutants"))
from tree import Tree, copy_tree  # noqa: E402


def main() -> int:
    """Returns 0 if every fault was found, otherwise 1."""
    parser = argparse.ArgumentParser(prog="tools/planted_faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose file contains this")
    parser.add_argument("--tests", nargs="+", metavar="PATH", help="run these tests for every fault")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.file]
    tree = copy_tree(ROOT, ROOT / "build" / f"planted_faults-{os.getpid()}")
    missed, sound = [], dict[tuple[str, ...], bool]()
    try:
        for number, fault in enumerate(faults, 1):
            tests = tuple(options.tests or (f"tests/{test}" for test in fault.tests))
            start = time.monotonic()
            if tests not in sound:
                sound[tests] = run(tree, tests) is None
            if (tree.folder / fault.file).read_text().count(fault.before) != 1:
                verdict = f"outdated: the file does not have this text once: {fault.before}"
            elif not sound[tests]:
                verdict = "not found: the tests fail without it"
            else:
                verdict = judge(tree, fault, tests)
            if not verdict.startswith("found"):
                missed.append(fault)
            seconds = time.monotonic() - start
            print(f"{number:3}/{len(faults)} {fault.file:44} {seconds:5.0f} s  {verdict}", flush=True)
    finally:
        tree.remove()
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found")
    return 1 if missed else 0


def judge(tree: Tree, fault: Fault, tests: tuple[str, ...]) -> str:
    """Make the fault in the copy, run tests, and take it back."""
    file = tree.folder / fault.file
    text = file.read_text()
    file.write_text(text.replace(fault.before, fault.after))
    try:
        test = run(tree, tests)
    finally:
        file.write_text(text)
    return f"found by {test}" if test else f"not found: {fault.after.strip()}"


def run(tree: Tree, tests: tuple[str, ...]) -> str | None:
    """The first test that fails in the copy, None if all pass."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--hypothesis-profile=ci",
        "--tb=no",
        *tests,
    ]
    try:
        ended = subprocess.run(
            command, cwd=tree.folder, env=tree.environment(), capture_output=True, text=True, timeout=1800, check=False
        )
    except subprocess.TimeoutExpired:
        return "the time limit of half an hour"
    if ended.returncode == 0:
        return None
    failed = (line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
    return next(failed, f"exit status {ended.returncode}").partition(" - ")[0].partition(" ")[2] or "an error"


if __name__ == "__main__":
    sys.exit(main())
