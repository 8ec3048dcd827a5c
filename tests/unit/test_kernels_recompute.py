"""Attention over many tokens recomputes its weights for the backward pass, with the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from graph_build_models import run_file, run_graph, tensors_of
from kernels import LIBRARY, needs_kernels

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.kernels import recompute

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

pytestmark = needs_kernels
TOKENS = 512


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(build(Config(layers=2, width=16, heads=2, context=TOKENS, vocabulary=11)), path)
    return path


def softmaxes(path: Path) -> list[str]:
    return [node.output[0] for node in onnx.load(path).graph.node if node.op_type == "Softmax"]


def test_the_gradients_keep_their_bits(model: Path) -> None:
    with mock.patch.object(recompute, "LONG", TOKENS + 1):
        short = build_graphs(run_file(model), model.parent / "short", TOKENS)
    random = np.random.default_rng(0)
    window = random.integers(0, 11, (2, TOKENS + 1))
    feeds = {**tensors_of(short), "tokens": window[:, :-1], "labels": window[:, 1:]}
    kept = run_graph(Form.KERNELS.of(short.train), feeds, threads=2, kernels=LIBRARY.path)
    long = build_graphs(run_file(model), model.parent / "long", TOKENS)
    again = run_graph(Form.KERNELS.of(long.train), feeds, threads=2, kernels=LIBRARY.path)
    assert kept.keys() == again.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_only_long_sequences_are_recomputed(model: Path) -> None:
    for length, again in ((0, 0), (TOKENS - 1, 0), (TOKENS, 2)):
        graphs = build_graphs(run_file(model), model.parent / str(length), length)
        names = softmaxes(Form.KERNELS.of(graphs.train))
        assert len([name for name in names if name.endswith(".again")]) == again
        assert len(names) == 2 + again


def test_the_forward_pass_keeps_none_of_the_weights(model: Path) -> None:
    graphs = build_graphs(run_file(model), model.parent / "long", TOKENS)
    graph = onnx.load(Form.KERNELS.of(graphs.train)).graph
    for name in softmaxes(Form.KERNELS.of(graphs.train)):
        readers = [node.op_type for node in graph.node if name in node.input]
        assert readers.count("SoftmaxGrad") == int(name.endswith(".again"))
        assert len(readers) == (2 if name.endswith(".again") else 1)
