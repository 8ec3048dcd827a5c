"""What each test costs, for .ci/reports.py: the processes that it starts, and processor seconds."""

from __future__ import annotations

import resource
import sys
from collections.abc import Generator

import pytest
from forks import SPENT

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})
PROCESSES, PROCESSOR = "processes", "processor seconds"
"""Names of properties in a test's report."""


class Meter:
    """Measures from its creation on; an audit hook stays to the end of the interpreter."""

    def __init__(self) -> None:
        self.processes = 0
        self.seconds = processor_seconds()
        sys.addaudithook(self._heard)

    def _heard(self, event: str, _: object) -> None:
        self.processes += event in EVENTS

    def record(self, report: pytest.TestReport) -> None:
        """Write what was spent since the last test, with that of fixtures, into the report of a test's end."""
        if report.when == "teardown":
            seconds = processor_seconds()
            report.user_properties += [(PROCESSES, self.processes), (PROCESSOR, round(seconds - self.seconds, 3))]
            self.processes, self.seconds = 0, seconds


def processor_seconds() -> float:
    """Of this process and of all descendants that have been waited for; a daemon's are not among them."""
    spent = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return SPENT[0] + sum(usage.ru_utime + usage.ru_stime for usage in spent)


METER = Meter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """For a conftest: the reports of the tests in its folder have their costs."""
    report = yield
    METER.record(report)
    return report
