"""The check of the runtime: rank 0 makes it before anything else, then one rank of every other machine.

Called by steps `configure` and `runtime`. All ranks open their sessions alike, with what any of their machines needs.
"""

from __future__ import annotations

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.events import warn
from ortflow.workflow.runtime_check.settings import Settings, merged
from ortflow.workflow.steps.context import Context


def check_runtime(context: Context) -> Settings:
    """What sessions need here; raises UserError where this machine's runtime is of no use."""
    from ortflow.workflow.runtime_check.remember import runtime_here

    found = runtime_here()
    outcome = found.outcome
    context.events.write(
        "runtime_check",
        package=found.package,
        version=found.version,
        settings=str(outcome.settings),
        faults=dict(outcome.faults),
        seconds=None if found.seconds is None else round(found.seconds, 6),
    )
    if outcome.faults:
        wrong = "; ".join(f"{need} ({fault})" for need, fault in outcome.faults.items())
        warn(
            context.events,
            f"{found.package} {found.version} computes wrongly as it is: {wrong}; sessions are opened without: "
            f"{outcome.settings}",
        )
    return outcome.settings


def agree(context: Context) -> Settings:
    """The settings of all ranks. Raises UserError, on all, where some machine's runtime is of no use."""
    mine, trouble = context.settings, None
    if not context.leads and context.place.local_rank == 0:
        try:
            mine = check_runtime(context)
        except OrtflowError as error:
            trouble = error
    told = context.world.gather((mine, trouble))
    shared = None
    if told is not None:
        shared = (merged(settings for settings, _ in told), next((error for _, error in told if error), None))
    settings: Settings
    settings, trouble = context.world.share(shared)
    if trouble is not None:
        raise trouble
    return settings
