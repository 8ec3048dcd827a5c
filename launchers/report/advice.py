"""What would make the profiled steps faster, with numbers. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ortflow.launchers.report.profile import Profile, Row

MOST = 3
LEAST = 0.02
"""Share of the time from which on a saving is worth a sentence."""
SHORT = 50e-6
"""Seconds of an operator below which starting it counts."""


def advice(profile: Profile) -> list[str]:
    """The sentences about the largest possible savings, the largest first; at most three."""
    found = [(share, text) for share, text in _savings(profile) if share >= LEAST]
    return [text for _, text in sorted(found, key=lambda each: -each[0])[:MOST]]


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
        seconds = sum(each.outside.get(kind, 0.0) for each in ranks)
        yield seconds / wall, f"{kind} takes {seconds / wall:.0%} of the window: {fix}."
    rows = profile.rows()
    yield from _between(profile, rows)
    yield from _operators(profile, [row for row in rows if row.kind == "operator" and row.calls])


def _data(profile: Profile) -> Iterator[tuple[float, str]]:
    slowest = max(profile.ranks, key=lambda each: each.data)
    share = slowest.data / slowest.wall
    of_rank = f" on rank {slowest.rank}" if len(profile.ranks) > 1 else ""
    yield share, (
        f"data wait takes {share:.0%}{of_rank}, {_ms(slowest.data / profile.steps)} a step: raise data.workers, give "
        "the ranks more cores or convert the data."
    )


def _exchange(profile: Profile) -> Iterator[tuple[float, str]]:
    """Collectives: the rank that is in them for the shortest time waits for none, and the others for it."""
    ranks = profile.ranks
    least = min(ranks, key=lambda each: each.collectives)
    transfer = sum(least.collectives / each.wall for each in ranks) / len(ranks)
    size = sum(row.bytes for row in profile.collectives) / len(ranks) / profile.steps
    rate = size * profile.steps / least.collectives if least.collectives else 0.0
    if profile.world_size == len(ranks):
        now = int(profile.window.get("gradient_accumulation") or 1)
        yield transfer, (
            f"collectives take {transfer:.0%} where no rank waits for another, for {_size(size)} a step at "
            f"{_size(rate)}/s: raise train.gradient_accumulation from {now} to {2 * now}, which halves them for each "
            "sample."
        )
        waited = sum(each.collectives - least.collectives for each in ranks) / profile.wall
        longer = least.own - min(each.own for each in ranks)
        yield waited, (
            f"ranks wait {waited:.0%} of the time for rank {least.rank}, which computes {_ms(longer / profile.steps)} "
            "a step longer than the fastest: compare its node and its cores with the others'."
        )


def _between(profile: Profile, rows: list[Row]) -> Iterator[tuple[float, str]]:
    share = sum(row.seconds for row in rows if row.kind == "between") / profile.wall
    calls = sum(row.calls for row in rows if row.kind == "operator")
    seconds = sum(row.seconds for row in rows if row.kind == "operator")
    micro_batch = profile.window.get("micro_batch")
    if not calls or micro_batch is None:
        return
    yield share, (
        f"{share:.0%} is spent between operators, of which {calls / profile.steps / len(profile.ranks):.0f} run in a "
        f"step for {1e6 * seconds / calls:.0f} us each: raise data.micro_batch from {micro_batch}."
    )


def _operators(profile: Profile, rows: list[Row]) -> Iterator[tuple[float, str]]:
    for row in rows:
        share, reached = row.seconds / profile.wall, profile.of_limit(row)
        if reached is None or reached >= 1:
            continue
        mean = row.seconds / row.calls
        fix = (
            f"its {row.calls / profile.steps / len(profile.ranks):.0f} calls a step take {1e6 * mean:.0f} us each, so "
            f"a larger data.micro_batch than {profile.window.get('micro_batch')} would use the cores better"
            if mean < SHORT
            else f"most of it is in {row.largest}"
        )
        yield share * (1 - reached), (
            f"{row.name} takes {share:.0%} and reaches {reached:.0%} of what this machine can do: {fix}."
        )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _size(count: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"
