"""The memory that a rank may use, and what to say if no layout fits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ortflow.workflow.errors import UserError
from ortflow.workflow.planning.rates import Rates
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.spec.units import parse_memory
from ortflow.workflow.system import host_memory

if TYPE_CHECKING:
    from ortflow.workflow.planning.survey import Survey

SHORT = 5.0
"""Seconds of a micro-batch, predicted, up to which it is measured unasked."""


@dataclass(frozen=True)
class Budget:
    """Memory of a rank."""

    bytes: int
    source: str
    """The option, key or machine that it is from."""


def budget_of(spec: TrainerRunSpec, option: str | None) -> Budget:
    """The memory of a rank of a run.

    Parameters
    ----------
    spec
        The run.
    option
        The value of --memory, if given.

    Raises
    ------
    UserError
        If the option is not an amount of memory, or there is no GPU here to ask.
    """
    if option is not None:
        try:
            return Budget(parse_memory(option), "--memory")
        except UserError as error:
            raise UserError(error.what, where="--memory", fix=error.fix) from None
    ranks_per_node = spec.resources.ranks_per_node
    if spec.on_gpus:
        from ortflow.workflow.device.choice import cuda_runtime
        from ortflow.workflow.device.cudart import CudaError

        try:
            return Budget(cuda_runtime().describe(0).total, "the first GPU of this machine")
        except (UserError, CudaError) as error:
            raise UserError(
                f"the memory of a GPU is unknown, because this machine has none that can be asked ({error})",
                where="--memory",
                fix="give it, such as --memory 80GB",
            ) from None
    if spec.resources.memory is not None:
        return Budget(parse_memory(spec.resources.memory) // ranks_per_node, f"resources.memory / {ranks_per_node}")
    return Budget(host_memory.total() // ranks_per_node, f"this machine's / {ranks_per_node}")


def too_small(survey: Survey, budget: Budget) -> UserError:
    """Why no layout fits."""
    ranks, smallest = survey.spec.world_size, survey.smallest
    if smallest is None:
        layout, reason = survey.refused[0]
        return UserError(
            f"no layout of {ranks} ranks is valid; {layout}: {reason}", where="parallel", fix="use --ranks"
        )
    need = -(-smallest.memory.total // 1_000_000)
    return UserError(
        f"no layout of {ranks} rank{'' if ranks == 1 else 's'} fits {budget.bytes / 1e6:,.0f} MB a rank; the smallest "
        f"needs {need:,} MB: {smallest}",
        where="--memory" if budget.source == "--memory" else "resources.memory",
        fix=f"give ranks {need:,} MB, use more ranks, or lower data.micro_batch",
    )


def may_measure(measure: bool | None, spec: TrainerRunSpec, rates: Rates, operations: int, memory: int) -> bool:
    """Whether to run the undivided model here.

    Parameters
    ----------
    measure
        The option; None to decide here.
    spec, rates
        The run on one rank, and its assumed speed.
    operations, memory
        Of a micro-batch of the undivided model.

    Raises
    ------
    UserError
        If it is wanted and cannot be.
    """
    if measure is False:
        return False
    if spec.on_gpus:
        if measure:
            raise UserError("measures on CPUs only, and the run is on GPUs", where="--measure", fix="leave it out")
        return False
    free_memory = host_memory.available()
    if memory <= free_memory:
        return bool(measure) or operations / rates.operations <= SHORT
    if measure:
        raise UserError(
            f"the undivided model needs {memory / 1e6:,.0f} MB, and {free_memory / 1e6:,.0f} MB are free here",
            where="--measure",
            fix="leave it out: speeds are then assumed",
        )
    return False
