"""Sweeps: the values, one array for all runs, each run as if it were alone, the table of results."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Fake, late
from slurm_scripts import CASES, PLAIN, common
from waits import PATIENCE

from ortflow.cli import sweep as cli
from ortflow.cli.sweep_table import results
from ortflow.launchers.batch import sweeps
from ortflow.launchers.batch.job_submission import InDoubt
from ortflow.launchers.records import State
from ortflow.launchers.slurm import sweep
from ortflow.launchers.slurm.commands import NoAnswer
from ortflow.launchers.slurm.current_job import SlurmJob
from ortflow.launchers.slurm.jobs import Job
from ortflow.launchers.slurm.launcher import SlurmLauncher
from ortflow.launchers.slurm.runner import Answer
from ortflow.launchers.status import RunStatus
from ortflow.launchers.sweeps import Sweep, SweepDir, read_sweep
from ortflow.manifests.array import run_file
from ortflow.manifests.slurm import launch, script
from ortflow.manifests.slurm.placement import TASK
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.file.combinations import combinations, read_axes
from ortflow.workflow.spec.file.dump import dump_run_file
from ortflow.workflow.spec.file.load import load_run_file, load_run_text

RUN = """\
name: gpt
model: {path: m.onnx, loss: mse}
data: {train: {path: d.arrow}, micro_batch: 1}
train: {steps: 10, optimizer: {name: sgd, lr: 0.1}}
"""
RATES = "train.optimizer.lr=1e-3,3e-4"
FINISHED = {"outcome": "finished", "next": "stop", "cause": "finished"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run file and its inputs."""
    for file in ("m.onnx", "d.arrow"):
        (tmp_path / file).touch()
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wanted(
    fake: Fake, *sets: str, overrides: tuple[str, ...] = (), at_once: int | None = None, **options: Any
) -> sweep.SweepRequest:
    launcher = SlurmLauncher(fake.slurm)
    planned = cli.plan_sweep(Path("run.yaml"), overrides, sets, Path("runs"), launcher, "slurm", **options)
    return launcher.request_sweep(*planned, at_once)


def submit(fake: Fake, *sets: str, **options: Any) -> str:
    return sweeps.submit(wanted(fake, *sets, **options), fake.slurm)


def run(task: int) -> RunDir:
    return RunDir(Path.cwd() / "runs" / f"gpt-{task}")


def events(task: int) -> list[str]:
    return [record["event"] for record in run(task).read_attempts()]


def over(fake: Fake) -> None:
    """End all jobs."""
    for job in [*fake.jobs]:
        fake.change(job.id, state="COMPLETED")


def finish(*tasks: int, **end: Any) -> None:
    for task in tasks:
        run(task).record_attempt(event="start", attempt=0)
        run(task).record_attempt(event="end", attempt=0, **(end or FINISHED))


# --- values


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=1..4", ["1", "2", "3", "4"]),
        ("seed=-1..1,7", ["-1", "0", "1", "7"]),
        ("seed=5..5", ["5"]),
        (RATES, ["1e-3", "3e-4"]),
        ("train.optimizer.betas=[0.9, 0.95],[0.9,0.999]", ["[0.9, 0.95]", "[0.9,0.999]"]),
        ("train.optimizer={name: sgd, lr: 1},{name: adamw, lr: 1}", ["{name: sgd, lr: 1}", "{name: adamw, lr: 1}"]),
        ("model.path='a,b.onnx',\"c,d\"", ["'a,b.onnx'", '"c,d"']),
        ("model.path=it's,b", ["it's", "b"]),
        ("model.parameters.freeze=['a,]b'],[c]", ["['a,]b']", "[c]"]),
        ("train.clip_norm=null, 1", ["null", "1"]),
        ("x=1..b,1.5..2", ["1..b", "1.5..2"]),
    ],
)
def test_values(text: str, values: list[str]) -> None:
    (axis,) = read_axes([text])
    assert list(axis.values) == values


