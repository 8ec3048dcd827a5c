"""What a training program calls, so that it stops, saves and resumes with its run; without ortflow it changes nothing.

Imported by users' programs, also where neither ortflow's launcher nor torch is there: this package imports the standard
library and `ortflow.workflow.program.wire` alone, and the modules below only when they are used.

    import ortflow.program
    run = ortflow.program.start(model=model, optimizer=optimizer)
    for batch in run.steps(loader, total=1000):
        ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortflow.program.errors import ProgramError
    from ortflow.program.part import Context
    from ortflow.program.run import Run
    from ortflow.program.sampler import Sampler
    from ortflow.program.workers import loader_worker

__all__ = ["Context", "ProgramError", "Run", "Sampler", "context", "loader_worker", "start"]

_MODULES = {
    "Context": "part",
    "ProgramError": "errors",
    "Run": "run",
    "Sampler": "sampler",
    "loader_worker": "workers",
}


def context() -> Context:
    """Return this process's part in the run: to stop at an agreed step, to commit checkpoints and to log.

    The same object each time. Raises ProgramError if the rank process that started this program does not answer.
    """
    from ortflow.program.part import current

    return current()


def start(*, jax: bool = False, **objects: Any) -> Run:
    """Register the program's state, and load it from the newest checkpoint when `Run.steps` begins or now.

    Raises ProgramError if the checkpoint does not fit them.

    Parameters
    ----------
    jax
        Call `jax.distributed.initialize` with this rank's place first.
    objects
        Modules, optimizers, and anything else with `state_dict` and `load_state_dict`, or random generators, by name.
    """
    from ortflow.program.run import start as start_run

    return start_run(objects, jax=jax)


def __getattr__(name: str) -> Any:
    """Load a class on first access, so that the import stays fast."""
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"ortflow.program.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
