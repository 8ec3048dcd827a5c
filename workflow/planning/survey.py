"""Every layout of a run: what memory it needs, how long a step takes, and why it is refused. For `ortflow plan`.

The model is built once, and divided once for each number of stages and parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ortflow.workflow.assembly.timing import Timing
from ortflow.workflow.assembly.variants import Variants
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.memory.peak_memory import Peak
from ortflow.workflow.graph.shards.graphs import Sharded
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.parallel.division import Division, folder_of
from ortflow.workflow.planning.built import Built, built
from ortflow.workflow.planning.forecast import (
    activations,
    exchange_in,
    has_kernels,
    messages_of,
    shards_of,
    training_work,
)
from ortflow.workflow.planning.layout import CHUNKS, Layout, layouts, refusal, section, under
from ortflow.workflow.planning.measure import threads_of
from ortflow.workflow.planning.passes import StagePasses, Work, stage_passes
from ortflow.workflow.planning.preference import ordered
from ortflow.workflow.planning.ranks import RankMemory, memory_of, most, part_memory, pipeline_memory, replays_of
from ortflow.workflow.planning.rates import Rates
from ortflow.workflow.planning.replay import Replayed
from ortflow.workflow.planning.seconds import StepTime, step_time
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.steps.run_plan import Plan, resolve


@dataclass(frozen=True)
class Candidate:
    """A layout that `ortflow validate` accepts."""

    layout: Layout
    section: dict[str, Any]
    """`parallel` of the run file."""
    memory: RankMemory
    """Of the rank that needs most."""
    time: StepTime
    micro_batches: int
    """Of a replica, in a step."""
    recompute: str | None = None
    """`model.recompute`, if it is set for this layout only."""

    def __str__(self) -> str:
        return f"{self.layout}{f', recompute {self.recompute}' if self.recompute else ''}"

    def to_json(self) -> dict[str, Any]:
        """JSON-serialisable data."""
        time = self.time
        return {
            "parallel": self.section, "recompute": self.recompute, "seconds": time.total, "memory": self.memory.total,
            "rank": self.memory.rank, "parts": dict(self.memory.parts), "unknown": len(self.memory.peak.unknown),
            "micro_batches": self.micro_batches, "bubble": time.bubble, "bubble_by_formula": time.formula,
            "seconds_by_part": {"passes": time.passes, "gradients": time.gradients, "update": time.update},
        }  # fmt: skip


@dataclass(frozen=True)
class Survey:
    """All layouts."""

    spec: TrainerRunSpec
    """The run, on the wanted number of ranks."""
    candidates: tuple[Candidate, ...]
    """In the order of `preference`."""
    refused: tuple[tuple[Layout, str], ...]
    """With the reason."""
    rates: Rates
    notes: tuple[str, ...] = ()
    """What was not considered, and why."""

    def fitting(self, memory: float) -> list[Candidate]:
        """The layouts whose ranks need at most so many bytes."""
        return [candidate for candidate in self.candidates if candidate.memory.total <= memory]

    @property
    def smallest(self) -> Candidate | None:
        """The layout that needs the least memory."""
        return min(self.candidates, key=lambda candidate: candidate.memory.total, default=None)


Measure = Callable[[Built, TrainerRunSpec, int, int], Rates]
"""Finds the rates, from the built model, the run on one rank with two micro-batches a step, the operations of one, and
the bytes that such a rank needs.
"""


def survey(spec: TrainerRunSpec, measure: Measure) -> Survey:
    """Look at every layout of a run with absolute paths.

    Raises
    ------
    UserError
        If its model or data is unusable.
    """
    with built(one_rank(spec)) as built_run:
        models = _DividedModels(spec, built_run)
        undivided, twice = models.whole(), one_rank(spec, micro_batches=2)
        rates = measure(built_run, twice, undivided.work.operations, models.memory(twice, undivided).total)
        models.timed = rates.measured
        candidates, refused = [], []
        for layout in layouts(spec.world_size, chunks_of(spec)):
            layout_spec = under(spec, layout)
            reason = refusal(layout_spec) or models.missing(layout_spec)
            if reason is not None:
                refused.append((layout, reason))
                continue
            try:
                models.check_samples(layout_spec)
                candidates.append((layout, layout_spec, models.at(layout_spec, layout)))
            except UserError as error:
                refused.append((layout, f"{error.where or 'parallel'} {error.what}"))
        rates = replace(rates, explanations=(*rates.explanations, *models.how_cut()))
        accepted = [
            Candidate(
                layout, section(layout, spec), models.memory(layout_spec, shape),
                step_time(layout_spec, rates, built_run.graphs.index, shape.stages or shape.work, shape.division),
                layout_spec.accumulation,
            )
            for layout, layout_spec, shape in candidates
        ]  # fmt: skip
    return Survey(spec, ordered(accepted), tuple(refused), rates)


def one_rank(spec: TrainerRunSpec, micro_batches: int = 1) -> TrainerRunSpec:
    """The run on one rank, with so many micro-batches a step and without an export."""
    resources = spec.resources.model_copy(update={"nodes": 1, "ranks_per_node": 1})
    solo_spec = under(spec.model_copy(update={"resources": resources}), Layout(1))
    train = solo_spec.train.model_copy(update={"global_batch": None, "gradient_accumulation": micro_batches})
    export = solo_spec.export.model_copy(update={"enabled": False})
    return solo_spec.model_copy(update={"train": train, "export": export})


def chunks_of(spec: TrainerRunSpec) -> tuple[int, ...]:
    """Numbers of stages of a rank to look at: also the run file's own."""
    return tuple(sorted({*CHUNKS, *([spec.parallel.chunks] if spec.parallel.chunks > 1 else ())}))