def test_the_last_key_changes_fastest() -> None:
    found = [*combinations(read_axes(["a=1,2", "b=x,y"]))]
    assert found == [{"a": a, "b": b} for a in "12" for b in "xy"]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["seed"], r"--set seed.*KEY=VALUE"),
        (["a..b=1"], "has no key"),
        (["seed=4..1"], r"seed.*4 to 1.*1..4"),
        (["seed=1,,2"], "seed has an empty value"),
        (["seed="], "seed has an empty value"),
        (["seed=1..3,2"], "seed has the value 2 twice"),
        (["seed=1", "seed=2"], "seed is given twice"),
        (["train.steps=1,2", "train={}"], "train and train.steps are both given"),
        (["monitor.every_steps=1,2"], "monitor.every_steps is given twice"),
        (["a=[1,2"], r"a lacks a \]"),
        (["a='1,2"], "a has an unclosed '"),
        (["seed=1..999999999999"], "more than 100000 runs"),
        (["a=1..1000", "b=1..1000"], "more than 100000 runs"),
    ],
)
def test_invalid_values(sets: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_axes(sets, ["monitor.every_steps=3"])


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["seed=1,x"], "on the command line, seed: "),
        (["train.optimiser.lr=1"], "on the command line, train.optimiser"),
        (["seed=1..2", "train.optimizer.lr=0.1,{"], "a lacks|lacks a }"),
        (["seed=1..2", "model.path=m.onnx,n.onnx"], "there is no file"),
        (
            ["resources.nodes=1,2"],
            r"resources.nodes:.*same.*job array",
        ),
        (["backends.slurm.qos=a,b"], r"backends.slurm.qos:.*same"),
        (["backends={}"], r"backends:.*same"),
        (["name=a,b"], r"name:.*name-0, name-1"),
        (["run_dir=a,b"], r"run_dir:.*sweep"),
        (["seed=1..1001"], r"1001 runs.*at most 1000 \(MaxArraySize\)"),
    ],
)
def test_what_refuses_the_whole_sweep(place: Path, sets: list[str], sentence: str) -> None:
    fake = Fake(config="MaxArraySize            = 1000\nMaxJobCount = 10000\n")
    before = sorted(place.iterdir())
    with pytest.raises((UserError, Faults), match=sentence) as reported:
        submit(fake, *sets)
    assert reported.value.exit_code == 2
    assert sorted(place.iterdir()) == before
    assert not fake.jobs


def test_the_longest_array(place: Path) -> None:
    """The largest index is one less than MaxArraySize, and the first task is 0 (slurm.conf(5))."""
    fake = Fake(config="MaxArraySize            = 3\n")
    assert submit(fake, "seed=1..3") == "slurm://100"
    with pytest.raises(UserError, match=r"4 runs.*at most 3 \(MaxArraySize\)"):
        submit(fake, "seed=1..4")


@pytest.mark.parametrize(("tasks", "least"), [(2, 2), (5, 3)])
def test_the_longest_array_of_the_scheduler_s_parameters(place: Path, tasks: int, least: int) -> None:
    """A lower limit than MaxArraySize, of which tasks may still have any number (slurm.conf(5))."""
    config = (
        f"MaxArraySize            = 3\nSchedulerParameters     = bf_continue,max_array_tasks={tasks},sched_interval=9\n"
    )
    name = "max_array_tasks in SchedulerParameters" if tasks == least else "MaxArraySize"
    fake = Fake(config=config)
    with pytest.raises(UserError, match=rf"4 runs.*at most {least} \({name}\)"):
        submit(fake, "seed=1..4")
    assert not fake.jobs
    assert submit(fake, f"seed=1..{least}") == "slurm://100"


def test_a_name_that_is_too_long_with_its_number(place: Path) -> None:
    with pytest.raises(UserError, match=r"^name: a{51}-0 .*at most 50"):
        submit(Fake(), "seed=1..2", overrides=(f"name={'a' * 51}",))


def test_a_container_that_would_mount_other_folders(place: Path) -> None:
    (place / "other").mkdir()
    (place / "other/m.onnx").touch()
    overrides = ("backends.slurm.container=/i.sif",)
    with pytest.raises(UserError, match=r"model.path would change the batch script"):
        submit(Fake(), "model.path=m.onnx,other/m.onnx", overrides=overrides)
    assert not (place / "runs").exists()
    mounts = f"backends.slurm.container.mounts=['{place}']"
    assert submit(Fake(), "model.path=m.onnx,other/m.onnx", overrides=(*overrides, mounts)) == "slurm://100"


