"""Variables of an allocation around sbatch, which the job must not take for requests of its own.

sbatch passes on the environment that it is called in. Inside `salloc --gpus` or `--mem-per-cpu` that contains the
requests of another job, and Slurm replaces only those that this job makes too: srun would read the others as options.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ortflow.manifests.slurm.quoting import shell

OPTIONS = (
    "mem", "mem-per-cpu", "mem-per-gpu", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "cpus-per-gpu",
    "gpu-bind", "gpu-freq", "tres-per-task", "tres-bind", "cpus-per-task", "ntasks-per-node", "ntasks-per-core",
    "ntasks-per-socket", "ntasks-per-gpu", "threads-per-core", "hint", "distribution", "exclusive", "overcommit",
    "core-spec", "thread-spec",
)  # fmt: skip
"""Options of a job of which Slurm sets a variable that srun reads (sbatch(1), srun(1) of 22.05 to 25.11)."""
_NAMES = {"mem": "MEM_PER_NODE"}
"""Variables that are not named like their option."""
_LAYOUT = ("SLURM_HET_SIZE", "SLURM_PLANE_SIZE", "SLURM_STEP_GPUS")
_OF_STEPS = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
"""Prefixes of the binding of a step, such as that of `srun --pty bash`: the cores of another job."""
_OPTION = re.compile(r"^#SBATCH --([a-z-]+)")


def unset_lines(directives: Sequence[str]) -> Iterator[str]:
    """Lines that remove what srun would read, except what the job's own directives request."""
    options = {match[1] for line in directives if (match := _OPTION.match(line))}
    names = [variable(option) for option in OPTIONS if option not in options]
    yield "# Of an allocation around sbatch: srun would take it for this job's."
    yield from shell(["unset", *names, *_LAYOUT])
    yield f"unset {' '.join(f'${{!{prefix}@}}' for prefix in _OF_STEPS)}"


def variable(option: str) -> str:
    """The variable of an option."""
    return f"SLURM_{_NAMES.get(option, option.replace('-', '_').upper())}"
