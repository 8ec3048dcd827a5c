"""Run a failed test again, alone and behind everything else, where bad luck on a busy machine may be the reason.

    .ci/once_more.py list                      # check tests/unstable.md
    .ci/once_more.py record FOLDER/LANE -- PYTEST OPTION…   # how tests of a lane are started, with this environment
    .ci/once_more.py defer FOLDER/LANE         # exit 0 if every failure of the lane may be run again
    .ci/once_more.py run FOLDER OUTPUTS        # run all of them twice; exit 1 unless each passes both times

A lane is FOLDER/LANE.json (its command and environment) and FOLDER/LANE.jsonl (pytest-reportlog's report).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from reports import records, text_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "tests" / "unstable.md"
MOST = 5
"""Unstable tests that the project may have; one more fails."""
MAY_BE_UNLUCKY = (
    "tests/chaos/", "tests/gridengine/", "tests/integration/", "tests/kubernetes/", "tests/slurm/",
    "tests/torch/test_export_layouts.py", "tests/torch/test_program_",
)  # fmt: skip
"""Where tests start clusters or whole runs. A unit test has no such excuse."""
TURNS = 2

FINAL = {
    "a wrong number": r"\b(loss(es)?|curves?|evaluations?|accurac\w+|gradients?|norms?|parameters|weights?|bits?"
    r"|digests?|hash(es)?|allclose|approx|array_equal|assert_equal|identical|nan)\b",
    "a lost or repeated sample": r"\b(samples?|rows|tokens|batch(es)?|duplicates?)\b",
    "a process or memory that stays": r"\b(nobody_left|living|sinks_of|leftovers?|orphans?|zombies?|stays|segments"
    r"|of_run|shared memory)\b|\b(left|processes)\(",
    "damage": r"\b(damaged?|corrupt\w*|torn|truncated|verify|verified)\b",
}
"""By kind, words of a failed statement that say that a second try would hide a fault."""
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Failure:
    """A failed test of a lane."""

    lane: str
    test: str
    text: str
    """What pytest prints of the failure, with what was captured."""

    @property
    def reason_not_to_repeat(self) -> str | None:
        """Why this failure counts at once; None if the test may be run again."""
        if not self.test.startswith(MAY_BE_UNLUCKY):
            return "no cluster and no whole run is in it"
        if TRACEBACK in self.text:
            return "a traceback of the product"
        statements = "\n".join(self._statements())
        return next((kind for kind, words in FINAL.items() if re.search(words, statements, re.IGNORECASE)), None)

    def _statements(self) -> Iterator[str]:
        """Lines of the source that failed, and what pytest says of them.

        The further lines of an assertion's message are not among them: they are what the test prints of a run, and
        each transcript of a run has the word loss.
        """
        lines = self.text.splitlines()
        for line, previous in zip(lines, ["", *lines], strict=False):
            explains = re.match(r"E +(assert |[-+] |where )", line)
            if line.startswith(">") or explains or (line.startswith("E ") and not previous.startswith("E ")):
                yield line


def failures(report: Path) -> list[Failure]:
    """Failed tests of a lane, each once, with the first failure's text."""
    failed: dict[str, Failure] = {}
    for record in records(report):
        if record["outcome"] == "failed":
            failed.setdefault(record["nodeid"], Failure(report.stem, record["nodeid"], text_of(record)))
    return list(failed.values())


def listed_tests(page: str) -> list[str]:
    """Tests that the page of unstable tests names.

    Raises
    ------
    ValueError
        If a row does not have a test, a date and a suspected cause, or there are more than `MOST`.
    """
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    tests = []
    for row in rows[2:]:
        if len(row) != 3 or not all(row) or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", row[1]):
            raise ValueError(f"tests/unstable.md: give test, day (2026-01-31) and suspected cause: {' | '.join(row)}")
        tests.append(row[0].strip("`"))
    if len(tests) > MOST:
        raise ValueError(f"tests/unstable.md: {len(tests)} tests; at most {MOST}. Repair one before anything new")
    return tests


