"""The launcher for Slurm against a fake scheduler: submitting once, status, cancelling in every state."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Fake, late
from messages import mentions
from slurm_scripts import common

from ortflow.launchers.attempts.locks import hold
from ortflow.launchers.base import Submission, launcher_name
from ortflow.launchers.batch import elapsed, history
from ortflow.launchers.batch.elapsed import stamp
from ortflow.launchers.batch.history import SETTLE
from ortflow.launchers.batch.job_submission import PATIENCE, PAUSE, InDoubt
from ortflow.launchers.batch.launcher import POLL
from ortflow.launchers.placed import Placed, placed
from ortflow.launchers.records import State
from ortflow.launchers.slurm import probe
from ortflow.launchers.slurm.commands import NoAnswer
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.launcher import SlurmLauncher, SlurmRequest
from ortflow.launchers.slurm.runner import Answer
from ortflow.launchers.slurm.sbatch import settings
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.system.disk_space import Notice, OutOfDisk


def submission(folder: Path, name: str = "gpt", **sections: Any) -> Submission:
    """A run whose files exist."""
    for file in ("m.onnx", "d.arrow"):
        (folder / file).touch()
    values = {
        "name": name,
        "run_dir": str(folder / "runs" / name),
        "model": {"path": "m.onnx", "loss": {"kind": "mse"}},
        "data": {"train": {"path": "d.arrow"}, "micro_batch": 1},
        "train": {"steps": 10, "optimizer": {"name": "sgd", "lr": 0.1}},
        **sections,
    }
    spec = resolve_paths(TrainerRunSpec.model_validate(values), folder / "run.yaml")
    return Submission(spec, RunDir(folder / "runs" / name), folder)


def submit(fake: Fake, wanted: Submission) -> str:
    slurm = SlurmLauncher(fake.slurm)
    return slurm.submit(slurm.request(wanted))


def events(run: RunDir) -> list[str]:
    return [record["event"] for record in run.read_attempts()]


def attempt(run: RunDir, number: int = 0, **end: Any) -> None:
    """The records of a supervisor process."""
    run.record_attempt(event="start", attempt=number)
    if end:
        run.record_attempt(event="end", attempt=number, **end)


FINISHED = {"outcome": "finished", "next": "stop", "cause": "finished"}
PREEMPTED = {"outcome": "preempted", "next": "restart", "cause": "saved and stopped"}


# --- submitting


def test_a_job_is_submitted_and_on_record(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    assert submit(fake, wanted) == "slurm://100"
    before, after = wanted.run.read_attempts()
    assert (before["event"], after["event"]) == ("submitting", "submit")
    reported = {"launcher": "slurm", "job": "100", "submission": before["submission"], "new_budget": False}
    assert after == {**after, **reported}
    assert fake.jobs[0].comment == f"ortflow {before['submission']}"
    assert fake.count("sbatch") == 2, "its version and the job"
    assert fake.count("squeue") == 0, "a new run is not queried"
    script = wanted.run.root / "slurm" / "job.sh"
    assert script.read_text() == fake.scripts[0]
    assert (wanted.run.root / "slurm" / "100_submission.sh").read_text() == fake.scripts[0], (
        "where submitit looks for it"
    )
    assert (wanted.run.root / "logs").is_dir(), "Slurm does not create it, and starts nothing without it"
    assert load_run_file(wanted.run.run_file) == wanted.spec
    assert launcher_name(wanted.run.read_attempts()) == "slurm"


def test_a_folder_named_like_a_pattern(tmp_path: Path) -> None:
    """submitit and Slurm replace these by numbers, but not in the name of a run's folder."""
    folder = tmp_path / "%j %t %a %A"
    folder.mkdir()
    fake, wanted = Fake(), submission(folder)
    assert submit(fake, wanted) == "slurm://100"
    script = folder / "runs" / wanted.run.root.name / "slurm/100_submission.sh"
    assert script.read_text() == fake.scripts[0]


