"""Finds the trainer that a run file selects. Called by steps `configure` and `export`, `validate` and `schema`.

`graph` is built in. Others are entry points of the group `ortflow.trainers`, in packages that are installed for the
ranks' interpreter.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.run.rundir import RunDir
from ortflow.workflow.spec.base import Section
from ortflow.workflow.spec.file.wording import problems
from ortflow.workflow.spec.problem import nearest
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import Report, TrainerBuilder, TrainerContext

GROUP = "ortflow.trainers"
GRAPH = EntryPoint("graph", "ortflow.workflow.trainer.builder:GraphBuilder", GROUP)
NEEDED = ("Options", "check_machine", "prepare", "inputs", "open")


def builder_of(spec: TrainerRunSpec, run_dir: RunDir, report: Report, *, starting: bool = False) -> TrainerBuilder:
    """The builder of a run's trainer; `starting` as in `TrainerContext`.

    Raises UserError or Faults if name or options are wrong.
    """
    kind = load_builder(spec.trainer.name)
    options = _options(kind, spec)
    export_path = run_dir.root / spec.export.path if spec.export.enabled else None
    return kind(TrainerContext(spec, options, run_dir.graphs, export_path, report, starting))


def load_builder(name: str) -> type[TrainerBuilder]:
    """The class for a name. Raises UserError if there is none, or if it cannot be used."""
    points = {GRAPH.name: GRAPH} if name == GRAPH.name else installed()
    key_path = "trainer.name"
    if name not in points:
        near = nearest(name, [*points])
        hint = f"did you mean {near}?" if near else f"installed are {', '.join(sorted(points))}"
        raise UserError(f"there is no trainer {name!r}", where=key_path, fix=f"{hint}; packages provide others")
    point = points[name]
    try:
        kind: type[TrainerBuilder] = point.load()
    except Exception as error:  # its module may raise anything
        raise UserError(
            f"trainer {name!r} cannot be loaded from {point.value} ({type(error).__name__}: {error})",
            where=key_path,
            fix="repair the package that provides it",
        ) from error
    missing = [attribute for attribute in NEEDED if not hasattr(kind, attribute)]
    if missing:
        raise UserError(
            f"trainer {name!r}, {point.value}, has no {' and no '.join(missing)}",
            where=key_path,
            fix="derive it from ortflow.workflow.trainer.TrainerBuilder",
        )
    return kind


def installed() -> dict[str, EntryPoint]:
    """Every trainer by name, including `graph`."""
    return {**{point.name: point for point in entry_points(group=GROUP)}, GRAPH.name: GRAPH}


def _options(kind: type[TrainerBuilder], spec: TrainerRunSpec) -> Any:
    section: type[Section] = kind.Options
    values = {key: value for key, value in spec.trainer.options.items() if value is not None}
    try:
        return section.model_validate(values)
    except ValidationError as error:
        option_problems = problems(error, values, section)
    raise Faults(
        [UserError(p.what, where=f"trainer.options.{'.'.join(map(str, p.path))}", fix=p.fix) for p in option_problems]
    )
