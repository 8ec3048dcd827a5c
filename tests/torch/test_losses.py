"""Every loss against PyTorch's in double precision: value and gradient, on random shapes, padded and in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import torch
from graph_build_models import Array
from loss_graphs import compute, feeds_of, training_graph
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 6
RNG = np.random.default_rng(11)


def classes_first(x: Tensor) -> Tensor:
    return x.movedim(-1, 1)


def weights(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def entropy(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: functional.cross_entropy(classes_first(x), y, **options)


def multi_margin(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    return functional.multi_margin_loss(x[y != -100], y[y != -100], margin=0.7)


def focal(x: Tensor, y: Tensor) -> Tensor:
    each = functional.cross_entropy(classes_first(x), y, reduction="none")
    factor = weights(1.0, 0.5, 2.0, 0.0, 3.0)[y.clamp(min=0)]
    return (factor * (1 - torch.exp(-each)) ** 2 * each)[y != -100].mean()


def binary_focal(x: Tensor, y: Tensor) -> Tensor:
    """torchvision.ops.sigmoid_focal_loss."""
    p = torch.sigmoid(x)
    each = functional.binary_cross_entropy_with_logits(x, y, reduction="none")
    each = each * (1 - (p * y + (1 - p) * (1 - y))) ** 1.5
    return ((0.25 * y + 0.75 * (1 - y)) * each).mean()


def pinball(*levels: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        q = weights(*levels)
        return torch.maximum(q * (y - x), (q - 1) * (y - x)).mean()

    return loss


def overlap(p: Tensor, y: Tensor) -> Tensor:
    """MONAI's DiceLoss: sums over all axes after the channels."""
    p, y = p.reshape(*p.shape[:2], -1), y.reshape(*y.shape[:2], -1)
    return (1 - (2 * (p * y).sum(2) + 1e-5) / (p.sum(2) + y.sum(2) + 1e-5)).mean()


def dice(x: Tensor, y: Tensor) -> Tensor:
    counted = (y != -100).unsqueeze(1)
    truth = functional.one_hot(y.clamp(min=0), x.shape[-1]).movedim(-1, 1)
    return overlap(classes_first(x).softmax(1) * counted, truth * counted)


def divergence(temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        return nn.KLDivLoss(reduction="batchmean")((x / temperature).log_softmax(1), y) * temperature**2

    return loss


CLASSES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "entropy": ({"kind": "cross_entropy"}, entropy()),
    "weights": (
        {"kind": "cross_entropy", "class_weights": [1.0, 0.5, 2.0, 0.0, 3.0]},
        entropy(weight=weights(1.0, 0.5, 2.0, 0.0, 3.0)),
    ),
    "weights-smooth": (
        {"kind": "cross_entropy", "class_weights": [1.0, 0.5, 2.0, 0.0, 3.0], "label_smoothing": 0.2},
        entropy(weight=weights(1.0, 0.5, 2.0, 0.0, 3.0), label_smoothing=0.2),
    ),
    "focal": ({"kind": "focal", "class_weights": [1.0, 0.5, 2.0, 0.0, 3.0]}, focal),
    "margin": ({"kind": "multi_margin", "margin": 0.7}, multi_margin),
    "dice": ({"kind": "dice"}, dice),
}
VALUES: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "mse": ({"kind": "mse"}, nn.MSELoss()),
    "l1": ({"kind": "l1"}, nn.L1Loss()),
    "huber": ({"kind": "huber", "delta": 0.6}, nn.HuberLoss(delta=0.6)),
    "smooth": ({"kind": "smooth_l1", "beta": 0.4}, nn.SmoothL1Loss(beta=0.4)),
    "poisson": ({"kind": "poisson"}, nn.PoissonNLLLoss()),
    "rate": ({"kind": "poisson", "log_input": False}, nn.PoissonNLLLoss(log_input=False)),
    "median": ({"kind": "quantile", "quantiles": [0.3]}, pinball(0.3)),
    "quantiles": ({"kind": "quantile", "quantiles": [0.1, 0.2, 0.5, 0.7, 0.9]}, pinball(0.1, 0.2, 0.5, 0.7, 0.9)),
}
TARGETS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "bce": ({"kind": "bce_with_logits"}, nn.BCEWithLogitsLoss()),
    "pos": ({"kind": "bce_with_logits", "pos_weight": 2.5}, nn.BCEWithLogitsLoss(pos_weight=weights(2.5))),
    "pos-each": (
        {"kind": "bce_with_logits", "pos_weight": [1.0, 2.0, 3.0, 0.5, 0.25]},
        nn.BCEWithLogitsLoss(pos_weight=weights(1.0, 2.0, 3.0, 0.5, 0.25)),
    ),
    "focal": ({"kind": "binary_focal", "gamma": 1.5, "alpha": 0.25}, binary_focal),
    "hinge": ({"kind": "hinge"}, lambda x, y: functional.relu(1 - (2 * y - 1) * x).mean()),
    "dice": ({"kind": "binary_dice"}, lambda x, y: overlap(x.sigmoid(), y)),
    "kl": ({"kind": "kl_div"}, divergence(1.0)),
    "kl-warm": ({"kind": "kl_div", "temperature": 3.0}, divergence(3.0)),
}