def test_what_is_printed_is_what_is_submitted(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    slurm = SlurmLauncher(fake.slurm)
    request = slurm.request(wanted)
    printed = str(request)
    assert not (tmp_path / "runs").exists()
    slurm.submit(request)

    assert common(printed) == common(fake.scripts[0])
    assert printed == str(slurm.request(wanted)), "the same bytes each time"
    assert printed.split("<<'END_OF_THE_RUN_FILE'\n")[1] == f"{dump_run_file(wanted.spec)}END_OF_THE_RUN_FILE"
    assert "--output" not in printed, "a folder that does not exist yet would prevent the job's start"


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    fake = Fake(refuses="sbatch: error: Batch job submission failed: Invalid qos specification\n")
    wanted = submission(tmp_path)
    with pytest.raises(UserError, match=r"^backends.slurm.qos: .*Invalid qos.*sacctmgr"):
        submit(fake, wanted)
    assert not (tmp_path / "runs").exists()
    assert fake.count("sbatch") == 2, "a refused submission is not retried"


def test_a_refusal_changes_nothing_of_a_run_that_was_there(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **{**FINISHED, "outcome": "failure"})
    fake.change("100", state="FAILED")
    fake.refuses = "sbatch: error: Invalid --time specification\n"
    with pytest.raises(UserError, match=r"resources\.time_limit"):
        submit(fake, wanted)
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.FAILED
    assert launcher_name(wanted.run.read_attempts()) == "slurm"
    fake.refuses = None
    assert submit(fake, wanted) == "slurm://101"
    assert wanted.run.read_attempts()[-1]["new_budget"] is True, "submitting a run that was given up renews its budget"


def test_a_refused_submission_does_not_take_a_local_run_over(tmp_path: Path) -> None:
    fake = Fake(refuses="sbatch: error: Invalid --time specification\n")
    wanted = submission(tmp_path)
    wanted.run.root.mkdir(parents=True)
    wanted.run.record_attempt(event="submit", launcher="local")
    attempt(wanted.run, outcome="preempted", next="stop")
    wanted.run.run_file.write_text(dump_run_file(wanted.spec))
    with pytest.raises(UserError):
        submit(fake, wanted)
    assert launcher_name(wanted.run.read_attempts()) == "local"


def test_a_controller_that_is_dead(tmp_path: Path) -> None:
    fake, wanted = Fake(away="dead"), submission(tmp_path)
    with pytest.raises(NoAnswer, match=r"does not answer .*nothing was submitted.*--retry"):
        submit(fake, wanted)
    assert not (tmp_path / "runs").exists()
    assert fake.count("sbatch") == 2


def test_waiting_for_a_controller(tmp_path: Path) -> None:
    fake, wanted = Fake(away="dead"), replace(submission(tmp_path), retry=20.0)
    answer = fake.sbatch

    def back_after_three(arguments: list[str]) -> Answer:
        if len(fake.scripts) == 3:
            fake.away = None
        return answer(arguments)

    fake.sbatch = back_after_three  # type: ignore[method-assign, assignment]
    assert submit(fake, wanted) == "slurm://100"
    assert events(wanted.run) == ["submitting", "refused"] * 3 + ["submitting", "submit"]
    assert len(fake.jobs) == 1


def test_a_controller_that_hangs_leaves_a_doubt(tmp_path: Path) -> None:
    fake, wanted = Fake(away="hung"), submission(tmp_path)
    begun = fake.clock.now
    with pytest.raises(InDoubt, match=r"may have taken.*ortflow status"):
        submit(fake, wanted)
    assert fake.clock.now - begun <= PATIENCE
    assert events(wanted.run) == ["submitting"], "the directory stays: a job may need it"
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.PENDING
    assert "does not answer" in (reported.waits or "")


@pytest.mark.parametrize("retry", [0.0, 20.0])
def test_a_controller_that_is_slow_gets_one_job(tmp_path: Path, retry: float) -> None:
    fake, wanted = Fake(on_sbatch=late), replace(submission(tmp_path), retry=retry)
    assert submit(fake, wanted) == "slurm://100"
    assert len(fake.jobs) == 1
    assert events(wanted.run) == ["submitting", "submit"]


def test_a_job_that_comes_into_the_queue_after_the_first_query(tmp_path: Path) -> None:
    fake, wanted = Fake(), replace(submission(tmp_path), retry=20.0)
    waiting: list[Job] = []
    squeue = fake.squeue

    def much_later(one: Fake, job: Job) -> Answer:
        waiting.append(job)
        return late(Fake(), job)

    def third_look(arguments: list[str]) -> Answer:
        if fake.count("squeue") == 3:
            fake.take(waiting.pop())
        return squeue(arguments)

    fake.on_sbatch = much_later
    fake.squeue = third_look  # type: ignore[method-assign, assignment]
    assert submit(fake, wanted) == "slurm://100"
    assert len(fake.scripts) == 1, "no second try while it may still come"


def test_another_try_once_it_surely_does_not_come(tmp_path: Path) -> None:
    def lost_once(one: Fake, job: Job) -> Answer | None:
        return late(Fake(), job) if len(one.scripts) == 1 else None

    fake, wanted = Fake(on_sbatch=lost_once), replace(submission(tmp_path), retry=60.0)
    assert submit(fake, wanted) == "slurm://101"
    first, second, done = wanted.run.read_attempts()
    assert first["submission"] != second["submission"] == done["submission"], "each try has its own token"


def test_submitting_again_after_a_doubt_takes_the_job_that_came(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)

    def late_and_gone(one: Fake, job: Job) -> Answer:
        one.away = "hung"
        return late(one, job)

    fake.on_sbatch = late_and_gone
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away, fake.on_sbatch = None, None
    assert SlurmLauncher(fake.slurm).status(wanted.run).job == "100", "it is found by its comment"
    assert submit(fake, wanted) == "slurm://100"
    assert len(fake.jobs) == 1
    with pytest.raises(UserError, match="is job 100 in Slurm, pending"):
        submit(fake, wanted)


def test_submitting_again_immediately_waits_for_what_may_still_come(tmp_path: Path) -> None:
    fake, wanted = Fake(away="hung"), submission(tmp_path)
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away, begun = None, wanted.run.read_attempts()[-1]["uptime"]
    assert submit(fake, wanted) == "slurm://100"
    assert SETTLE <= fake.clock.now - begun <= SETTLE + PAUSE


@pytest.mark.parametrize("ahead", [300.0, -300.0, 7200.0, -7200.0, 1e6])
def test_a_doubt_that_a_machine_with_another_clock_has_left(
    tmp_path: Path, ahead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own clock has to see the seconds pass: by the other's they are over, or never will be."""
    fake, wanted = Fake(away="hung"), submission(tmp_path)
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away, begun = None, fake.clock.now
    fake.clock.ahead += ahead
    monkeypatch.setattr(elapsed, "BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(elapsed.socket, "gethostname", lambda: "login2")
    assert submit(fake, wanted) == "slurm://100"
    assert SETTLE <= fake.clock.now - begun <= SETTLE + PAUSE


def test_a_run_that_had_failed_and_is_submitted_into_a_doubt(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="failure", next="stop")
    fake.change("100", state="FAILED")

    def late_and_gone(one: Fake, job: Job) -> Answer:
        one.away = "hung"
        return late(one, job)

    fake.on_sbatch = late_and_gone
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away = None
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.job, reported.state) == ("101", State.PENDING)
    fake.change("101", state="RUNNING")
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.PENDING
    attempt(wanted.run, 1)
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.RUNNING


def test_a_submission_that_never_came_into_the_queue(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="failure", next="stop")
    fake.change("100", state="FAILED")
    fake.away = "hung"
    with pytest.raises(NoAnswer):
        submit(fake, wanted)
    fake.away, fake.on_sbatch = None, lambda one, job: late(Fake(), job)
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    wanted.run.record_attempt(event="submitting", launcher="slurm", submission="newest", **stamp(fake.clock))
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.PENDING
    assert mentions(reported.waits or "", "sbatch did not answer", "queue")
    fake.clock.sleep(SETTLE)
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.LOST
    assert "did not enter the queue" in (reported.cause or "")


@pytest.mark.parametrize("ahead", [300.0, -300.0, 7200.0, -7200.0])
def test_the_status_of_a_doubt_under_a_clock_that_was_set(tmp_path: Path, ahead: float) -> None:
    fake, wanted = Fake(away="hung"), submission(tmp_path)
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away = None
    fake.clock.ahead += ahead
    begun = wanted.run.read_attempts()[-1]["uptime"]
    for later, state in ((SETTLE - 1.0, State.PENDING), (SETTLE, State.LOST)):
        fake.clock.now = begun + later
        assert SlurmLauncher(fake.slurm).status(wanted.run).state is state


@pytest.mark.parametrize("ahead", [300.0, -300.0, 7200.0, -7200.0, 1e6])
def test_the_status_of_a_doubt_that_another_machine_has_left(tmp_path: Path, ahead: float) -> None:
    """Nobody here knows how long ago that was, whatever its clock said; submitting again is safe, and waits."""
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="failure", next="stop")
    fake.change("100", state="FAILED")
    there = {"host": "login2", "boot": "another", "uptime": 5.0, "time": fake.clock.time() + ahead}
    wanted.run.record_attempt(event="submitting", launcher="slurm", submission="newest", **there)
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.PENDING
    assert "sbatch on login2 did not answer" in str(reported.waits)
    begun = fake.clock.now
    assert submit(fake, wanted) == "slurm://101"
    assert SETTLE <= fake.clock.now - begun <= SETTLE + PAUSE


def test_a_doubt_from_before_a_reboot_is_over(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="failure", next="stop")
    fake.change("100", state="FAILED")
    there = {**stamp(fake.clock), "boot": "the one before", "uptime": 1e9}
    wanted.run.record_attempt(event="submitting", launcher="slurm", submission="newest", **there)
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.LOST


def test_a_submitter_that_holds_the_directory_is_still_at_it(tmp_path: Path) -> None:
    fake, wanted = Fake(away="hung"), submission(tmp_path)
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away = None
    fake.clock.sleep(10 * SETTLE)
    lock = hold(wanted.run.lock)
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.PENDING
    os.close(lock)
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.LOST


@pytest.mark.parametrize(
    ("state", "reason", "fix"),
    [
        ("PENDING", "launch failed requeued held", "`scontrol release 100` … `scancel 100`"),
        ("PENDING", "Priority", "it ends when it starts"),
    ],
)
def test_the_job_of_a_finished_run_is_in_the_queue_again(tmp_path: Path, state: str, reason: str, fix: str) -> None:
    """A controller that dies before it has saved a start restores the job as pending."""
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **FINISHED)
    slurm = SlurmLauncher(fake.slurm)
    fake.change("100", state="RUNNING")
    assert slurm.status(wanted.run).waits is None
    fake.change("100", state=state, reason=reason, restarts=1)
    for reported in (slurm.status(wanted.run), *slurm.statuses([wanted.run])):
        assert (reported.state, reported.job, reported.job_restarts) == (State.FINISHED, "100", 1)
        assert "job 100 is still in the queue" in (reported.waits or "")
        assert mentions(reported.waits or "", fix)
    fake.away = "dead"
    assert slurm.status(wanted.run).waits is None
    fake.away = None
    assert slurm.cancel(wanted.run, now=False)
    assert slurm.status(wanted.run).waits is None
    assert slurm.status(wanted.run).state is State.FINISHED
    assert not slurm.cancel(wanted.run, now=False)


