"""What runs inside the pods of a run, as far as it needs no cluster: hosts, mpirun, worker reports, the log stream."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_clock import FakeClock
from messages import mentions, says
from run_files import spec_of
from waits import PATIENCE

from ortflow.launchers import prepare as preparing
from ortflow.launchers.kubernetes import account, hosts, worker
from ortflow.launchers.kubernetes.account import ensure_account
from ortflow.launchers.kubernetes.folder import unpack
from ortflow.launchers.kubernetes.hosts import PERIOD, address, read_hosts, short, wait_for
from ortflow.launchers.kubernetes.hydra_output import early_kill, first_end
from ortflow.launchers.kubernetes.log_stream import MARK, LogStream
from ortflow.launchers.kubernetes.mpirun import DEFAULTS, command, environment, hostfile
from ortflow.launchers.kubernetes.pod import Pod
from ortflow.launchers.kubernetes.run_supervisor import ranks_grace
from ortflow.launchers.kubernetes.sshd import pass_on, sshd_config
from ortflow.launchers.kubernetes.unready_workers import NEW_KEY, UnreadyWorkers
from ortflow.launchers.kubernetes.worker_report import (
    WorkerReport,
    WorkerReports,
    conclude,
    key_digest,
    leaves,
    read_reports,
    write_report,
)
from ortflow.launchers.records import Outcome
from ortflow.manifests.local import Mpi
from ortflow.workflow.errors import EndedBySignal, OrtflowError, Preempted, UserError
from ortflow.workflow.ranks import HOST, Place
from ortflow.workflow.run.rundir import RunDir, append_json_line
from ortflow.workflow.system.disk_space import OutOfDisk

SPEC = spec_of(resources={"nodes": 2, "ranks_per_node": 3})
VARIABLES = {
    "ORTFLOW_JOB": "gpt-abc", "ORTFLOW_RUN_FILE": "/etc/ortflow/run/run.yaml", "ORTFLOW_MOUNT": "/data",
    "ORTFLOW_SSH_PORT": "2222",
}  # fmt: skip


def pod(mount: Path) -> Pod:
    return Pod("gpt-abc", "uid", Path("/etc/ortflow/run/run.yaml"), mount, 2222, new_budget=False, fresh=False)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server with sshd's greeting, which may come late."""
    monkeypatch.setattr(hosts, "TIMEOUT", PATIENCE)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=greet, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


class TestPod:
    def test_is_reported_by_its_environment(self) -> None:
        reported = Pod.from_environment({**VARIABLES, "ORTFLOW_NEW_BUDGET": "1", "ORTFLOW_SUBMISSION": "u"})
        assert (reported.job, reported.submission, reported.mount, reported.new_budget, reported.fresh) == (
            "gpt-abc",
            "u",
            Path("/data"),
            True,
            False,
        )
        assert reported.carried == Path("/etc/ortflow/run/files")

    def test_outside_of_one_the_missing_variable_is_named(self) -> None:
        with pytest.raises(UserError, match=r"ORTFLOW_JOB .*pods"):
            Pod.from_environment({})


