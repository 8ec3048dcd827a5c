"""Runs the tests of a module on its mutants, each in a fork.

The tests are collected once, on the unchanged module. For a mutant whose change is within functions, a fork of that
process gives the live functions the changed code and runs the tests: it costs a few milliseconds and the tests' own
time. A change of what an import runs (a constant, a decorator, a default) needs a fork that imports and collects anew.
In both, the file of the module in the copy of the tree is the mutant's, for the processes that tests start.
"""

from __future__ import annotations

import enum
import gc
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from code_objects import changed_functions
from operators import Mutant
from tree import Tree

OWN_MODULES = ("code_objects", "judge", "operators", "rooms", "sample", "session", "tree")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = 70
"""Exit status of a fork in which this program itself failed."""


class Verdict(enum.Enum):
    """What the tests said of a mutant."""

    KILLED = "killed"
    TIMEOUT = "timeout"
    SURVIVED = "survived"


class JudgeError(Exception):
    """The tests cannot judge mutants: they fail without one."""


class Judge:
    """The tests of one module.

    Parameters
    ----------
    tree
        The copy of the tree.
    module
        The module's path from the root.
    tests
        The tests' files or folders, from the root.
    record
        Called with each mutant, its verdict and the test that failed.
    """

    def __init__(
        self, tree: Tree, module: str, tests: tuple[str, ...], record: Callable[[Mutant, Verdict, str], None]
    ) -> None:
        self._tree, self._tests, self._record = tree, tests, record
        self._file = tree.folder / module
        self._original = self._file.read_text()
        self._name = str(tree.folder / "ortflow" / module)
        """The module's path as its code objects have it."""
        self._scratch = tree.folder.with_name(tree.folder.name + "-scratch")
        self._lines: dict[str, set[int]] = {}
        """The lines of the module that each test runs."""
        self._import_lines: set[int] = set()
        self._seconds: dict[str, float] = {}
        self._kills = Counter[str]()

    def judge(self, mutants: list[Mutant]) -> None:
        """Judge mutants, in a fork of this process that collects the tests.

        Raises
        ------
        JudgeError
            If a test fails without a mutant.
        """
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        output = self._scratch / "output"
        child = os.fork()
        if child == 0:
            _leave(lambda: self._pytest([_Loop(self, mutants)], output))
        _, status = os.waitpid(child, 0)
        text = output.read_text(errors="replace") if output.exists() else ""
        shutil.rmtree(self._scratch, ignore_errors=True)
        if status:
            raise JudgeError(f"the tests fail without a mutant, or cannot run:\n{text[-3000:]}")

    def loop(self, session: pytest.Session, import_lines: set[int], mutants: list[Mutant]) -> None:
        """Judge mutants by the tests that `session` has collected; called by the plugin of the fork."""
        self._import_lines = import_lines
        items = {item.nodeid: item for item in session.items}
        self._measure(items)
        functions = [
            function
            for function in gc.get_objects()
            # isinstance asks an object for its class, and torch's deprecated ones warn.
            if type(function) is FunctionType and function.__code__.co_filename == self._name
        ]
        gc.freeze()
        for mutant in mutants:
            order = self._order(mutant)
            limit = 10.0 + 6.0 * sum(self._seconds[test] for test in order)
            changes = None
            if not self._import_lines & set(range(mutant.line, mutant.last_line + 1)):
                changes = changed_functions(self._original, mutant.source, self._name, functions)
            with self._mutated(mutant):
                if changes is None:
                    work = self._whole_run(order, limit)
                else:
                    work = self._test_run(changes, [items[test] for test in order])
                status, test = self._fork(work, limit)
            verdict = Verdict.TIMEOUT if status is None else Verdict.KILLED if status else Verdict.SURVIVED
            self._kills[test] += verdict is Verdict.KILLED
            self._record(mutant, verdict, test)

    def _measure(self, items: dict[str, pytest.Item]) -> None:
        """Run all tests on the unchanged module, in a fork: which lines they run, and for how long."""

        def work(report: Path) -> int:
            passed = True
            with report.open("w") as file:
                for item in items.values():
                    start, trace = time.monotonic(), _Trace(self._name)
                    with trace:
                        passed &= _passes(item)
                    lines = {"test": item.nodeid, "lines": sorted(trace.lines), "seconds": time.monotonic() - start}
                    file.write(json.dumps(lines) + "\n")
            return 0 if passed else 1

        status, report = self._fork(work, 3600.0)
        if status != 0:
            raise JudgeError("a test fails without a mutant")
        for line in report.splitlines():
            record = json.loads(line)
            self._lines[record["test"]] = set(record["lines"])
            self._seconds[record["test"]] = record["seconds"]

    def _order(self, mutant: Mutant) -> list[str]:
        """The tests that run the changed lines: those that have killed mutants, then the fast ones.

        What no test runs in its own process may be run by a child process, and what an import runs may show in any
        test: then all of them.
        """
        changed = set(range(mutant.line, mutant.last_line + 1))
        tests = [test for test, lines in self._lines.items() if lines & changed]
        if not tests or changed & self._import_lines:
            tests = list(self._lines)
        return sorted(tests, key=lambda test: (-self._kills[test], self._seconds[test]))

    @contextmanager
    def _mutated(self, mutant: Mutant) -> Iterator[None]:
        self._file.write_text(mutant.source)
        try:
            yield
        finally:
            self._file.write_text(self._original)

    def _test_run(self, changes: list[tuple[FunctionType, Any]], items: list[pytest.Item]) -> Callable[[Path], int]:
        def work(report: Path) -> int:
            for function, code in changes:
                function.__code__ = code
            for item in items:
                if not _passes(item):
                    report.write_text(item.nodeid)
                    return 1
            return 0

        return work

    def _whole_run(self, order: list[str], limit: float) -> Callable[[Path], int]:
        def work(report: Path) -> int:
            child = os.fork()  # from here, so that this one stays the parent of what is left behind
            if child == 0:
                for name in [name for name in sys.modules if name.partition(".")[0] in self._reimported()]:
                    del sys.modules[name]
                _leave(lambda: self._pytest([_Selection(order, report)], self._scratch / "inner-output"))
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        return work

    def _reimported(self) -> set[str]:
        """Top-level names of the modules that come from the copy of the tree."""
        folder = str(self._tree.folder) + os.sep
        return {
            name.partition(".")[0]
            for name, module in list(sys.modules.items())
            if str(getattr(module, "__file__", None) or "").startswith(folder)
        }

    def _fork(self, work: Callable[[Path], int], limit: float) -> tuple[int | None, str]:
        """Exit status of `work` in a process group of its own, None after `limit` seconds; and what it reported."""
        report = self._scratch / "report"
        report.write_text("")
        child = os.fork()
        if child == 0:
            os.setsid()
            # An endless loop ends by its own time, however busy the machine is.
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
            _leave(lambda: work(report))
        status = _ended(child, limit)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status == LOST:
            raise JudgeError((self._scratch / "output").read_text(errors="replace"))
        return status, report.read_text()

    def _pytest(self, plugins: list[Any], output: Path) -> int:
        """Run pytest on the copy of the tree, in this process."""
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(self._tree.folder)
        environment = self._tree.environment()
        os.environ.clear()
        os.environ.update(environment)
        sys.dont_write_bytecode = True
        own = str(Path(__file__).parent)
        sys.path[:] = [
            str(self._tree.folder),
            *(path for path in sys.path if path not in (own, str(self._tree.folder))),
        ]
        for name in OWN_MODULES:  # they must not hide those of the tests
            sys.modules.pop(name, None)
        arguments = ["-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:faulthandler"]
        # The same examples for each mutant, and no deadline of a busy machine.
        arguments += ["--hypothesis-profile=ci"]
        # In a fork of a process that has run pytest, its plugins are imported already.
        arguments += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*arguments, f"--basetemp={self._scratch / 'tmp'}", *self._tests], plugins=plugins))