def test_a_run_in_the_queue_is_not_submitted_again(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    before = wanted.run.run_file.read_bytes()
    changed = submission(tmp_path, train={"steps": 20, "optimizer": {"name": "sgd", "lr": 0.1}})
    for again in (wanted, changed, replace(wanted, fresh=True)):
        for state in ("PENDING", "RUNNING", "SUSPENDED", "REQUEUE_HOLD"):
            fake.change("100", state=state)
            with pytest.raises(UserError, match=r"is job 100 in Slurm.*ortflow cancel"):
                submit(fake, again)
    assert len(fake.jobs) == 1
    assert wanted.run.run_file.read_bytes() == before
    assert wanted.run.root.is_dir()


def test_a_completing_job_does_not_block_a_submission(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="preempted", next="stop", asked="cancel")
    fake.change("100", state="COMPLETING")
    assert submit(fake, wanted) == "slurm://101"


def test_a_finished_run_is_not_submitted(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **FINISHED)
    fake.change("100", state="COMPLETED")
    assert submit(fake, wanted) == "slurm://100"
    assert len(fake.jobs) == 1


def test_an_old_stop_request_is_removed(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="preempted", next="stop", asked="cancel")
    fake.change("100", state="CANCELLED")
    wanted.run.stop_request.touch()
    submit(fake, wanted)
    assert not wanted.run.stop_request.exists()


def test_an_interpreter_that_cannot_run_ranks(tmp_path: Path) -> None:
    fake = Fake()
    wanted = submission(tmp_path, resources={"python": "/bin/false"})
    with pytest.raises(UserError, match=r"resources\.python"):
        submit(fake, wanted)
    assert not (tmp_path / "runs").exists()
    elsewhere = submission(tmp_path, resources={"python": "/only/on/the/nodes/python"})
    assert submit(fake, elsewhere) == "slurm://100", "what only the nodes have is not checked here"
    assert "/only/on/the/nodes/python -m ortflow.workflow.rank" in " ".join(fake.scripts[-1].split())


def test_without_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submitting does not need it: its import costs as much as all the rest."""
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert submit(Fake(), submission(tmp_path)) == "slurm://100"
    sys.modules.pop("ortflow.slurm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ortflow\[slurm\]'"):
        import_module("ortflow.slurm")


def test_a_missing_file_is_reported_before_anything_is_submitted(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    (tmp_path / "d.arrow").unlink()
    with pytest.raises(UserError, match=r"data\.train\.path"):
        submit(fake, wanted)
    assert fake.scripts == []
    assert not (tmp_path / "runs").exists()


# --- the start


def library(folder: Path, name: str) -> str:
    """An interpreter beside an MPI."""
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / name).touch()
    return str(folder / "bin" / "python")


@pytest.mark.parametrize(
    ("file", "plugins", "start"),
    [("libmpi.so.12", ("pmi2", "pmix"), "pmi2"), ("libmpi.so.40.30.1", ("pmi2", "pmix"), "pmix")],
)
def test_the_start_that_fits_the_mpi(tmp_path: Path, file: str, plugins: tuple[str, ...], start: str) -> None:
    fake, python = Fake(plugins=plugins), library(tmp_path, file)
    spec = submission(tmp_path, resources={"ranks_per_node": 2}).spec
    assert probe.choose_start(spec, python, fake.slurm).how == start
    assert fake.count("srun") == 1


@pytest.mark.parametrize(
    ("file", "expected_text"), [("libmpi.so.12", "HYDRA build details"), ("libmpi.so.40", "Open MPI")]
)
def test_mpirun_where_no_plugin_loads(tmp_path: Path, file: str, expected_text: str) -> None:
    python = library(tmp_path, file)
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho {expected_text}\n")
    mpirun.chmod(0o755)
    spec = submission(tmp_path, resources={"ranks_per_node": 2}).spec
    found = probe.choose_start(spec, python, Fake(plugins=()).slurm)
    assert (found.how, found.mpirun) == ("mpirun", str(mpirun))
    assert found.kind == ("mpich" if "12" in file else "openmpi")


def test_no_mpi_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = submission(tmp_path, resources={"ranks_per_node": 2}).spec
    with pytest.raises(UserError, match=r"backends\.slurm\.mpi: 2 ranks need an MPI"):
        probe.choose_start(spec, str(tmp_path / "bin" / "python"), Fake().slurm)


def test_what_the_run_file_sets_is_not_probed(tmp_path: Path) -> None:
    fake = Fake()
    backends = {"slurm": {"mpi": "pmix"}}
    spec = submission(tmp_path, resources={"ranks_per_node": 2}, backends=backends).spec
    assert probe.choose_start(spec, sys.executable, fake.slurm).how == "pmix"
    assert probe.choose_start(submission(tmp_path).spec, sys.executable, fake.slurm).how == "none", "one rank"
    container = {"slurm": {"container": {"kind": "apptainer", "image": "/a.sif"}}}
    inside = submission(tmp_path, resources={"ranks_per_node": 2}, backends=container).spec
    assert probe.choose_start(inside, "/nowhere/python", fake.slurm).how == "pmi2", (
        "the image's contents are not visible"
    )
    assert fake.calls == []


@pytest.mark.parametrize(
    ("version", "directive"), [("slurm-wlm 22.05.8", "--requeue"), ("slurm 25.11.2", "--requeue=expedite")]
)
def test_expedited_restarts_if_slurm_supports_them(tmp_path: Path, version: str, directive: str) -> None:
    fake = Fake(version=version)
    submit(fake, submission(tmp_path))
    assert f"#SBATCH {directive}\n" in fake.scripts[0]


def test_a_script_is_printed_without_any_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    text = str(SlurmLauncher().request(submission(tmp_path, resources={"ranks_per_node": 2})))
    assert text.startswith("#!/bin/bash\n")
    assert "--mpi=pmi2" in text


# --- status


def test_a_pending_run(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.change("100", start=2_000_000_000.0)
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.state, reported.job, reported.launcher) == (State.PENDING, "100", "slurm")
    assert "waits for free nodes" in reported.waits
    assert reported.starts_at == 2_000_000_000.0
    assert json.loads(json.dumps(reported.to_json()))["job"] == "100"


def test_a_running_run(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.change("100", state="RUNNING", nodes="node[1-2]", end=2_000_000_000.0)
    slurm = SlurmLauncher(fake.slurm)
    reported = slurm.status(wanted.run)
    assert reported.state is State.PENDING
    assert "its first attempt has not" in (reported.waits or "")
    attempt(wanted.run)
    reported = slurm.status(wanted.run)
    assert (reported.state, reported.nodes, reported.job_ends_at) == (State.RUNNING, "node[1-2]", 2_000_000_000.0)
    assert reported.waits is None
    assert reported.starts_at is None


def test_a_job_may_start_before_its_submission_is_on_record(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)

    def at_once(one: Fake, job: Job) -> Answer:
        one.take(replace(job, state="RUNNING"))
        attempt(wanted.run)
        return Answer(0, f"{job.id}\n", "")

    fake.on_sbatch = at_once
    submit(fake, wanted)
    assert events(wanted.run) == ["submitting", "start", "submit"]
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.RUNNING


def test_a_restarting_run(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **PREEMPTED)
    fake.change("100", state="PENDING", reason="BeginTime", restarts=2)
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.state, reported.job_restarts, reported.cause) == (State.RESTARTING, 2, "saved and stopped")
    assert "delays its next start" in (reported.waits or "")
    attempt(wanted.run, 1)
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.RESTARTING, (
        "its node was lost: there is no record of it"
    )


def test_a_waiting_job_does_not_report_the_disk_of_its_last_start(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run)
    Notice(wanted.run.heartbeat).report(OutOfDisk(wanted.run.root / "checkpoints", 1))
    slurm = SlurmLauncher(fake.slurm)
    fake.change("100", state="RUNNING", nodes="n[1-2]")
    assert "out of disk on" in (slurm.status(wanted.run).waits or "")
    fake.change("100", state="PENDING", reason="BeginTime", restarts=1)
    reported = slurm.status(wanted.run)
    assert reported.state is State.RESTARTING
    assert "out of disk on" not in (reported.waits or "")


def test_a_follow_up_job_is_the_run_s(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **PREEMPTED)
    fake.change("100", state="FAILED")
    fake.take(Job("101", None, "PENDING", "Dependency", comment=fake.jobs[0].comment, name="gpt"))
    wanted.run.record_attempt(event="submit", launcher="slurm", job="101", follows="100")
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.state, reported.job) == (State.PENDING, "101")


@pytest.mark.parametrize(
    ("ended", "state", "cause"),
    [
        ({"state": "TIMEOUT"}, State.LOST, r"time limit.*backends\.slurm\.signal_seconds"),
        ({"state": "NODE_FAIL"}, State.LOST, "a node of the job was lost"),
        ({"state": "OUT_OF_MEMORY"}, State.LOST, r"out of memory.*resources\.memory"),
        ({"state": "PREEMPTED"}, State.LOST, "preempted"),
        ({"state": "CANCELLED"}, State.CANCELLED, "cancelled in Slurm"),
        ({"state": "CANCELLED", "reason": "DependencyNeverSatisfied"}, State.CANCELLED, "its dependency did not end"),
        ({"state": "FAILED", "signal": 53, "nodes": "node2"}, State.LOST, r"write .*/logs on node2.*every node"),
        ({"state": "FAILED", "reason": "JobLaunchFailure"}, State.LOST, r"could not write .*/logs"),
        ({"state": "FAILED", "code": 127, "nodes": "node1"}, State.LOST, r"could not be started on node1.*every node"),
        ({"state": "FAILED", "code": 3}, State.LOST, "ended with exit code 3"),
        ({"state": "FAILED", "signal": 9}, State.LOST, "killed by SIGKILL"),
        # Slurm 22.05's output for `scancel -s KILL -b`.
        ({"state": "FAILED", "reason": "JobLaunchFailure", "signal": 9}, State.LOST, "script was killed by SIGKILL"),
        ({"state": "COMPLETED"}, State.LOST, "left no record.*every node"),
    ],
)  # fmt: skip
def test_a_job_that_ended_without_a_record(tmp_path: Path, ended: dict[str, Any], state: State, cause: str) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.change("100", **{"reason": "", **ended})
    for _ in range(2):
        reported = SlurmLauncher(fake.slurm).status(wanted.run)
        assert reported.state is state
        assert re.search(cause, reported.cause or ""), reported.cause
        # After that it is no longer in the queue, but still in the accounting.
        fake.accounted, fake.jobs = [*fake.jobs, *fake.accounted], []
        if "reason" in ended:
            return


def test_the_last_output_of_the_batch_script(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.change("100", state="FAILED", code=1)
    (wanted.run.root / "logs" / "slurm-100.log").write_text("hello\nmodule: command not found\n\n")
    cause = SlurmLauncher(fake.slurm).status(wanted.run).cause or ""
    assert cause.endswith("slurm-100.log ends with: module: command not found")


def test_a_job_without_any_record(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.jobs = []
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.LOST
    assert mentions(reported.cause, "no longer knows", "100")


def test_slurm_is_asked_once_about_a_run_that_has_ended(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **FINISHED)
    fake.jobs = []
    fake.calls.clear()
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.state, reported.job, reported.waits) == (State.FINISHED, "100", None)
    assert [call[0] for call in fake.calls] == ["squeue"]


def test_many_runs_cost_one_call(tmp_path: Path) -> None:
    fake = Fake()
    runs = [submission(tmp_path, f"r{number}") for number in range(20)]
    for wanted in runs:
        submit(fake, wanted)
    attempt(runs[0].run, **FINISHED)
    fake.change("101", state="RUNNING")
    attempt(runs[1].run)
    fake.calls.clear()
    reported = SlurmLauncher(fake.slurm).statuses([wanted.run for wanted in runs])
    assert [call[0] for call in fake.calls] == ["squeue"]
    assert [how.state for how in reported] == [State.FINISHED, State.RUNNING, *[State.PENDING] * 18]
    assert [how.job for how in reported] == [str(100 + number) for number in range(20)]


def test_of_many_runs_those_without_a_record_cost_one_more(tmp_path: Path) -> None:
    fake = Fake()
    runs = [submission(tmp_path, f"r{number}") for number in range(5)]
    for wanted in runs:
        submit(fake, wanted)
    fake.accounted, fake.jobs = [replace(job, state="CANCELLED") for job in fake.jobs[:2]], fake.jobs[3:]
    fake.calls.clear()
    reported = SlurmLauncher(fake.slurm).statuses([wanted.run for wanted in runs])
    assert [call[0] for call in fake.calls] == ["squeue", "squeue", "sacct"]
    assert [how.state for how in reported] == [State.CANCELLED] * 2 + [State.LOST] + [State.PENDING] * 2


@pytest.mark.parametrize("away", ["dead", "hung"])
def test_a_controller_that_is_away_during_a_status_request(tmp_path: Path, away: str) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run)
    fake.away = away
    slurm = SlurmLauncher(fake.slurm)
    for reported in (slurm.status(wanted.run), *slurm.statuses([wanted.run])):
        assert reported.state is State.RUNNING, "nothing contradicts it"
        assert (reported.waits or "").startswith("the Slurm controller does not answer")


def test_a_job_that_slurm_ends(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **PREEMPTED)
    fake.change("100", state="COMPLETING", nodes="node1")
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert (reported.state, reported.nodes) == (State.RESTARTING, None)
    assert "Slurm ends the job" in (reported.waits or "")


def test_a_machine_without_slurm_reads_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = submission(tmp_path)
    submit(Fake(), wanted)
    attempt(wanted.run)
    monkeypatch.setenv("PATH", str(tmp_path))
    for reported in (SlurmLauncher().status(wanted.run), *SlurmLauncher().statuses([wanted.run])):
        assert reported.state is State.RUNNING
        assert "Slurm is not installed here" in (reported.waits or "")


def test_a_log_is_followed_while_the_job_is_in_the_queue(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    lines = SlurmLauncher(fake.slurm).logs(wanted.run, attempt=None, rank=0, follow=True)
    attempt(wanted.run, **PREEMPTED)
    for number, text in enumerate(("first\n", "second\n")):
        log = wanted.run.log(number, 0)
        log.parent.mkdir(parents=True)
        log.write_text(text)
        assert next(lines) == text.strip()
    fake.away = "dead"
    fake.clock.sleep(POLL)
    with log.open("a") as file:
        file.write("third\n")
    assert next(lines) == "third", "a controller that is away ends nothing"
    fake.away = None
    attempt(wanted.run, 1, **FINISHED)
    assert list(lines) == []


# --- cancelling


def cancelled(fake: Fake, wanted: Submission, *, now: bool = False) -> bool:
    return SlurmLauncher(fake.slurm).cancel(wanted.run, now=now)


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "SPECIAL_EXIT"])
def test_a_waiting_job_is_taken_out_of_the_queue(tmp_path: Path, state: str) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.change("100", state=state)
    assert cancelled(fake, wanted)
    assert fake.jobs[0].state == "CANCELLED"
    assert not wanted.run.stop_request.exists()
    reported = SlurmLauncher(fake.slurm).status(wanted.run)
    assert reported.state is State.CANCELLED
    assert not cancelled(fake, wanted)


def test_a_job_that_starts_while_it_is_cancelled_saves_and_leaves(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    scancel = fake.scancel

    def too_late(arguments: list[str]) -> Answer:
        fake.change("100", state="RUNNING")
        return scancel(arguments)

    fake.scancel = too_late  # type: ignore[method-assign, assignment]
    assert cancelled(fake, wanted)
    assert fake.jobs[0].state == "RUNNING", "it is asked, not killed"
    assert json.loads(wanted.run.stop_request.read_text()) == {"reason": "cancel", "now": False}


def test_a_running_job_is_asked(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run)
    fake.change("100", state="RUNNING")
    assert cancelled(fake, wanted)
    assert fake.count("scancel") == 0
    assert wanted.run.stop_request.exists()


@pytest.mark.parametrize(("state", "now"), [("RUNNING", True), ("SUSPENDED", False), ("COMPLETING", True)])
def test_a_running_job_is_ended(tmp_path: Path, state: str, now: bool) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run)
    fake.change("100", state=state)
    assert cancelled(fake, wanted, now=now)
    assert fake.jobs[0].state == "CANCELLED"
    assert json.loads(wanted.run.stop_request.read_text())["reason"] == "cancel", (
        "the supervisor process knows who asked"
    )
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.CANCELLED


def test_a_run_that_has_ended_is_not_cancelled(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, **FINISHED)
    fake.change("100", state="RUNNING")
    assert not cancelled(fake, wanted)
    assert not wanted.run.stop_request.exists()
    assert fake.jobs[0].state == "RUNNING"


def test_cancelling_without_a_controller(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    fake.away = "dead"
    with pytest.raises(NoAnswer):
        cancelled(fake, wanted)
    attempt(wanted.run)
    assert cancelled(fake, wanted), "a running job sees the file"
    assert wanted.run.stop_request.exists()


def test_a_submission_in_doubt_is_cancelled(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)

    def late_and_gone(one: Fake, job: Job) -> Answer:
        one.away = "hung"
        return late(one, job)

    fake.on_sbatch = late_and_gone
    with pytest.raises(InDoubt):
        submit(fake, wanted)
    fake.away = None
    assert cancelled(fake, wanted)
    assert fake.jobs[0].state == "CANCELLED"
    assert SlurmLauncher(fake.slurm).status(wanted.run).state is State.CANCELLED


# --- chains


def test_a_run_after_others(tmp_path: Path) -> None:
    fake = Fake()
    first, second, third = (submission(tmp_path, name) for name in ("a", "b", "c"))
    for wanted in (first, second):
        submit(fake, wanted)
    submit(fake, replace(third, after=(first.run, second.run)))
    assert fake.jobs[-1].dependency == "afterok:100:101"


def test_one_that_has_finished_needs_no_waiting(tmp_path: Path) -> None:
    fake = Fake()
    first, second, third = (submission(tmp_path, name) for name in ("a", "b", "c"))
    for wanted in (first, second):
        submit(fake, wanted)
    attempt(first.run, **FINISHED)
    submit(fake, replace(third, after=(first.run, second.run)))
    assert fake.jobs[-1].dependency == "afterok:101"
    attempt(second.run, **FINISHED)
    submit(fake, replace(submission(tmp_path, "d"), after=(first.run, second.run)))
    assert fake.jobs[-1].dependency == ""


def test_the_run_file_s_own_dependency_counts_too(tmp_path: Path) -> None:
    fake, first = Fake(), submission(tmp_path, "a")
    submit(fake, first)
    own = submission(tmp_path, "b", backends={"slurm": {"dependency": "afterany:7"}})
    submit(fake, replace(own, after=(first.run,)))
    assert fake.jobs[-1].dependency == "afterany:7,afterok:100"
    either = submission(tmp_path, "c", backends={"slurm": {"dependency": "afterany:7?afterok:8"}})
    with pytest.raises(UserError, match=r"backends\.slurm\.dependency"):
        submit(fake, replace(either, after=(first.run,)))


@pytest.mark.parametrize(
    "end", [{"outcome": "failure", "next": "stop"}, {"outcome": "preempted", "next": "stop", "asked": "cancel"}]
)
def test_one_that_will_not_finish(tmp_path: Path, end: dict[str, Any]) -> None:
    fake, first = Fake(), submission(tmp_path, "a")
    submit(fake, first)
    attempt(first.run, **end)
    with pytest.raises(UserError, match=r"will not finish.*ortflow resume"):
        submit(fake, replace(submission(tmp_path, "b"), after=(first.run,)))
    assert len(fake.jobs) == 1


def test_one_that_is_not_in_slurm(tmp_path: Path) -> None:
    other = RunDir(tmp_path / "other")
    other.root.mkdir()
    other.record_attempt(event="submit", launcher="local")
    with pytest.raises(UserError, match="belongs to the launcher local, not slurm"):
        submit(Fake(), replace(submission(tmp_path), after=(other,)))


def test_waiting_for_a_job_needs_a_controller(tmp_path: Path) -> None:
    fake, first = Fake(), submission(tmp_path, "a")
    submit(fake, first)
    fake.away = "dead"
    with pytest.raises(UserError, match=r"job is unknown.*does not answer"):
        submit(fake, replace(submission(tmp_path, "b"), after=(first.run,)))


# --- the record


def test_history() -> None:
    records = [
        {"event": "submit", "launcher": "local"},
        {"event": "submitting", "launcher": "slurm", "submission": "a"},
        {"event": "refused", "submission": "a"},
        {"event": "submitting", "launcher": "slurm", "submission": "b"},
        {"event": "start"},
        {"event": "submit", "launcher": "slurm", "submission": "b", "job": "7"},
        {"event": "submit", "launcher": "slurm", "job": "8", "follows": "7"},
        {"event": "submitting", "launcher": "slurm", "submission": "c", "time": 5.0},
    ]
    assert [(one.submission, one.job) for one in placed(records, "slurm")] == [
        ("b", "7"),
        (None, "8"),
        ("c", None),
    ]
    assert history.in_doubt(records) == records[-1]
    assert history.in_doubt(records[:-1]) is None
    assert history.in_doubt([*records, {"event": "stop"}]) is None
    ordered = [record["event"] for record in history.in_order(records)]
    assert ordered == ["submit", "submitting", "refused", "submit", "start", "submit", "submitting"]


def test_the_job_of_a_run_is_the_active_one() -> None:
    submissions = [Placed("a", None), Placed("b", "7")]
    old = Job("6", None, "RUNNING", comment="ortflow a")
    new = Job("7", None, "FAILED", comment="ortflow b")
    other = Job("9", None, "RUNNING", comment="ortflow zzz")
    assert history.find(submissions, [other, old, new]) == old
    assert history.find(submissions, [other, new]) == new
    assert history.find(submissions, [other]) is None


def test_the_environment_does_not_change_the_script(tmp_path: Path) -> None:
    script = "#!/bin/bash\n#SBATCH --partition=a\n#SBATCH --time=1\n#SBATCH --no-requeue\n#SBATCH --mem=1G\n"
    environment = {
        "SBATCH_PARTITION": "b", "SBATCH_TIMELIMIT": "2", "SBATCH_REQUEUE": "1", "SBATCH_MEM_PER_NODE": "3",
        "SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1", "SBATCH_ACCOUNT": "mine", "PYTHONPATH": "lib:/abs", "HOME": "/h",
    }  # fmt: skip
    changes = settings(script, environment, tmp_path)
    taken_away = {name for name, value in changes.items() if value is None}
    assert taken_away == {
        "SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_REQUEUE", "SBATCH_MEM_PER_NODE", "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
    }  # fmt: skip
    assert changes["PYTHONPATH"] == f"{tmp_path}/lib:/abs"


def test_the_request_is_of_the_launcher(tmp_path: Path) -> None:
    assert isinstance(SlurmLauncher(Fake().slurm).request(submission(tmp_path)), SlurmRequest)


def test_a_run_that_has_had_a_job_waits_for_the_controller_too(tmp_path: Path) -> None:
    fake, wanted = Fake(), submission(tmp_path)
    submit(fake, wanted)
    attempt(wanted.run, outcome="failure", cause="a rank died", next="stop")
    fake.change("100", state="FAILED")
    fake.away = "dead"
    with pytest.raises(NoAnswer):
        submit(fake, wanted)
    fake.clock.after(6.0, lambda: setattr(fake, "away", None))
    assert submit(fake, replace(wanted, retry=20.0)) == "slurm://101"


@pytest.mark.parametrize("earlier", [False, True], ids=["no job of one's own", "an ended job of one's own"])
def test_a_job_of_another_member_of_the_group(tmp_path: Path, earlier: bool) -> None:
    """`squeue --me` does not show it."""
    fake, wanted = Fake(), submission(tmp_path)
    if earlier:
        submit(fake, wanted)
        attempt(wanted.run, outcome="preempted", asked="cancel", next="stop")
        fake.change("100", state="CANCELLED")
    job = submit(fake, wanted).removeprefix("slurm://")
    attempt(wanted.run, 1)
    fake.others = [replace(one, state="RUNNING") for one in fake.jobs if one.id == job]
    fake.jobs = [one for one in fake.jobs if one.id != job]
    slurm = SlurmLauncher(fake.slurm)
    assert slurm.status(wanted.run).state is State.RUNNING
    assert [how.state for how in slurm.statuses([wanted.run])] == [State.RUNNING]
    with pytest.raises(UserError, match=f"is job {job} in Slurm, running"):
        submit(fake, wanted)
    assert slurm.cancel(wanted.run, now=False)
    assert wanted.run.stop_request.exists()
    fake.others = [replace(one, state="PENDING") for one in fake.others]
    with pytest.raises(UserError, match=rf"job {job} is another user's.*permission denied"):
        slurm.cancel(wanted.run, now=False)
