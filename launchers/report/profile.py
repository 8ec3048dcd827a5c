"""Where the time of the profiled steps went: the records of `monitor.profile` as rows of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ortflow.launchers.report.peaks import known_peak
from ortflow.workflow.run import profile_records as records
from ortflow.workflow.run.operator_records import RUN

EXCHANGES = frozenset({"Collective", "Shards"})
"""Operators that call other ranks: their time is that of the collectives."""
Record = Mapping[str, Any]
QUEUED_BY = "CUDAExecutionProvider"
"""What records the time in which the host queued an operator: ONNX Runtime does not wait for the GPU at each."""


@dataclass
class Row:
    """An operator, a module, or another part of the steps; sums over ranks and steps."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0
    """Of products and convolutions whose shapes determine them."""
    counted: float = 0.0
    """Seconds of the runs whose operations are known."""
    kind: str = "operator"
    """`operator`, or the part: data, collective, between, evaluation, checkpoint, other."""
    by: str = ""
    """What computed it."""
    largest: str = ""
    """The module or operator that takes most of it."""

    @property
    def rate(self) -> tuple[float, str] | None:
        """Operations or bytes a second; None where the time is not that of the computation."""
        if not self.seconds or self.by == QUEUED_BY:
            return None
        if self.flops:
            return self.flops / self.counted, "FLOP/s"
        return (self.bytes / self.seconds, "B/s") if self.bytes else None


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank in the window."""

    rank: int
    wall: float
    steps: float
    data: float
    collectives: float
    """In steps."""
    operators: float
    outside: Mapping[str, float] = field(default_factory=dict)
    """Evaluation and checkpoints between steps."""
    exchanges: Sequence[float] = ()
    """Of `collectives`, those of each step."""

    @property
    def own(self) -> float:
        """Of the steps, what the rank took without others: it neither waited for samples nor for ranks."""
        return max(0.0, self.steps - self.data - self.collectives)


@dataclass(frozen=True)
class Profile:
    """A window of steps."""

    folder: Path
    first: int
    steps: int
    """Steps that every counted rank has done."""
    planned: tuple[int, int]
    world_size: int
    ranks: Sequence[RankTimes]
    nodes: Sequence[Record]
    """Rows by graph, module and operator, of all ranks."""
    collectives: Sequence[Row]
    limits: tuple[float, float] | None
    """Operations and bytes a second of a rank at most, averaged over the ranks."""
    clock_error: float | None
    """Seconds; None if the clocks of the ranks were not compared."""
    window: Record
    flops: int | None
    """Of the model in a step over all ranks, by the planner's rules; None if unknown."""
    complete: bool
    """Whether all ranks have recorded the window to its end."""

    @property
    def queued(self) -> bool:
        """Whether the times of operators are those in which the host queued them on a GPU."""
        return any(row.get("by") == QUEUED_BY for row in self.nodes)

    @property
    def wall(self) -> float:
        """Seconds of all ranks together."""
        return sum(rank.wall for rank in self.ranks)

    @property
    def peak(self) -> tuple[float, str] | None:
        """Operations a second that all ranks' devices can do at most, and how that is known; None if it is not."""
        if self.limits is not None:
            meaning = "the fastest matrix product in fp32 that was measured on the ranks' cores"
            return self.limits[0] * self.world_size, meaning
        return known_peak(str(self.window.get("device", "")), str(self.window.get("precision", "")), self.world_size)

    @property
    def transfer(self) -> float:
        """Seconds of the collectives of one rank if none waited for another: in each step those of the last rank."""
        seconds: float = sum(min(step) for step in zip(*(rank.exchanges for rank in self.ranks), strict=False))
        return seconds

    @property
    def mfu(self) -> float | None:
        """The model's operations of the profiled steps, as a share of what the devices could have done meanwhile."""
        steps = sum(rank.steps for rank in self.ranks) / len(self.ranks) / self.steps
        if self.flops is None or self.peak is None or not steps:
            return None
        return self.flops / steps / self.peak[0]

    def rows(self, by: str = "operator") -> list[Row]:
        """The table, the longest first: operators or modules, then the other parts of the time."""
        parts = [*_grouped((row for row in self.nodes if row.get("step")), by), *self.collectives]
        data = sum(rank.data for rank in self.ranks)
        parts.append(Row("data wait", self.steps * len(self.ranks), data, kind="data"))
        if self.nodes:
            between = sum(max(0.0, rank.own - rank.operators) for rank in self.ranks)
            parts.append(Row("between operators", 0, between, kind="between"))
        else:
            parts.append(Row("compute", 0, sum(rank.own for rank in self.ranks), kind="operator"))
        outside: dict[str, float] = defaultdict(float)
        for rank in self.ranks:
            for name, seconds in rank.outside.items():
                outside[name] += seconds
        parts += [Row(name, 0, seconds, kind=name) for name, seconds in outside.items()]
        rest = sum(max(0.0, rank.wall - rank.steps - sum(rank.outside.values())) for rank in self.ranks)
        parts.append(Row("between steps", 0, rest, kind="other"))
        return sorted((row for row in parts if row.seconds > 0), key=lambda row: -row.seconds)

    def of_limit(self, row: Row) -> float | None:
        """The share of the machine's measured limit that a row reaches: of its operations or its bytes."""
        if self.limits is None or row.kind != "operator" or not row.seconds or not row.bytes or not row.counted:
            return None
        moved = row.bytes * row.counted / row.seconds
        return max(row.flops / self.limits[0], moved / self.limits[1]) / row.counted

    def to_json(self) -> dict[str, Any]:
        """The numbers, for programs; seconds are sums over the ranks."""
        from ortflow.launchers.report.advice import advice

        def plain(row: Row) -> dict[str, Any]:
            share = row.seconds / self.wall if self.wall else 0.0
            return {**vars(row), "share": share, "of_limit": self.of_limit(row)}

        return {
            "first": self.first, "steps": self.steps, "from": self.planned[0], "to": self.planned[1],
            "ranks": len(self.ranks), "world_size": self.world_size, "complete": self.complete,
            "queued": self.queued,
            "seconds": self.wall, "clock_error": self.clock_error, "flops_per_step": self.flops,
            "mfu": self.mfu, "peak": None if self.peak is None else {"flops": self.peak[0], "of": self.peak[1]},
            "limits": None if self.limits is None else {"flops": self.limits[0], "bytes": self.limits[1]},
            "operators": [plain(row) for row in self.rows()], "modules": [plain(row) for row in self.rows("module")],
            "by_rank": [{**vars(rank), "own": rank.own} for rank in self.ranks], "advice": advice(self),
        }  # fmt: skip


