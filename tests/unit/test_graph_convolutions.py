"""Gradients of convolutions of every rank and attribute against a reference in double precision.

Each stands between other operators whose gradients are compared too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from test_graph_intake_gradients import gradient_of, session, with_loss

from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_forms
from ortflow.workflow.graph.normalize.prepare import prepare

CASES = 40
"""Of each rank."""


@dataclass
class Convolution:
    """Shapes, attributes and data of one, drawn from a seed."""

    rank: int
    seed: int
    attributes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng, rank = np.random.default_rng([self.seed, self.rank]), self.rank
        groups, channels, out = (int(n) for n in rng.integers(1, [5, 4, 4]))
        if rng.random() < 0.4:
            groups, channels = int(rng.integers(2, 9)), 1
        kernel, self.strides = rng.integers(1, 4, rank).tolist(), rng.integers(1, 4, rank).tolist()
        self.dilations = rng.integers(1, 3, rank).tolist()
        reach = [d * (k - 1) + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        sizes = [r + int(rng.integers(0, 6)) for r in reach]
        self.groups = groups
        self.attributes = {"group": groups, "strides": self.strides, "dilations": self.dilations}
        if rng.random() < 0.5:
            self.attributes["kernel_shape"] = kernel
        mode = str(rng.choice(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
        pads = rng.integers(0, 3, 2 * rank).tolist()
        if mode == "NOTSET":
            self.attributes["pads"] = pads
        else:
            self.attributes["auto_pad"] = mode
            need = [0] * rank
            if mode != "VALID":
                steps = zip(sizes, self.strides, reach, strict=True)
                need = [max(0, (-(-size // stride) - 1) * stride + r - size) for size, stride, r in steps]
            fewer, more = [n // 2 for n in need], [n - n // 2 for n in need]
            pads = [*fewer, *more] if mode != "SAME_LOWER" else [*more, *fewer]
        self.begins, self.ends = pads[:rank], pads[rank:]
        self.dynamic = bool(rng.random() < 0.5)
        data = (int(rng.integers(1, 4)), groups * channels, *sizes)
        self.u, self.v = rng.normal(size=(2, *data)).astype(np.float32)
        self.w = rng.normal(size=(groups * out, channels, *kernel)).astype(np.float32)
        self.b = rng.normal(size=groups * out).astype(np.float32) if rng.random() < 0.6 else None
        shape = self.forward(self.u, self.w)[0].shape
        self.q, self.dz = rng.normal(size=(2, *shape)).astype(np.float32)

    def forward(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """The product without bias in double precision, and the gradients of x and w for `dy`."""
        x = np.pad(x.astype(np.float64), [(0, 0), (0, 0), *zip(self.begins, self.ends, strict=True)])
        w = w.astype(np.float64)
        channels, out = w.shape[1], w.shape[0] // self.groups
        lengths = [
            (size - d * (k - 1) - 1) // s + 1
            for size, k, s, d in zip(x.shape[2:], w.shape[2:], self.strides, self.dilations, strict=True)
        ]
        y, dx, dw = np.zeros((x.shape[0], w.shape[0], *lengths)), np.zeros_like(x), np.zeros_like(w)
        for place in np.ndindex(*w.shape[2:]):
            starts = [p * d for p, d in zip(place, self.dilations, strict=True)]
            met = tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, lengths, self.strides, strict=True))
            for group in range(self.groups):
                mine = (slice(None), slice(group * channels, (group + 1) * channels), *met)
                rows = slice(group * out, (group + 1) * out)
                weight = w[(rows, slice(None), *place)]
                y[:, rows] += np.einsum("nc...,mc->nm...", x[mine], weight)
                if dy is not None:
                    dx[mine] += np.einsum("nm...,mc->nc...", dy[:, rows], weight)
                    flat = x[mine].reshape(*x[mine].shape[:2], -1), dy[:, rows].reshape(len(dy), out, -1)
                    dw[(rows, slice(None), *place)] += np.einsum("ncp,nmp->mc", *flat)
        inner = tuple(slice(a, n - b) for a, b, n in zip(self.begins, self.ends, x.shape[2:], strict=True))
        return y, dx[(slice(None), slice(None), *inner)], dw

    def feeds(self) -> dict[str, np.ndarray]:
        arrays = {"u": self.u, "v": self.v, "w": self.w, "q": self.q}
        return arrays if self.b is None else {**arrays, "b": self.b}

    def expected(self) -> dict[str, np.ndarray]:
        """Loss and gradients of sum(dz q sigmoid(conv(tanh(u v), w) + b))."""
        u, v, q, dz = (a.astype(np.float64) for a in (self.u, self.v, self.q, self.dz))
        x = np.tanh(u * v)
        y = self.forward(x, self.w)[0]
        bias = np.zeros(y.shape[1]) if self.b is None else self.b.astype(np.float64)
        s = 1 / (1 + np.exp(-y - bias.reshape(-1, *[1] * self.rank)))
        dy = dz * q * s * (1 - s)
        _, dx, dw = self.forward(x, self.w, dy)
        turned = dx * (1 - x * x)
        found = {"u": turned * v, "v": turned * u, "w": dw, "q": dz * s, "loss": (dz * q * s).sum()}
        return found if self.b is None else {**found, "b": dy.sum(axis=(0, *range(2, dy.ndim)))}

    def model(self) -> onnx.ModelProto:
        bias = [] if self.b is None else ["b"]
        nodes = [
            helper.make_node("Mul", ["u", "v"], ["uv"], "product"),
            helper.make_node("Tanh", ["uv"], ["x"], "tanh"),
            helper.make_node("Conv", ["x", "w", *bias], ["y"], "conv", **self.attributes),
            helper.make_node("Sigmoid", ["y"], ["s"], "sigmoid"),
            helper.make_node("Mul", ["s", "q"], ["z"], "scaled"),
        ]
        inputs = [
            helper.make_tensor_value_info(
                name, TensorProto.FLOAT, ["n", *a.shape[1:]] if self.dynamic and name in "uv" else a.shape
            )
            for name, a in self.feeds().items()
        ]
        outputs = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
        graph = helper.make_graph(nodes, "convolution", inputs, outputs)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def worst(self) -> float:
        """The largest difference to the reference, relative to each tensor's largest value."""
        feeds, expected = self.feeds(), self.expected()
        prepared, _ = prepare(self.model())
        avoid_wrong_forms(prepared)
        ready, _ = make_differentiable(with_loss(prepared, "z", self.dz), list(feeds), "loss")
        training = gradient_of(ready, list(feeds))
        results = session(training).run([f"{name}_grad" for name in feeds] + ["loss"], feeds)
        expected = {name: expected[name] for name in (*feeds, "loss")}
        scale = {name: np.abs(array).max() for name, array in expected.items()}
        scale["loss"] = np.abs(self.dz * self.q).sum()
        return max(
            float(np.abs(result - array).max() / (1 + scale[name]))
            for result, (name, array) in zip(results, expected.items(), strict=True)
        )


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_gradient_is_that_of_double_precision(rank: int) -> None:
    wrong = {seed: worst for seed in range(CASES) if (worst := Convolution(rank, seed).worst()) > 2e-6}
    assert wrong == {}


def test_four_axes() -> None:
    """ONNX Runtime has kernels for any number of axes; PyTorch exports up to three."""
    assert max(Convolution(4, seed).worst() for seed in range(5)) < 2e-6