# --- the script


def test_bash_puts_the_task_in_place(tmp_path: Path) -> None:
    """Whatever the folder's name contains."""
    spec, placement = CASES["array-in-an-odd-place"]
    run_supervisor, words = tmp_path / "run_supervisor", tmp_path / "words"
    run_supervisor.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > {words}\n')
    run_supervisor.chmod(0o755)
    text = script(spec, replace(placement, run_supervisor_python=str(run_supervisor)))
    environment = {"PATH": os.environ["PATH"], "SLURM_ARRAY_TASK_ID": "12"}
    subprocess.run(["bash", "-c", text], env=environment, check=True, timeout=PATIENCE)
    expected = ["-m", "ortflow.launchers.slurm.run_supervisor", str(placement.run_dir), "--", *launch(spec, placement)]
    assert words.read_bytes().decode().split("\0")[:-1] == [word.replace(TASK, "12") for word in expected]


def test_no_path_of_a_user_holds_the_mark() -> None:
    with pytest.raises(UserError, match="run_dir"):
        script(CASES["one-rank"][0], replace(PLAIN, start="none", run_dir=Path(f"/a{TASK}b")))


@pytest.mark.parametrize(
    ("numbers", "text"), [([0], "0"), (range(8), "0-7"), ([0, 1, 3, 5, 6, 7], "0-1,3,5-7"), ([4, 2], "4,2")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert sweep.ranges(numbers) == text


# --- submitting


def test_each_task_is_a_run(place: Path) -> None:
    fake = Fake()
    assert submit(fake, RATES, "seed=1..4", at_once=3) == "slurm://100"
    assert len(fake.scripts) == 1
    assert fake.count("squeue") == 0, "new runs are not queried"
    assert "#SBATCH --array=0-7%3\n" in fake.scripts[0]
    for task in range(8):
        spec = load_run_file(run(task).run_file)
        assert (spec.name, spec.run_dir) == (f"gpt-{task}", str(run(task).root))
        assert (spec.train.optimizer.lr, spec.seed) == ((1e-3, 3e-4)[task // 4], 1 + task % 4)
        before, after = run(task).read_attempts()
        assert (before["event"], before["launcher"], before["task"]) == ("submitting", "slurm", str(task))
        assert (after["event"], after["job"], after["submission"]) == ("submit", f"100_{task}", before["submission"])
        assert fake.jobs[task].comment == f"ortflow {before['submission']}"
        assert (run(task).root / "logs").is_dir()
        alone = (run(task).root / "slurm/job.sh").read_text()
        assert "--array" not in alone
        assert f"{run(task).root}/logs/slurm-%j.log" in alone
        assert [word for word in alone.split() if word == str(run(task).root)] == [str(run(task).root)] * 3
    reported = json.loads((place / "runs/gpt.sweep/sweep.json").read_text())
    assert reported["runs"][5] == {"run": "gpt-5", "values": {"train.optimizer.lr": "3e-4", "seed": "2"}}
    assert (place / "runs/gpt.sweep/slurm/job.sh").read_text() == fake.scripts[0]


def test_what_is_printed_is_what_is_submitted(place: Path) -> None:
    fake = Fake()
    one = wanted(fake, RATES)
    printed = str(one)
    assert not (place / "runs").exists()
    sweeps.submit(one, fake.slurm)
    assert common(printed) == common(fake.scripts[0])
    text = printed.split("<<'END_OF_THE_RUN_FILE'\n")[1].removesuffix("END_OF_THE_RUN_FILE")
    files = [run_file(text, task) for task in range(len(one.requests))]
    assert files == [dump_run_file(request.submission.spec) for request in one.requests]


def test_a_script_of_a_thousand_runs(place: Path) -> None:
    """sbatch accepts 4 MiB; a run file has more than 4 KiB."""
    one = wanted(Fake(), "seed=1..970")
    printed = str(one)
    assert len(printed) < 2**20
    text = printed.split("<<'END_OF_THE_RUN_FILE'\n")[1].removesuffix("END_OF_THE_RUN_FILE")
    assert load_run_text(run_file(text, 969), "the script") == one.requests[969].submission.spec


def test_each_is_followed_and_ended_alone(place: Path) -> None:
    fake = Fake()
    submit(fake, "seed=1..3")
    fake.change("100_1", state="RUNNING", nodes="node2")
    slurm = SlurmLauncher(fake.slurm)
    states = [slurm.status(run(task)) for task in range(3)]
    assert [(how.state, how.job) for how in states] == [(State.PENDING, f"100_{task}") for task in range(3)]
    assert [how.nodes for how in states] == [None, "node2", None]
    assert slurm.cancel(run(2), now=False)
    assert [job.state for job in fake.jobs] == ["PENDING", "RUNNING", "CANCELLED"]


def test_a_refusal_leaves_nothing_behind(place: Path) -> None:
    fake = Fake(refuses="sbatch: error: Batch job submission failed: Invalid qos specification\n")
    with pytest.raises(UserError, match=r"backends.slurm.qos: .*Invalid qos"):
        submit(fake, RATES)
    assert not (place / "runs").exists()


def test_a_directory_of_another_run_refuses_all(place: Path) -> None:
    run(1).root.mkdir(parents=True)
    run(1).run_file.write_text(RUN.replace("gpt", "gpt-1").replace("sgd", "adamw"))
    finish(1, outcome="preempted", next="stop")
    run(1).record_attempt(event="start", attempt=1)
    fake = Fake()
    with pytest.raises(UserError, match=r"gpt-1 holds another run"):
        submit(fake, RATES)
    assert sorted(path.name for path in (place / "runs").iterdir()) == ["gpt-1"]
    assert not fake.scripts


def test_another_sweep_of_the_same_name(place: Path) -> None:
    fake = Fake()
    submit(fake, RATES)
    finish(0, 1)
    over(fake)
    with pytest.raises(UserError, match=r"gpt.sweep.*2 runs.*train.optimizer.lr.*--fresh"):
        submit(fake, "seed=1..2")
    assert submit(fake, "seed=1..2", fresh=True) == "slurm://101"
    assert (place / "runs/gpt-1.1/run.yaml").exists(), "the old ones are kept"
    assert read_sweep(place / "runs/gpt").keys == ["seed"]


def test_a_record_that_nests_without_end_is_refused(place: Path) -> None:
    submit(Fake(), RATES)
    (record,) = (place / "runs").glob("gpt.sweep/*.json")
    record.write_text("[" * 50_000)
    with pytest.raises(UserError, match="is not a record of a sweep"):
        read_sweep(place / "runs/gpt")


def test_records_of_an_earlier_submission_say_nothing_about_this_one(tmp_path: Path) -> None:
    folder, member = tmp_path / "sweep", RunDir(tmp_path / "sweep-3")
    RunDir(folder).record_attempt(event="submit", job="1")
    again = SweepDir(folder, {3: member}, earlier=1)
    assert again.read_attempts() == []
    again.record_attempt(event="stop", outcome="failure")
    assert [record["event"] for record in again.read_attempts()] == ["stop"]
    (own,) = member.read_attempts()
    assert (own["event"], own["task"]) == ("stop", "3")


def test_a_sweep_at_work_is_not_submitted_twice(place: Path) -> None:
    fake = Fake()
    submit(fake, RATES)
    fake.change("100_0", state="COMPLETED")
    finish(0)
    with pytest.raises(UserError, match=r"gpt-1 is job 100_1 in Slurm, pending"):
        submit(fake, RATES)
    assert len(fake.scripts) == 1


def test_a_repeated_submission_continues_unfinished_runs(place: Path) -> None:
    fake = Fake()
    submit(fake, "seed=1..5")
    finish(0, 3)
    finish(4, outcome="failure", next="stop")
    over(fake)
    assert submit(fake, "seed=1..5") == "slurm://101"
    assert "#SBATCH --array=1-2,4\n" in fake.scripts[1]
    assert [run(task).read_attempts()[-1].get("job") for task in range(5)] == [None, "101_1", "101_2", None, "101_4"]
    assert run(4).read_attempts()[-1]["new_budget"] is True
    finish(1, 2, 4)
    over(fake)
    assert submit(fake, "seed=1..5").startswith("slurm://10")
    assert len(fake.scripts) == 2


def test_a_dead_controller(place: Path) -> None:
    with pytest.raises(NoAnswer, match="nothing was submitted"):
        submit(Fake(away="dead"), RATES)
    assert not (place / "runs").exists()


@pytest.mark.parametrize("retry", [0.0, 20.0])
def test_a_slow_controller_gets_one_array(place: Path, retry: float) -> None:
    fake = Fake(on_sbatch=late)
    assert submit(fake, RATES, retry=retry) == "slurm://100"
    assert len(fake.scripts) == 1
    assert run(1).read_attempts()[-1]["job"] == "100_1"


def test_after_a_doubt_each_run_finds_its_own_task(place: Path) -> None:
    fake = Fake()

    def late_and_gone(one: Fake, job: Job) -> Answer:
        one.away = "hung"
        return late(one, job)

    fake.on_sbatch = late_and_gone
    with pytest.raises(InDoubt, match=r"`ortflow list --sweep .*/runs/gpt` shows"):
        submit(fake, "seed=1..3")
    assert [events(task) for task in range(3)] == [["submitting"]] * 3
    fake.away, fake.on_sbatch = None, None
    found = SlurmLauncher(fake.slurm).statuses([run(task) for task in range(3)])
    assert [how.job for how in found] == ["100_0", "100_1", "100_2"]
    assert submit(fake, "seed=1..3") == "slurm://100"
    assert len(fake.scripts) == 1
    assert [run(task).read_attempts()[-1]["job"] for task in range(3)] == ["100_0", "100_1", "100_2"]
    with pytest.raises(UserError, match="is job 100_0 in Slurm"):
        submit(fake, "seed=1..3")


def test_more_runs_than_files_may_be_open(place: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests of the session may have left files open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 70, hard))
    try:
        assert submit(Fake(), "seed=1..90") == "slurm://100"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- cancelling


def test_cancel_of_all(place: Path) -> None:
    fake = Fake()
    submit(fake, "seed=1..5")
    fake.change("100_0", state="COMPLETED")
    finish(0)
    fake.change("100_1", state="RUNNING")
    run(1).record_attempt(event="start", attempt=0)
    fake.change("100_2", state="REQUEUE_HOLD")
    calls = len(fake.calls)
    assert sweeps.cancel([run(task) for task in range(5)], fake.slurm, now=False) == 4
    assert [job.state for job in fake.jobs] == ["COMPLETED", "RUNNING", "CANCELLED", "CANCELLED", "CANCELLED"]
    assert len(fake.calls) - calls <= 4, "not one per run"
    assert json.loads(run(1).stop_request.read_text())["reason"] == "cancel"
    found = SlurmLauncher(fake.slurm).statuses([run(task) for task in range(5)])
    assert [how.state.value for how in found] == ["finished", "running", "cancelled", "cancelled", "cancelled"]
    assert sweeps.cancel([run(0), run(3)], fake.slurm, now=False) == 0
    assert [run(task).read_attempts()[-1].get("asked") for task in (2, 3, 4)] == ["cancel"] * 3, (
        "Slurm does not keep it"
    )
    assert sweeps.cancel([run(1)], fake.slurm, now=True) == 1
    assert SlurmLauncher(fake.slurm).status(run(1)).state is State.CANCELLED


# --- in the job


def test_a_task_is_known_by_its_array() -> None:
    """The last task's job number is the array's: cancelling by it would cancel all others too."""
    reported = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "n"}
    assert SlurmJob.from_environment(reported).id == "7_3"
    assert SlurmJob.from_environment({"SLURM_JOB_ID": "7"}).id == "7"


def test_a_follow_up_is_not_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "sbatch"
    output = tmp_path / "said"
    tool.write_text(f'#!/bin/sh\necho "$@" >{output}; env | grep -E "SLURM_ARRAY|SBATCH" >>{output}; echo 8\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-7")
    assert SlurmJob("7_3", 0, "n").follow_up(Path("/r/job.sh")) == "8"
    assert output.read_text() == "--parsable --dependency=afterany:7_3 /r/job.sh\n"


# --- the table


@pytest.fixture
def found(place: Path) -> Callable[..., tuple[Sweep, list[RunStatus]]]:
    """A sweep with these evaluations."""

    def make(*evaluations: dict[str, float | None]) -> tuple[Sweep, list[RunStatus]]:
        fake = Fake()
        submit(fake, f"seed=1..{len(evaluations)}")
        reported = SlurmLauncher(fake.slurm).statuses([run(task) for task in range(len(evaluations))])
        both = zip(reported, evaluations, strict=True)
        return read_sweep(place / "runs/gpt"), [replace(how, evaluation=values, loss=1.5) for how, values in both]

    return make


Found = Callable[..., tuple[Sweep, list[RunStatus]]]


def test_an_evaluation_that_is_not_finite_is_not_the_best(found: Found) -> None:
    one, reported = found({"loss": None, "accuracy": 0.99}, {"loss": 1.0, "accuracy": 0.9})
    assert [row[0] for row in results(one, reported, "accuracy").rows()[1:]] == ["", "*"]


def test_the_best_is_marked(found: Found) -> None:
    nan = float("nan")
    worse, better = {"loss": 2.0, "accuracy": 0.9}, {"loss": 1.0, "accuracy": 0.1}
    one, reported = found({"loss": nan}, better, {}, worse, {"loss": 1.0, "accuracy": 0.9})
    rows = results(one, reported, None).rows()
    assert rows[0] == ("", "NAME", "seed", "STATE", "STEP", "LOSS", "EVAL LOSS", "EVAL ACCURACY")
    assert rows[2] == ("*", "gpt-1", "2", "pending", "0", "1.5000", "1.0000", "0.1000")
    assert rows[3][6:] == ("-", "-")
    assert [row[0] for row in rows[1:]] == ["", "*", "", "", ""]
    assert results(one, reported, "accuracy").best == 3, "more is better"
    with pytest.raises(UserError, match="evaluated by perplexity; there are: loss, accuracy"):
        results(one, reported, "perplexity")


def test_nothing_evaluated_yet(found: Found) -> None:
    one, reported = found({}, {})
    shown = results(one, reported, None)
    assert (shown.metric, shown.best) == (None, None)
    assert shown.rows()[1] == ("", "gpt-0", "1", "pending", "0", "1.5000")
    assert results(one, reported, "accuracy").best is None


def test_the_table_as_json(found: Found) -> None:
    one, reported = found({"loss": 2.0}, {"loss": 1.0})
    shown = json.loads(json.dumps(results(one, reported, None).to_json()))
    assert (shown["sweep"], shown["metric"]) == ("gpt", "loss")
    assert [(row["values"], row["best"], row["name"], row["job"]) for row in shown["runs"]] == [
        ({"seed": "1"}, False, "gpt-0", "100_0"),
        ({"seed": "2"}, True, "gpt-1", "100_1"),
    ]


# --- the command line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["submit", "run.yaml", "--set", "seed=1..2"], r"local.*add -b slurm"),
        (["submit", "run.yaml", "-b", "slurm", "--at-once", "2"], "--at-once needs a sweep"),
        (["submit", "run.yaml", "-b", "slurm", "--set", "seed=1..2", "-f"], "--follow works only for a single run"),
        (["render", "run.yaml", "--set", "seed=1..2"], "the launcher local has none"),
        (["list", "--by", "loss"], "--by needs a sweep"),
        (["list", "--sweep", "gpt"], "there is no sweep gpt in runs"),
        (["cancel"], "cancel takes a run or a sweep"),
        (["cancel", "a", "--sweep", "b"], "cancel takes a run or a sweep"),
    ],
)
def test_what_the_command_line_refuses(place: Path, words: list[str], sentence: str) -> None:
    from typer.testing import CliRunner

    from ortflow.cli.app import command_line

    with pytest.raises(UserError, match=sentence):
        CliRunner().invoke(command_line(), words, catch_exceptions=False)
    assert not (place / "runs").exists()


def test_a_rendered_sweep_that_sbatch_would_refuse(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Slurm takes scripts of 4 MiB, and a rendered sweep contains the run file of each run."""
    planned = wanted(Fake(), "seed=1..12")
    size = len(str(planned).encode())
    monkeypatch.setattr(sweep, "LARGEST_SCRIPT", size)
    assert str(planned)
    monkeypatch.setattr(sweep, "LARGEST_SCRIPT", size - 1)
    with pytest.raises(UserError, match=r"12 runs, .*max_script_size.*ortflow submit"):
        str(planned)