class TestHosts:
    @pytest.mark.parametrize("text", ["a-worker-0.a.ns.svc:2\nb-1.b\n", "a-worker-0.a.ns.svc slots=2\nb-1.b\n\n"])
    def test_of_either_mpi_are_read(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "hostfile").write_text(text)
        assert read_hosts(tmp_path / "hostfile") == ["a-worker-0.a.ns.svc", "b-1.b"]

    @pytest.mark.parametrize("text", ["", "\n", "a slots\n", "a;reboot\n"])
    def test_a_foreign_file_is_refused(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "hostfile").write_text(text)
        with pytest.raises(OrtflowError, match="lists no hosts"):
            read_hosts(tmp_path / "hostfile")

    def test_no_file_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(OrtflowError, match="not made by the mpi-operator"):
            read_hosts(tmp_path / "hostfile")

    def test_one_that_greets_as_ssh_is_there(self, daemon: int) -> None:
        assert address("localhost", daemon) == "127.0.0.1"

    def test_one_that_does_not_is_not(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
            assert address("127.0.0.1", port) is None
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # nobody else can listen there, and it does not
            assert address("127.0.0.1", silent.getsockname()[1]) is None
        assert address("no-such-host.invalid", port) is None

    def test_one_that_is_slow_to_greet_takes_connections(self) -> None:
        """As the ssh daemon of a node with much to do: that is no lost host."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert address("localhost", port, greets=False) == "127.0.0.1"
        assert address("localhost", port, greets=False) is None

    def test_all_are_waited_for(self, daemon: int) -> None:
        assert wait_for(["localhost"], daemon, PATIENCE, lambda: None, print) == {"localhost": "127.0.0.1"}

    def test_those_that_never_answer_are_named(self, daemon: int) -> None:
        with pytest.raises(OrtflowError, match=f"port {daemon} .*0 s.* gone$"):
            wait_for(["localhost", "gone.invalid"], daemon, 0.0, lambda: None, print)

    def test_one_that_leaves_is_not_used(self, daemon: int) -> None:
        answers = iter([True, True, False])
        asked = []

        def on_its_way(host: str, address: str) -> bool:
            asked.append((host, address))
            return next(answers)

        clock = FakeClock()
        known = wait_for(["localhost"], daemon, PATIENCE, lambda: None, print, on_its_way, clock)
        assert known == {"localhost": "127.0.0.1"}
        assert asked == [("localhost", "127.0.0.1")] * 3
        assert clock.sleeps == [PERIOD] * 2

    def test_what_is_waited_for_is_reported_twice_a_minute(self) -> None:
        messages, clock = list[str](), FakeClock()
        begun = clock.now
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # nobody else can listen there, and it does not
            port = silent.getsockname()[1]
            with pytest.raises(OrtflowError, match="within 100 s"):
                wait_for(["127.0.0.1"], port, 100.0, lambda: None, messages.append, clock=clock)
        assert messages == ["waiting for 127"] * 3
        assert clock.now - begun == pytest.approx(100.0, abs=2 * PERIOD)

    def test_waiting_ends_when_reported(self) -> None:
        def look() -> None:
            raise Preempted("enough")

        with pytest.raises(Preempted):
            wait_for(["gone.invalid"], 1, 60.0, look, print)


class TestMpirun:
    def test_of_mpich_gives_hosts_places_and_its_own_address(self) -> None:
        words = command(SPEC, Path("/data/runs/gpt"), "/py", Mpi("mpich", "/bin/mpirun"), Path("/h"), "10.0.0.7", ["A"])
        assert words[:3] == ["/bin/mpirun", "-localhost", "10.0.0.7"]
        assert words[words.index("-f") + 1] == "/h"
        assert words[words.index("-ppn") + 1] == "3"
        assert words[words.index("-n") + 1] == "6"
        assert words[-4:] == ["/py", "-m", "ortflow.workflow.rank", "/data/runs/gpt"]

    def test_of_openmpi_names_hostfile_and_every_variable(self) -> None:
        words = command(SPEC, Path("/d"), "/py", Mpi("openmpi", "/bin/mpirun"), Path("/h"), "10.0.0.7", ["A", "B"])
        assert words[words.index("--hostfile") + 1] == "/h"
        assert words[words.index("--map-by") + 1] == "ppr:3:node"
        assert [words[place + 1] for place, word in enumerate(words) if word == "-x"] == ["A", "B"]

    def test_hostfile_is_written_as_each_reads_it(self) -> None:
        assert hostfile("mpich", ["a", "b"], 2) == "a:2\nb:2\n"
        assert hostfile("openmpi", ["a", "b"], 2) == "a slots=2\nb slots=2\n"

    def test_settings_of_the_operator_are_replaced_by_ours(self) -> None:
        outer = {
            "PATH": "/bin", "HOSTNAME": "gpt-launcher", "HOME": "/home/ortflow", "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
            "HYDRA_LAUNCH_EXTRA_ARGS": "-o x", "KUBERNETES_PORT": "1", "TOKEN": "secret",
        }  # fmt: skip
        ours = environment({"ORTFLOW_ATTEMPT": "2"}, outer, Mpi("mpich", "mpirun"), 2200)
        assert ours.keys() - DEFAULTS["mpich"].keys() == {
            "PATH", "HOME", "TOKEN", "ORTFLOW_ATTEMPT", "HYDRA_LAUNCHER_EXTRA_ARGS",
        }  # fmt: skip
        assert ours["HYDRA_LAUNCHER_EXTRA_ARGS"].startswith("-p 2200 -o StrictHostKeyChecking=no")

    def test_what_the_container_sets_wins_over_defaults(self) -> None:
        assert environment({}, {}, Mpi("mpich", "mpirun"), 2222)["UCX_TLS"] == "^cma"
        assert environment({}, {"UCX_TLS": "rc"}, Mpi("mpich", "mpirun"), 2222)["UCX_TLS"] == "rc"

    def test_both_generations_of_openmpi_get_the_port(self) -> None:
        ours = environment({}, {}, Mpi("openmpi", "mpirun"), 2200)
        assert ours["PRTE_MCA_plm_ssh_args"] == ours["OMPI_MCA_plm_rsh_args"]
        assert "-p 2200" in ours["PRTE_MCA_plm_ssh_args"]


BEFORE: WorkerReports = {"w-0": WorkerReport("10.0.0.1", 100.0), "w-1": WorkerReport("10.0.0.2", 100.0), "w-2": None}


class TestWorkerReports:
    def test_are_written_and_read(self, tmp_path: Path) -> None:
        write_report(pod(tmp_path), "w-0", WorkerReport("10.0.0.1", 5.0, leaving=True))
        (tmp_path / ".ortflow/gpt-abc/workers/w-1.json").write_text("{torn")
        heard = read_reports(pod(tmp_path), ["w-0", "w-1", "w-2"])
        assert heard == {"w-0": WorkerReport("10.0.0.1", 5.0, leaving=True), "w-1": None, "w-2": None}

    def test_one_leaves_until_another_pod_has_its_name(self, tmp_path: Path) -> None:
        write_report(pod(tmp_path), "w-0", WorkerReport("10.0.0.1", 5.0, leaving=True))
        write_report(pod(tmp_path), "w-1", WorkerReport("10.0.0.2", 5.0))
        asked = [("w-0", "10.0.0.1"), ("w-0", "10.0.0.9"), ("w-1", "10.0.0.2"), ("w-2", "10.0.0.3")]
        assert [leaves(pod(tmp_path), *one) for one in asked] == [True, False, False, False]

    def test_without_news_explain_nothing(self) -> None:
        assert conclude(BEFORE, BEFORE, []) is None

    def test_one_without_memory_is_a_failure(self) -> None:
        after = {**BEFORE, "w-1": WorkerReport("10.0.0.2", 100.0, out_of_memory=1)}
        found = conclude(BEFORE, after, [])
        assert found is not None
        assert found.outcome is Outcome.FAILURE
        assert mentions(found.sentence, "w-1 ran out of memory", "resources.memory")

    def test_a_container_that_began_again_is_a_failure(self) -> None:
        found = conclude(BEFORE, {**BEFORE, "w-0": WorkerReport("10.0.0.1", 200.0)}, ["w-0"])
        assert found is not None
        assert found.outcome is Outcome.FAILURE

    @pytest.mark.parametrize("now", [WorkerReport("10.0.0.9", 200.0), WorkerReport("10.0.0.1", 100.0, leaving=True)])
    def test_a_deleted_pod_is_not_a_failure(self, now: WorkerReport) -> None:
        found = conclude(BEFORE, {**BEFORE, "w-0": now}, [])
        assert found is not None
        assert found.outcome is Outcome.PREEMPTED

    def test_one_that_is_silent_is_lost(self) -> None:
        found = conclude(BEFORE, BEFORE, ["w-1"])
        assert found is not None
        assert found.outcome is Outcome.LOST
        assert "w-1 no longer answers" in found.sentence


HYDRA = """
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 16 RUNNING AT gpt-abc-worker-1.gpt-abc.team.svc
=   EXIT CODE: {code}
=   CLEANING UP REMAINING PROCESSES
"""


@pytest.mark.parametrize(("code", "status"), [(9, -9), (11, -11), (1, 1), (75, 75), (256, 1), (19200, 75)])
def test_hydra_names_the_rank_that_ended_first(code: int, status: int) -> None:
    ranks = {("gpt-abc-worker-0", 16): 0, ("gpt-abc-worker-1", 15): 2, ("gpt-abc-worker-1", 16): 3}
    assert first_end(HYDRA.format(code=code), ranks) == {3: status}


def test_a_process_that_is_not_a_rank_is_ignored() -> None:
    assert first_end(HYDRA.format(code=9), {}) == {}
    assert first_end("all is well", {("gpt-abc-worker-1", 16): 3}) == {}


@pytest.mark.parametrize(
    ("code", "outcome", "words"),
    [
        (9, Outcome.FAILURE, "… gpt-abc-worker-1 … SIGKILL"),
        (11, Outcome.FAILURE, "… gpt-abc-worker-1 … SIGSEGV"),
        (15, Outcome.PREEMPTED, "… gpt-abc-worker-1 … ended by SIGTERM"),
    ],
)
def test_a_rank_killed_before_it_is_known_is_named_by_its_host(code: int, outcome: Outcome, words: str) -> None:
    found = early_kill(HYDRA.format(code=code))
    assert found is not None
    assert (found.outcome, found.rank) == (outcome, None)
    assert says(found.sentence, words)


@pytest.mark.parametrize("words", ["all is well", HYDRA.format(code=1), HYDRA.format(code=19200)])
def test_an_exit_code_is_not_a_kill(words: str) -> None:
    assert early_kill(words) is None


class TestStory:
    def test_prints_messages_ranks_and_records(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = RunDir(tmp_path)
        run.record_attempt(event="submit", launcher="kubernetes")
        append_json_line(run.events(0), {"event": "step", "time": 1.0, "attempt": 0, "step": 1})
        with LogStream(run, 10, 2) as log_stream:
            log_stream.begin()
            log_stream.attempt(1)
            run.record_attempt(event="start", attempt=1)
            for rank, text in ((0, "hello\nhalf"), (1, "there\n")):
                run.log(1, rank).parent.mkdir(parents=True, exist_ok=True)
                run.log(1, rank).write_text(text)
            log_stream.tick()
            log_stream.record({"event": "failure", "time": 2.0, "attempt": 1, "reason": "no"})
        lines = capsys.readouterr().out.splitlines()
        reported = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
        assert [(one["file"], one["record"].get("event"), one.get("again", False)) for one in reported] == [
            ("attempts", "submit", False), ("events", "step", True), ("notice", None, False),
            ("attempts", "start", False), ("events", "failure", False),
        ]  # fmt: skip
        assert [line for line in lines if line.startswith("[")] == ["[0] hello", "[1] there", "[0] half"]
        # The start of an attempt comes before its ranks' output: that is how a reader attributes the lines.
        assert lines.index("[0] hello") > next(n for n, line in enumerate(lines) if '"start"' in line)


def test_sshd_refuses_logins_without_a_key() -> None:
    config = sshd_config(2222, Path("/home/ortflow/.ssh")).splitlines()
    assert "Port 2222" in config
    assert "PasswordAuthentication no" in config
    assert "PermitRootLogin prohibit-password" in config
    assert "HostKey /home/ortflow/.ssh/id_rsa" in config


def test_probes_of_the_daemon_are_not_in_the_workers_log(capfd: pytest.CaptureFixture[str]) -> None:
    source, target = os.pipe()
    noise = (
        "kex_exchange_identification: Connection closed by remote host\r\n"
        "error: kex_exchange_identification: read: Connection reset by peer\r\n"
        "banner exchange: Connection from 10.0.0.1 port 3: invalid format\r\n"
        "Connection closed by 10.0.0.1 port 44412\r\n"
    )
    os.write(target, (noise + "error: Bind to port 2222 on 0.0.0.0 failed\n").encode())
    os.close(target)
    pass_on(source)
    assert capfd.readouterr().err == "error: Bind to port 2222 on 0.0.0.0 failed\n"


def test_a_worker_with_another_ssh_key_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Secret was replaced, and one pod has the new key before the other: not a failure."""
    ours = tmp_path / ".ssh"
    ours.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    (ours / "authorized_keys").write_text("new")
    key = key_digest(ours)
    messages: list[str] = []
    clock = FakeClock()
    unready_workers = UnreadyWorkers(pod(tmp_path), messages.append, clock)
    write_report(pod(tmp_path), "w-0", WorkerReport("10.0.0.1", 5.0, key="old"))
    assert unready_workers("w-0.gpt", "10.0.0.1")
    assert unready_workers("w-0.gpt", "10.0.0.1")
    (message,) = messages
    assert mentions(message, "w-0", "ssh key", "Secret")
    clock.sleep(NEW_KEY)
    assert unready_workers("w-0.gpt", "10.0.0.1")
    clock.sleep(1.0)
    with pytest.raises(OrtflowError, match="Secret was replaced"):
        unready_workers("w-0.gpt", "10.0.0.1")
    write_report(pod(tmp_path), "w-0", WorkerReport("10.0.0.1", 5.0, key=key))
    assert not unready_workers("w-0.gpt", "10.0.0.1")
    write_report(pod(tmp_path), "w-0", WorkerReport("10.0.0.1", 5.0))
    assert not unready_workers("w-0.gpt", "10.0.0.1"), "a host that does not report"


def test_a_worker_on_a_full_volume_has_its_ranks_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to end from the start; space is freed when its ranks get their signal."""
    reported, sent, full = list[WorkerReport](), list[int](), [True]

    def put(pod: Pod, host: str, worker_report: WorkerReport) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reported.append(worker_report)

    def send(found: list[str], number: int) -> None:
        sent.append(number)
        full.clear()

    monkeypatch.setattr(worker, "write_report", put)
    monkeypatch.setattr(worker, "start_sshd", lambda port, host, node: 1)
    monkeypatch.setattr(worker, "ranks", lambda: [] if reported else ["a rank"])
    monkeypatch.setattr(worker.processes, "send", send)
    monkeypatch.setattr(worker.signal, "signal", lambda number, leave: leave(number, None))
    assert worker.Worker(pod(tmp_path)).work() == worker.TERMINATED
    assert sent == [signal.SIGTERM]
    assert [one.leaving for one in reported] == [True]


def test_a_full_disk_for_files_is_not_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    carried = tmp_path / "run" / "files"
    carried.mkdir(parents=True)
    (carried / "make.py").write_text("")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OutOfDisk):
        unpack(replace(pod(tmp_path), run_file=carried.parent / "run.yaml"), tmp_path / "files")


def test_prepare_that_runs_out_of_memory_is_not_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that notices its child's kill ends with its own exit code."""
    spec = spec_of(prepare=["sh", "-c", "exit 3"])
    kills = iter([4, 5])
    monkeypatch.setattr(preparing, "oom_kills", lambda: next(kills))
    key = "backends.kubernetes.launcher_resources.memory"
    with pytest.raises(EndedBySignal, match=rf"^`sh -c 'exit 3'` .*memory.*raise {re.escape(key)}$"):
        preparing.prepare(spec, tmp_path, "python", key)
    monkeypatch.setattr(preparing, "oom_kills", lambda: 5)
    with pytest.raises(UserError, match="ended with exit code 3"):
        preparing.prepare(spec, tmp_path, "python", key)


def test_ranks_have_time_to_save_in_a_short_grace_period() -> None:
    assert [ranks_grace(seconds) for seconds in (1, 4, 10, 60)] == [0.5, 2.0, 5.0, 55.0]
    assert spec_of(backends={"kubernetes": {"grace_seconds": 1}}).backends.kubernetes.grace_seconds == 1


def test_short_is_the_pods_own_name() -> None:
    assert short("gpt-abc-worker-0.gpt-abc.team.svc") == "gpt-abc-worker-0"


def test_on_the_nodes_network_a_pod_is_known_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hostNetwork the host name is the node's: not that of the hostfile, and perhaps in no DNS."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1.internal")
    found = Pod.from_environment({**VARIABLES, "ORTFLOW_POD": "gpt-abc-worker-0", "ORTFLOW_ADDRESS": "10.0.0.7"})
    assert (found.name, found.address) == ("gpt-abc-worker-0", "10.0.0.7")
    (line,) = [line for line in sshd_config(2222, Path("/k"), found.name).splitlines() if line.startswith("SetEnv")]
    assert line == f"SetEnv {HOST}=gpt-abc-worker-0"
    ours = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert Place.from_environment({**ours, HOST: found.name}).host == found.name
    assert Place.from_environment(ours).host == "node-1.internal"


def test_a_user_that_the_image_does_not_know_gets_an_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace's own user id, as on OpenShift, is in no image; ssh refuses it without an account."""
    passwd, home = tmp_path / "passwd", tmp_path / "home"
    monkeypatch.setenv("HOME", "/")
    ensure_account(home, passwd)
    assert not passwd.exists(), "this user has one"

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(account.pwd, "getpwuid", nobody)
    passwd.write_text("root:x:0:0::/root:/bin/sh\n")
    ensure_account(home, passwd)
    assert (
        passwd.read_text().splitlines()[1]
        == f"ortflow-{os.getuid()}:x:{os.getuid()}:{os.getgid()}:ortflow:{home}:/bin/sh"
    )
    assert Path.home() == home
    with pytest.raises(UserError, match="has no account in the image") as caught:
        ensure_account(home, tmp_path / "none" / "passwd")
    assert caught.value.where == "backends.kubernetes.security.run_as_user"
