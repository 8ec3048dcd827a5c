"""Runs the table on the installed runtime, and finds settings with which all results are correct."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms, avoid_wrong_normalizations
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.runtime_check import images, places, products, recurrent, rows
from ortflow.workflow.runtime_check.behaviour import BEHAVIOURS, Behaviour
from ortflow.workflow.runtime_check.case import Case
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.sessions.settings import DEFAULTS, Outcome, Settings
from ortflow.workflow.system.runtimes import installed_runtime

THREADS = 2
"""Threads of each session, so that errors between threads are detected."""
Need = Case | Behaviour
Open = Callable[[Settings], Sessions]


def needs() -> list[Need]:
    """The table."""
    cases = [case for part in (images, places, products, recurrent, rows) for case in part.cases()]
    return [*cases, *BEHAVIOURS]


def open_sessions(settings: Settings) -> Sessions:
    """Sessions as in a rank, without our kernels."""
    return Sessions(CpuDevice(), THREADS, "fatal", settings=settings)


def verify(table: Iterable[Need], opened: Open = open_sessions) -> Outcome:
    """Run the table; if a result is wrong, find the settings that correct it.

    Raises UserError, with the errors and the runtime, if no settings do.
    """
    table = list(table)
    first = _faults(table, opened(DEFAULTS))
    faults = {need.need: fault for need, fault in first}
    if not first:
        return Outcome(DEFAULTS)
    rewrites = tuple(sorted({name for need, _ in first for name in need.optimizers}))
    remaining_faults = first
    for settings in (*([Settings(rewrites)] if rewrites else []), Settings(optimised=False)):
        # Run all of it again: disabling a rewrite for one case may break another.
        remaining_faults = _faults(table, opened(settings))
        if not remaining_faults:
            return Outcome(settings, faults)
    wrong = "; ".join(f"{need.need} ({fault})" for need, fault in remaining_faults)
    package, version = installed_runtime(), onnxruntime.__version__
    raise UserError(
        f"{package} {version} computes wrong results on this machine: {wrong}",
        where="ONNX Runtime",
        fix=f"install another version, such as `pip install '{package}!={version}'`",
    )


def _faults(table: Iterable[Need], sessions: Sessions) -> list[tuple[Need, str]]:
    results = [(need, fault(need, sessions)) for need in table]
    return [(need, wrong) for need, wrong in results if wrong is not None]


def fault(need: Need, sessions: Sessions) -> str | None:
    """What a runtime computes wrongly for one requirement, in a few words; None if it is correct."""
    try:
        if isinstance(need, Behaviour):
            return need.fault(sessions)
        return _fault_as(need, sessions, constant_weights=False) or (
            _fault_as(need, sessions, constant_weights=True) if need.weights else None
        )
    except OrtflowError as error:
        return error.what if isinstance(error, UserError) else str(error)


def _fault_as(case: Case, sessions: Sessions, *, constant_weights: bool) -> str | None:
    """Run the case in the form in which ortflow's graphs have it."""
    model = prepare(case.model(constant_weights=constant_weights))[0]
    avoid_wrong_forms(model)
    if constant_weights:
        avoid_wrong_normalizations(model)
    binding = Binding(sessions.open(model.SerializeToString()), sessions.device)
    for name, array in {**case.data, **case.weights}.items():
        if name in binding.inputs:
            binding.feed(name, array)
    names = list(case.expected)
    return case.fault(dict(zip(names, binding.fetch(names), strict=True)))
