"""Derivatives against finite differences of a loss in single precision: right ones pass, wrong ones do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ortflow.workflow.trainer.check.differences import UNDECIDED, Differences, Disagreement, Tensor, Undecided

Vector = npt.NDArray[np.float32]


class Network:
    """Two layers and a cross-entropy over random numbers, in fp32, with the gradient in double precision."""

    def __init__(self, seed: int, rectify: bool) -> None:
        random = np.random.default_rng(seed)
        inside, width, classes = (int(random.integers(2, 40)) for _ in range(3))
        self.rectify = rectify
        self.x = random.normal(size=(16, inside)).astype(np.float32)
        self.labels = random.integers(0, classes, 16)
        self.shapes = {"u": (inside, width), "b": (width,), "v": (width, classes)}
        scale = {"u": inside**-0.5, "b": 0.0, "v": width**-0.5}
        self.values = {n: (scale[n] * random.normal(size=s)).astype(np.float32) for n, s in self.shapes.items()}

    def loss(self, moved: Iterable[tuple[str, Vector]]) -> float:
        p = {**self.values, **{name: values.reshape(self.shapes[name]) for name, values in moved}}
        h = self.x @ p["u"] + p["b"]
        y = (np.maximum(h, 0) if self.rectify else np.tanh(h)) @ p["v"]
        y = y - y.max(1, keepdims=True)
        losses = np.log(np.exp(y).sum(1)) - y[np.arange(16), self.labels]
        return float(losses.sum(dtype=np.float32))

    def tensors(self) -> list[Tensor]:
        p = {name: values.astype(np.float64) for name, values in self.values.items()}
        h = self.x @ p["u"] + p["b"]
        a = np.maximum(h, 0) if self.rectify else np.tanh(h)
        y = np.exp(a @ p["v"] - (a @ p["v"]).max(1, keepdims=True))
        d = y / y.sum(1, keepdims=True)
        d[np.arange(16), self.labels] -= 1
        dh = (d @ p["v"].T) * ((h > 0) if self.rectify else 1 - a * a)
        gradients = {"u": self.x.T @ dh, "b": dh.sum(0), "v": a.T @ d}
        return [
            Tensor(name, values.reshape(-1).copy(), gradients[name].astype(np.float32).reshape(-1))
            for name, values in self.values.items()
        ]


@pytest.mark.parametrize("rectify", [False, True])
def test_right_gradients_agree(rectify: bool) -> None:
    for seed in range(60):
        network = Network(seed, rectify)
        differences, tensors = Differences(network.loss, seed), network.tensors()
        rounding = differences.rounding(tensors)
        assert differences.check(tensors, rounding) is None
        for tensor in tensors:
            assert not isinstance(differences.check([tensor], rounding), Disagreement)
            # Biases are zeros, along which the loss changes little.
            assert tensor.name == "b" or differences.check([tensor], rounding) is None


def zero(gradient: Vector) -> Vector:
    return np.zeros_like(gradient)


def half_missing(gradient: Vector) -> Vector:
    return np.where(np.arange(gradient.size) % 2 == 0, gradient, 0).astype(np.float32)


def scaled(gradient: Vector) -> Vector:
    return gradient * np.float32(1.08)


def shuffled(gradient: Vector) -> Vector:
    return np.roll(gradient, 1)


@pytest.mark.parametrize(("spoil", "share"), [(zero, 0.9), (half_missing, 0.3), (scaled, 0.9), (shuffled, 0.9)])
@pytest.mark.parametrize("rectify", [False, True])
def test_wrong_gradients_do_not(spoil: Callable[[Vector], Vector], share: float, rectify: bool) -> None:
    found = 0
    for seed in range(20):
        network = Network(seed, rectify)
        differences, tensors = Differences(network.loss, seed), network.tensors()
        rounding = differences.rounding(tensors)
        wrong = Tensor(tensors[0].name, tensors[0].values, spoil(tensors[0].gradient))
        disagreement = differences.check([wrong], rounding)
        found += isinstance(disagreement, Disagreement) and disagreement.names == ("u",)
    assert found >= share * 20


def test_a_wrong_gradient_is_found_in_a_group() -> None:
    found = 0
    for seed in range(20):
        network = Network(seed, False)
        differences, tensors = Differences(network.loss, seed), network.tensors()
        rounding = differences.rounding(tensors)
        wrong = Tensor(tensors[0].name, tensors[0].values, -tensors[0].gradient)
        found += isinstance(differences.check([wrong, *tensors[1:]], rounding), Disagreement)
    assert found >= 18


@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("rectify", [False, True])
def test_a_tenth_too_much_or_too_little_is_found_in_every_weight(factor: float, rectify: bool) -> None:
    for seed in range(30):
        network = Network(seed, rectify)
        differences, tensors = Differences(network.loss, seed), network.tensors()
        rounding = differences.rounding(tensors)
        for tensor in tensors:
            wrong = Tensor(tensor.name, tensor.values, tensor.gradient * np.float32(factor))
            verdict = differences.check([wrong], rounding)
            assert isinstance(verdict, (Disagreement, Undecided) if tensor.name == "b" else Disagreement)


def test_the_opposite_of_a_bias_s_gradient_is_found() -> None:
    found = 0
    for seed in range(30):
        network = Network(seed, False)
        differences, tensors = Differences(network.loss, seed), network.tensors()
        (bias,) = (tensor for tensor in tensors if tensor.name == "b")
        wrong = Tensor("b", bias.values, -bias.gradient)
        found += isinstance(differences.check([wrong], differences.rounding(tensors)), Disagreement)
    assert found >= 28


class Text:
    """Rows of a table, a layer, and the cross-entropy of a softmax of a softmax, in fp32, with the exact gradient.

    The second softmax is nearly flat: the slope of the loss is a 1e-4th of it and less, and large weights bend it
    within the first steps.
    """

    def __init__(self, seed: int, classes: int, tokens: int, scale: float) -> None:
        random = np.random.default_rng(seed)
        self.tokens, self.labels = random.integers(0, classes, tokens), random.integers(0, classes, tokens)
        table, weight = random.normal(size=(classes, 16)), random.normal(size=(16, classes))
        self.values = {"e": (10 * table).astype(np.float32), "w": (scale * weight / 4).astype(np.float32)}

    def loss(self, moved: Iterable[tuple[str, Vector]]) -> float:
        p = {**self.values, **{name: values.reshape(self.values[name].shape) for name, values in moved}}
        losses = self._forward(p["e"], p["w"])[0]
        return float(losses.sum(dtype=np.float32))

    def _forward(self, table: Any, weight: Any) -> tuple[Any, Any, Any]:
        hidden = np.tanh(table[self.tokens])
        first = softmax(hidden @ weight)
        losses = np.log(np.exp(first).sum(1)) - first[np.arange(len(first)), self.labels]
        return losses, hidden, first

    def tensors(self) -> list[Tensor]:
        table, weight = (self.values[name].astype(np.float64) for name in "ew")
        _, hidden, first = self._forward(table, weight)
        slope = softmax(first)
        slope[np.arange(len(first)), self.labels] -= 1
        slope = first * (slope - (slope * first).sum(1, keepdims=True))
        gradients = {"e": np.zeros_like(table), "w": hidden.T @ slope}
        np.add.at(gradients["e"], self.tokens, (slope @ weight.T) * (1 - hidden**2))
        return [
            Tensor(n, v.reshape(-1).copy(), gradients[n].astype(np.float32).ravel()) for n, v in self.values.items()
        ]


def softmax(values: Any) -> Any:
    raised = np.exp(values - values.max(1, keepdims=True))
    return raised / raised.sum(1, keepdims=True)


@pytest.mark.rotates
@pytest.mark.parametrize(("classes", "tokens"), [(1000, 64), (8000, 32), (30000, 16)])
@pytest.mark.parametrize("scale", [3.0, 10.0, 30.0])
def test_right_gradients_with_tiny_slopes_are_not_called_wrong(classes: int, tokens: int, scale: float) -> None:
    for seed in range(6):
        text = Text(seed, classes, tokens, scale)
        differences, tensors = Differences(text.loss, seed), text.tensors()
        rounding = differences.rounding(tensors)
        for group in (tensors, *([tensor] for tensor in tensors)):
            assert not isinstance(differences.check(group, rounding), Disagreement), (seed, len(group))


def test_a_loss_that_is_not_finite_decides_nothing() -> None:
    tensor = Tensor("w", np.ones(3, np.float32), np.ones(3, np.float32))
    assert Differences(lambda moved: float("nan"), 0).check([tensor], 0.0) is UNDECIDED


def test_a_slope_that_rounding_hides_is_undecided() -> None:
    tensor = Tensor("w", np.ones(3, np.float32), np.full(3, 1e-4, np.float32))
    differences = Differences(lambda moved: float(np.float32(10 + 1e-4 * dict(moved)["w"].sum())), 0)
    assert differences.check([tensor], differences.rounding([tensor])) is UNDECIDED


def test_a_kink_beside_the_point_contradicts_nothing() -> None:
    """The slope is 1 only within 1% of the first step."""
    start = np.array([1.0], np.float32)

    def loss(moved: Iterable[tuple[str, Vector]]) -> float:
        x = dict(moved).get("w", start)[0] - 1
        return float(np.float32(10 + x - 0.9 * np.maximum(x - np.float32(1e-4), 0) - 0.9 * np.minimum(x + 1e-4, 0)))

    for seed in range(20):
        differences = Differences(loss, seed)
        tensor = Tensor("w", start, np.ones(1, np.float32))
        assert not isinstance(differences.check([tensor], differences.rounding([tensor])), Disagreement)
