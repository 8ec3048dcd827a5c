"""Operators that are composed of others, over random shapes and attributes: values and gradients are PyTorch's.

PyTorch computes in double precision. Matrices include those of one rank less and permutations, whose pivots are swapped
and equal; regions reach outside of the image; products have zeros.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflow.workflow.onnx_runtime import onnxruntime as ort

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torchvision", reason="torchvision is not installed")
import torch
import torchvision
from onnx import TensorProto, helper

import ortflow
from ortflow.exporter.running_products import log_determinant, running_product
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.normalize.prepare import prepare

SEEDS = range(12)


def by_onnx(
    operator: str, x: np.ndarray, weights: np.ndarray, given: dict[str, np.ndarray], *, dynamic: bool, **attributes: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The value of a node, and the gradient of its sum with weights towards `x`. `dynamic`: its first axis varies."""
    value = helper.make_tensor_value_info
    shape: list[int | str] = ["n", *x.shape[1:]] if dynamic else [*x.shape]
    nodes = [
        helper.make_node(operator, ["x", *given], ["y"], "node", **attributes),
        helper.make_node("Mul", ["y", "weights"], ["product"], "product"),
        helper.make_node("ReduceSum", ["product"], ["loss"], "loss", keepdims=0),
    ]
    inputs = [value("x", TensorProto.FLOAT, shape), value("weights", TensorProto.FLOAT, [None] * weights.ndim)]
    inputs += [value(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for name, a in given.items()]
    outputs = [value("loss", TensorProto.FLOAT, []), value("y", TensorProto.FLOAT, [None] * weights.ndim)]
    graph = helper.make_graph(nodes, "composed", inputs, outputs)
    model = prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))[0]
    train, _ = differentiate(make_differentiable(model, ["x"], "loss")[0], ["x"], "loss")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # more of them only wait for each other
    session = ort.InferenceSession(compose(train).SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"x": x, "weights": weights, **given}
    names = {one.name for one in session.get_inputs()}
    found = session.run(["y", "x_grad"], {name: array for name, array in feeds.items() if name in names})
    return found[0], found[1]


