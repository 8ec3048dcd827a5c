"""The update rules against float64 references from the papers, in place, reproducible bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from kernels import LIBRARY, needs_kernels

from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime as ort
from ortflow.workflow.optim.graph import optimizer_graph
from ortflow.workflow.optim.segments import Segment, segments
from ortflow.workflow.spec.optimizers import (
    Adagrad,
    Adam,
    Lamb,
    Lion,
    NAdam,
    Optimizer,
    RAdam,
    RmsProp,
    Sgd,
    moments,
)

Array = npt.NDArray[Any]

INDEX = FlatIndex.place(
    [
        Tensor("matrix", (37, 29), "decay"),
        Tensor("kernel", (5, 3, 3, 3), "decay"),
        Tensor("zero", (70,), "decay"),
        Tensor("bias", (13,), "no_decay"),
        Tensor("scalar", (), "no_decay"),
        Tensor("frozen", (11, 7), "frozen"),
        Tensor("mean", (9,), "state"),
    ]
)
OPTIMIZERS: dict[str, Optimizer] = {
    "adam": Adam(name="adam", lr=1e-2, weight_decay=0.1),
    "adam without decay": Adam(name="adam", lr=1e-2, betas=(0.8, 0.99), epsilon=1e-4),
    "adamw": Adam(name="adamw", lr=1e-2, weight_decay=0.1),
    "adamw with a large epsilon": Adam(name="adamw", lr=1e-2, weight_decay=0.1, epsilon=1e-2),
    "lamb": Lamb(name="lamb", lr=1e-2, weight_decay=0.1),
    "sgd": Sgd(name="sgd", lr=1e-2, weight_decay=0.1),
    "momentum": Sgd(name="sgd", lr=1e-2, weight_decay=0.1, momentum=0.9),
    "nesterov": Sgd(name="sgd", lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True),
}
STANDARD: dict[str, Optimizer] = {
    "lion": Lion(name="lion", lr=1e-2, weight_decay=0.1),
    "rmsprop": RmsProp(name="rmsprop", lr=1e-2, weight_decay=0.1),
    "rmsprop with all": RmsProp(name="rmsprop", lr=1e-2, weight_decay=0.1, momentum=0.9, centered=True),
    "adagrad": Adagrad(name="adagrad", lr=1e-2, weight_decay=0.1, initial_sum=0.1),
    "nadam": NAdam(name="nadam", lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": RAdam(name="radam", lr=1e-2, weight_decay=0.1),
}
"""Those of ONNX's operators alone; their numbers are compared with torch.optim's in tests/torch/test_optim_rules.py."""
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
all_optimizers = pytest.mark.parametrize(
    "optimizer", [*OPTIMIZERS.values(), *STANDARD.values()], ids=[*OPTIMIZERS, *STANDARD]
)


class Bound:
    """An optimizer graph bound to flat buffers as in the trainer: every output in its input's memory."""

    kernels = "standard"

    def __init__(self, optimizer: Optimizer, parts: list[Segment], size: int, threads: int = 2) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        model = optimizer_graph(optimizer, parts)
        onnx.checker.check_model(model)
        if self.kernels == "standard":
            model = compose(model)
            assert not any(node.domain for node in model.graph.node)
        if self.kernels == "ours":
            model = compose(with_kernels(optimizer_graph(optimizer, parts, kernels=True)))
            standard = isinstance(optimizer, Adam) or optimizer in STANDARD.values()
            assert standard or {node.domain for node in model.graph.node} == {"ortflow"}
            options.register_custom_ops_library(str(LIBRARY.path))
        self.session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        kept = ("parameters", *moments(optimizer))
        self.buffers = {name: np.zeros(size, np.float32) for name in (*kept, "gradients")}
        self.rate, self.step = np.zeros(1, np.float32), np.zeros(1, np.int64)
        for name, array in (("learning_rate", self.rate), ("step", self.step)):
            self.binding.bind_input(name, "cpu", 0, array.dtype, (1,), array.ctypes.data)
        for i, part in enumerate(parts):
            for name, buffer in self.buffers.items():
                place = ("cpu", 0, np.float32, (part.count,), buffer.ctypes.data + 4 * part.start)
                self.binding.bind_input(f"{name}.{i}", *place)
                if name in kept:
                    self.binding.bind_output(f"{name}.{i}.out", *place)

    def update(self, rate: float, step: int) -> None:
        self.rate[0], self.step[0] = rate, step
        self.session.run_with_iobinding(self.binding)
        assert (self.rate[0], self.step[0]) == (np.float32(rate), step)


