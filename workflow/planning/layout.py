"""The layouts of a number of ranks, and the run file's checks of each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.parallel.schedule import Kind
from ortflow.workflow.spec.checks.check import check
from ortflow.workflow.spec.problem import dotted
from ortflow.workflow.spec.run import TrainerRunSpec

CHUNKS = (2, 4)
"""Stages of a rank to consider under the schedule interleaved."""
LAYOUT = frozenset({"data", "pipeline", "schedule", "chunks", "cuts", "horizontal", "zero"})
"""Keys of `parallel` that a layout sets."""
OF_HORIZONTAL = frozenset({"whole", "columns", "rows", "sequence_parallel"})
"""Keys of `parallel` that are about the parts of layers."""
Zero = Literal[0, 1, 2, 3]
ZERO: tuple[Zero, ...] = (0, 1, 2, 3)


@dataclass(frozen=True)
class Layout:
    """One way to divide a model over ranks: the section `parallel`."""

    data: int
    pipeline: int = 1
    horizontal: int = 1
    zero: Zero = 0
    schedule: Kind = "1f1b"
    chunks: int = 1

    @property
    def grid(self) -> Grid:
        """Its degrees."""
        return Grid(self.data, self.pipeline, self.horizontal)

    @property
    def cut(self) -> tuple[int, int, int]:
        """What its graphs depend on: stages of the pipeline, of each rank, and parts."""
        return self.pipeline, self.chunks, self.horizontal

    def __str__(self) -> str:
        words = [f"data {self.data}"]
        if self.pipeline > 1:
            words.append(f"pipeline {self.pipeline} ({self.schedule}{f' {self.chunks}' if self.chunks > 1 else ''})")
        words += [f"horizontal {self.horizontal}"] if self.horizontal > 1 else []
        return " x ".join(words) + (f", zero {self.zero}" if self.zero else "")


def layouts(ranks: int, chunks: tuple[int, ...] = CHUNKS) -> Iterator[Layout]:
    """Every layout of so many ranks.

    ZeRO has nothing to shard with a single replica, so such layouts are left out.
    """
    for pipeline in divisors(ranks):
        for horizontal in divisors(ranks // pipeline):
            data = ranks // pipeline // horizontal
            for zero in ZERO if data > 1 else ZERO[:1]:
                if pipeline == 1:
                    yield Layout(data, pipeline, horizontal, zero)
                    continue
                yield Layout(data, pipeline, horizontal, zero)
                yield Layout(data, pipeline, horizontal, zero, "gpipe")
                for stages_per_rank in chunks:
                    yield Layout(data, pipeline, horizontal, zero, "interleaved", stages_per_rank)


def divisors(number: int) -> list[int]:
    """Divisors, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def section(layout: Layout, spec: TrainerRunSpec) -> dict[str, Any]:
    """The section `parallel` of a run file, without keys that have their default.

    Keys that a layout does not set, such as the names of weights that stay whole, stay as the run file has them.
    """
    keys: dict[str, Any] = {"data": layout.data}
    if layout.pipeline > 1:
        keys |= {"pipeline": layout.pipeline, "schedule": layout.schedule}
        keys |= {"chunks": layout.chunks} if layout.chunks > 1 else {}
        cuts = spec.parallel.cuts
        keys |= {"cuts": cuts} if cuts is not None and len(cuts) == layout.pipeline * layout.chunks - 1 else {}
    keys |= {"horizontal": layout.horizontal} if layout.horizontal > 1 else {}
    keys |= {"zero": layout.zero} if layout.zero else {}
    other_keys = spec.parallel.model_dump(exclude_defaults=True, exclude=set(LAYOUT))
    omitted_keys = OF_HORIZONTAL if layout.horizontal == 1 else frozenset[str]()
    return {**keys, **{name: value for name, value in other_keys.items() if name not in omitted_keys}}


def keys_of(
    file_spec: TrainerRunSpec, spec: TrainerRunSpec, layout: Layout, recompute: str | None = None
) -> dict[str, Any]:
    """What to change in a run file, so that it trains under a layout with the same samples in a step.

    Parameters
    ----------
    file_spec
        The run file's run.
    spec
        The same run on the wanted number of ranks.
    layout
        The layout.
    recompute
        `model.recompute`, if the layout sets it.
    """
    changes: dict[str, Any] = {"parallel": section(layout, spec)}
    if recompute is not None:
        changes["model"] = {"recompute": recompute}
    count, train = under(spec, layout).accumulation, file_spec.train
    if (train.global_batch is None or train.gradient_accumulation > 1) and count != train.gradient_accumulation:
        changes["train"] = {"gradient_accumulation": count}
    before, after = file_spec.resources, spec.resources
    if (before.nodes, before.ranks_per_node) != (after.nodes, after.ranks_per_node):
        changes["resources"] = {"nodes": after.nodes, "ranks_per_node": after.ranks_per_node}
    return changes


def under(spec: TrainerRunSpec, layout: Layout) -> TrainerRunSpec:
    """The run under a layout, with the same samples in a step."""
    parallel = type(spec.parallel).model_validate(section(layout, spec))
    train = spec.train.model_copy(update={"global_batch": spec.global_batch})
    return spec.model_copy(update={"parallel": parallel, "train": train})


def on_ranks(spec: TrainerRunSpec, ranks: int) -> TrainerRunSpec:
    """The run on another number of ranks: as many nodes if these divide it, else one; `spec` itself if it has so many.

    The samples of a step stay those of `spec`.
    """
    if ranks == spec.world_size:
        return spec
    nodes = spec.resources.nodes if ranks % spec.resources.nodes == 0 else 1
    resources = spec.resources.model_copy(update={"nodes": nodes, "ranks_per_node": ranks // nodes})
    train = spec.train.model_copy(update={"global_batch": spec.global_batch})
    return spec.model_copy(update={"resources": resources, "train": train})


def refusal(spec: TrainerRunSpec) -> str | None:
    """Why `ortflow validate` refuses a run; None if its keys are valid."""
    problems = check(spec)
    return f"{dotted(problems[0].path)} {problems[0].what}" if problems else None
