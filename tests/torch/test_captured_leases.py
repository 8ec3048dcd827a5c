"""When a captured graph of an ORTModule must not be launched, and when results are copied."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from ortflow.torch import leases


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_captured", weakref.WeakKeyDictionary())
    monkeypatch.setattr(leases, "_leases", weakref.WeakSet())


class Captured:
    """A captured graph."""

    def __init__(self) -> None:
        leases.note_captured(self)


def test_values_that_a_backward_pass_still_reads_hold_captured_graphs_back() -> None:
    graph, first, second = Captured(), leases.Lease(), leases.Lease()
    leases.note(first)
    leases.note(second)
    assert leases.any_pending(graph)
    first.pending = False
    assert leases.any_pending(graph)
    del second  # a call whose results nobody has any more
    assert not leases.any_pending(graph)


def test_values_in_a_captured_graph_hold_no_later_graph_back() -> None:
    other, graph, lease = Captured(), Captured(), leases.Lease()
    later = Captured()
    leases.note(lease, graph)
    assert leases.any_pending(graph)
    assert not leases.any_pending(later)
    leases.overwrite(later)
    lease.check()
    leases.overwrite(graph)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()
    assert not leases.any_pending(graph), "its values are gone"
    assert not leases.any_pending(other)


def test_values_in_a_graph_that_was_captured_later_hold_a_graph_back() -> None:
    """It has them where the earlier one, when it was captured, had values in between."""
    earlier, graph, lease = Captured(), Captured(), leases.Lease()
    leases.note(lease, graph)
    assert leases.any_pending(earlier)
    leases.overwrite(earlier)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()


def test_values_of_a_graph_that_is_not_captured_any_more_are_in_the_arena() -> None:
    graph, later, lease = Captured(), Captured(), leases.Lease()
    leases.note(lease, graph)
    assert not leases.any_pending(later)
    leases.note_forgotten(graph)
    assert leases.any_pending(later)
    leases.note_captured(graph)
    assert leases.any_pending(later), "now it is the later one"


def test_results_are_copied_while_a_graph_is_captured() -> None:
    assert not leases.any_captured()
    graph = leases.Lease()
    leases.note_captured(graph)
    assert leases.any_captured()
    del graph
    assert not leases.any_captured()


def test_values_of_another_call_are_not_read() -> None:
    lease = leases.Lease()
    lease.check()
    lease.overwrite()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()


def test_a_launch_ends_the_use_of_values_in_the_arena() -> None:
    """Also of a call that was queued node by node, whose backward pass has run once (retain_graph=True)."""
    lease = leases.Lease()
    leases.note(lease)
    lease.pending = False
    leases.overwrite(Captured())
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()
