"""What pytest-reportlog wrote of each lane.

.ci/reports.py FOLDER FILE.json      # print the tests of each lane, those that cost the most, and the unit test
                                     # files that start processes; add the seconds of each test file to FILE.json,
                                     # for .ci/reach.py
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SLOWEST = 50
"""Tests that are listed, by time and by processor time. Most of a test's time is waiting for the lanes beside it."""


def records(report: Path) -> Iterator[dict[str, Any]]:
    """The reports of tests: one of each test's setup, call and teardown."""
    for line in report.read_text().splitlines():
        record = json.loads(line)
        if record.get("$report_type") == "TestReport":
            yield record


def text_of(record: Mapping[str, Any]) -> str:
    """What pytest prints of a failed report: the traceback's lines, and what was captured."""
    return "\n".join([*lines_of(record.get("longrepr")), *(text for _, text in record.get("sections", ()))])


def lines_of(longrepr: object) -> Iterator[str]:
    """Lines of a report's `longrepr`, which is a string or nested entries."""
    if isinstance(longrepr, str):
        yield longrepr
    elif isinstance(longrepr, (list, dict)):
        for part in longrepr.values() if isinstance(longrepr, dict) else longrepr:
            yield from lines_of(part)


def seconds_by_file(folder: Path) -> dict[str, float]:
    """Seconds that each test file took, with its fixtures."""
    seconds: Counter[str] = Counter()
    for report in folder.glob("*.jsonl"):
        for record in records(report):
            seconds[record["nodeid"].partition("::")[0]] += record["duration"]
    return dict(seconds)


def processor_seconds(folder: Path) -> dict[str, dict[str, float]]:
    """By lane, of each test with its fixtures and the processes that it waited for, by tests/support/costs.py."""
    lanes: dict[str, dict[str, float]] = {}
    for report in folder.glob("*.jsonl"):
        seconds: Counter[str] = Counter()
        for record in records(report):
            seconds[record["nodeid"]] += dict(record.get("user_properties", ())).get("processor seconds", 0)
        lanes[report.stem] = dict(seconds)
    return lanes


def tests_by_lane(folder: Path) -> dict[str, dict[str, float]]:
    """By lane, seconds of each test with its fixtures; those of skipped tests are left out."""
    lanes: dict[str, dict[str, float]] = {}
    for report in sorted(folder.glob("*.jsonl")):
        seconds: Counter[str] = Counter()
        skipped = set()
        for record in records(report):
            seconds[record["nodeid"]] += record["duration"]
            if record["outcome"] == "skipped":
                skipped.add(record["nodeid"])
        lanes[report.stem] = {test: spent for test, spent in seconds.items() if test not in skipped}
    return lanes


def processes_by_unit_file(folder: Path) -> dict[str, int]:
    """Processes that each file of tests/unit started, by tests/support/costs.py; 0 where none."""
    started: Counter[str] = Counter()
    for report in folder.glob("*.jsonl"):
        for record in records(report):
            if record["nodeid"].startswith("tests/unit/"):
                properties = dict(record.get("user_properties", ()))
                started[record["nodeid"].partition("::")[0]] += properties.get("processes", 0)
    return dict(started)


def starting(processes: Mapping[str, int]) -> Iterator[str]:
    """A line for each file that started processes, those with the most first."""
    most = sorted(((number, file) for file, number in processes.items() if number), reverse=True)
    yield f"{len(most)} of {len(processes)} unit test files started {sum(processes.values())} processes"
    for number, file in most:
        yield f"{number:8}  {file}"


def figures(lanes: Mapping[str, Mapping[str, float]], processor: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """A line for each lane, and one for each of the slowest and of the dearest tests."""
    yield f"{'tests':>6} {'seconds':>8} {'processor':>10}  lane"
    for lane, tests in lanes.items():
        spent = sum(processor[lane].get(test, 0) for test in tests)
        yield f"{len(tests):6} {sum(tests.values()):8.0f} {spent:10.0f}  {lane}"
    yield from most("seconds", {test: seconds for tests in lanes.values() for test, seconds in tests.items()})
    yield from most("processor seconds", {test: spent for tests in processor.values() for test, spent in tests.items()})


def most(unit: str, costs: Mapping[str, float]) -> Iterator[str]:
    """A line for each test that costs the most."""
    yield ""
    yield f"{unit}: the tests with the most"
    for cost, test in sorted(((cost, test) for test, cost in costs.items() if cost), reverse=True)[:SLOWEST]:
        yield f"{cost:8.1f}  {test}"


if __name__ == "__main__":
    reports, durations = Path(sys.argv[1]), Path(sys.argv[2])
    print("\n".join(figures(tests_by_lane(reports), processor_seconds(reports))))
    print("", *starting(processes_by_unit_file(reports)), sep="\n")
    earlier = json.loads(durations.read_text()) if durations.exists() else {}
    durations.write_text(json.dumps(earlier | seconds_by_file(reports)))
