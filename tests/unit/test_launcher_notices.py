"""Messages about a run: real commands and a real web server, sinks that fail or hang, and secrets."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_attempts import FakeAttempt
from fake_clock import FakeClock
from views import Lines
from waits import PATIENCE

from ortflow.launchers.budget import Decision
from ortflow.launchers.records import Outcome, Used
from ortflow.launchers.stop import Stop
from ortflow.launchers.supervision import notices as module
from ortflow.launchers.supervision.notice_sender import run_command
from ortflow.launchers.supervision.notices import PERIOD, Notices, NoticingView, kinds_after
from ortflow.launchers.supervision.supervised import Job
from ortflow.launchers.supervision.supervisor import Supervisor
from ortflow.workflow.errors import EXIT_DONE, EXIT_FAILURE
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.notify import Notify
from ortflow.workflow.spec.restart import Backoff, Restart

SECRET = "hunter2"


class Server:
    """A web server that keeps what was posted; `/broken` answers 500, `/hangs` never."""

    def __init__(self) -> None:
        posted = self.posted = list[tuple[str, dict[str, Any]]]()
        released = self.released = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                if self.path == "/hangs":
                    released.wait(PATIENCE)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                posted.append((self.path, body))
                self.send_response(500 if self.path == "/broken" else 204)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def web() -> Iterator[Server]:
    server = Server()
    yield server
    server.released.set()
    server.http.shutdown()
    server.http.server_close()
    server.thread.join()


def writes(path: Path) -> list[str]:
    """A command that appends what it gets to a file."""
    return [sys.executable, "-c", f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + chr(10))"]


def supervise(run: RunDir, sinks: list[Notify], *codes: int, failures: int = 3) -> Lines:
    clock, view = FakeClock(), Lines()

    def start(number: int) -> FakeAttempt:
        return FakeAttempt(clock, number, code=codes[min(number, len(codes) - 1)], seconds=5.0)

    restart = Restart(failures=failures, backoff=Backoff(first=0.0), hung_seconds=None)
    job = Job(run, 1, restart, start, lambda: None, notify=sinks)
    Supervisor(job, view, Stop(run.stop_request, clock=clock), clock).supervise()
    return view


def test_a_command_and_a_web_address_get_the_message(
    tmp_path: Path, web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    sinks = [
        Notify(on=["finished", "budget_low"], command=writes(tmp_path / "messages")),
        Notify(on=["finished"], webhook=f"{web.address}/${{HOOK_TOKEN}}"),
        Notify(on=["failed"], webhook=f"{web.address}/wrong"),
    ]
    view = supervise(RunDir(tmp_path / "run"), sinks, EXIT_FAILURE, EXIT_DONE, failures=1)
    messages = [json.loads(line) for line in (tmp_path / "messages").read_text().splitlines()]
    assert sorted(one["event"] for one in messages) == ["budget_low", "finished"]
    assert {one["run"] for one in messages} == {"run"}
    assert [path for path, _ in web.posted] == [f"/{SECRET}"]
    assert web.posted[0][1]["text"] == "finished"
    assert not [line for line in view.said if "monitor.notify" in line]
    assert SECRET not in "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_a_run_that_is_given_up_has_failed(tmp_path: Path, web: Server) -> None:
    sinks = [Notify(on=["failed", "finished", "budget_low"], webhook=f"{web.address}/x")]
    supervise(RunDir(tmp_path / "run"), sinks, EXIT_FAILURE, failures=0)
    assert [body["event"] for _, body in web.posted] == ["failed"]
    assert "the budget of 0 failures is spent" in web.posted[0][1]["text"]


def test_sinks_that_fail_or_hang_cost_no_run(tmp_path: Path, web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    begun = time.monotonic()
    fail = [
        Notify(on=["finished"], command=["/no/such/program"]),
        Notify(on=["finished"], command=[sys.executable, "-c", f"print('{SECRET}'); raise SystemExit(3)"]),
        Notify(on=["finished"], webhook="http://127.0.0.1:9/${NOT_SET}"),
        Notify(on=["finished"], webhook="${HOOK_TOKEN}"),
    ]
    fail_each_time = [
        Notify(on=["finished"], webhook=f"{web.address}/broken"),
        Notify(on=["finished"], webhook="http://127.0.0.1:9/${HOOK_TOKEN}"),
    ]
    hang = [
        Notify(on=["finished"], command=["sh", "-c", "sleep 300; true"]),
        Notify(on=["finished"], webhook=f"{web.address}/hangs"),
    ]
    # Only what is tried again, or never ends, has a limit of seconds: a busy machine takes as long to start a program.
    monkeypatch.setattr(module, "START", PATIENCE)
    for name, limit, sinks, expected in (
        ("fails", PATIENCE, fail, ["No such file", "exit status 3", "NOT_SET is not set", "is not a URL"]),
        ("fails-each-time", 5.0, fail_each_time, ["HTTP 500", "Connection refused"]),
        ("hangs", 1.5, hang, ["did not end within", "webhook failed"]),
    ):  # fmt: skip
        monkeypatch.setattr(module, "LIMIT", limit)
        run = RunDir(tmp_path / name)
        view = supervise(run, sinks, EXIT_DONE)
        assert run.read_attempts()[-1]["outcome"] == "finished"
        said = "\n".join(view.said)
        for place, reason in enumerate(expected):
            assert f"monitor.notify[{place}]" in said
            assert reason in said, said
        assert SECRET not in said
    assert time.monotonic() - begun < PATIENCE


def test_messages_of_one_kind_are_rare(tmp_path: Path, web: Server) -> None:
    clock, view = FakeClock(), Lines()
    notices = Notices([Notify(on=["loss_nan"], webhook=f"{web.address}/nan")], RunDir(tmp_path), view, clock)
    noticing = NoticingView(view, notices)
    for step in range(5):
        noticing.record({"event": "step", "step": step, "loss": None})
        noticing.record({"event": "step", "step": step})  # a program that logs no loss
    clock.now += PERIOD + 1
    noticing.record({"event": "step", "step": 9, "loss": None})
    notices.close()
    assert sorted(body["step"] for _, body in web.posted) == [0, 9]


def test_what_an_end_means() -> None:
    restart, again, over = Restart(failures=2, preemptions=3), Decision(True), Decision(False)
    low = ["budget_low"]

    def kinds(outcome: Outcome, decision: Decision, used: Used, **more: bool) -> list[str]:
        return kinds_after(outcome, decision, used, restart, **{"hung": False, "asked": False, **more})

    assert kinds(Outcome.FAILURE, again, Used(1, 0)) == []
    assert kinds(Outcome.FAILURE, again, Used(2, 0)) == low
    assert kinds(Outcome.PREEMPTED, again, Used(2, 1)) == []
    assert kinds(Outcome.PREEMPTED, again, Used(0, 3)) == low
    assert kinds(Outcome.FAILURE, again, Used(1, 0), hung=True) == ["hung"]
    assert kinds(Outcome.FAILURE, over, Used(3, 0), hung=True) == ["hung", "failed"]
    assert kinds(Outcome.PREEMPTED, over, Used(), asked=True) == []
    assert kinds(Outcome.USER_ERROR, over, Used()) == ["failed"]
    assert kinds(Outcome.FINISHED, over, Used()) == ["finished"]


def test_a_command_runs_in_the_run_directory(tmp_path: Path) -> None:
    run_command(["sh", "-c", "cat > note.json"], {"directory": str(tmp_path), "event": "finished"}, PATIENCE)
    assert json.loads((tmp_path / "note.json").read_text())["event"] == "finished"
