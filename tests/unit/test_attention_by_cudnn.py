"""Attention by cuDNN without a GPU: its kernel compiles, shapes are checked, and reasons why it is unavailable."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from messages import mentions
from onnx import TensorProto

from ortflow.workflow.cuda import attention
from ortflow.workflow.cuda.attention import Given
from ortflow.workflow.cuda.attention_shape import packed_shape_of, shape_of
from ortflow.workflow.cuda.cudnn import available
from ortflow.workflow.cuda.nvrtc import compiled, headers
from ortflow.workflow.cuda.operators import Tensor
from ortflow.workflow.errors import OrtflowError, UserError

HALF = TensorProto.FLOAT16


def tensor(*shape: int, kind: int = HALF) -> Tensor:
    return Tensor(0, shape, kind)


def library() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    return next((path for folder in folders or () for path in Path(folder).glob("cu*/lib/libnvrtc.so.*")), None)


@pytest.mark.parametrize(
    ("mask", "bias", "architecture"),
    [
        *((mask, HALF, "sm_90") for mask in (TensorProto.BOOL, TensorProto.FLOAT, HALF)),
        *((TensorProto.BFLOAT16, TensorProto.BFLOAT16, name) for name in ("sm_80", "sm_120")),
    ],
)
def test_the_kernel_for_masks_compiles(mask: int, bias: int, architecture: str) -> None:
    if not (found := library()):
        pytest.skip("NVRTC is not installed")
    nvrtc = ctypes.CDLL(str(found))
    if not any((folder / "cuda_fp16.h").exists() for folder in headers()):
        pytest.skip("CUDA's headers are not installed")
    assert len(compiled(nvrtc, attention.source(mask, bias), architecture)) > 1000


def test_shapes_are_used_unchanged() -> None:
    q, k = tensor(2, 77, 8, 64), tensor(2, 50, 2, 64)
    shape = shape_of(q, k, k, tensor(2, 1, 1, 50, kind=TensorProto.BOOL), 0.125, False)
    assert (shape.tokens, shape.keys, shape.heads, shape.shared, shape.mask) == (77, 50, 8, 2, (2, 1))
    assert shape.bias == 2 * 77 * 50
    assert shape.statistics == (2, 8, 77, 1)


def test_packed_parts_lie_where_their_strides_say() -> None:
    batch, tokens, heads, shared, size = 2, 5, 4, 2, 8
    shape = packed_shape_of(tensor(batch, tokens, (heads + 2 * shared) * size), (heads, shared, size), None, 0.5, True)
    assert (shape.rows, shape.statistics) == ((batch, tokens, heads, size), (batch, heads, tokens, 1))
    whole = np.arange(batch * tokens * shape.width, dtype=np.float16).reshape(batch, tokens, shape.width)
    wanted = np.split(whole, [heads * size, (heads + shared) * size], axis=-1)
    pointers = shape.parts([whole.ctypes.data])
    for part, pointer, (dims, strides) in zip(wanted, pointers, shape.layouts(), strict=True):
        first = (pointer - whole.ctypes.data) // whole.itemsize
        steps = [stride * whole.itemsize for stride in strides]
        found = np.lib.stride_tricks.as_strided(whole.reshape(-1)[first:], dims, steps)
        np.testing.assert_array_equal(found, part.reshape(batch, tokens, -1, size).transpose(0, 2, 1, 3))


@pytest.mark.parametrize("turned", [False, True])
def test_parts_apart_lie_where_their_strides_say(turned: bool) -> None:
    sizes = [(2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)] if turned else [(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8)]
    q, k, v = (tensor(*each) for each in sizes)
    shape = shape_of(q, k, v, None, 1.0, False, (turned, turned, turned))
    for each, (dims, strides) in zip(sizes, shape.layouts(), strict=True):
        value = np.arange(np.prod(each), dtype=np.int64).reshape(each)
        found = np.lib.stride_tricks.as_strided(value, dims, [stride * value.itemsize for stride in strides])
        np.testing.assert_array_equal(found, value if turned else value.transpose(0, 2, 1, 3))
    assert shape.parts([1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("packed", "heads", "mask", "words"),
    [
        (tensor(2, 9, 192), (3, 2, 24), None, "heads of size 24"),
        (tensor(2, 9, 192), (4, 4, 24), None, "heads of size 24"),
        (tensor(2, 9, 8, 24), (4, 2, 24), None, "heads of size 24"),
        (tensor(2, 9, 192, kind=TensorProto.FLOAT), (4, 2, 24), None, "all fp16 or all bf16"),
        (tensor(2, 9, 192), (4, 2, 24), tensor(2, 1, 5, 9, kind=TensorProto.BOOL), "a mask of shape"),
    ],
)
def test_what_does_not_fit_packed_is_refused(
    packed: Tensor, heads: tuple[int, int, int], mask: Tensor | None, words: str
) -> None:
    with pytest.raises(OrtflowError, match=words):
        packed_shape_of(packed, heads, mask, 1.0, False)


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_values_of_packed_nodes_come_in_the_order_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, masked: bool, drops: bool
) -> None:
    queued: list[tuple[str, list[int], Tensor | None, list[int], float]] = []

    class Library:
        def run(self, call: Any, write: Any, pointers: list[int], given: Given) -> None:
            drawn = [each.pointer for each in given.drawn]
            queued.append((write.__name__, pointers, given.mask, drawn, given.shape.dropout))

    class Call:
        def __init__(self, *inputs: Tensor | None) -> None:
            self.inputs, self.made = inputs, list[tuple[int, ...]]()

        def given(self, place: int) -> Tensor:
            found = self.inputs[place]
            assert found is not None
            return found

        def output(self, place: int, shape: tuple[int, ...]) -> int:
            self.made.append(tuple(shape))
            return 70000 + 10000 * place

    monkeypatch.setattr(attention, "check_available", lambda *, drops: None)
    monkeypatch.setattr(attention, "plans", Library)
    rows, width = (2, 5, 4, 8), 64
    do, packed, o = (Tensor(at, dims, HALF) for at, dims in ((10000, rows), (20000, (2, 5, width)), (30000, rows)))
    stats, mask = Tensor(40000, (2, 4, 5, 1), TensorProto.FLOAT), Tensor(50000, (2, 1, 1, 5), TensorProto.BOOL)
    key = [Tensor(place, (1,), TensorProto.INT64) for place in (60000, 61000)]
    last = [mask if masked else None, *key] if drops else [mask] if masked else []
    forward, backward = Call(packed, *last), Call(do, packed, o, stats, *last)
    for operator, call in ((attention.Attention, forward), (attention.AttentionGrad, backward)):
        operator({"packed": [4, 2, 8], "dropout": 0.1 if drops else 0.0}).run(cast(Any, call))
    parts = [20000, 20000 + 4 * 8 * 2, 20000 + 6 * 8 * 2]
    gradients = [each + 50000 for each in parts]
    read = mask if masked else None, [60000, 61000] if drops else [], 0.1 if drops else 0.0
    assert queued == [
        ("forward", [*parts, 70000, 80000], *read),
        ("backward", [10000, *parts, 30000, 40000, *gradients], *read),
    ]
    assert (forward.made, backward.made) == ([rows, (2, 4, 5, 1)], [(2, 5, width)])


@pytest.mark.parametrize(
    ("q", "k", "v", "mask", "words"),
    [
        (tensor(2, 9, 8, 64), tensor(2, 9, 3, 64), tensor(2, 9, 3, 64), None, "keys"),
        (tensor(2, 9, 8, 64), tensor(2, 9, 8, 64), tensor(2, 7, 8, 64), None, "values"),
        (tensor(2, 9, 8, 64), tensor(1, 9, 8, 64), tensor(1, 9, 8, 64), None, "keys"),
        (tensor(2, 9, 8, 64), *[tensor(2, 9, 8, 64, kind=TensorProto.FLOAT)] * 2, None, "all fp16 or all bf16"),
        (*[tensor(2, 9, 8, 64)] * 3, tensor(2, 1, 5, 9, kind=TensorProto.BOOL), "a mask of shape"),
        (*[tensor(2, 9, 8, 64)] * 3, tensor(2, 1, 9, kind=TensorProto.BOOL), "a mask of shape"),
        (*[tensor(2, 9, 8, 64)] * 3, tensor(2, 1, 1, 9, kind=TensorProto.INT64), "a mask of ONNX's type"),
    ],
)
def test_what_does_not_fit_is_refused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, words: str) -> None:
    with pytest.raises(OrtflowError, match=words):
        shape_of(q, k, v, mask, 1.0, False)


def test_why_cudnn_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        version = 91900

        def backend_version(self) -> int:
            return self.version

    package = Package()

    def found(name: str) -> Package:
        assert name == "cudnn"
        return package

    monkeypatch.setattr(importlib, "import_module", found)
    assert available() is None
    assert available((9, 0)) is None
    assert mentions(available((7, 5)) or "", "8.0", "7.5")
    package.version = 90100
    assert "cuDNN 9.5 at least" in (available() or "")

    def missing(name: str) -> Package:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "nvidia-cudnn-frontend, which is not installed" in (available() or "")

    def broken(name: str) -> Package:
        raise RuntimeError("libcudnn.so.9 is\nnot there")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "(libcudnn.so.9 is not there)" in (available() or "")


def test_a_gpu_that_is_too_old_is_refused_when_the_session_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuCtxGetDevice(self, device: object) -> int:  # noqa: N802 - CUDA's name
            return 0

        def cuDeviceGetAttribute(self, value: Any, code: int, device: object) -> int:  # noqa: N802
            value._obj.value = {75: 7, 76: 5}[code]
            return 0

    class Package:
        def backend_version(self) -> int:
            return 91900

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(importlib, "import_module", lambda name: Package())
    with pytest.raises(UserError, match=r"8\.0.*7\.5"):
        attention.Attention({"scale": 1.0})
