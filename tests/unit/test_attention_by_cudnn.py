"""Attention by cuDNN as far as there need be no GPU: its kernel compiles, shapes are checked, and why there is none."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto

from ortflow.workflow.cuda import attention
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


def test_shapes_are_taken_as_they_are() -> None:
    q, k = tensor(2, 77, 8, 64), tensor(2, 50, 2, 64)
    shape = attention.shape_of(q, k, k, tensor(2, 1, 1, 50, kind=TensorProto.BOOL), 0.125, False)
    assert (shape.tokens, shape.keys, shape.heads, shape.shared, shape.mask) == (77, 50, 8, 2, (2, 1))
    assert shape.bias == 2 * 77 * 50
    assert shape.statistics == (2, 8, 77, 1)


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
        attention.shape_of(q, k, v, mask, 1.0, False)


def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        version = 91900

        def backend_version(self) -> int:
            return self.version

    package = Package()

    def found(name: str) -> Package:
        assert name == "cudnn"
        return package

    monkeypatch.setattr(importlib, "import_module", found)
    assert attention.available() is None
    assert attention.available((9, 0)) is None
    assert "8.0 at least, and this has 7.5" in (attention.available((7, 5)) or "")
    package.version = 90100
    assert "cuDNN 9.5 at least" in (attention.available() or "")

    def missing(name: str) -> Package:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    assert "nvidia-cudnn-frontend, which is not installed" in (attention.available() or "")

    def broken(name: str) -> Package:
        raise RuntimeError("libcudnn.so.9 is\nnot there")

    monkeypatch.setattr(importlib, "import_module", broken)
    assert "(libcudnn.so.9 is not there)" in (attention.available() or "")


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
    with pytest.raises(UserError, match=r"8\.0 at least, and this has 7\.5"):
        attention.Attention({"scale": 1.0})
