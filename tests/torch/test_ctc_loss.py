"""The loss ctc against torch.nn.CTCLoss in double precision: value and gradient, lengths, padding, infinite losses."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.onnx", reason="PyTorch is not installed")
import numpy as np
import onnx
import torch
from graph_build_models import Array
from loss_graphs import compute, feeds_of, section, training_graph
from onnx import TensorProto, helper
from torch.nn import functional

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.objective.loss import attach
from ortflow.workflow.graph.types import VALID

SAMPLES, TIME, CLASSES, LONGEST = 5, 12, 6, 4
BOTH = {"input_lengths": "frames", "target_lengths": "lengths"}


def batch(seed: int, blank: int = 0) -> tuple[Array, dict[str, Array]]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(SAMPLES, TIME, CLASSES)).astype("float32") * 2
    other = np.array([each for each in range(CLASSES) if each != blank])
    labels = other[random.integers(0, 3, (SAMPLES, LONGEST))]
    return x, {"labels": labels, "frames": np.array([12, 9, 10, 12, 8]), "lengths": np.array([4, 2, 0, 3, 1])}


def reference(x: Array, feeds: dict[str, Array], count: int = SAMPLES, **options: Any) -> tuple[float, Array]:
    given = torch.tensor(x[:count], dtype=torch.float64, requires_grad=True)
    labels, frames, lengths = (torch.tensor(feeds[name][:count]) for name in ("labels", "frames", "lengths"))
    loss = functional.ctc_loss(given.log_softmax(2).transpose(0, 1), labels, frames, lengths, **options)
    loss.backward()
    return loss.item(), given.grad.numpy()


@pytest.mark.parametrize("blank", [0, 5])
def test_ctc(blank: int) -> None:
    x, feeds = batch(1, blank)
    graph = training_graph(
        {"kind": "ctc", "batch_first": True, "blank": blank, **BOTH}, {"y": (TIME, CLASSES)}, SAMPLES
    )
    expected, slope = reference(x, feeds, blank=blank)
    total, weight, gradients = compute(graph, feeds_of({"y": x}, feeds))
    assert weight == SAMPLES
    assert total / weight == pytest.approx(expected, rel=2e-6)
    np.testing.assert_allclose(gradients["y"] / weight, slope, rtol=2e-5, atol=2e-6)
    # Log-probabilities are their own log-softmax.
    logs = torch.tensor(x).log_softmax(2).numpy()
    assert compute(graph, feeds_of({"y": logs}, feeds))[0] == pytest.approx(total, rel=2e-6)


def test_padded_rows_and_lengths_from_the_labels() -> None:
    x, feeds = batch(2)
    graph = training_graph({"kind": "ctc", "batch_first": True}, {"y": (TIME, CLASSES)}, SAMPLES, padded=True)
    feeds["frames"][:] = TIME
    feeds["labels"][np.arange(LONGEST) >= feeds["lengths"][:, None]] = -1
    expected, slope = reference(x, feeds, 4)
    given = feeds_of({"y": x}, {"labels": feeds["labels"]}, 4)
    total, weight, gradients = compute(graph, given)
    assert (weight, total / weight) == (4, pytest.approx(expected, rel=2e-6))
    np.testing.assert_allclose(gradients["y"][:4] / weight, slope, rtol=2e-5, atol=2e-6)
    assert not gradients["y"][4:].any()


def test_labels_that_do_not_fit_and_wrong_ones() -> None:
    x, feeds = batch(3)
    # Two equal labels need a blank between them: three labels in four frames fit, in three they do not.
    feeds["labels"][0], feeds["frames"][0], feeds["lengths"][0] = [1, 1, 2, 2], 3, 3
    feeds["frames"][1] = 0
    shapes = {"y": (TIME, CLASSES)}
    infinite = training_graph({"kind": "ctc", "batch_first": True, **BOTH}, shapes, SAMPLES)
    assert reference(x, feeds)[0] == compute(infinite, feeds_of({"y": x}, feeds))[0] == np.inf
    finite = training_graph({"kind": "ctc", "batch_first": True, "zero_infinity": True, **BOTH}, shapes, SAMPLES)
    expected, slope = reference(x, feeds, zero_infinity=True)
    total, weight, gradients = compute(finite, feeds_of({"y": x}, feeds))
    assert total / weight == pytest.approx(expected, rel=2e-6)
    np.testing.assert_allclose(gradients["y"] / weight, slope, rtol=2e-5, atol=2e-6)
    assert not gradients["y"][:2].any()
    for name, value in (("frames", TIME + 1), ("lengths", LONGEST + 1), ("lengths", -1), ("labels", CLASSES)):
        wrong = {key: array.copy() for key, array in feeds.items()}
        wrong[name].reshape(SAMPLES, -1)[3, 0] = value
        assert np.isnan(compute(finite, feeds_of({"y": x}, wrong))[0]), name


def time_first() -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "frames", CLASSES])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["frames", "batch", CLASSES])
    graph = helper.make_graph([helper.make_node("Transpose", ["x"], ["y"], "/t", perm=[1, 0, 2])], "model", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def test_time_first_and_what_is_refused() -> None:
    from ortflow.workflow.graph.ir.edit import make_outputs, scalar
    from ortflow.workflow.graph.types import LOSS_SUM, LOSS_WEIGHT

    x, feeds = batch(4)
    model = time_first()
    attach(model.graph, section({"kind": "ctc", **BOTH}), "x", False)
    make_outputs(model.graph, [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)])
    total, weight, _ = compute(model, {"x": x, **feeds, VALID: np.array([SAMPLES])})
    assert total / weight == pytest.approx(reference(x, feeds)[0], rel=2e-6)
    for loss, message in (
        (
            {"batch_first": True},
            "model.loss.batch_first: is true, and output 'y' of shape .* has the samples on axis 1",
        ),
        ({"blank": CLASSES}, "model.loss.blank: is 6, and output 'y' has 6 classes"),
    ):
        with pytest.raises(UserError, match=message):
            attach(time_first().graph, section({"kind": "ctc", **loss}), "x", False)


def test_what_to_do_about_an_infinite_loss() -> None:
    from run_files import spec_of

    from ortflow.workflow.steps.not_finite import infinite_ctc

    loss = {"kind": "sum", "terms": [{"loss": {"kind": "mse"}}, {"loss": {"kind": "ctc"}}]}
    spec = spec_of(model={"path": "model.onnx", "loss": loss})
    assert infinite_ctc(spec, "the loss is inf").endswith("or set model.loss.terms[1].loss.zero_infinity")
    assert "one of them is out of range" in infinite_ctc(spec, "the loss is nan")
    assert infinite_ctc(spec, "the gradient is inf") == "" == infinite_ctc(spec_of(), "the loss is inf")