def _leave(work: Callable[[], int]) -> None:
    """End this fork with the result of `work`."""
    status = LOST
    try:
        status = work()
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
        with suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _passes(item: pytest.Item) -> bool:
    """Run a test, with its fixtures; whether it passes."""
    from _pytest.runner import runtestprotocol

    return not any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _ended(child: int, limit: float) -> int | None:
    """Wait for a process; its exit status, minus the signal, or None if it has been killed after `limit` seconds."""
    end = time.monotonic() + limit
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.005)


class _Trace:
    """Records which lines of a file run inside functions, in this process and all its threads."""

    def __init__(self, name: str) -> None:
        self._name, self.lines = name, set[int]()

    def __enter__(self) -> None:
        sys.settrace(self._call)
        threading.settrace(self._call)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._name:
            return None
        self.lines.add(frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines.add(frame.f_lineno)
        return self._line


class _Loop:
    """Judges mutants in place of running the tests once."""

    def __init__(self, judge: Judge, mutants: list[Mutant]) -> None:
        self._judge, self._mutants = judge, mutants
        self._trace = _Trace(judge._name)
        self._trace.__enter__()

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._trace.__exit__()
        if session.testsfailed:
            raise JudgeError("the tests cannot be collected")
        self._judge.loop(session, self._trace.lines, self._mutants)
        return True


class _Selection:
    """Runs the tests of a list in its order, and writes the name of the one that fails."""

    def __init__(self, order: list[str], report: Path) -> None:
        self._places, self._report = {test: place for place, test in enumerate(order)}, report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._places] or items
        items[:] = sorted(chosen, key=lambda item: self._places.get(item.nodeid, 0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._report.read_text():
            self._report.write_text(report.nodeid)