def by_torch(function: Any, x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tensor = torch.from_numpy(x).double().requires_grad_()
    result = function(tensor)
    (result * torch.from_numpy(weights).double()).sum().backward()
    assert tensor.grad is not None
    return result.detach().numpy(), tensor.grad.numpy()


def assert_alike(found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, seed
        scale = max(1.0, float(np.abs(other).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5 * scale, err_msg=str(seed))


def drawn(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


def matrices(random: np.random.Generator) -> np.ndarray:
    """[..., n, n]: of full rank, of one rank less, permutations, of few whole numbers, or with a column of zeros."""
    size, outer = int(random.integers(1, 8)), [int(n) for n in random.integers(1, 4, random.integers(0, 3))]
    kind = random.integers(5)
    found = drawn(random, *outer, size, size)
    if kind == 1 and size > 1:
        found[..., -1, :] = 2 * found[..., 0, :]
    elif kind == 2:
        found = np.broadcast_to(np.eye(size, dtype=np.float32)[random.permutation(size)], found.shape).copy()
    elif kind == 3:
        found = random.integers(-1, 2, found.shape).astype(np.float32)
    elif kind == 4:
        found[..., random.integers(size)] = 0
    return found


def cofactors(x: np.ndarray) -> np.ndarray:
    """The gradient of the determinant. PyTorch's is 0 where a determinant is exactly 0, whatever the cofactors are."""
    found, size = np.ones(x.shape), x.shape[-1]
    for *outer, i, j in np.ndindex(x.shape) if size > 1 else ():
        minor = np.delete(np.delete(x[tuple(outer)].astype(np.float64), i, 0), j, 1)
        found[(*outer, i, j)] = (-1) ** (i + j) * np.linalg.det(minor)
    return found


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(30))
def test_determinants(seed: int) -> None:
    random = np.random.default_rng(seed)
    x = matrices(random)
    weights = drawn(random, *x.shape[:-2])
    dynamic = x.ndim > 2 and bool(random.integers(2))
    expected = np.linalg.det(x.astype(np.float64)), cofactors(x) * weights[..., None, None]
    assert_alike(by_onnx("Det", x, weights, {}, dynamic=dynamic), expected, seed)


class Deformed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.weight = torch.nn.Conv2d(3, 18, 3, padding=1), torch.nn.Parameter(torch.ones(4, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torchvision.ops.deform_conv2d(x, self.offset(x), self.weight, padding=1)


def test_a_deformable_convolution_is_refused_by_its_name(tmp_path: Path) -> None:
    """torchvision's translation writes an operator of opset 19 into a file of opset 18."""
    with pytest.raises(UserError, match=r"^DeformConv is an operator of a newer opset than 18, .*node_deform_conv2d"):
        ortflow.export_for_training(Deformed(), torch.ones(2, 3, 6, 6), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rotates
@pytest.mark.parametrize("seed", SEEDS)
def test_regions(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    images, channels, height, width = (int(n) for n in random.integers(1, 7, 4))
    count, bins = int(random.integers(1, 6)), [int(n) for n in random.integers(1, 4, 2)]
    samples, scale, aligned = int(random.integers(1, 4)), float(random.choice([0.25, 0.5, 1.0, 2.0])), bool(seed % 2)
    x = drawn(random, images, channels, height, width)
    # In pixels of the image, some outside of it, some of no extent.
    starts = random.uniform(-2, 6, (count, 2))
    regions = (np.concatenate([starts, starts + random.uniform(0, 5, (count, 2))], 1) / scale).astype(np.float32)
    of = random.integers(0, images, count)
    weights = drawn(random, count, channels, *bins)
    numbered = torch.from_numpy(np.concatenate([of[:, None], regions], 1)).double()
    expected = by_torch(
        lambda tensor: torchvision.ops.roi_align(tensor, numbered, bins, scale, samples, aligned), x, weights
    )
    found = by_onnx(
        "RoiAlign", x, weights, {"regions": regions, "of": of}, dynamic=bool(random.integers(2)),
        output_height=bins[0], output_width=bins[1], sampling_ratio=samples, spatial_scale=scale,
        coordinate_transformation_mode="half_pixel" if aligned else "output_half_pixel",
    )  # fmt: skip
    assert_alike(found, expected, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_running_products(seed: int) -> None:
    """Their form in PyTorch, which is exported: in double precision the same to the last bits."""
    random = np.random.default_rng(200 + seed)
    shape = [int(n) for n in random.integers(1, 12, random.integers(1, 4))]
    axis = int(random.integers(-len(shape), len(shape)))
    x = drawn(random, *shape)
    x[random.random(shape) < 0.2] = 0
    weights = drawn(random, *shape)
    found = by_torch(lambda tensor: running_product(tensor, axis), x, weights)
    for one, other in zip(found, by_torch(lambda tensor: tensor.cumprod(axis), x, weights), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_logarithms_of_determinants(seed: int) -> None:
    random = np.random.default_rng(300 + seed)
    size, outer = int(random.integers(1, 9)), [int(n) for n in random.integers(1, 4, random.integers(0, 3))]
    x = drawn(random, *outer, size, size) * float(random.choice([1e-3, 1.0, 1e3]))
    weights = drawn(random, *outer)
    found = by_torch(lambda tensor: log_determinant(tensor).logabsdet, x, weights)
    expected = by_torch(lambda tensor: torch.linalg.slogdet(tensor).logabsdet, x, weights)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9 * np.abs(other).max())
    signs = [function(torch.from_numpy(x).double())[0] for function in (log_determinant, torch.linalg.slogdet)]
    torch.testing.assert_close(*signs)
