"""Mutation tests: which changes of a line would no test notice?

    pip install -e '.[train,test,mutants]'
    python tools/mutants launchers                      # all modules of a room; `--list` shows the rooms
    python tools/mutants launchers/stop.py              # one module
    python tools/mutants launchers --resume             # go on where the last call ended, with the same sources
    python tools/mutants launchers --survivors          # after new tests: judge the survivors again
    python tools/mutants launchers --sample 16          # 16 mutants of each module, the same each time; --seed: others

A copy of the tree is changed, one place at a time, by the operators of Cosmic Ray (operators.py). A mutant is judged by
those tests of its module (rooms.py) that run the changed lines, until one fails. A mutant that all of them pass
survives, and is printed. Sessions and copies are below build/mutants. One process; a mutant takes from a tenth of a
second to a few seconds. tests/mutants.md has the results.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from judge import Judge, JudgeError, Verdict
from operators import Mutant, mutants
from rooms import ROOMS
from sample import sample
from session import Session
from tree import Tree, copy_tree

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"


def main() -> int:
    """Returns 0 if at least 90% of the mutants of every module died, otherwise 1."""
    parser = argparse.ArgumentParser(prog="tools/mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("places", nargs="*", metavar="ROOM|MODULE")
    parser.add_argument("--resume", action="store_true", help="keep the verdicts of the last call")
    parser.add_argument("--survivors", action="store_true", help="like --resume, and judge survivors again")
    parser.add_argument("--sample", type=int, metavar="N", help="judge only N mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--list", action="store_true", help="list rooms, modules and their tests")
    options = parser.parse_args()
    if options.list or not options.places:
        for room, modules in ROOMS.items():
            for module, tests in modules.items():
                print(f"{room:24} {module:36} {' '.join(Path(test).name for test in tests)}")
        return 0
    modules = chosen_modules(options.places)
    tree = copy_tree(ROOT, WORK / f"tree-{os.getpid()}")
    enough = True
    try:
        for module, tests in modules.items():
            session = Session(WORK / "sessions", module, (ROOT / module).read_text())
            if not (options.resume or options.survivors):
                session.clear()
            elif options.survivors:
                session.forget(Verdict.SURVIVED)
            every = list(mutants((ROOT / module).read_text()))
            judged = every if options.sample is None else sample(every, options.sample, options.seed)
            enough &= run(module, tests, tree, session, judged, len(every))
    finally:
        tree.remove()
    return 0 if enough else 1


def chosen_modules(places: list[str]) -> dict[str, tuple[str, ...]]:
    """The modules of the rooms and modules named on the command line, with their tests."""
    known = {module: tests for room in ROOMS.values() for module, tests in room.items()}
    modules: dict[str, tuple[str, ...]] = {}
    for place in places:
        if place in ROOMS:
            modules |= ROOMS[place]
        elif place in known:
            modules[place] = known[place]
        else:
            sys.exit(f"tools/mutants: there is no room or module {place!r}; rooms: {', '.join(ROOMS)} (--list)")
    return modules


def run(module: str, tests: tuple[str, ...], tree: Tree, session: Session, every: list[Mutant], of: int) -> bool:
    """Judge those of `every` that have no verdict; prints survivors and the sum; whether 90% died.

    `of`: the number of mutants of the module, if `every` is a sample.
    """
    source = (ROOT / module).read_text()
    pending = [mutant for mutant in every if session.verdict(mutant) is None]
    start = time.monotonic()
    if pending:
        try:
            Judge(tree, module, tests, session.record).judge(pending)
        except JudgeError as error:
            sys.exit(f"tools/mutants: {module}: {error}")
        session.read()
    survivors = [mutant for mutant in every if session.verdict(mutant) is Verdict.SURVIVED]
    for mutant in survivors:
        print(f"  survived  {module}:{mutant.line}  {shown(source, mutant)}")
    dead = len(every) - len(survivors)
    share = dead / len(every) if every else 1.0
    seconds = time.monotonic() - start
    number = f"{len(every)}" if of == len(every) else f"{len(every)} of {of}"
    print(f"{module}: {number} mutants, {dead} killed ({share:.0%}); {seconds:.0f} s for {len(pending)}", flush=True)
    return share >= 0.9


def shown(source: str, mutant: Mutant) -> str:
    """The first line that a mutant changes, before and after."""
    before, after = source.splitlines(), mutant.source.splitlines()
    pairs = zip(before, after, strict=False)
    old, new = next(((old, new) for old, new in pairs if old != new), (before[mutant.line - 1], ""))
    return f"`{old.strip()}` -> `{new.strip()}`"


if __name__ == "__main__":
    sys.exit(main())
