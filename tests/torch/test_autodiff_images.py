"""Gradients of image, indexing and recurrent operators against PyTorch's, also where several derivatives are valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gradients import gradients_of, model_of

torch = pytest.importorskip("torch")
F = torch.nn.functional

GENERATOR = np.random.default_rng(0)


def drawn(*shape: int) -> np.ndarray:
    return GENERATOR.uniform(-1, 1, shape).astype(np.float32)


def tied(*shape: int) -> np.ndarray:
    """Many equal numbers."""
    return GENERATOR.integers(0, 3, shape).astype(np.float32)


def compare(
    operator: str, inputs: dict[str, Any], parameters: list[str], formula: Callable[..., Any], **options: Any
) -> None:
    """`formula` computes the node's first output from the inputs as tensors, by name."""
    tensors = {
        name: torch.tensor(array, dtype=torch.float64 if array.dtype.kind == "f" else None)
        for name, array in inputs.items()
        if array is not None
    }
    for name in parameters:
        tensors[name].requires_grad_()
    y = formula(**tensors)
    ((y * y + y).sum() * 0.5).backward()
    for unknown in (False, True):
        found = gradients_of(model_of(operator, inputs, parameters, unknown=unknown, **options), inputs, parameters)
        for name in parameters:
            expected = tensors[name].grad.numpy()
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_convolution(axes: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    inputs = {"x": drawn(2, 4, *[9, 8, 7][:axes]), "w": drawn(8, 4 // groups, *[3, 2, 3][:axes]), "b": drawn(8)}
    formula = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[axes]
    compare(
        "Conv",
        inputs,
        ["x", "w", "b"],
        lambda x, w, b: formula(x, w, b, stride, padding, dilation, groups),
        kernel_shape=list(inputs["w"].shape[2:]),
        strides=[stride] * axes,
        pads=[padding] * (2 * axes),
        dilations=[dilation] * axes,
        group=groups,
    )


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_transposed_convolution(axes: int, stride: int, padding: int, dilation: int, groups: int) -> None:
    inputs = {"x": drawn(2, 4, *[4, 5, 3][:axes]), "w": drawn(4, 2, *[3, 4, 3][:axes]), "b": drawn(2 * groups)}
    formula = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}[axes]
    extra = stride - 1
    compare(
        "ConvTranspose",
        inputs,
        ["x", "w", "b"],
        lambda x, w, b: formula(x, w, b, stride, padding, extra, groups, dilation),
        kernel_shape=list(inputs["w"].shape[2:]),
        strides=[stride] * axes,
        pads=[padding] * (2 * axes),
        output_padding=[extra] * axes,
        dilations=[dilation] * axes,
        group=groups,
    )


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(2, 0, 1), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_max_pool_of_equal_numbers(axes: int, stride: int, padding: int, dilation: int, ceil: bool) -> None:
    formula = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[axes]
    compare(
        "MaxPool",
        {"x": tied(2, 3, *[9, 8, 7][:axes])},
        ["x"],
        lambda x: formula(x, 3, stride, padding, dilation, ceil_mode=ceil),
        kernel_shape=[3] * axes,
        strides=[stride] * axes,
        pads=[padding] * (2 * axes),
        dilations=[dilation] * axes,
        ceil_mode=int(ceil),
    )


def test_global_max_pool_of_equal_numbers() -> None:
    compare("GlobalMaxPool", {"x": tied(2, 3, 4, 5)}, ["x"], lambda x: F.adaptive_max_pool2d(x, 1))


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("padding", [0, 1])
def test_average_pool(padding: int, include: bool) -> None:
    compare(
        "AveragePool",
        {"x": drawn(2, 3, 8, 7)},
        ["x"],
        lambda x: F.avg_pool2d(x, 3, 2, padding, count_include_pad=include),
        kernel_shape=[3, 3],
        strides=[2, 2],
        pads=[padding] * 4,
        count_include_pad=int(include),
    )


@pytest.mark.parametrize("training", [False, True])
def test_batch_normalization(training: bool) -> None:
    inputs = {"x": drawn(4, 3, 5, 6), "w": drawn(3), "b": drawn(3), "m": drawn(3), "v": np.abs(drawn(3)) + 0.5}
    compare(
        "BatchNormalization",
        inputs,
        ["x", "w", "b"],
        lambda x, w, b, m, v: F.batch_norm(x, m.clone(), v.clone(), w, b, training=training),
        training_mode=int(training),
        outputs=3 if training else 1,
    )


@pytest.mark.parametrize(
    ("reduction", "torch_name"), [("max", "amax"), ("min", "amin"), ("mul", "prod"), ("add", "sum")]
)
def test_scatter_of_equal_numbers(reduction: str, torch_name: str) -> None:
    inputs = {"data": tied(3, 4), "i": GENERATOR.integers(0, 3, (6, 4)), "updates": tied(6, 4)}
    compare(
        "ScatterElements",
        inputs,
        ["data", "updates"],
        lambda data, i, updates: data.scatter_reduce(0, i, updates, torch_name),
        axis=0,
        reduction=reduction,
    )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_network(kind: str, bidirectional: bool) -> None:
    count, order = 1 + bidirectional, {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}[kind]
    gates = len(order)
    inputs = {
        "x": drawn(5, 3, 4),
        "w": drawn(count, gates * 6, 4),
        "r": drawn(count, gates * 6, 6),
        "b": drawn(count, 2 * gates * 6),
    }

    def formula(x: Any, w: Any, r: Any, b: Any) -> Any:
        network = getattr(torch.nn, kind)(4, 6, bidirectional=bidirectional).double()
        given = {}
        for place in range(count):
            # ONNX's gates are in another order than torch's.
            def turned(value: Any) -> Any:
                parts = value.chunk(gates)
                return torch.cat([parts[order.index(gate)] for gate in range(gates)])

            suffix = "_l0" + "_reverse" * place
            given |= {f"weight_ih{suffix}": turned(w[place]), f"weight_hh{suffix}": turned(r[place])}
            halves = b[place].chunk(2)
            given |= {f"bias_ih{suffix}": turned(halves[0]), f"bias_hh{suffix}": turned(halves[1])}
        y = torch.func.functional_call(network, given, (x,))[0]
        return y.reshape(5, 3, count, 6).transpose(1, 2)

    attributes = {"linear_before_reset": 1} if kind == "GRU" else {}
    direction = "bidirectional" if bidirectional else "forward"
    compare(kind, inputs, ["x", "w", "r", "b"], formula, hidden_size=6, direction=direction, **attributes)
