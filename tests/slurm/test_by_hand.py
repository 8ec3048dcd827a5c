"""A batch script that `ortflow render` printed and that a user submits with sbatch, any number of times."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import ENDS, Cluster, Run, same_end, slow, unlocked
from messages import mentions, says
from project import curve
from testbed import FINAL, wait_until


def rendered(cluster: Cluster, name: str, *arguments: str, **changes: object) -> Path:
    """Write the output of render to a file; a second render must give the same."""
    file = cluster.write(name, **changes)
    texts = []
    for _ in range(2):
        done = cluster.ortflow("render", "--backend", "slurm", file.name, *arguments)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    script = cluster.project.folder / f"{name}.sh"
    script.write_text(texts[0])
    return script


def sbatch(cluster: Cluster, script: Path, *options: str) -> str:
    return cluster.testbed.sbatch(f"--chdir={cluster.project.folder}", *options, str(script))


def words(cluster: Cluster, job: str) -> str:
    """The other entries in the folder."""
    return (cluster.project.folder / f"slurm-{job}.out").read_text()


@pytest.mark.rotates("Slurm by hand")
def test_a_fresh_run_begins_by_itself_and_comes_back(cluster_of: Cluster, undisturbed: Run) -> None:
    """It resumes after a preemption."""
    script = rendered(cluster_of, "by-hand", **slow(0.3, attempts=1))
    assert not cluster_of.project.run_dir("by-hand").exists(), "render creates nothing"
    edited = script.read_text().replace("#SBATCH --signal", "#SBATCH --partition=main\n#SBATCH --signal")
    script.write_text(edited.replace("\nexec ", "\nexport EDITED=1\nexec "))
    job = sbatch(cluster_of, script)
    run = Run(cluster_of, "by-hand")
    run_dir = run.run_dir
    wait_until(lambda: run.steps() >= 7, ENDS, lambda: words(cluster_of, job))
    run.testbed.preempt(job, seconds=3)
    run.finish()
    same_end(run, undisturbed)
    assert run.outcomes() == ["preempted", "finished"]
    assert run.job == job
    assert run.status()["state"] == "finished"
    assert f"{run_dir}/logs/slurm-{job}.log" in words(cluster_of, job)
    assert "by-hand" in cluster_of.ortflow("list").stdout
    again = sbatch(cluster_of, script)
    assert cluster_of.testbed.ended(again, 60)["JobState"] == "COMPLETED"
    assert words(cluster_of, again).count("\n") == 1
    assert "has finished" in words(cluster_of, again)


@pytest.mark.rotates("Slurm by hand")
def test_a_second_submission_leaves_the_first_alone(cluster_of: Cluster, undisturbed: Run) -> None:
    script = rendered(cluster_of, "twice", **slow(0.3))
    first = sbatch(cluster_of, script, "--nodelist=" + ",".join(cluster_of.testbed.nodes[:2]))
    run = Run(cluster_of, "twice")
    wait_until(lambda: run.steps() >= 3, ENDS, lambda: words(cluster_of, first))
    second = sbatch(cluster_of, script)
    wait_until(lambda: cluster_of.testbed.state(second) in FINAL, ENDS)
    assert cluster_of.testbed.job(second)["ExitCode"] == "2:0"
    reported = words(cluster_of, second)
    assert reported.count("\n") == 1, reported
    assert mentions(reported, f"job {first} … {run.run_dir} … running")
    assert not (run.run_dir / f"logs/slurm-{second}.log").exists()
    # The script in the run directory has no other submission's token, and takes the run over as little as ours does.
    third = sbatch(cluster_of, run.run_dir / "slurm/job.sh")
    wait_until(lambda: cluster_of.testbed.state(third) in FINAL, ENDS)
    assert f"job {first} has the run" in words(cluster_of, third)
    submitted = cluster_of.ortflow("submit", "-b", "slurm", "twice.yaml")
    assert submitted.returncode == 2
    assert f"is job {first} in Slurm, running" in submitted.stderr
    run.finish()
    assert run.job == first
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]


@pytest.mark.rotates("Slurm by hand")
@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_two_that_begin_in_the_same_moment(cluster_of: Cluster, locks: bool) -> None:
    name = "both" if locks else "both-unlocked"
    short = {"train__steps": 6, "train__schedule": {"name": "constant"}}
    script = rendered(cluster_of, name, **short, **({} if locks else unlocked()))
    start = int(time.time()) + 6
    begin = time.strftime("--begin=%Y-%m-%dT%H:%M:%S", time.localtime(start))
    jobs = [sbatch(cluster_of, script, begin) for _ in range(2)]
    for job in jobs:
        wait_until(lambda job=job: cluster_of.testbed.state(job) in FINAL, ENDS, lambda job=job: words(cluster_of, job))
    states = sorted(cluster_of.testbed.state(job) for job in jobs)
    run = Run(cluster_of, name)
    assert states == ["COMPLETED", "FAILED"], run.transcript()
    assert run.outcomes() == ["finished"]
    loser = next(job for job in jobs if cluster_of.testbed.state(job) == "FAILED")
    assert "error: " in words(cluster_of, loser)
    assert len(curve(run.run_dir)) == 6


@pytest.mark.rotates("Slurm by hand")
def test_the_script_of_a_submission_by_hand(cluster_of: Cluster, undisturbed: Run) -> None:
    """Two jobs with one comment: the second exits."""
    run = cluster_of.submit("owned", **slow(0.3))
    first = run.job
    run.until_step(3)
    second = sbatch(cluster_of, run.run_dir / "slurm/job.sh")
    wait_until(lambda: cluster_of.testbed.state(second) in FINAL, ENDS)
    assert f"job {first} has the run" in (run.run_dir / f"logs/slurm-{second}.log").read_text()
    run.finish()
    same_end(run, undisturbed)
    assert run.outcomes() == ["finished"]


@pytest.mark.rotates("Slurm by hand")
def test_it_continues_where_it_was_stopped(cluster_of: Cluster, undisturbed: Run) -> None:
    script = rendered(cluster_of, "goes-on", **slow(0.2, attempts=2))
    first = sbatch(cluster_of, script)
    run = Run(cluster_of, "goes-on")
    wait_until(lambda: run.steps() >= 7, ENDS, lambda: words(cluster_of, first))
    waiting = sbatch(cluster_of, script, "--begin=now+1hour")
    done = cluster_of.ortflow("cancel", "goes-on", timeout=90)
    assert done.returncode == 0, done.stderr
    assert run.status()["state"] == "cancelled"
    assert cluster_of.testbed.ended(waiting, 30)["JobState"] == "CANCELLED", "it would have started an unwanted run"
    done = cluster_of.ortflow("resume", "goes-on")
    assert done.returncode == 0, done.stderr
    run.until_step(14)
    run.testbed.reported("scancel", run.job)
    run.until_state("cancelled", timeout=120)
    third = sbatch(cluster_of, script)
    wait_until(lambda: cluster_of.testbed.state(third) in FINAL, ENDS, run.transcript)
    assert run.job == third
    run.finish()
    same_end(run, undisturbed)


def test_prepare_runs_in_the_job(cluster_of: Cluster) -> None:
    folder = cluster_of.project.folder
    script = rendered(
        cluster_of, "prepares", train__steps=4, train__schedule={"name": "constant"},
        model__path="made.onnx", prepare=["cp", "model.onnx", "made.onnx"],
    )  # fmt: skip
    assert not (folder / "made.onnx").exists()
    job = sbatch(cluster_of, script)
    wait_until(lambda: cluster_of.testbed.state(job) in FINAL, ENDS)
    assert cluster_of.testbed.state(job) == "COMPLETED", words(cluster_of, job)
    (folder / "made.onnx").unlink()


def test_a_sweep(cluster_of: Cluster) -> None:
    small = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1}
    script = rendered(
        cluster_of, "swept", "--set", "seed=1..2",
        train__steps=4, train__schedule={"name": "constant"}, resources=small,
    )  # fmt: skip
    array = sbatch(cluster_of, script)
    for task in range(2):
        run = Run(cluster_of, f"swept-{task}")
        wait_until(lambda task=task: cluster_of.testbed.state(f"{array}_{task}") in FINAL, ENDS)
        assert run.status()["state"] == "finished", run.transcript()
        assert run.job == f"{array}_{task}"
        assert f"seed: {task + 1}" in (run.run_dir / "run.yaml").read_text()


@pytest.mark.parametrize("allocation", [["--mem-per-cpu=200"], ["--mem=200", "--gpus=1", "--hint=nomultithread"]])
def test_sbatch_inside_an_allocation(cluster_of: Cluster, allocation: list[str]) -> None:
    """sbatch passes on the variables of that job; srun would read its requests for memory and GPUs as options."""
    small = {"nodes": 1, "ranks_per_node": 2, "cpus_per_rank": 1, "memory": "500Mi"}
    name = f"inside-{len(allocation)}"
    short = {"train__steps": 4, "train__schedule": {"name": "constant"}, "resources": small}
    script = rendered(cluster_of, name, **short)
    inside = ["sbatch", "--parsable", f"--chdir={cluster_of.project.folder}", str(script)]
    job = cluster_of.testbed.reported("salloc", "--quiet", "--nodes=1", *allocation, *inside)
    run = Run(cluster_of, name)
    wait_until(lambda: cluster_of.testbed.state(job) in FINAL, ENDS)
    assert cluster_of.testbed.state(job) == "COMPLETED", run.transcript()
    assert run.outcomes() == ["finished"], run.transcript()


@pytest.mark.chaos
@pytest.mark.parametrize("place", ["script", "environment"])
def test_another_signal_ahead_of_the_time_limit(cluster_of: Cluster, undisturbed: Run, place: str) -> None:
    """`--signal=B:USR1@30` as users of other tools write it, and SBATCH_SIGNAL, which signals the ranks."""
    name = f"usr1-{place}"
    script = rendered(cluster_of, name, resources__time_limit="00:01:00", **slow(1.2, 1))
    options = ["sbatch", "--parsable", f"--chdir={cluster_of.project.folder}", str(script)]
    if place == "script":
        text = script.read_text()
        assert "--signal=B:USR2@" in text
        script.write_text(text.replace("--signal=B:USR2@30", "--signal=B:USR1@30"))
    else:
        options = ["env", "SBATCH_SIGNAL=USR1@30", *options]
    job = cluster_of.testbed.reported(*options)
    run = Run(cluster_of, name)
    wait_until(lambda: cluster_of.testbed.state(job) in FINAL, ENDS, lambda: words(cluster_of, job))
    assert cluster_of.testbed.state(job) == "COMPLETED", run.transcript()
    same_end(run, undisturbed)
    *ends, _ = run.records("end")
    assert ends, run.transcript()
    assert {end["outcome"] for end in ends} == {"preempted"}, run.transcript()
    assert run.status()["preemptions"] == 0


@pytest.mark.rotates("Slurm by hand")
def test_folders_that_slurm_has_patterns_for(cluster_of: Cluster) -> None:
    small = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1}
    short = {"train__steps": 4, "train__schedule": {"name": "constant"}, "resources": small}
    places = ["a%j", "b%t", "c%a", "d%A", "e%%n%N"]
    jobs = {}
    for place in places:
        file = cluster_of.write("odd", run_dir=f"{place}/odd", **short)
        done = cluster_of.ortflow("submit", "-b", "slurm", file.name)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("\n") <= 2
        jobs[place] = done.stdout.split("slurm://")[1].split()[0]
    for place, job in jobs.items():
        root = cluster_of.project.folder / place / "odd"
        wait_until(lambda job=job: cluster_of.testbed.state(job) in FINAL, ENDS)
        assert cluster_of.testbed.state(job) == "COMPLETED"
        assert (root / f"logs/slurm-{job}.log").read_text()
        reported = cluster_of.ortflow("status", str(root))
        assert "finished" in reported.stdout, reported
    assert {path.name for path in cluster_of.project.folder.glob("*%*") if path.is_dir()} == set(places)


def test_run_outside_of_a_job(cluster_of: Cluster) -> None:
    script = rendered(cluster_of, "no-job")
    done = cluster_of.testbed.ask("bash", str(script))
    assert done.returncode == 2
    assert says(done.stdout, "error: … inside a Slurm job … sbatch")
