"""Peak memory of the training graph: gradients reuse their inputs' memory, weights' gradients come early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import run_file, tensors_of
from kernels import LIBRARY, needs_kernels
from onnx import helper

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.optimize.order import results_first

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

TOKENS, VOCABULARY = 256, 65536
RUN = """
import re, sys, numpy as np
from pathlib import Path
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.sessions.session import Sessions
graph, feeds, library = map(Path, sys.argv[1:])
session = Sessions(CpuDevice(), 1, "error", library).open(graph)
feeds = dict(np.load(feeds))
held = lambda: int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
before = held()
session.run(["ortflow.loss_sum", "wte.weight_grad"], feeds)
print(held() - before)
"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A training graph with our operators, in which the scores are by far the largest value, and its feeds."""
    folder = tmp_path_factory.mktemp("memory")
    path = folder / "m.onnx"
    onnx.save(build(Config(layers=2, width=16, heads=2, context=TOKENS, vocabulary=VOCABULARY)), path)
    made = build_graphs(run_file(path), folder, TOKENS)
    window = np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS + 1))
    np.savez(folder / "feeds.npz", **tensors_of(made), tokens=window[:, :-1], labels=window[:, 1:])
    return Form.KERNELS.of(made.train), folder / "feeds.npz"


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="counts the memory of a process as Linux does")
def test_the_gradient_of_the_scores_takes_their_place(graphs: tuple[Path, Path]) -> None:
    words = [sys.executable, "-c", RUN, *map(str, graphs), str(LIBRARY.path)]
    taken = int(subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout)
    scores = TOKENS * VOCABULARY * 4
    assert 0.9 * scores < taken < 1.5 * scores


@needs_kernels
def test_gradients_of_weights_do_not_wait_for_the_next_layer(graphs: tuple[Path, Path]) -> None:
    made = [name for node in onnx.load(graphs[0]).graph.node for name in node.output]
    last = max(place for place, name in enumerate(made) if name.startswith("h.1.") and name.endswith("weight_grad"))
    first = min(place for place, name in enumerate(made) if name.startswith("h.0.") and name.endswith("bias_grad"))
    assert last < first


def test_what_only_results_are_made_of_goes_first() -> None:
    def node(operator: str, inputs: str, output: str) -> onnx.NodeProto:
        return helper.make_node(operator, inputs.split(), [output], output)

    graph = helper.make_graph(
        [
            node("Tanh", "x", "a"),
            node("Exp", "a", "b"),
            node("MatMul", "b a", "c"),
            node("MatMul", "a x", "d"),
            node("Transpose", "d", "first"),
            node("Neg", "c", "last"),
        ],
        "graph",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 2])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 2]) for name in ("first", "last")],
    )
    results_first(graph)
    assert [each.name for each in graph.node] == ["a", "d", "first", "b", "c", "last"]
