"""The gate before the first step: which nodes are too slow, and which pairs of nodes exchange data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import mentions

from ortflow.workflow.comm.solo import SoloCommunicator
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.preflight import gate, gpu
from ortflow.workflow.preflight.judge import sentence, slow_nodes, summary
from ortflow.workflow.preflight.links import best_links, pairings
from ortflow.workflow.preflight.measure import compute_rate, copy_rate
from ortflow.workflow.preflight.report import best_of, of_nodes
from ortflow.workflow.ranks import Place, node_of

GOOD = {"compute": 32.0, "copy": 9.0, "network": 900.0}


def nodes(**slow: dict[str, float]) -> dict[str, dict[str, float]]:
    return {name: GOOD | slow.get(name, {}) for name in ("n1", "n2", "n3", "n4")}


def test_the_slow_node_is_named_with_its_numbers() -> None:
    bad = slow_nodes(nodes(n3={"compute": 12.2}))
    assert sentence(bad) == ("preflight: node n3 computes at 38% of its peers' median (12 against 32 GFLOP/s)")
    assert slow_nodes(nodes()) == {}
    assert slow_nodes(nodes(n3={"compute": 20.0})) == {}, "other load for a moment"


@pytest.mark.parametrize(
    ("figures", "words"),
    [({"copy": 1.0}, "copies memory at 11%"), ({"network": 90.0}, "exchanges data at 10%")],
)
def test_every_quantity_counts(figures: dict[str, float], words: str) -> None:
    assert mentions(slow_nodes(nodes(n2=figures))["n2"], words)


def test_of_two_nodes_the_slower_is_named_and_of_one_only_a_floor() -> None:
    assert list(slow_nodes({"n1": GOOD, "n2": GOOD | {"compute": 9.0}})) == ["n2"]
    assert slow_nodes({"n1": GOOD}) == {}
    assert slow_nodes({"n1": {"compute": 0.2}}) == {"n1": "computes at 0.2 GFLOP/s, below 0.5"}
    every = {name: {"network": 0.3} for name in ("n1", "n2")}
    assert list(slow_nodes(every)) == ["n1", "n2"], "both are below the floor, equal as they are"


@given(st.integers(3, 9), st.integers(0, 8), st.floats(0.01, 0.45))
def test_only_the_bad_node_of_many_is_named(count: int, place: int, share: float) -> None:
    figures = {f"n{number}": dict(GOOD) for number in range(count)}
    figures[f"n{place % count}"]["compute"] *= share
    assert list(slow_nodes(figures)) == [f"n{place % count}"]


def test_the_figures_of_a_node_are_those_of_its_ranks() -> None:
    ranks = [{"compute": 3.0, "network": 7.0}, {"compute": 4.0}, {"compute": 5.0}, {"compute": 6.0}]
    assert of_nodes(["a", "a", "b", "b"], ranks) == {"a": {"compute": 7.0, "network": 7.0}, "b": {"compute": 11.0}}
    assert summary({"a": {"compute": 31.2, "copy": 9.91}, "b": {"compute": 33.0, "copy": 9.91}}) == (
        "compute 31 to 33 GFLOP/s, copy 9.9 GB/s"
    )


@given(st.integers(1, 12), st.integers(1, 5))
def test_pairs_are_disjoint_and_nobody_has_the_same_partner_twice(count: int, rounds: int) -> None:
    seen = set()
    for pairs in pairings(count, rounds):
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
        assert len(nodes) == count - count % 2
        for pair in pairs:
            assert frozenset(pair) not in seen
            seen.add(frozenset(pair))
    assert len(pairings(count, rounds)) == (min(rounds, count - 1 + count % 2) if count > 1 else 0)


def test_one_bad_node_of_three_is_known_by_its_links() -> None:
    """A pair is as slow as its worse node; the best of its partners shows each good node as good."""
    measured: list[dict[int, float]] = [{}, {}, {}]
    for [(one, other)] in pairings(3):
        measured[one][other] = 20.0 if 1 in (one, other) else 900.0
        measured[other][one] = 880.0  # one end alone may have begun later
    best = best_links(measured)
    assert best == [880.0, 20.0, 880.0]
    assert list(slow_nodes({f"n{node}": {"network": rate} for node, rate in enumerate(best) if rate})) == ["n1"]
    assert best_links([{1: 80.0}, {0: 993.0}]) == [80.0, 80.0], "of two nodes nobody knows whose link is slow"
    assert best_links([{}]) == [None]


def test_a_rank_measures_its_cores_and_memory() -> None:
    assert compute_rate(1) > 0.5
    assert copy_rate() > 0.1


def test_the_node_of_a_rank() -> None:
    place = Place(2, 4, 2, 4, "MPICH", "laptop")
    assert node_of(place, {}) == "laptop"
    assert node_of(place, {"ORTFLOW_NODE_NAMES": "node1,node3"}) == "node3"


def test_the_work_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with small matrices: the graph and the copies are those of a GPU."""
    monkeypatch.setattr(gpu, "SIDE", 32)
    monkeypatch.setattr(gpu, "BYTES", 1 << 20)
    figures = gpu.gpu_figures(CpuDevice())
    assert set(figures) == {"gpu", "gpu_copy"}
    assert min(figures.values()) > 0


def test_a_node_is_slow_only_if_it_is_so_in_every_measurement() -> None:
    held_up = {"n1": {"compute": 9.0, "copy": 8.0}, "n2": {"compute": 30.0, "copy": 9.0}}
    again = {"n1": {"compute": 31.0, "copy": 3.0}, "n2": {"compute": 29.0, "copy": 9.0}}
    assert list(slow_nodes(held_up)) == list(slow_nodes(again)) == ["n1"]
    best = best_of(held_up, again)
    assert best == {"n1": {"compute": 31.0, "copy": 8.0}, "n2": {"compute": 30.0, "copy": 9.0}}
    assert slow_nodes(best) == {}


@pytest.mark.parametrize(("second", "expected"), [(9.0, 2), (3.0, 3)])
def test_a_slow_node_is_measured_again(monkeypatch: pytest.MonkeyPatch, second: float, expected: int) -> None:
    """Also by the doctor's job: a moment of other load names no node."""
    rounds = [{"a": {"compute": 10.0}, "b": {"compute": value}} for value in (2.0, second, 2.5)]
    measured = iter(rounds)
    monkeypatch.setattr(gate, "measure", lambda *_: (next(measured), None))
    nodes, _ = gate.best_measure(SoloCommunicator(), "a", 1)
    assert nodes is not None
    assert nodes["b"] == {"compute": second}
    assert 3 - len([*measured]) == expected
