"""`ortflow plan`: the ways to divide a run's model over ranks that fit their memory, the fastest first.

Wired into the command line by `ortflow.cli.app`. Nothing heavy may be imported at module level: `--help` reads this.
"""

from __future__ import annotations

import json as jsonlib
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ortflow.cli.status import table
from ortflow.cli.submission import FileArgument, OverridesArgument
from ortflow.launchers.view.lines import size
from ortflow.workflow.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ortflow.workflow.planning.built import Built
    from ortflow.workflow.planning.rates import Rates
    from ortflow.workflow.planning.survey import Candidate, Survey
    from ortflow.workflow.spec.run import TrainerRunSpec

STYLE: dict[str, Any] = {"sort_keys": False, "default_flow_style": None}
"""How keys are printed: one section a line."""
UNKNOWN = "*"
"""Mark of a memory that is too low."""


def plan(
    run_file: FileArgument,
    overrides: OverridesArgument = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            "--ranks", "--devices", min=1, max=4096, help="Number of ranks (default: the run file's).", metavar="N"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            help="Memory of a rank, such as 24GB (default: its share of resources.memory, of this machine, "
            "or its GPU's).",
            metavar="SIZE",
        ),
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Measure speeds on this machine: a few steps of the undivided model, and messages of two ranks "
            "(default: if it has the memory and the model is small).",
            show_default=False,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            "--bandwidth",
            help="Bytes per second between two machines, such as 12GB (default: an assumed 1.25GB).",
            metavar="SIZE",
        ),
    ] = None,
    layout: Annotated[
        int, typer.Option("--layout", min=1, help="Number of the layout whose keys are printed.", metavar="N")
    ] = 1,
    refused: Annotated[
        bool, typer.Option("--refused", help="Also list layouts that are refused or too large, with the reason.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List ways to divide a run over ranks, the fastest first.

    Lists the layouts that fit a number of ranks and their memory. A layout is data x pipeline x horizontal parallelism,
    with a schedule and a ZeRO stage. Those that do not fit are also considered with model.recompute: layers. Memory and
    seconds per step are predicted; nothing is trained. Keys to copy into the run file are printed for the first, or for
    --layout N.
    """
    import yaml

    from ortflow.workflow.planning.budget import budget_of, too_small
    from ortflow.workflow.planning.layout import keys_of, on_ranks
    from ortflow.workflow.planning.measure import threads_of
    from ortflow.workflow.planning.recomputed import with_recomputation
    from ortflow.workflow.planning.survey import survey
    from ortflow.workflow.spec.file.load import load_run_file
    from ortflow.workflow.spec.file.paths import resolve_paths
    from ortflow.workflow.spec.run import trainer_run

    spec_of_file = trainer_run(
        resolve_paths(load_run_file(run_file, overrides or (), files=True), run_file), "ortflow plan"
    )
    spec = on_ranks(spec_of_file, ranks or spec_of_file.world_size)
    budget = budget_of(spec, memory)
    rates = _Rates(measure, bandwidth, threads_of(spec), overrides or ())
    plan_survey = with_recomputation(survey(spec, rates), budget.bytes)
    fitting = plan_survey.fitting(budget.bytes)
    if not fitting:
        raise too_small(plan_survey, budget)
    if layout > len(fitting):
        raise UserError(f"is {layout}, and {len(fitting)} layouts fit", where="--layout", fix="give a smaller number")
    if json:
        typer.echo(jsonlib.dumps(_data(spec_of_file, plan_survey, fitting, budget.bytes), indent=2))
        return
    _print(plan_survey, fitting, budget.bytes, budget.source, refused=refused)
    typer.echo(f"keys of layout {layout}:")
    selected = fitting[layout - 1]
    typer.echo(yaml.safe_dump(keys_of(spec_of_file, spec, selected.layout, selected.recompute), **STYLE), nl=False)
    for line in (
        *plan_survey.rates.explanations,
        *plan_survey.notes,
        *without_data_parallelism(plan_survey.spec),
        *_not_counted(spec_of_file, fitting),
    ):
        typer.echo(line)


def without_data_parallelism(spec: TrainerRunSpec) -> Iterator[str]:
    """Why no layout has copies of the undivided model on all ranks, which is the simplest one, and what permits it."""
    ranks, samples, micro_batch = spec.world_size, spec.global_batch, spec.data.micro_batch
    if ranks == 1 or samples % (ranks * micro_batch) == 0:
        return
    smaller = f"data.micro_batch: {samples // ranks}, or " if samples % ranks == 0 else ""
    yield (
        f"No layout has {ranks} copies of the model: a step of {samples} samples is not a multiple of {ranks} "
        f"micro-batches of {micro_batch}. {smaller}train.global_batch: {ranks * micro_batch} permits data parallelism, "
        "the usual choice for a model that one rank can hold."
    )


def _not_counted(spec_of_file: TrainerRunSpec, fitting: list[Candidate]) -> Iterator[str]:
    """What the predicted memory leaves out."""
    unknown = max(len(candidate.memory.peak.unknown) for candidate in fitting)
    if unknown:
        yield f"{UNKNOWN} Memory leaves out values whose size is unknown, up to {unknown} of a layout."
    if spec_of_file.train.check_gradient and spec_of_file.train.precision in ("bf16", "fp16"):
        yield (
            "Memory leaves out the check of the gradient before the first step, which computes in fp32 on two samples "
            "(train.check_gradient: false avoids it)."
        )


class _Rates:
    """Measures or assumes speeds, as the options want."""

    def __init__(self, measure: bool | None, bandwidth: str | None, threads: int, overrides: Sequence[str]) -> None:
        from ortflow.workflow.spec.units import parse_memory

        self._measure, self._threads, self._overrides = measure, threads, overrides
        try:
            self._bandwidth = None if bandwidth is None else float(parse_memory(bandwidth))
        except UserError as error:
            raise UserError(error.what, where="--bandwidth", fix=error.fix) from None

    def __call__(self, built: Built, spec: TrainerRunSpec, operations: int, memory: int) -> Rates:
        from ortflow.launchers.link import measure_link
        from ortflow.launchers.named_programs import unconfirmed
        from ortflow.workflow.planning.budget import may_measure
        from ortflow.workflow.planning.measure import linked, measured, micro_batch_seconds
        from ortflow.workflow.planning.rates import Link, assumed

        threads = self._threads
        rates = assumed(threads, gpu=spec.on_gpus, bandwidth=self._bandwidth)
        if not may_measure(self._measure, spec, rates, operations, memory):
            return rates
        rates = measured(
            rates, micro_batch_seconds(built, spec, threads), operations, built.graphs.index.trained, threads
        )
        link = measure_link(spec) if unconfirmed(spec, self._overrides) is None else None
        return rates if link is None else linked(rates, Link(*link))


def _data(spec_of_file: TrainerRunSpec, plan_survey: Survey, fitting: list[Candidate], budget: float) -> dict[str, Any]:
    from ortflow.workflow.planning.layout import keys_of

    listed = [
        {**candidate.to_json(), "keys": keys_of(spec_of_file, plan_survey.spec, candidate.layout, candidate.recompute)}
        for candidate in fitting
    ]
    large = [candidate for candidate in plan_survey.candidates if candidate.memory.total > budget]
    return {
        "ranks": plan_survey.spec.world_size, "memory": budget, "global_batch": plan_survey.spec.global_batch,
        "device": "cuda" if plan_survey.spec.on_gpus else "cpu", "layouts": listed,
        "too_large": [candidate.to_json() for candidate in large],
        "refused": [{"layout": str(candidate), "reason": reason} for candidate, reason in plan_survey.refused],
        "prediction": list(plan_survey.rates.explanations), "notes": list(plan_survey.notes),
    }  # fmt: skip


def _print(plan_survey: Survey, fitting: list[Candidate], budget: float, source: str, *, refused: bool) -> None:
    spec = plan_survey.spec
    large = [candidate for candidate in plan_survey.candidates if candidate.memory.total > budget]
    many = "rank" if spec.world_size == 1 else "ranks"
    typer.echo(
        f"{spec.world_size} {many} on {'GPUs' if spec.on_gpus else 'CPUs'} with {size(budget)} each ({source}), "
        f"{spec.global_batch} samples a step in micro-batches of {spec.data.micro_batch}"
    )
    counts = f"{len(fitting)} layouts fit, {len(large)} need more memory, {len(plan_survey.refused)} are refused"
    typer.echo(counts if refused or not (large or plan_survey.refused) else f"{counts} (--refused lists them)")
    rows = [
        ("", "data", "pipeline", "horizontal", "zero", "recompute", "micro-batches", "memory", "s a step", "waiting")
    ]
    any_recomputed = any(candidate.recompute for candidate in fitting)
    for number, candidate in enumerate(fitting, 1):
        layout, time = candidate.layout, candidate.time
        stages = str(layout.pipeline)
        if layout.pipeline > 1:
            stages += f" {layout.schedule}" + (f" x {layout.chunks}" if layout.chunks > 1 else "")
        waiting = f"{time.bubble:.0%}" if layout.pipeline > 1 else "-"
        rows.append((
            str(number), str(layout.data), stages, str(layout.horizontal), str(layout.zero), candidate.recompute or "-",
            str(candidate.micro_batches),
            size(candidate.memory.total) + (UNKNOWN if candidate.memory.peak.unknown else ""),
            f"{time.total:.3g}", waiting,
        ))  # fmt: skip
    for text in table(rows if any_recomputed else [(*row[:5], *row[6:]) for row in rows]):
        typer.echo(text)
    if refused:
        for candidate in large:
            typer.echo(f"needs {size(candidate.memory.total)}: {candidate}")
        for reason, count in Counter(reason for _, reason in plan_survey.refused).most_common():
            first = next(str(candidate) for candidate, cause in plan_survey.refused if cause == reason)
            typer.echo(f"refused: {first}{f' and {count - 1} more' if count > 1 else ''}: {reason}")