def _grouped(rows: Iterable[Record], by: str) -> list[Row]:
    table: dict[str, Row] = {}
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    other = "module" if by == "operator" else "operator"
    for row in rows:
        if row["operator"] in EXCHANGES or row["operator"] == RUN:
            continue
        name = str(row[by]) or f"({row['graph']})"
        entry = table.setdefault(name, Row(name, by=str(row.get("by", ""))))
        entry.calls += row["calls"]
        entry.seconds += row["seconds"]
        entry.bytes += row["bytes"]
        if row["flops"] is not None:
            entry.flops += row["flops"]
            entry.counted += row["seconds"]
        parts[name][str(row[other]) or f"({row['graph']})"] += row["seconds"]
    for name, entry in table.items():
        entry.largest = max(parts[name], key=parts[name].__getitem__)
    return list(table.values())


def read(root: Path) -> Profile | None:
    """The newest window of a run; None if it has none with a step. Raises OSError."""
    for folder in reversed(records.attempts(root)):
        profile = of_records(folder, records.records(folder))
        if profile is not None:
            return profile
    return None


def of_records(folder: Path, by_rank: Mapping[int, Sequence[Record]]) -> Profile | None:
    """The window in the records of an attempt; None if no step was recorded."""
    windows = [_first(lines, "window") for lines in by_rank.values()]
    window = next((rank_window for rank_window in windows if rank_window), None)
    if window is None:
        return None
    errors = [rank_window["clock_error"] for rank_window in windows if rank_window]
    ranks, nodes, calls, limits, steps = [], list[Record](), list[Record](), list[Record](), list[int]()
    for rank, lines in by_rank.items():
        spans = [line for line in lines if line.get("kind") == "span"]
        done = sorted((line["start"], line["start"] + line["seconds"]) for line in _in(spans, records.STEP))
        if not done:
            continue
        rank_nodes = [row for line in lines if line.get("kind") == "nodes" for row in line["rows"]]
        exchanged = [line for line in _in(spans, records.COLLECTIVE) if _within(line["start"], done)]
        outside: dict[str, float] = defaultdict(float)
        for line in _in(spans, records.OTHER):
            outside[line["name"]] += line["seconds"]
        end = max([end for _, end in done] + [line["start"] + line["seconds"] for line in _in(spans, records.OTHER)])
        computed = sum(
            row["seconds"] for row in rank_nodes if row.get("step") and row["operator"] not in (RUN, *EXCHANGES)
        )  # fmt: skip
        ranks.append(
            RankTimes(
                rank, end - done[0][0], sum(end - start for start, end in done),
                sum(line["seconds"] for line in _in(spans, records.DATA)),
                sum(line["seconds"] for line in exchanged), computed, outside,
                [sum(line["seconds"] for line in exchanged if _within(line["start"], [step])) for step in done],
            )
        )  # fmt: skip
        steps.append(len(done))
        nodes += rank_nodes
        calls += exchanged
        limits += [line for line in lines if line.get("kind") == "limits"]
    if not ranks:
        return None
    collectives: dict[str, Row] = {}
    for call in calls:
        row = collectives.setdefault(call["name"], Row(call["name"], kind="collective"))
        row.calls += 1
        row.seconds += call["seconds"]
        row.bytes += call.get("bytes", 0)
    work = next((line for lines in by_rank.values() for line in lines if line.get("kind") == "work"), {})
    ends = sum(_first(lines, "end") is not None for lines in by_rank.values())
    most = [sum(line[name] for line in limits) / len(limits) for name in ("flops", "bytes")] if limits else None
    return Profile(
        folder, window["first"], min(steps), (window["first"], window["to"]), window["world_size"], ranks, nodes,
        list(collectives.values()), (most[0], most[1]) if most else None,
        None if None in errors else max(errors), window, work.get("flops"), ends == window["world_size"],
    )  # fmt: skip


def _first(lines: Sequence[Record], kind: str) -> Record | None:
    return next((line for line in lines if line.get("kind") == kind), None)


def _in(spans: Sequence[Record], lane: str) -> list[Record]:
    return [line for line in spans if line.get("lane") == lane]


def _within(moment: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(start <= moment <= end for start, end in spans)
