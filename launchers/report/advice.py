"""What would make the profiled steps faster, with numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.launchers.report.profile import Profile, Row
from ortflow.launchers.report.profile_table import scaled

MOST = 3
LEAST = 0.02
"""Share of the time from which on a saving is worth a sentence."""
SHORT = 50e-6
"""Seconds of an operator below which starting it counts."""


def advice(profile: Profile) -> list[str]:
    """The sentences about the largest possible savings, the largest first; at most three."""
    savings = [(share, text) for share, text in _savings(profile) if share >= LEAST]
    return [text for _, text in sorted(savings, key=lambda saving: -saving[0])[:MOST]]


def _savings(profile: Profile) -> Iterator[tuple[float, str]]:
    """Pairs of the share of the time that could be saved at most, and a sentence."""
    wall, ranks = profile.wall, profile.ranks
    if not wall or not profile.steps:
        return
    yield from _data(profile)
    if len(ranks) > 1:
        yield from _exchange(profile)
    for kind, fix in (
        ("evaluation", "raise train.evaluation.every_steps or lower data.eval_samples"),
        ("checkpoint", "raise checkpoint.every_steps or set checkpoint.asynchronous"),
    ):
        seconds = sum(rank.outside.get(kind, 0.0) for rank in ranks)
        yield seconds / wall, f"{kind} takes {seconds / wall:.0%} of the window: {fix}."
    if profile.queued:
        return
    rows = profile.rows()
    yield from _between(profile, rows)
    yield from _operators(profile, [row for row in rows if row.kind == "operator" and row.calls])


def _data(profile: Profile) -> Iterator[tuple[float, str]]:
    slowest = max(profile.ranks, key=lambda rank: rank.data)
    share = slowest.data / slowest.wall
    of_rank = f" on rank {slowest.rank}" if len(profile.ranks) > 1 else ""
    if profile.window.get("program"):
        fix = "give the loader more workers (num_workers of torch's DataLoader), or the ranks more cores"
    else:
        fix = "raise data.workers, give the ranks more cores or convert the data"
    text = f"data wait takes {share:.0%}{of_rank}, {_ms(slowest.data / profile.steps)} a step: {fix}."
    yield share, text


def _exchange(profile: Profile) -> Iterator[tuple[float, str]]:
    """Collectives: the rank that is in them for the shortest time waits for none, and the others for it."""
    ranks = profile.ranks
    if profile.world_size > len(ranks):
        return
    least = min(ranks, key=lambda rank: rank.collectives)
    transfer = profile.transfer * len(ranks) / profile.wall
    size = sum(row.bytes for row in profile.collectives) / len(ranks) / profile.steps
    rate = size * profile.steps / profile.transfer if profile.transfer else 0.0
    now = int(profile.window.get("gradient_accumulation") or 1)
    fix = f"raise train.gradient_accumulation from {now} to {2 * now}, which halves them for each sample"
    if profile.window.get("exchanges_in_passes"):
        fix = "the passes of each micro-batch exchange them, so use a faster network or another layout (`ortflow plan`)"
    text = (
        f"collectives take {transfer:.0%} where no rank waits for another, for {scaled(size, 'B')} a step at "
        f"{scaled(rate, 'B/s')}: {fix}."
    )
    yield transfer, text
    waited = sum(rank.collectives - profile.transfer for rank in ranks) / profile.wall
    longer = least.own + least.data - min(rank.own + rank.data for rank in ranks)
    text = (
        f"ranks wait {waited:.0%} of the time for others, most for rank {least.rank}, which takes "
        f"{_ms(longer / profile.steps)} a step longer than the fastest: compare its data wait, its node and its cores."
    )
    yield waited, text


def _between(profile: Profile, rows: list[Row]) -> Iterator[tuple[float, str]]:
    share = sum(row.seconds for row in rows if row.kind == "between") / profile.wall
    operators = [row for row in rows if row.kind == "operator" and row.calls]
    calls, seconds = sum(row.calls for row in operators), sum(row.seconds for row in operators)
    micro_batch = profile.window.get("micro_batch")
    if not calls or micro_batch is None:
        return
    in_step = calls / profile.steps / len(profile.ranks)
    text = (
        f"{share:.0%} is spent between operators, of which {in_step:.0f} run in a step for {1e6 * seconds / calls:.0f} "
        f"us each: raise data.micro_batch from {micro_batch}."
    )
    yield share, text


def _operators(profile: Profile, rows: list[Row]) -> Iterator[tuple[float, str]]:
    for row in rows:
        share, reached = row.seconds / profile.wall, profile.of_limit(row)
        if reached is None or reached >= 1:
            continue
        mean, in_step = row.seconds / row.calls, row.calls / profile.steps / len(profile.ranks)
        fix = f"most of it is in {row.largest}"
        if mean < SHORT:
            fix = (
                f"its {in_step:.0f} calls a step take {1e6 * mean:.0f} us each, and a larger data.micro_batch than "
                f"{profile.window.get('micro_batch')} would use the cores better"
            )
        text = f"{row.name} takes {share:.0%} and reaches {reached:.0%} of what this machine can do: {fix}."
        yield share * (1 - reached), text


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