def check_page() -> None:
    """Raise ValueError if the page is malformed or names a test that does not exist."""
    for test in listed_tests(PAGE.read_text()):
        file, _, name = test.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        if not (ROOT / file).is_file() or f"def {function}(" not in (ROOT / file).read_text():
            raise ValueError(f"tests/unstable.md: there is no test {test}; remove its line")


def record(lane: Path, command: list[str]) -> None:
    """Write how tests of a lane are started."""
    lane.parent.mkdir(parents=True, exist_ok=True)
    lane.with_suffix(".json").write_text(json.dumps({"command": command, "environment": dict(os.environ)}))


def reasons_not_to_repeat(failed: Sequence[Failure]) -> list[str]:
    """Why failures of a lane count at once; none if all of them may be run again."""
    reasons = [f"{failure.test}: {reason}" for failure in failed if (reason := failure.reason_not_to_repeat)]
    if len(failed) > MOST:
        reasons.append(f"{len(failed)} tests of {failed[0].lane} failed; more than {MOST} failures are not repeated")
    return reasons


def may_wait(lane: Path) -> bool:
    """Whether every failure of a lane may be run again; prints those that may not, with the reason."""
    failed = failures(lane.with_suffix(".jsonl"))
    reasons = reasons_not_to_repeat(failed)
    for reason in reasons:
        print(f"not run again: {reason}")
    return bool(failed) and not reasons


def passes_alone(failure: Failure, lane: Path, output: Path) -> bool:
    """Run a test `TURNS` times; whether it passed each time. `output` gets what pytest printed."""
    start = json.loads(lane.with_suffix(".json").read_text())
    command = [*start["command"], "-q", "-m", "chaos or not chaos", failure.test]
    with output.open("a") as file:
        for turn in range(1, TURNS + 1):
            file.write(f"\n=== alone, {turn} of {TURNS}\n")
            file.flush()
            done = subprocess.run(command, cwd=ROOT, env=start["environment"], stdout=file, stderr=file, check=False)
            if done.returncode != 0:
                return False
    return True


def run_again(reports: Path, outputs: Path) -> int:
    """Run the failed tests of all lanes whose failures may be run again; the exit code."""
    lanes = [failures(report) for report in sorted(reports.glob("*.jsonl"))]
    waiting = [failure for failed in lanes if not reasons_not_to_repeat(failed) for failure in failed]
    unstable: list[str] = []
    broken = False
    for failure in waiting:
        outputs.mkdir(parents=True, exist_ok=True)
        output = outputs / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', failure.test)}.log"
        output.write_text(f"=== {failure.lane}: {failure.test}\n{failure.text}\n")
        if not passes_alone(failure, reports / failure.lane, output):
            print(f"{output.read_text()}\nfailed again alone: {failure.test}")
            broken = True
        else:
            unstable.append(failure.test)
    listed = listed_tests(PAGE.read_text())
    for test in unstable:
        note = "listed in tests/unstable.md" if test in listed else "add it to tests/unstable.md and look for its cause"
        print(f"unstable: {test} failed once and passed {TURNS} times alone; {note}")
    if len({*unstable, *listed}) > MOST:
        print(f"more than {MOST} unstable tests: repair one before anything new")
        broken = True
    return int(broken)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    for verb in ("record", "defer"):
        verbs.add_parser(verb).add_argument("lane", type=Path)
    verbs.choices["record"].add_argument("command", nargs=argparse.REMAINDER)
    again = verbs.add_parser("run")
    again.add_argument("reports", type=Path)
    again.add_argument("outputs", type=Path)
    options = parser.parse_args()
    if options.verb == "run":
        return run_again(options.reports, options.outputs)
    if options.verb == "defer":
        return 0 if may_wait(options.lane) else 1
    if options.verb == "record":
        record(options.lane, [word for word in options.command if word != "--"])
        return 0
    try:
        check_page()
    except ValueError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
