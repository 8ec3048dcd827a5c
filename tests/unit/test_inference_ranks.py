"""Work that is divided over processes: items in order, one sentence for a failure, nothing left behind."""

from __future__ import annotations

import psutil
import pytest
from rank_jobs import Counting

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.inference import ranks
from ortflow.workflow.inference.ranks import in_order


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "inference.ranks" in " ".join(each.cmdline())]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_items_in_order(count: int) -> None:
    found = [(number, rank) for number, rank, _ in in_order(Counting(count, size=100_000), 3)]
    assert found == [(number, number % 3) for number in range(count)]
    assert not children()


def test_failures_end_all_ranks() -> None:
    items = in_order(Counting(9, wrong=4), 2)
    with pytest.raises(UserError, match="item 4: is wrong; correct it"):
        list(items)
    with pytest.raises(OrtflowError, match="rank 1 was killed by signal 9"):
        list(in_order(Counting(9, dies=5), 2))
    # The reader stops early, as on Ctrl-C.
    items = in_order(Counting(1000, size=100_000), 2)
    next(items)
    assert len(children()) == 2
    items.close()  # type: ignore[attr-defined]
    assert not children()


def test_a_rank_that_ends_slowly_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ENDED", 0.0)
    assert len(list(in_order(Counting(3), 2))) == 3
    assert not children()
