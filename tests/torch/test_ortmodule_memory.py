"""Memory of an ORTModule that is given out again: blocks, and copies of parameters in half precision."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch

from ortflow.torch.gpu_graphs import reading_halves
from ortflow.torch.half_weights import HalfWeights
from ortflow.torch.memory import ALIGNMENT, Block

SHAPES = [torch.Size([3, 5]), torch.Size([]), torch.Size([0, 4]), torch.Size([7])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_a_block(dtype: torch.dtype) -> None:
    block = Block(SHAPES, dtype, torch.device("cpu"))
    lent = block.lend()
    assert [tensor.shape for tensor in lent] == SHAPES
    for number, tensor in enumerate(lent):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(block.tensors):
        assert tensor.dtype is dtype
        assert (tensor == number + 1).all(), "not the same memory"
    assert all((tensor.data_ptr() - block.tensors[0].data_ptr()) % ALIGNMENT == 0 for tensor in lent if tensor.numel())


def test_a_block_is_in_use_while_anybody_has_a_tensor_of_it() -> None:
    block = Block(SHAPES, torch.float32, torch.device("cpu"))
    assert not block.in_use
    lent = block.lend()
    view = lent[0].t()[1:]
    del lent
    assert block.in_use, "a view is left"
    del view
    assert not block.in_use
    weight = torch.ones(3, 5, requires_grad=True)
    product = weight * block.lend()[0]
    assert block.in_use, "autograd has saved a factor"
    product.sum().backward()
    del product
    assert not block.in_use


def test_lent_tensors_outlive_their_block() -> None:
    block = Block([torch.Size([1000])], torch.float32, torch.device("cpu"))
    (tensor,) = block.lend()
    tensor.fill_(3.0)
    del block
    gc.collect()
    torch.zeros(1000).fill_(5.0)
    assert (tensor == 3.0).all()


def test_a_gradient_that_autograd_keeps_is_in_use() -> None:
    """AccumulateGrad takes over a gradient that nobody else has: `zero_grad` is what frees it."""
    block = Block([torch.Size([4])], torch.float32, torch.device("cpu"))

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            (tensor,) = block.lend()
            return tensor.fill_(2.0)

    parameter = torch.nn.Parameter(torch.zeros(4))
    Given.apply(parameter).backward()
    assert parameter.grad is not None
    assert parameter.grad.data_ptr() == block.tensors[0].data_ptr()
    assert block.in_use
    parameter.grad = None
    assert not block.in_use


def weights(stays: bool = True) -> tuple[HalfWeights, dict[str, torch.Tensor]]:
    tensors = {"a": torch.randn(3, 4), "b": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    return HalfWeights({"a/half": "a", "b/half": "b"}, torch.bfloat16, stays=stays), tensors


def test_copies_are_the_parameters_in_half_precision() -> None:
    half, tensors = weights()
    for _ in range(3):
        tensors["a"].add_(0.37)
        copies = half.of(tensors)
        for name in tensors:
            assert torch.equal(copies[f"{name}/half"], tensors[name].bfloat16())
            assert copies[f"{name}/half"].is_contiguous()


def test_copies_of_an_earlier_call_stay_as_they_are_while_they_are_needed() -> None:
    half, tensors = weights()
    first = half.of(tensors)["a/half"]
    address, before = first.data_ptr(), first.clone()
    tensors["a"].add_(1.0)
    second = half.of(tensors)["a/half"]
    assert torch.equal(first, before)
    assert torch.equal(second, tensors["a"].bfloat16())
    del first, second
    assert half.of(tensors)["a/half"].data_ptr() == address, "a captured graph reads this memory"


def test_saved_copies_can_be_read_after_the_next_call() -> None:
    """PyTorch compares the version of a saved tensor: the copies of a later call must not count as a change of it."""
    half, tensors = weights()
    factor = torch.ones(3, 4, dtype=torch.bfloat16, requires_grad=True)
    products = []
    expected = []
    for _ in range(2):
        copy = half.of(tensors)["a/half"]
        products.append((factor * copy).sum())
        expected.append(copy.clone())
        del copy
        tensors["a"].add_(1.0)
    for product, gradient in zip(products, expected, strict=True):
        factor.grad = None
        product.backward()
        assert factor.grad is not None
        assert torch.equal(factor.grad, gradient)


def graph_of(kind: int) -> onnx.ModelProto:
    """The parameter w is converted twice and also read in fp32; the inputs x and s are converted."""
    f, half = TensorProto.FLOAT, kind
    nodes = [
        helper.make_node("Cast", ["w"], ["w1"], to=half),
        helper.make_node("Cast", ["w"], ["w2"], to=half),
        helper.make_node("Cast", ["x"], ["x1"], to=half),
        helper.make_node("Cast", ["s"], ["s1"], to=half),
        helper.make_node("MatMul", ["x1", "w1"], ["y1"]),
        helper.make_node("MatMul", ["y1", "w2"], ["y2"]),
        helper.make_node("Add", ["y2", "s1"], ["y3"]),
        helper.make_node("Cast", ["y3"], ["y4"], to=f),
        helper.make_node("MatMul", ["y4", "w"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info(name, f, [4, 4]) for name in ("x", "w", "s")]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", f, [4, 4])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def test_conversions_of_parameters_become_inputs() -> None:
    from ortflow.workflow.onnx_runtime import onnxruntime

    model = graph_of(TensorProto.FLOAT16)
    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in ("x", "w", "s")}
    runs = []
    changed, sources = reading_halves(model, ["w"], "fp16")
    assert sources == {"w1": "w", "w2": "w"}
    onnx.checker.check_model(changed, full_check=True)
    assert sum(node.op_type == "Cast" for node in changed.graph.node) == 3
    for each in (model, changed):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        given = {**{name: feed[source].astype(np.float16) for name, source in sources.items()}, **feed}
        runs.append(session.run(None, {value.name: given[value.name] for value in session.get_inputs()})[0])
    # ONNX Runtime computes such products in fp32 on CPUs, and drops conversions in between.
    np.testing.assert_allclose(runs[1], runs[0], rtol=5e-3, atol=5e-3)


def test_what_is_returned_stays_a_conversion() -> None:
    model = graph_of(TensorProto.BFLOAT16)
    model.graph.output.append(helper.make_tensor_value_info("w2", TensorProto.BFLOAT16, [4, 4]))
    changed, sources = reading_halves(model, ["w"], "bf16")
    assert sources == {"w1": "w"}
    assert [node.output[0] for node in changed.graph.node if node.op_type == "Cast" and node.input[0] == "w"] == ["w2"]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_conversion_to_another_type_than_that_of_autocast_stays(precision: str) -> None:
    """Of a module that calls `half` on a weight itself: copies of it would be rounded twice, or have no type."""
    model = graph_of(TensorProto.FLOAT16)
    changed, sources = reading_halves(model, ["w"], precision)
    assert sources == {}
    assert [node.op_type for node in changed.graph.node] == [node.op_type for node in model.graph.node]
    assert [value.name for value in changed.graph.input] == ["x", "w", "s"]


def test_a_buffer_of_another_type_stays_a_conversion() -> None:
    model = graph_of(TensorProto.BFLOAT16)
    next(value for value in model.graph.input if value.name == "s").type.tensor_type.elem_type = TensorProto.INT64
    assert reading_halves(model, ["w", "s"], "bf16")[1] == {"w1": "w", "w2": "w"}
