"""How many processes each test starts from its own process, for .ci/reports.py."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
PROPERTY = "processes"


class Counter:
    """Counts from its creation on; an audit hook stays to the end of the interpreter."""

    def __init__(self) -> None:
        self.number = 0
        sys.addaudithook(self._heard)

    def _heard(self, event: str, _: object) -> None:
        self.number += event in EVENTS

    def record(self, report: pytest.TestReport) -> None:
        """Write the processes since the last test, with those of fixtures, into the report of a test's end."""
        if report.when == "teardown":
            report.user_properties.append((PROPERTY, self.number))
            self.number = 0


PROCESSES = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """For a conftest: the reports of the tests in its folder have the processes that each has started."""
    report = yield
    PROCESSES.record(report)
    return report
