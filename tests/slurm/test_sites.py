"""Sites with unusual settings: accounting, limits, a slow controller, no requeue, another signal.

Each has a testbed of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import PACE, STARTS, Cluster, Run, same_end, slow
from conftest import QUICK, start, stop
from messages import mentions
from project import Project, of_kind
from testbed import FINAL, Testbed, wait_until

pytestmark = pytest.mark.chaos
LATER = {"backends__slurm__begin": "now+1hour"}
MakeSite = Callable[..., Cluster]


@pytest.fixture
def site(cluster: Testbed, project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeSite]:
    """Makes a testbed with more options."""
    testbeds = []

    def make(*options: str) -> Cluster:
        port = 18000 + os.getpid() % 100 * 10
        folder = Path(f"/var/tmp/ortflow-slurm-site-{port}")
        testbed = start(folder, port, [tmp_path_factory.getbasetemp()], *QUICK, *options)
        testbeds.append(testbed)
        return Cluster(testbed, project)

    yield make
    for testbed in testbeds:
        stop(testbed)


def test_accounting_remembers_what_the_queue_has_forgotten(site: MakeSite) -> None:
    there = site("--accounting", "--set", "MinJobAge=2")
    run = there.submit("forgotten", **LATER)
    there.testbed.reported("scancel", run.job)
    wait_until(lambda: run.job not in there.testbed.ask("scontrol", "show", "job", run.job).stdout, 120)
    wait_until(lambda: "CANCELLED" in there.testbed.reported("sacct", "-n", "-j", run.job, "-o", "state%30"), 120)
    reported = run.status()
    assert reported["state"] == "cancelled"
    assert "cancelled in Slurm" in reported["cause"]


def test_without_accounting_the_end_is_unknown(site: MakeSite) -> None:
    there = site("--set", "MinJobAge=2")
    run = there.submit("unknown", **LATER)
    there.testbed.reported("scancel", run.job)
    wait_until(lambda: run.job not in there.testbed.ask("scontrol", "show", "job", run.job).stdout, 120)
    reported = run.status()
    assert reported["state"] == "lost"
    assert run.job in reported["cause"]
    done = there.ortflow("resume", "unknown")
    assert done.returncode == 0, done.stderr


def test_limits_are_reported_by_the_keys_of_the_run_file(site: MakeSite) -> None:
    there = site("--accounting", "--enforce", "associations,limits,qos")
    there.testbed.reported("sacctmgr", "-i", "add", "account", "lab")
    there.testbed.reported("sacctmgr", "-i", "add", "user", "root", "account=lab")
    for key, value in (("account", "nope"), ("qos", "nope")):
        file = there.write(f"bad-{key}", **{f"backends__slurm__{key}": value})
        done = there.ortflow("submit", "--backend", "slurm", file.name)
        assert done.returncode == 2, done.stderr
        assert f"backends.slurm.{key}" in done.stderr
    there.testbed.reported("sacctmgr", "-i", "modify", "account", "lab", "set", "GrpTRES=cpu=1")
    run = there.submit("limited", backends__slurm__account="lab")
    wait_until(lambda: "Assoc" in there.testbed.job(run.job)["Reason"], 120, lambda: str(there.testbed.job(run.job)))
    assert "account" in run.status()["waits"]


SLOW_CONTROLLER = """
function slurm_job_submit(description, partitions, user)
  os.execute("sleep 8")
  return slurm.SUCCESS
end
function slurm_job_modify(description, record, partitions, user) return slurm.SUCCESS end
return slurm.SUCCESS
"""


def test_a_slow_controller_gets_the_run_once(site: MakeSite) -> None:
    """sbatch reports a time-out although the job was queued: a second submission must find it."""
    there = site()
    testbed = there.testbed
    (testbed.folder / "etc/job_submit.lua").write_text(SLOW_CONTROLLER)
    testbed.controller("stop")
    with (testbed.folder / "etc/slurm.conf").open("a") as conf:
        conf.write("JobSubmitPlugins=lua\n")
    testbed.controller("start")
    file = there.write("slowly", **LATER)
    first = there.ortflow("submit", "--backend", "slurm", file.name)
    again = there.ortflow("submit", "--backend", "slurm", "--retry", "60", file.name, timeout=120)
    assert again.returncode == 0 or "is job" in again.stderr, f"{first}\n{again}"
    time.sleep(10)
    assert testbed.reported("squeue", "-h", "-o", "%j").split() == ["slowly"]
    assert Run(there, "slowly").status()["state"] == "pending"


@pytest.mark.parametrize("grace", ["0", "15"])
def test_where_nothing_is_requeued_another_job_follows(site: MakeSite, undisturbed: Run, grace: str) -> None:
    there = site("--grace", grace, "--set", "JobRequeue=0")
    name = f"follows-{grace}"
    run = there.submit(name, backends__slurm__requeue=False, **slow(PACE, attempts=1))
    first = run.job
    run.until_step(15)
    there.testbed.preempt(first)
    wait_until(lambda: run.job != first, STARTS, run.transcript)
    run.finish()
    same_end(run, undisturbed)
    assert run.outcomes() == ["preempted", "finished"]
    assert not of_kind(run.run_dir, "rewind")
    assert there.testbed.state(first) in FINAL


@pytest.mark.parametrize("grace", ["0", "15"])
def test_preemption_with_another_signal(site: MakeSite, undisturbed: Run, grace: str) -> None:
    """USR2 comes first, and with no grace TERM right behind it."""
    there = site("--grace", grace, "--preempt-signal")
    run = there.submit(f"told-{grace}", **slow(PACE, attempts=1))
    run.until_step(15)
    there.testbed.preempt(run.job)
    run.finish()
    same_end(run, undisturbed)
    assert run.restarts == 1
    assert run.outcomes() == ["preempted", "finished"]
    assert not of_kind(run.run_dir, "rewind")


def test_a_rank_that_does_not_leave_in_time(site: MakeSite, undisturbed: Run) -> None:
    """A step longer than the grace period: killed before it has saved, and resumed from the checkpoint before."""
    there = site("--set", "KillWait=2")
    run = there.submit("late", **slow(10.0, attempts=1))
    run.until_step(2)
    there.testbed.preempt(run.job)
    run.finish()
    same_end(run, undisturbed)
    assert run.restarts == 1
    assert run.status()["failures"] == 0


def test_the_doctor_reports_the_limits_of_a_qos(site: MakeSite) -> None:
    there = site("--accounting", "--enforce", "associations,limits,qos")
    for words in ("add account lab", "add user root account=lab", "add qos small MaxTRESPerJob=node=1 MaxWall=10:00"):
        there.testbed.reported("sacctmgr", "-i", *words.split())
    there.testbed.reported("sacctmgr", "-i", "modify", "user", "root", "set", "qos=normal,small")
    limits = {"backends__slurm__account": "lab", "resources__time_limit": "00:20:00"}
    file = there.write("too-much", **limits, backends__slurm__qos="small")
    reported = there.ortflow("doctor", "-b", "slurm", file.name)
    assert reported.returncode == 1
    assert mentions(reported.stdout, "QOS small", "1 node", "MaxTRESPerJob", "2")
    assert mentions(reported.stdout, "QOS small", "00:10:00", "MaxWall", "00:20:00")
    run = there.submit("too-much", **limits, backends__slurm__qos="small")
    wait_until(lambda: "QOS" in there.testbed.job(run.job)["Reason"], 120, lambda: str(there.testbed.job(run.job)))
    fine = there.ortflow("doctor", "-b", "slurm", there.write("little", **limits).name)
    assert "MaxTRESPerJob" not in fine.stdout
