"""Batches that do not divide: what is said, and which sizes are proposed, by a search of all of them."""

from __future__ import annotations

import pytest
from messages import mentions

from ortflow.workflow.parallel.grid import Grid
from ortflow.workflow.spec.checks.batch import fitting, replicas, undivided


def grid(data: int, pipeline: int = 1, horizontal: int = 1) -> Grid:
    return Grid(data=data, pipeline=pipeline, horizontal=horizontal)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (grid(1), "1 rank"),
        (grid(2), "2 ranks"),
        (grid(1, 2), "1 replica of 2 ranks"),
        (grid(2, 3), "2 replicas of 3 ranks"),
        (grid(3, 2, 2), "3 replicas of 4 ranks"),
    ],
)
def test_replicas_as_text(layout: Grid, text: str) -> None:
    assert replicas(layout) == text


@pytest.mark.parametrize(
    ("batch", "micro_batch", "layout", "sizes", "batches"),
    [
        # The batch divides over the ranks: a smaller micro-batch, the largest that divides a rank's share.
        (16, 3, grid(2), "data.micro_batch=2", (12, 18)),
        (6, 5, grid(2), "data.micro_batch=3", (10,)),
        # It divides over the micro-batches: the nearest numbers of ranks below and above.
        (16, 4, grid(3), "2 ranks or 4 ranks", (12, 24)),
        (20, 4, grid(3), "1 rank or 5 ranks", (12, 24)),
        (20, 4, grid(7), "5 ranks", (28,)),
        (16, 4, grid(3, 2), "4 ranks or 8 ranks", (12, 24)),
        (7, 4, grid(2), None, (8,)),
    ],
)
def test_what_fits_instead(
    batch: int, micro_batch: int, layout: Grid, sizes: str | None, batches: tuple[int, ...]
) -> None:
    other = " or ".join(f"train.global_batch={size}" for size in batches)
    assert fitting(batch, micro_batch, layout) == [*filter(None, [sizes]), f"accept another batch with {other}"]


def test_every_proposed_size_divides_and_none_is_nearer() -> None:
    for batch in range(1, 61):
        for micro_batch in range(1, 8):
            for copies in range(1, 8):
                if batch % (micro_batch * copies) == 0:
                    assert undivided(batch, micro_batch, grid(copies)) is None
                    continue
                error = undivided(batch, micro_batch, grid(copies))
                assert error is not None
                sizes = [size for size in range(1, micro_batch + 1) if batch % (size * copies) == 0]
                counts = [count for count in range(1, batch + 1) if batch % (micro_batch * count) == 0]
                below = [count for count in counts if count < copies][-1:]
                above = [count for count in counts if count > copies][:1]
                expected = [f"data.micro_batch={sizes[-1]}"] if sizes else []
                if below or above:
                    expected.append(" or ".join(replicas(grid(count)) for count in (*below, *above)))
                assert fitting(batch, micro_batch, grid(copies))[:-1] == expected, (batch, micro_batch, copies)


def test_a_number_of_ranks_is_searched_for_only_so_far() -> None:
    """A run file may contain any integer: the next divisor of a prime is itself."""
    assert fitting(4111, 1, grid(14))[0] == "1 rank or 4111 ranks", "4096 after 15, the first above"
    assert fitting(4111, 1, grid(13))[0] == "1 rank"
    assert fitting(4111, 1, grid(4097))[0] == "1 rank or 4111 ranks"
    assert fitting(4111, 1, grid(4098))[0] == "4111 ranks"


def test_the_message_names_the_numbers() -> None:
    error = undivided(16, 4, grid(3))
    assert error is not None
    assert mentions(str(error), "train.global_batch", "16 samples", "3 ranks x 4 samples (data.micro_batch)", "2 ranks")
