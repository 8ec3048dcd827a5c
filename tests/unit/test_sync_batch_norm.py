"""Statistics of BatchNormalization over ranks: values and gradients of one graph with the whole batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from graph_build_models import kept_child, run_file, run_graph, save_model, tensors_of, value
from kernels import LIBRARY, needs_kernels
from onnx import helper
from real_ranks import all_good

from ortflow.workflow.assembly import build
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.ir.collective import Kind, is_collective, kind_of
from ortflow.workflow.graph.types import GraphSet, synced_of

Array = npt.NDArray[np.generic]
COUNTS = (3, 5)
"""Samples of each rank."""


def network(path: Path, *, norm: bool = True) -> Path:
    """A convolution, BatchNormalization with trained scale and bias, and a classifier."""
    random = np.random.default_rng(0)
    tensors = {
        "kernel": random.normal(size=(4, 2, 3, 3)).astype("float32"),
        "scale": random.uniform(0.5, 2, 4).astype("float32"),
        "bias": random.normal(size=4).astype("float32"),
        "mean": random.normal(size=4).astype("float32"),
        "var": random.uniform(0.5, 2, 4).astype("float32"),
    }
    nodes = [helper.make_node("Conv", ["x", "kernel"], ["a"], "conv")]
    if norm:
        inputs = ["a", "scale", "bias", "mean", "var"]
        nodes.append(helper.make_node("BatchNormalization", inputs, ["b"], "norm", momentum=0.7))
    else:
        tensors = {"kernel": tensors["kernel"]}
    nodes += [
        helper.make_node("Tanh", ["b" if norm else "a"], ["c"], "tanh"),
        helper.make_node("GlobalAveragePool", ["c"], ["d"], "pool"),
        helper.make_node("Flatten", ["d"], ["logits"], "flatten"),
    ]
    return save_model(path, nodes, [value("x", ["batch", 2, 5, 5])], [value("logits", ["batch", 4])], tensors)


def graphs_of(path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> GraphSet:
    class Kept:
        __enter__ = staticmethod(kept_child)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(build, "Child", Kept)
    spec = run_file(path, train__sync_batch_norm=True, resources__ranks_per_node=ranks)
    return build.build_graphs(spec, path.parent / f"graphs-{ranks}")


def samples() -> dict[str, Array]:
    """The ranks' samples differ in scale, and the ranks in their number."""
    random = np.random.default_rng(1)
    images = random.normal(size=(sum(COUNTS), 2, 5, 5)) * np.repeat([0.5, 3.0], COUNTS)[:, None, None, None]
    return {"x": images.astype("float32"), "labels": random.integers(0, 4, sum(COUNTS))}


PROGRAM = """
import sys
sys.path[:0] = sys.argv[3:]
from test_sync_batch_norm import run_rank
run_rank(sys.argv[1], sys.argv[2])
print("good")
"""


def run_rank(graph: str, folder: str) -> None:
    """One rank's outputs, in a file."""
    from ortflow.workflow.parallel.division import STATISTICS
    from ortflow.workflow.sessions.collectives import connect

    communicator = MpiCommunicator()
    assert LIBRARY.path is not None
    connect(LIBRARY.path, {STATISTICS: communicator})
    rank = communicator.rank
    feeds = dict(np.load(Path(folder) / "feeds.npz"))
    start = sum(COUNTS[:rank])
    mine = {**feeds, **{name: feeds[name][start : start + COUNTS[rank]] for name in ("x", "labels")}}
    np.savez(Path(folder) / f"rank-{rank}.npz", **run_graph(Path(graph), mine, kernels=LIBRARY.path))


@pytest.mark.rotates
@needs_kernels
@pytest.mark.parametrize("kernels", [False, True], ids=["plain", "kernels"])
def test_unequal_ranks_compute_what_one_does(kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(network(tmp_path / "m.onnx"), monkeypatch)
    feeds = {**tensors_of(graphs), **samples()}
    whole = run_graph(graphs.train, feeds)
    np.savez(tmp_path / "feeds.npz", **feeds)
    path = Form.KERNELS.of(synced_of(graphs.train)) if kernels else synced_of(graphs.train)
    here = Path(__file__).parent
    all_good(2, PROGRAM, str(path), str(tmp_path), str(here), str(here.parent / "support"))
    ranks = [dict(np.load(tmp_path / f"rank-{rank}.npz")) for rank in range(2)]
    alone = run_graph(graphs.train, {**feeds, **{name: feeds[name][: COUNTS[0]] for name in ("x", "labels")}})
    for name, expected in whole.items():
        if name.endswith("_new"):
            for rank in ranks:
                np.testing.assert_allclose(rank[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
            assert np.abs(alone[name] - expected).max() > 1e-2, "the ranks' own statistics differ"
        else:
            found = ranks[0][name] + ranks[1][name]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_one_gather_forward_and_one_sum_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(network(tmp_path / "m.onnx"), monkeypatch)
    nodes = onnx.load(synced_of(graphs.train)).graph.node
    assert [kind_of(node) for node in nodes if is_collective(node)] == [Kind.ALL_GATHER, Kind.ALL_REDUCE]
    assert not any(is_collective(node) for node in onnx.load(graphs.train).graph.node), "checked on one rank"


def test_one_rank_has_nobody_to_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(network(tmp_path / "m.onnx"), monkeypatch, ranks=1)
    assert not synced_of(graphs.train).exists()


def test_a_model_without_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no BatchNormalization") as caught:
        graphs_of(network(tmp_path / "m.onnx", norm=False), monkeypatch)
    assert caught.value.where == "train.sync_batch_norm"
    assert not (tmp_path / "graphs-2").exists()