def draw(group: str, loss: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[Array, Array]:
    """A prediction [samples, *shape] and its labels."""
    x = RNG.normal(size=(SAMPLES, *shape)).astype("float32")
    if group == "classes":
        labels = RNG.integers(0, 5, (SAMPLES, *shape[:-1]))
        labels.reshape(-1)[1::4] = -100
        return x, labels
    if loss["kind"] == "kl_div":
        y = torch.from_numpy(RNG.normal(size=x.shape)).softmax(-1).numpy()
        y[..., 1] = 0
        return x, y.astype("float32")
    if loss["kind"] == "poisson":
        return (x if loss.get("log_input", True) else np.abs(x) + 0.1), RNG.poisson(2, x.shape).astype("float32")
    y = RNG.random(x.shape) if group == "values" else RNG.integers(0, 2, x.shape)
    return x, (y[..., :1] if len(loss.get("quantiles", ())) > 1 else y).astype("float32")


CASES = [
    pytest.param(group, *case, shape, id=f"{group}-{name}-{len(shape)}")
    for group, cases in (("classes", CLASSES), ("values", VALUES), ("targets", TARGETS))
    for name, case in cases.items()
    for shape in ((5,), (3, 5))
]


@pytest.mark.parametrize(("group", "loss", "reference", "shape"), CASES)
def test_loss(group: str, loss: dict[str, Any], reference: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    """The mean and its gradient; then the same of padded pieces of 4 and 2 samples, added as over ranks."""
    x, y = draw(group, loss, shape)
    given = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    expected = reference(given, torch.tensor(y, dtype=torch.int64 if group == "classes" else torch.float64))
    expected.backward()

    total, weight, gradients = compute(training_graph(loss, {"y": shape}, SAMPLES), feeds_of({"y": x}, {"labels": y}))
    assert total / weight == pytest.approx(expected.item(), rel=2e-6)
    np.testing.assert_allclose(gradients["y"] / weight, given.grad.numpy(), rtol=2e-5, atol=1e-7)

    graph, sums, pieces = training_graph(loss, {"y": shape}, 4, padded=True), np.zeros(2), []
    for rows in (slice(0, 4), slice(4, 6)):
        count = rows.stop - rows.start
        filled = [np.concatenate([array[rows], array[: 4 - count]]) for array in (x, y)]
        *found, gradients = compute(graph, feeds_of({"y": filled[0]}, {"labels": filled[1]}, count))
        sums += found
        assert not gradients["y"][count:].any()
        pieces.append(gradients["y"][:count])
    assert sums[0] / sums[1] == pytest.approx(expected.item(), rel=2e-6)
    np.testing.assert_allclose(np.concatenate(pieces) / sums[1], given.grad.numpy(), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("loss", [loss for cases in (CLASSES, TARGETS) for loss, _ in cases.values()], ids=str)
def test_large_logits(loss: dict[str, Any]) -> None:
    """No overflow, and no gradient that is not a number, where a logit is far from all others."""
    x = np.array([[3e4, 0, 0, 0, 0], [-3e4, 0, 0, 0, 1]], "float32")
    classes = loss["kind"] in ("cross_entropy", "focal", "multi_margin", "dice")
    labels = np.zeros(2, "int64") if classes else np.array([[1, 0, 0, 0, 0]] * 2, "float32")
    if classes and loss["kind"] == "dice":
        labels = labels.reshape(2)
    total, _, gradients = compute(training_graph(loss, {"y": (5,)}, 2), feeds_of({"y": x}, {"labels": labels}))
    assert np.isfinite(total)
    assert np.isfinite(gradients["y"]).all()


def clip(x: Tensor, y: Tensor) -> Tensor:
    scores = functional.normalize(x) @ functional.normalize(y).T / 0.2
    rows = torch.arange(len(x))
    return (functional.cross_entropy(scores, rows) + functional.cross_entropy(scores.T, rows)) / 2


@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        ({"kind": "info_nce", "output": "a", "other": "b", "temperature": 0.2}, lambda a, b, c: clip(a, b)),
        ({"kind": "triplet", "output": "a", "positive": "b", "negative": "c"}, nn.TripletMarginLoss()),
    ],
    ids=["info_nce", "triplet"],
)
def test_losses_of_several_outputs(loss: dict[str, Any], reference: Callable[..., Tensor]) -> None:
    """The mean and its gradients; rows that pad the batch count nowhere, and are not negatives."""
    names = ["a", "b", "c"] if loss["kind"] == "triplet" else ["a", "b"]
    values = {name: RNG.normal(size=(SAMPLES, 4)).astype("float32") for name in names}
    for padded, count in ((False, SAMPLES), (True, 4)):
        given = {name: torch.tensor(v[:count], dtype=torch.float64, requires_grad=True) for name, v in values.items()}
        expected = reference(*given.values(), *[None] * (3 - len(names) if loss["kind"] == "info_nce" else 0))
        expected.backward()
        graph = training_graph(loss, dict.fromkeys(names, (4,)), SAMPLES, padded=padded)
        total, weight, gradients = compute(graph, feeds_of(values, {}, count))
        assert weight == count
        assert total / weight == pytest.approx(expected.item(), rel=2e-6)
        for name, tensor in given.items():
            np.testing.assert_allclose(gradients[name][:count] / weight, tensor.grad.numpy(), rtol=2e-5, atol=1e-7)
            assert not gradients[name][count:].any()
