"""When a captured graph of an ORTModule must not be launched, and when results are copied."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from ortflow.torch import leases


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_captured", weakref.WeakSet())
    monkeypatch.setattr(leases, "_in_arena", weakref.WeakSet())


def test_values_that_a_backward_pass_still_reads_hold_captured_graphs_back() -> None:
    first, second = leases.Lease(), leases.Lease()
    leases.note_queued(first)
    leases.note_queued(second)
    assert leases.any_pending()
    first.pending = False
    assert leases.any_pending()
    del second  # a call whose results nobody has any more
    assert not leases.any_pending()


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
    leases.note_queued(lease)
    lease.pending = False
    leases.overwrite_arena()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        lease.check()
