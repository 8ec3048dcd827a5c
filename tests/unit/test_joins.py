"""Concat of tensors of different sizes: which nodes become copies, and that these give the same numbers."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from fake_cuda import FakeCuda, fake_device
from onnx import TensorProto, helper
from operators_on_cpu import needs_compilers, operators_here, session_of

from ortflow.workflow.errors import OrtflowError
from ortflow.workflow.fusion.joins import put_joins
from ortflow.workflow.sessions.session import _refusal


def model_of(axis: int, shapes: list[list[Any]], kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    names = [f"x{place}" for place in range(len(shapes))]
    graph = helper.make_graph(
        [helper.make_node("Concat", names, ["y"], "join", axis=axis)],
        "graph",
        [helper.make_tensor_value_info(name, kind, dims) for name, dims in zip(names, shapes, strict=True)],
        [helper.make_tensor_value_info("y", kind, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.mark.parametrize(
    ("axis", "shapes", "kind", "joined"),
    [
        (1, [["batch", 1, 8], ["batch", 4, 8]], TensorProto.FLOAT, True),
        (1, [["batch", 1, 8], ["batch", 4, 8]], TensorProto.BFLOAT16, True),
        (-1, [["batch", 4], ["batch", "n"]], TensorProto.FLOAT, True),
        (0, [["n", 4], ["n", 4]], TensorProto.FLOAT, True),
        (1, [["batch", 4, 8], ["batch", 4, 8]], TensorProto.FLOAT, False),
        (0, [[1], [2]], TensorProto.INT64, False),
        (0, [[1]], TensorProto.FLOAT, False),
    ],
)
def test_only_tensors_of_different_sizes_are_copied(axis: int, shapes: list[Any], kind: int, joined: bool) -> None:
    (node,) = put_joins(model_of(axis, shapes, kind)).graph.node
    assert (node.op_type == "Join") == joined


@needs_compilers
@pytest.mark.parametrize(
    ("axis", "shapes"),
    [
        (0, [[2, 3], [4, 3]]),
        (1, [[2, 1, 5], [2, 4, 5], [2, 0, 5], [2, 2, 5]]),
        (-1, [[3, 2, 1], [3, 2, 7]]),
        (-2, [[3, 2, 1], [3, 5, 1]]),
    ],
)
def test_copies_give_the_same_numbers(
    axis: int, shapes: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeCuda()

    def copy(target: Any, pitch: Any, source: Any, width: Any, size: Any, rows: Any, kind: int, stream: Any) -> int:
        assert (width.value, kind, stream.value) == (size.value, 3, 77)
        for row in range(rows.value):
            ctypes.memmove(target.value + row * pitch.value, source.value + row * width.value, size.value)
        return 0

    library.cudaMemcpy2DAsync = copy  # type: ignore[attr-defined]
    operators = operators_here(tmp_path, monkeypatch)
    operators._device, operators.stream = fake_device(library), 77
    session = session_of(operators, put_joins(model_of(axis, shapes)).SerializeToString())
    random = np.random.default_rng(0)
    arrays = [random.normal(size=dims).astype(np.float32) for dims in shapes]
    (found,) = session.run(["y"], {f"x{place}": array for place, array in enumerate(arrays)})
    np.testing.assert_array_equal(found, np.concatenate(arrays, axis))
    loose = model_of(axis, [[f"{place}.{i}" for i in range(len(dims))] for place, dims in enumerate(shapes)])
    session = session_of(operators, put_joins(loose).SerializeToString())
    arrays[0] = np.zeros([size + 1 for size in shapes[0]], np.float32)
    feeds = {f"x{place}": array for place, array in enumerate(arrays)}
    with pytest.raises(Exception, match="are not joined along axis"):
        session.run(["y"], feeds)


def test_what_cuda_says_through_onnx_runtime_is_told_in_one_sentence() -> None:
    message = (
        "Error in execution: /onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 "
        "std::conditional_t<THRW, void, onnxruntime::common::Status> onnxruntime::CudaCall(...) "
        "CUDA failure 900: operation not permitted when stream is capturing ; GPU=0 ; hostname=vm ; "
        "file=/x/cuda_call.h ; line=73 ; expr=cudaStreamSynchronize(stream); "
    )
    error = _refusal(message)
    assert isinstance(error, OrtflowError)
    assert str(error) == (
        "ONNX Runtime failed in a step: cudaStreamSynchronize(stream): operation not permitted when stream is "
        "capturing (CUDA error 900)"
    )
