"""submitit's parameters as keys of a run file, and a job's result file for it."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from messages import alike, says
from run_files import spec_of
from submitit.auto.auto import AutoExecutor
from submitit.slurm.slurm import _make_sbatch_string

from ortflow.launchers.base import find_launcher
from ortflow.launchers.names import BUILT_IN
from ortflow.launchers.slurm.outcome import begin_job, follower, leave_result, result_file
from ortflow.launchers.slurm.parameters import KEYS, NEVER, OTHERS, overrides, renamed
from ortflow.workflow.errors import Faults
from ortflow.workflow.run.rundir import OWN_FILES, RunDir
from ortflow.workflow.spec.file.dump import dump_run_file


def test_every_parameter_of_submitit_is_known() -> None:
    own = set(inspect.signature(_make_sbatch_string).parameters) - {"command", "folder", "map_count"}
    assert own == {*KEYS, *NEVER} - {"name"}
    assert set(AutoExecutor._typed_parameters()) - own == set(OTHERS)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"slurm_partition": "gpu"}, 'backends.slurm.partition="gpu"'),
        ({"timeout_min": 60}, 'resources.time_limit="60"'),
        ({"mem_gb": 4}, 'resources.memory="4Gi"'),
        ({"mem_gb": 1.5}, 'resources.memory="1536Mi"'),
        ({"mem": "16GB"}, 'resources.memory="16Gi"'),
        ({"slurm_mem": 512}, 'resources.memory="512Mi"'),
        ({"tasks_per_node": 4}, "resources.ranks_per_node=4"),
        ({"slurm_setup": ["module load x", "a=1"]}, 'backends.slurm.prologue=["module load x", "a=1"]'),
        ({"mail_type": "END,FAIL"}, 'backends.slurm.mail.types=["END", "FAIL"]'),
        ({"use_srun": False}, 'backends.slurm.mpi="mpirun"'),
        ({"timeout_min": 60, "slurm_time": 5}, 'resources.time_limit="5"'),
    ],
)
def test_a_parameter_is_a_key(given: dict[str, object], key: str) -> None:
    assert overrides(renamed(given)) == [key]


def test_none_is_not_given_and_the_rest_is_refused() -> None:
    assert renamed({"slurm_partition": None}) == {}
    with pytest.raises(Faults) as reported:
        renamed({"slurm_gpus_per_node": 2, "slurm_nodez": 1})
    assert alike(
        str(reported.value).splitlines(),
        [
            "slurm_gpus_per_node: … give gpus_per_task",
            f"slurm_nodez: … {', '.join(KEYS)}",
        ],
    )


def test_what_a_job_leaves(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.root.mkdir()
    run.run_file.write_text(dump_run_file(spec_of(name="r")))
    run.record_attempt(event="submit", launcher="slurm", job="7")
    begin_job(run, "7")
    run.record_attempt(event="start", attempt=0)
    run.record_attempt(event="end", attempt=0, outcome="preempted", next="restart")
    leave_result(run, "7")
    assert not result_file(run, "7").exists(), "it continues"
    run.record_attempt(event="start", attempt=1)
    run.record_attempt(event="end", attempt=1, outcome="failure", cause="a rank died", why="the budget", next="stop")
    leave_result(run, "7")
    reported = pickle.loads(result_file(run, "7").read_bytes())
    kind, text = reported
    assert kind == "error"
    assert says(text, f"… r in {run.root} … failed … a rank died; the budget")
    left = {f"slurm/{path.name}" for path in (run.root / "slurm").iterdir()}
    assert left == {"slurm/7_0_log.out", "slurm/7_0_result.pkl"}
    assert all(OWN_FILES.fullmatch(name) for name in left)
    run.record_attempt(event="start", attempt=2)
    run.record_attempt(event="end", attempt=2, outcome="finished", next="stop")
    leave_result(run, "7")
    kind, values = pickle.loads(result_file(run, "7").read_bytes())
    assert (kind, values["state"], values["name"]) == ("success", "finished", "r")
    begin_job(run, "7")
    assert not result_file(run, "7").exists(), "Slurm has started the same job again"


def test_the_job_that_follows() -> None:
    records = [
        {"event": "submit", "job": "1"}, {"event": "submit", "job": "2", "follows": "1"},
        {"event": "submit", "job": "5"}, {"event": "submit", "job": "6", "follows": "2"},
    ]  # fmt: skip
    assert [follower(records, job) for job in ("1", "2", "5", "6")] == ["6", "6", "5", "6"]


def test_what_is_submitted_is_made_without_what_costs(tmp_path: Path) -> None:
    """Their imports would take half as long as all the rest; `submit` does the same as `render`, and calls sbatch."""
    (tmp_path / "run.yaml").write_text(dump_run_file(spec_of(name="r")))
    program = (
        "import sys; sys.argv = ['ortflow', 'render', '-b', 'slurm', 'run.yaml']\n"
        "from ortflow.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "import ortflow.launchers.run_directory_lock, ortflow.launchers.batch.job_submission\n"
        "heavy = {'submitit', 'asyncio', 'ssl', 'kubernetes', 'numpy', 'onnx', 'ortflow.cli.data'}\n"
        "found = heavy & set(sys.modules); assert not found, found"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --job-name=r\n" in done.stdout


def test_own_launchers_are_what_the_package_registers() -> None:
    """Others are found by entry point, ours by name: a search through all installed packages is slow."""
    registered = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, where in BUILT_IN.items():
        assert f'\n{name} = "ortflow.launchers.{where}"\n' in registered
        assert type(find_launcher(name)).__name__ == where.partition(":")[2]
