"""A launcher for another batch scheduler on top of `ortflow.launchers.batch`, on a real Grid Engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from site_of_gridengine import Site, grid_engine

from ortflow.launchers.attempts.tail import last_records

pytestmark = pytest.mark.rotates("Grid Engine")

SLOW = {"FAKE_STEPS": "100000", "FAKE_PAUSE": "0.05"}


def steps(count: int, seconds: float = 0.05) -> dict[str, str]:
    return {"FAKE_STEPS": str(count), "FAKE_PAUSE": str(seconds)}


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def test_a_run_goes_through_every_verb(site: Site) -> None:
    site.write("one")
    rendered = site.ortflow("render", "run.yaml", "-b", "gridengine").stdout
    assert "#$ -pe smp 2\n" in rendered
    job = site.submit(**steps(100))
    finished = site.wait("one", "finished")
    assert (finished["launcher"], finished["job"], finished["attempts"]) == ("gridengine", job, 1)
    assert "rank 1 of 2 begins attempt 0" in site.ortflow("logs", "one", "--rank", "1").stdout
    listed = json.loads(site.ortflow("list", "-b", "gridengine", "--json").stdout)
    assert [how["name"] for how in listed] == ["one"]


def test_a_running_job_is_cancelled_and_the_run_resumed(site: Site) -> None:
    site.write("two")
    job = site.submit(**SLOW)
    running = site.wait("two", "running", step=3)
    assert (running["launcher"], running["job"], bool(running["nodes"])) == ("gridengine", job, True)
    again = site.ortflow("submit", "run.yaml", "-b", "gridengine")
    assert (again.returncode, f"is job {job} in Grid Engine" in again.stderr) == (2, True), again.stderr
    assert site.ortflow("cancel", "two").returncode == 0
    site.wait("two", "cancelled")
    site.until(lambda: job not in site.ask("qstat"))  # neither succeeds nor is started again
    saved = int((site.run("two").root / "saved").read_text())
    resumed = site.ortflow("resume", "two", **steps(saved + 10))
    assert resumed.returncode == 0, resumed.stderr
    assert site.wait("two", "finished")["attempts"] == 2
    assert [(end["outcome"], end.get("asked")) for end in site.ends("two")] == [
        ("preempted", "cancel"), ("finished", None)
    ]  # fmt: skip


def test_a_waiting_job_leaves_the_queue(site: Site) -> None:
    site.write("three")
    site.ask("qmod", "-d", "main")
    try:
        job = site.submit()
        assert site.wait("three", "pending")["waits"] == "waits for a free queue"
        site.ask("qhold", job)
        assert "`qrls" in site.status("three")["waits"]
        assert site.ortflow("cancel", "three").returncode == 0
        assert site.status("three")["state"] == "cancelled"
        assert job not in site.ask("qstat")
    finally:
        site.ask("qmod", "-e", "main")


def test_a_preempted_job_continues_where_it_was(site: Site) -> None:
    site.write("four")
    job = site.submit(**SLOW)
    site.wait("four", "running", step=20)
    site.ask("qmod", "-rj", job)
    saved = site.run("four").root / "saved"
    site.until(saved.exists, lambda: site.log("four"))
    how = site.wait("four", "running", step=int(saved.read_text()) + 1)
    assert (how["attempts"], how["preemptions"], how["failures"], how["job"]) == (2, 1, 0, job)
    (end,) = site.ends("four")
    assert (end["outcome"], end["next"]) == ("preempted", "restart")
    assert "started again by Grid Engine" in site.log("four")
    (resumed,) = (record for record in last_records(site.run("four").events(0)) if record["event"] == "resume")
    assert resumed["step"] == int(saved.read_text()) >= 20


def test_qdel_cancels_the_run(site: Site) -> None:
    site.write("five")
    job = site.submit(**SLOW)
    site.wait("five", "running", step=3)
    site.ask("qdel", job)
    how = site.wait("five", "cancelled")
    assert how["why"] == "requested by the scheduler's command"
    assert (site.run("five").root / "saved").exists(), "its ranks have saved"
    site.until(lambda: job not in site.ask("qstat"))


def test_ranks_save_ahead_of_the_time_limit_and_the_job_starts_again(site: Site) -> None:
    site.write("six", resources={"ranks_per_node": 1, "python": str(site.folder / "python"), "time_limit": "00:00:40"})
    job = site.submit(**SLOW)
    site.until(lambda: site.status("six")["attempts"] > 1, lambda: site.log("six"))
    how = site.status("six")
    assert (how["job"], how["preemptions"]) == (job, 0), "a time limit counts against no budget"
    assert site.ends("six")[0]["cause"].endswith("the time limit is near")


def test_a_failure_is_repaired_inside_the_job(site: Site) -> None:
    site.write("seven")
    script = json.dumps({0: {"rank": 1, "step": 5, "do": "signal 9"}})
    site.submit(**steps(20), FAKE_SCRIPT=script)
    how = site.wait("seven", "finished")
    assert (how["attempts"], how["failures"]) == (2, 1)
    assert site.ends("seven")[0]["cause"] == "rank 1 was killed by SIGKILL"


def test_a_script_that_is_submitted_by_hand(site: Site) -> None:
    site.write("eight")
    (site.folder / "job.sh").write_text(site.ortflow("render", "run.yaml", "-b", "gridengine").stdout)
    environment = {**steps(100), "PYTHONPATH": str(site.packages)}
    variables = ",".join(f"{name}={value}" for name, value in environment.items())
    for _ in range(2):
        site.ask("qsub", "-terse", "-v", variables, "job.sh")
    site.until(site.run("eight").run_file.exists)  # the first job makes the run directory
    assert site.wait("eight", "finished")["attempts"] == 1
    site.until(lambda: not site.ask("qstat"))
    printed = "".join(path.read_text() for path in site.folder.glob("eight.o*"))
    # The second job of the script ends: the run is the first one's.
    assert re.search(r"has the run in .*eight|eight is in use by|this job has nothing to do", printed), printed


def test_a_scheduler_that_is_away(site: Site) -> None:
    site.write("nine")
    done = site.ortflow("submit", "run.yaml", "-b", "gridengine", SGE_QMASTER_PORT="9")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "Grid Engine does not answer" in done.stderr
    assert "nothing was submitted" in done.stderr
    assert not site.run("nine").root.exists()


def test_a_testbed_takes_its_jobs_with_it(tmp_path: Path, cluster: dict[str, str], packages: Path) -> None:
    with grid_engine(tmp_path / "cell", 1) as variables:
        assert variables["SGE_ROOT"] != cluster["SGE_ROOT"]
        site = Site(tmp_path, variables, packages)
        site.write("eleven")
        site.submit(**SLOW)
        site.wait("eleven", "running", step=3)
        job = {process for process in psutil.process_iter() if str(tmp_path) in " ".join(cmdline(process))}
        assert len(job) > 2, "the daemons, the job's script and its ranks"
    # A container's first process may leave ended ones unread: zombies.
    assert not [process for process in job if process.is_running() and cmdline(process)]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("backends.gridengine.queue=nowhere", "nowhere"),
        ("resources.nodes=2", "backends.gridengine: starts ranks on one host"),
    ],
)
def test_what_is_refused_leaves_nothing_behind(site: Site, option: str, message: str) -> None:
    site.write("ten", backends={"gridengine": {}})
    done = site.ortflow("submit", "run.yaml", "-b", "gridengine", option)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert not site.run("ten").root.exists()