@pytest.fixture(
    autouse=True,
    params=["standard", pytest.param("ours", marks=needs_kernels)],
)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test with standard operators and with our kernels."""
    monkeypatch.setattr(Bound, "kernels", request.param)


def reference(
    optimizer: Optimizer, w: Array, g: Array, state: dict[str, Array], rate: float, t: int, decay: float
) -> Array:
    """One step on one tensor in float64; the state is updated, the new weights are returned."""
    if isinstance(optimizer, Sgd):
        g = g + decay * w
        if not optimizer.momentum:
            return w - rate * g
        state["b"] = optimizer.momentum * state["b"] + g if t > 1 else g.copy()
        return w - rate * (g + optimizer.momentum * state["b"] if optimizer.nesterov else state["b"])
    # The attributes of the kernel are fp32: a step of 1e-8 in beta is a step of 1e-5 in 1 - beta.
    b1, b2 = (float(np.float32(beta)) for beta in optimizer.betas)
    if optimizer.name == "adam":
        g = g + decay * w
    state["m"] = b1 * state["m"] + (1 - b1) * g
    state["v"] = b2 * state["v"] + (1 - b2) * g * g
    u = state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + optimizer.epsilon)
    if optimizer.name == "adam":
        return w - rate * u
    if optimizer.name == "adamw":
        return (1 - rate * decay) * w - rate * u
    u = u + decay * w
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - rate * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * u


@optimizers
@pytest.mark.parametrize("threads", [1, 2])
def test_twenty_steps_follow_the_float64_reference(optimizer: Optimizer, threads: int) -> None:
    rng = np.random.default_rng(5)
    bound = Bound(optimizer, segments(optimizer, INDEX), INDEX.size, threads)
    weights, state = {}, {}
    for entry in INDEX:
        start = 0 if entry.name == "zero" else rng.normal(size=entry.tensor.count)
        bound.buffers["parameters"][entry.offset : entry.end] = start
        weights[entry.name] = bound.buffers["parameters"][entry.offset : entry.end].astype(np.float64)
        state[entry.name] = {key: np.zeros(entry.tensor.count) for key in "mvb"}
    first = dict(weights)
    for t in range(1, 21):
        rate = optimizer.lr * t / 20
        bound.buffers["gradients"][:] = 0
        for entry in INDEX:
            if entry.tensor.group in ("frozen", "state"):
                continue
            # Small gradients show where epsilon is added; zero ones give a trust ratio without an update.
            scale = 10.0 ** rng.uniform(-5, 0, entry.tensor.count) * (t > 1 or entry.name != "bias")
            gradient = bound.buffers["gradients"][entry.offset : entry.end]
            gradient[:] = rng.normal(size=entry.tensor.count) * scale
            decay = optimizer.weight_decay if entry.tensor.group == "decay" else 0.0
            weights[entry.name] = reference(
                optimizer, weights[entry.name], gradient.astype(np.float64), state[entry.name], rate, t, decay
            )
        bound.update(rate, t)
    used = np.zeros(INDEX.size, bool)
    for entry in INDEX:
        used[entry.offset : entry.end] = True
        got = bound.buffers["parameters"][entry.offset : entry.end]
        if entry.tensor.group in ("frozen", "state"):
            np.testing.assert_array_equal(got, first[entry.name])
            continue
        moved = np.abs(weights[entry.name] - first[entry.name]).max()
        assert moved > 1e-5
        np.testing.assert_allclose(got, weights[entry.name], rtol=1e-6, atol=1e-5 * moved, err_msg=entry.name)
        assert np.linalg.norm(got) == pytest.approx(np.linalg.norm(weights[entry.name]), rel=2e-6)
    for name, buffer in bound.buffers.items():
        assert not buffer[~used].any(), f"padding of {name}"


@pytest.mark.rotates
@all_optimizers
@pytest.mark.parametrize("count", [64, 64 * 17, 64 * 16411])
def test_in_place_is_what_out_of_place_is_every_time(optimizer: Optimizer, count: int) -> None:
    parts = [Segment(0, count, optimizer.weight_decay), Segment(count, 2 * count, 0.0)]
    rng = np.random.default_rng(count)
    start = {name: rng.random(2 * count, np.float32) for name in ("parameters", *moments(optimizer), "gradients")}
    feeds = {"learning_rate": np.full(1, 0.01, np.float32), "step": np.full(1, 3)}
    for i, part in enumerate(parts):
        feeds |= {f"{name}.{i}": values[part.start : part.stop].copy() for name, values in start.items()}
    for threads in (1, 2):
        bound = Bound(optimizer, parts, 2 * count, threads)
        names = [output.name for output in bound.session.get_outputs()]
        copies = {name: values.copy() for name, values in feeds.items()}
        expected = dict(zip(names, bound.session.run(None, copies), strict=True))
        for _ in range(4):
            for name, values in start.items():
                bound.buffers[name][:] = values
            bound.update(0.01, 3)
            for i, part in enumerate(parts):
                for name in ("parameters", *moments(optimizer)):
                    got = bound.buffers[name][part.start : part.stop]
                    np.testing.assert_array_equal(got, expected[f"{name}.{i}.out"])


@all_optimizers
def test_readers_of_an_input_run_before_its_memory_is_written(optimizer: Optimizer) -> None:
    graph = optimizer_graph(optimizer, segments(optimizer, INDEX)).graph
    writer = {name: node for node in graph.node for name in node.output if name}
    for output in graph.output:
        seen: set[int] = set()
        queue = [writer[output.name]]
        while queue:
            node = queue.pop()
            if id(node) not in seen:
                seen.add(id(node))
                queue += [writer[name] for name in node.input if name in writer]
        source = output.name.removesuffix(".out")
        readers = [node for node in graph.node if source in node.input]
        assert readers
        assert all(id(node) in seen for node in readers), output.name
        assert writer[output.name].op_type in {"Add", "Sub", "AdamOptimizer"}


def test_lamb_takes_ratio_one_where_a_norm_is_zero() -> None:
    optimizer = Lamb(name="lamb", lr=0.1)
    bound = Bound(optimizer, [Segment(0, 64, 0.0), Segment(64, 128, 0.0)], 128)
    bound.buffers["gradients"][:64] = 1
    bound.buffers["parameters"][64:] = 1
    bound.update(0.1, 1)
    np.testing.assert_allclose(bound.buffers["parameters"][:64], -0.1, rtol=1e-5)
    np.testing.assert_array_equal(bound.buffers["parameters"][64:], 1)
