"""The command line with Slurm: submit, follow, resume, chains, and that no run is active twice."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
from in_process import command_here
from project import ORTFLOW, environment
from waits import PATIENCE, wait_until

from ortflow.workflow.run.rundir import RunDir

RUN = """\
name: {name}
model: {{path: m.onnx, loss: mse}}
data: {{train: {{path: d.arrow}}, micro_batch: 1}}
train: {{steps: 10, optimizer: {{name: sgd, lr: 0.1}}}}
"""
SBATCH = """\
[ "$1" = --version ] && echo 'slurm 23.11.4' && exit
id=$(( $(cat {jobs} 2>/dev/null | wc -l) + 100 ))
comment=$(sed -n 's/^#SBATCH --comment="\\(.*\\)"$/\\1/p' "$2")
sed -n 's/^#SBATCH --dependency=//p' "$2" >> {jobs}.chains
printf '%s\\037' $id $id PENDING Resources N/A N/A 10:00 '' 0 0 name "$comment" 1 '(null)' >> {jobs}
echo >> {jobs}
echo $id
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two run files, and commands that keep jobs in a file."""
    tools, jobs = tmp_path / "tools", tmp_path / "jobs"
    tools.mkdir()
    jobs.touch()
    for name, text in {
        "sbatch": SBATCH.format(jobs=jobs),
        "squeue": f"cat {jobs}",
        "scancel": f'sed -i "s/^${{@: -1}}\\(.*\\)PENDING/${{@: -1}}\\1CANCELLED/" {jobs}',
        "srun": "echo 'srun: error: Unable to confirm allocation' >&2; exit 1",
    }.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    for file in ("m.onnx", "d.arrow"):
        (tmp_path / file).touch()
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(RUN.format(name=name))
    return tmp_path


def run_dir(place: Path, name: str = "one") -> RunDir:
    return RunDir(place / "runs" / name)


def end(run: RunDir, outcome: str = "finished", **fields: object) -> None:
    run.record_attempt(event="start", attempt=0)
    run.record_attempt(event="end", attempt=0, outcome=outcome, next="stop", cause=outcome, **fields)


def leave(place: Path, state: str = "COMPLETED") -> None:
    """Every job has ended."""
    jobs, new = place / "jobs", place / "jobs.new"
    new.write_text(jobs.read_text().replace("PENDING", state).replace("RUNNING", state))
    new.replace(jobs)  # at once: a command may be reading it


def tell(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command_here(*arguments, folder=folder)


def test_a_run_from_submit_to_resume(place: Path) -> None:
    done = tell(place, "submit", "-b", "slurm", "one.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "slurm://100"
    reported = json.loads(tell(place, "status", "one", "--json").stdout)
    assert (reported["state"], reported["job"], reported["launcher"]) == ("pending", "100", "slurm")
    assert "waits       waits for free nodes" in tell(place, "status", "one").stdout
    listed = tell(place, "list").stdout.splitlines()
    assert listed[0].split() == ["NAME", "STATE", "STEP", "LOSS", "UPDATED", "JOB", "WAITS"]
    assert "100  waits for free nodes" in listed[1]

    for arguments in (("run", "one.yaml"), ("run", "--fresh", "one.yaml"), ("submit", "one.yaml"), ("resume", "one")):
        refused = tell(place, *arguments)
        assert refused.returncode == 2, arguments
        assert "job 100" in refused.stderr
        assert "ortflow cancel" in refused.stderr
    assert run_dir(place).run_file.exists()

    assert tell(place, "cancel", "one").stdout == "one: cancelled at step 0\n"
    again = tell(place, "resume", "one")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines()[0] == "slurm://101", "where it was"
    assert run_dir(place).read_attempts()[-1]["new_budget"] is True


def test_chains_by_name(place: Path) -> None:
    assert tell(place, "submit", "-b", "slurm", "one.yaml").returncode == 0
    done = tell(place, "submit", "-b", "slurm", "two.yaml", "--after", "one")
    assert done.returncode == 0, done.stderr
    assert (place / "jobs.chains").read_text() == "afterok:100\n"
    for arguments, words in {
        ("two.yaml", "--after", "nobody", "-b", "slurm"): "there is no run nobody",
        ("two.yaml", "--after", "one"): "--after: runs of the launcher local cannot depend on others; add -b slurm",
    }.items():
        refused = tell(place, "submit", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr


@pytest.mark.parametrize(
    ("outcome", "fields", "code"),
    [
        ("finished", {}, 0),
        ("failure", {"why": "the budget of 3 failures is spent"}, 1),
        ("user_error", {}, 2),
        ("preempted", {"asked": "cancel", "why": "requested by ortflow cancel"}, 75),
    ],
)
def test_following_to_the_end(place: Path, outcome: str, fields: dict[str, str], code: int) -> None:
    def run_supervisor() -> None:
        run = run_dir(place)
        wait_until(lambda: "submit" in [record["event"] for record in run.read_attempts()])
        run.events(0).parent.mkdir()
        run.events(0).write_text('{"event":"finished","time":1.0,"attempt":0,"rank":0,"step":10}\n')
        end(run, outcome, **fields)
        leave(place)

    thread = threading.Thread(target=run_supervisor)
    thread.start()
    done = tell(place, "submit", "-b", "slurm", "one.yaml", "--follow")
    thread.join()
    assert done.returncode == code, done.stderr
    assert "finished at step 10" in done.stdout


def test_a_finished_run_is_reported(place: Path) -> None:
    tell(place, "submit", "-b", "slurm", "one.yaml")
    end(run_dir(place))
    leave(place)
    done = tell(place, "submit", "-b", "slurm", "one.yaml")
    assert done.returncode == 0
    assert "`ortflow resume one train.steps=20`" in done.stdout


def test_what_changed_is_reported(place: Path) -> None:
    tell(place, "submit", "-b", "slurm", "one.yaml")
    end(run_dir(place))
    leave(place)
    done = tell(place, "resume", "one", "train.steps=20", "train.optimizer.lr=0.01")
    assert done.returncode == 0, done.stderr
    assert "train.steps: 10 before, 20 now\ntrain.optimizer.lr: 0.1 before, 0.01 now\n" in done.stdout


def test_a_log_that_has_not_begun_is_explained(place: Path) -> None:
    tell(place, "submit", "-b", "slurm", "one.yaml")

    with subprocess.Popen(
        [*ORTFLOW, "logs", "-f", "one"], cwd=place, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as follower:  # fmt: skip
        assert follower.stderr is not None
        assert "one is pending: waits for free nodes" in follower.stderr.readline()
        # Before its end is on record: the follower stops there.
        run_dir(place).log(0, 0).parent.mkdir(parents=True)
        run_dir(place).log(0, 0).write_text("hello\n")
        end(run_dir(place))
        leave(place)
        assert follower.communicate(timeout=PATIENCE)[0] == "hello\n"