@dataclass(frozen=True)
class Shape:
    """The graphs of a layout."""

    work: Work
    """Of a micro-batch on a rank that has all layers; unused where there are stages."""
    peak: Peak | None = None
    stages: Sequence[StagePasses] = ()
    division: Division | None = None
    replays: Sequence[Replayed] = ()
    fetched: int = 0


@dataclass
class _DividedModels:
    """What was found of the model, divided in one way after the other."""

    spec: TrainerRunSpec
    model: Built
    timed: bool = False
    """Whether the nodes may be timed here."""
    _divided: dict[tuple[int, int, int], tuple[Division, Path] | UserError] = field(default_factory=dict)
    _read: dict[tuple[int, int, int], list[StagePasses]] = field(default_factory=dict)
    _parts: dict[int, tuple[Peak, Work]] = field(default_factory=dict)
    _undivided: dict[bool, Shape] = field(default_factory=dict)
    _replayed: dict[object, list[Replayed]] = field(default_factory=dict)
    _variants: Variants | None = None

    def missing(self, spec: TrainerRunSpec) -> str | None:
        """What this machine lacks for a layout."""
        parallel = spec.parallel
        if spec.on_gpus or has_kernels(spec) or (parallel.horizontal == 1 and parallel.zero < 3):
            return None
        return "resources.kernels: this machine has no compiled kernels of ortflow's, which exchange within a pass"

    def how_cut(self) -> list[str]:
        """By what the stages were balanced, if a run would measure it."""
        if self._variants is None or self._variants.costs is None:
            return []
        if self._variants.costs.known:
            return ["Stages are balanced by the time of each node, measured here or recorded by the run."]
        return [
            "Stages are balanced by counted operations. A run on CPUs times the nodes when it first starts, and may "
            "cut the model elsewhere; parallel.cuts fixes the cuts."
        ]

    def check_samples(self, spec: TrainerRunSpec) -> None:
        """Raise UserError if the training set has too few samples for a step."""
        samples = Plan.load(self.model.run_dir.plan).samples
        resolve(spec, samples=samples, data="", parameters=0, fingerprint="", graphs={})

    def at(self, spec: TrainerRunSpec, layout: Layout) -> Shape:
        """The graphs of a layout. Raises UserError if the model cannot be divided so."""
        if not spec.divides:
            return self.whole(sharded=spec.parallel.zero == 3)
        division, root = self._division(spec, layout)
        division = replace(division, grid=spec.grid)
        if layout.pipeline == 1:
            if layout.horizontal not in self._parts:
                graphs = replace(self.model.graphs, root=folder_of(root, 0))
                self._parts[layout.horizontal] = self._passes(graphs, spec)
            peak, work = self._parts[layout.horizontal]
            return Shape(work, peak, division=division)
        if layout.cut not in self._read:
            folder = folder_of(root, 0)
            self._read[layout.cut] = stage_passes(folder, self.model.shapes, kernels=has_kernels(spec))
        stages = self._read[layout.cut]
        key = (layout.cut, layout.schedule, spec.accumulation)
        if key not in self._replayed:
            self._replayed[key] = replays_of(spec, stages)
        return Shape(Work(0), stages=stages, division=division, replays=self._replayed[key])

    def whole(self, *, sharded: bool = False) -> Shape:
        """The undivided graphs; `sharded`: those that fetch their parameters."""
        if sharded not in self._undivided:
            spec = under(self.spec, Layout(self.spec.world_size, zero=3 if sharded else 0))
            graphs = self.model.graphs
            shards = shards_of(graphs, spec)
            peak, work = self._passes(graphs, spec, shards)
            self._undivided[sharded] = Shape(work, peak, fetched=sum(messages_of(shards, graphs.index, spec)))
        return self._undivided[sharded]

    def memory(self, spec: TrainerRunSpec, shape: Shape) -> RankMemory:
        """The memory of the rank that needs most."""
        index, batch = self.model.graphs.index, self.model.bytes
        if shape.division is not None and shape.stages:
            return most(pipeline_memory(spec, index, shape.division, shape.replays, batch))
        assert shape.peak is not None
        if shape.division is not None:
            return most(part_memory(spec, index, shape.division, shape.peak, batch))
        exchange = exchange_in(self.model.graphs, spec)
        return memory_of(spec, index, shape.peak, batch, fetched=shape.fetched, messages=exchange.size)

    def _passes(self, graphs: GraphSet, spec: TrainerRunSpec, shards: Sharded | None = None) -> tuple[Peak, Work]:
        return activations(graphs, spec, self.model.shapes, shards), training_work(graphs, spec, self.model.shapes)

    def _division(self, spec: TrainerRunSpec, layout: Layout) -> tuple[Division, Path]:
        if layout.cut not in self._divided:
            if self._variants is None:
                timing = Timing(lambda _: self.model.batch.arrays, threads_of(self.spec)) if self.timed else None
                self._variants = Variants(self.spec, self.model.graphs, self.model.length, self.model.lengths, timing)
            root = self.model.graphs.root / "-".join(map(str, layout.cut))
            try:
                self._divided[layout.cut] = self._variants.write(spec, root), root
            except UserError as error:
                self._divided[layout.cut] = error
        entry = self._divided[layout.cut]
        if isinstance(entry, UserError):
            raise entry
        return entry
