"""Names the resource that a cluster lacks, if sbatch reports only that the configuration is not available."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ortflow.launchers.slurm.fit import asked, chosen, misfits
from ortflow.workflow.errors import OrtflowError, UserError

if TYPE_CHECKING:
    from ortflow.launchers.slurm.commands import Slurm
    from ortflow.workflow.spec.run import RunSpec

_VAGUE = re.compile(r"[Nn]ode configuration|More processors requested|gres|GRES")


def explained(error: OrtflowError, spec: RunSpec, slurm: Slurm) -> OrtflowError:
    """The refusal, with what no node of the partition has; unchanged if the cluster does not report it."""
    from ortflow.launchers.slurm.survey import Survey

    if not _VAGUE.search(str(error)):
        return error
    survey, request = Survey(slurm.runner), asked(spec)
    try:
        partitions, nodes = chosen(request, survey.partitions()), survey.nodes()
    except OrtflowError:
        return error
    for partition in partitions:
        for misfit in misfits(request, partition, nodes):
            if misfit.never:
                message = f"Slurm rejects the job: partition {partition.name} {misfit.what}"
                return UserError(message, where="resources", fix=misfit.fix)
    return error
