"""When a captured graph of an ORTModule must not be launched, and when results are copied."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from ortflow.torch import leases


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_captured", weakref.WeakSet())
    monkeypatch.setattr(leases, "_leases", weakref.WeakSet())


def test_values_that_a_backward_pass_still_reads_hold_captured_graphs_back() -> None:
    graph, first, second = object(), leases.Lease(), leases.Lease()
    leases.note(first)
    leases.note(second)
    assert leases.any_pending(graph)
    first.pending = False
    assert leases.any_pending(graph)
    del second  # a call whose results nobody has any more
    assert not leases.any_pending(graph)


def test_values_in_a_captured_graph_hold_only_that_graph_back() -> None:
    graph, other, lease = object(), object(), leases.Lease()
    leases.note(lease, graph)
    assert leases.any_pending(graph)
    assert not leases.any_pending(other)
    leases.overwrite(other)
    lease.check()
    leases.overwrite(graph)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()
    assert not leases.any_pending(graph), "its values are gone"


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
    leases.overwrite(object())
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()
