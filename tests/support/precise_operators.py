"""Operators in double precision where onnx's evaluator is wrong or knows not every form."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class ConvTranspose(OpRun):  # type: ignore[misc]
    """Each element of the data spreads its kernel over the output. onnx's is wrong in groups and with dilations."""

    def _run(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        *,
        auto_pad: str = "NOTSET",
        dilations: Any = None,
        group: int = 1,
        kernel_shape: Any = None,
        output_padding: Any = None,
        output_shape: Any = None,
        pads: Any = None,
        strides: Any = None,
    ) -> tuple[np.ndarray]:
        axes = x.ndim - 2
        kernel = weight.shape[2:]
        strides, dilations, extra = strides or [1] * axes, dilations or [1] * axes, output_padding or [0] * axes
        each = weight.shape[1]
        sizes = [
            s * (n - 1) + p + d * (k - 1) + 1
            for s, n, p, d, k in zip(strides, x.shape[2:], extra, dilations, kernel, strict=True)
        ]
        whole = np.zeros((x.shape[0], group * each, *sizes), x.dtype)
        for place in itertools.product(*map(range, kernel)):
            at = tuple(
                slice(k * d, k * d + s * (n - 1) + 1, s)
                for k, d, s, n in zip(place, dilations, strides, x.shape[2:], strict=True)
            )
            for part in range(group):
                inner = slice(part * x.shape[1] // group, (part + 1) * x.shape[1] // group)
                outer = slice(part * each, (part + 1) * each)
                spread = np.einsum("nc...,cm->nm...", x[:, inner], weight[(inner, slice(None), *place)])
                whole[(slice(None), outer, *at)] += spread
        pads = pads or [0] * (2 * axes)
        if output_shape or auto_pad.startswith("SAME"):
            asked = output_shape or [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
            totals = [size - n for size, n in zip(sizes, asked, strict=True)]
            fewer, more = [n // 2 for n in totals], [n - n // 2 for n in totals]
            pads = [*fewer, *more] if auto_pad == "SAME_UPPER" else [*more, *fewer]
        cut = tuple(slice(pads[i], size - pads[axes + i]) for i, size in enumerate(sizes))
        whole = whole[(slice(None), slice(None), *cut)]
        return (whole if bias is None else whole + bias.reshape(-1, *[1] * axes),)


OPERATORS = (ConvTranspose,)
