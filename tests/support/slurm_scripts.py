"""Run files whose batch scripts are in tests/unit/golden/slurm, byte for byte.

`python tests/support/slurm_scripts.py` writes them again; review the changes before you keep them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from run_files import spec_of

from ortflow.manifests.slurm import Placement, script
from ortflow.manifests.slurm.placement import TASK
from ortflow.workflow.spec.run import TrainerRunSpec

GOLDEN = Path(__file__).parents[1] / "unit" / "golden" / "slurm"

PLAIN = Placement(
    run_dir=Path("/scratch/runs/gpt"),
    run_supervisor_python="/home/me/venv/bin/python",
    rank_python="/home/me/venv/bin/python",
    start="pmi2",
    submission="6f1d0c52",
    kind="mpich",
)
FOUR = {"nodes": 2, "ranks_per_node": 2, "cpus_per_rank": 2, "memory": "2Gi", "time_limit": "12:00:00"}
MODEL = {"path": "/data/gpt/model.onnx", "loss": {"kind": "cross_entropy"}}
DATA = {"train": {"path": "/data/gpt/train"}, "micro_batch": 4}


def common(text: str) -> list[str]:
    """The common part of a submitted script and a printed one, which carries the run file."""
    own = ("#SBATCH --comment", "#SBATCH --output", "# For sbatch: ")
    whole = re.sub(r" \\\n *", " ", text.partition(" <<'END_OF_THE_RUN_FILE'")[0])
    lines = whole.replace(" --run-file -- ", " -- ").splitlines()
    return [line for line in lines if not line.startswith(own)]


def _run(slurm: dict[str, Any] | None = None, **sections: Any) -> TrainerRunSpec:
    return spec_of(name="gpt", model=MODEL, data=DATA, backends={"slurm": slurm or {}}, **sections)


EVERYTHING = {
    "partition": "main,urgent", "account": "lab-1", "qos": "high", "constraint": "a100&ib", "reservation": "maint",
    "exclusive": True, "nodelist": "node[1-2]", "exclude": "node3", "dependency": "afterok:12", "begin": "now+1hour",
    "nice": 5, "job_name": "gpt.sweep-1", "mail": {"types": ["END", "FAIL"], "user": "me@example.org"},
    "gpus_as": "gpus-per-node", "gres": "tmpdisk:10G", "memory_per": "cpu", "signal_seconds": 300, "mpi": "pmix",
    "srun_arguments": ["--cpu-bind=cores", "--distribution=block:block"],
    "directives": ["--licenses=matlab:1@flex", "--spread-job", "--acctg-freq=task=15,energy=0"],
    "omit": ["kill-on-invalid-dep"],
    "prologue": ["module load gcc/12", "source '/home/me/it''s mine/activate'", "export NCCL_DEBUG=WARN  # told once"],
    "epilogue": ['echo "over with $ortflow_code"'],
    "container": {"image": "/images/ort.sif", "mounts": ["/scratch/cache:/cache", "/refs:/refs:ro"],
                  "arguments": ["--writable-tmpfs"]},
}  # fmt: skip

CASES: dict[str, tuple[TrainerRunSpec, Placement]] = {
    "one-rank": (_run(), replace(PLAIN, start="none", kind=None)),
    "pmi2": (_run({"partition": "main"}, resources=FOUR), PLAIN),
    "mpirun-mpich": (_run(resources=FOUR), replace(PLAIN, start="mpirun", mpirun="/home/me/venv/bin/mpirun")),
    "mpirun-openmpi": (
        _run({"requeue": False}, resources=FOUR),
        replace(PLAIN, start="mpirun", mpirun="/usr/bin/mpirun", kind="openmpi"),
    ),
    "gpus-per-task": (_run(resources={**FOUR, "gpus_per_rank": 1}), PLAIN),
    "elastic": (_run(resources={**FOUR, "nodes": 4, "min_nodes": 2, "gpus_per_rank": 1}), PLAIN),
    "gpus-by-gres": (_run({"gpus_as": "gres", "gres": "gpu:2"}, resources={**FOUR, "gpus_per_rank": 1}), PLAIN),
    "apptainer": (_run({"container": {"image": "/images/ort.sif"}}, resources={**FOUR, "gpus_per_rank": 1}), PLAIN),
    "pyxis": (
        _run(
            {"container": {"kind": "pyxis", "image": "nvcr.io#nvidia/pytorch:24.01-py3", "mounts": ["/refs:/r:ro"]}},
            resources={**FOUR, "python": "/opt/venv/bin/python"},
        ),
        replace(PLAIN, start="pmix", kind="openmpi"),
    ),
    "enroot": (_run({"container": {"kind": "enroot", "image": "/images/ort.sqsh"}}, resources=FOUR), PLAIN),
    "prologue-epilogue": (
        _run({"prologue": ["module load gcc/12", "ulimit -c 0"], "epilogue": ["rm -rf /tmp/gpt"]}, resources=FOUR),
        PLAIN,
    ),
    "by-hand": (
        _run({"epilogue": ["rm -rf /tmp/gpt"]}),
        replace(
            PLAIN,
            start="none",
            kind=None,
            submission="run-0123",
            prepare_in=Path("/home/me/my runs"),
            run_file="name: gpt\nprepare:\n- $HOME `id` 'it''s'\n",
        ),
    ),
    "odd-places": (
        _run(resources=FOUR),
        replace(
            PLAIN,
            run_dir=Path('/scratch/it\'s 100% #1/$HOME `id` "x"'),
            rank_python="/home/me/my venv/bin/python",
        ),
    ),
    "array": (
        _run({"partition": "main", "container": {"image": "/images/ort.sif"}}, resources=FOUR),
        replace(PLAIN, run_dir=Path(f"/scratch/runs/gpt-{TASK}"), array="0-3,6%2"),
    ),
    "array-in-an-odd-place": (
        _run(),
        replace(PLAIN, start="none", run_dir=Path(f'/scratch/it\'s 100%-$HOME `id` "x"-{TASK}'), array="0-7"),
    ),
    "everything": (
        _run(EVERYTHING, resources={**FOUR, "gpus_per_rank": 1, "python": "/opt/venv/bin/python"}),
        replace(PLAIN, start="pmix", kind="openmpi", expedite=True, dependency="afterok:55:56"),
    ),
}


def main() -> None:
    """Write every script."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, (spec, placement) in CASES.items():
        (GOLDEN / f"{name}.sh").write_text(script(spec, placement))


if __name__ == "__main__":
    main()
