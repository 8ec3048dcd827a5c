"""Operators in double precision where onnx's evaluator is wrong or does not support every form."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class Erf(OpRun):  # type: ignore[misc]
    """onnx's computes in single precision."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(np.vectorize(math.erf, otypes=[x.dtype])(x)),)


class ConvTranspose(OpRun):  # type: ignore[misc]
    """Each element of the data spreads its kernel over the output. onnx's is wrong with groups and dilations."""

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


class _Pool(OpRun):  # type: ignore[misc]
    """One number of each window. onnx's evaluator places windows wrongly with `auto_pad` and `ceil_mode`."""

    def _pooled(self, x: np.ndarray, reduce: Callable[[np.ndarray, int], np.ndarray], **given: Any) -> np.ndarray:
        kernel, axes = given["kernel_shape"], x.ndim - 2
        strides, dilations = given.get("strides") or [1] * axes, given.get("dilations") or [1] * axes
        pads, mode = given.get("pads") or [0] * (2 * axes), given.get("auto_pad") or "NOTSET"
        begins, ends = list(pads[:axes]), list(pads[axes:])
        counts = []
        for axis, size in enumerate(x.shape[2:]):
            stride, reach = strides[axis], dilations[axis] * (kernel[axis] - 1) + 1
            if mode.startswith("SAME"):
                total = max(0, (-(-size // stride) - 1) * stride + reach - size)
                begins[axis] = total // 2 if mode == "SAME_UPPER" else total - total // 2
                ends[axis] = total - begins[axis]
            room = size + begins[axis] + ends[axis] - reach
            counts.append((-(-room // stride) if given.get("ceil_mode") else room // stride) + 1)
        y = np.zeros((*x.shape[:2], *counts), x.dtype)
        for window in np.ndindex(*counts):
            places, padded = [], 1
            for axis, size in enumerate(x.shape[2:]):
                start = window[axis] * strides[axis] - begins[axis]
                own = start + np.arange(kernel[axis]) * dilations[axis]
                places.append(own[(own >= 0) & (own < size)])
                padded *= int((own < size + ends[axis]).sum())
            elements = x[(slice(None), slice(None), *np.ix_(*places))].reshape(*x.shape[:2], -1)
            y[(slice(None), slice(None), *window)] = reduce(elements, padded)
        return y


class MaxPool(_Pool):
    """The maximum of each window."""

    def _run(self, x: np.ndarray, **given: Any) -> tuple[np.ndarray]:
        return (self._pooled(x, lambda elements, _: elements.max(axis=-1), **given),)


class AveragePool(_Pool):
    """The mean of each window, including its padding if `count_include_pad` is set."""

    def _run(self, x: np.ndarray, **given: Any) -> tuple[np.ndarray]:
        def mean(elements: np.ndarray, padded: int) -> np.ndarray:
            return elements.sum(axis=-1) / (padded if given.get("count_include_pad") else elements.shape[-1])

        return (self._pooled(x, mean, **given),)


class LpPool(_Pool):
    """The norm of each window."""

    def _run(self, x: np.ndarray, **given: Any) -> tuple[np.ndarray]:
        p = given.get("p") or 2
        return (self._pooled(x, lambda elements, _: (np.abs(elements) ** p).sum(axis=-1) ** (1 / p), **given),)


class GlobalMaxPool(OpRun):  # type: ignore[misc]
    """The maximum of each channel. onnx's takes it over the first spatial axis only."""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


class GlobalLpPool(OpRun):  # type: ignore[misc]
    """The norm of each channel."""

    def _run(self, x: np.ndarray, *, p: int = 2) -> tuple[np.ndarray]:
        return ((np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),)


class _Recurrent(OpRun):  # type: ignore[misc]
    """A recurrent network of any direction, with every output."""

    def _run(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        recurrence: np.ndarray,
        bias: np.ndarray | None = None,
        lengths: None = None,
        hidden: np.ndarray | None = None,
        cell: np.ndarray | None = None,
        **given: Any,
    ) -> tuple[np.ndarray, ...]:
        count, gates, size = recurrence.shape
        nothing = np.zeros((count, x.shape[1], size), x.dtype)
        bias = np.zeros((count, 2 * gates), x.dtype) if bias is None else bias
        states = np.zeros((x.shape[0], *nothing.shape), x.dtype)
        last = [nothing.copy(), nothing.copy()]
        for place in range(count):
            state = [(nothing if first is None else first)[place] for first in (hidden, cell)]
            backwards = given.get("direction") == "reverse" or place == 1
            for time in range(x.shape[0])[:: -1 if backwards else 1]:
                data = x[time] @ weight[place].T + bias[place, :gates]
                state = self._step(data, state, recurrence[place], bias[place, gates:], given)
                states[time, place] = state[0]
            last[0][place], last[1][place] = state
        return (states, *last[: self._states])

    _states = 1

    def _step(
        self, data: np.ndarray, state: list[np.ndarray], weight: np.ndarray, bias: np.ndarray, given: dict[str, Any]
    ) -> list[np.ndarray]:
        """The state after a step, from the data's part of each gate and the state before it."""
        raise NotImplementedError


class RNN(_Recurrent):
    """h' = tanh(W x + R h + b)"""

    def _step(self, data: Any, state: Any, weight: Any, bias: Any, given: Any) -> list[np.ndarray]:
        return [np.tanh(data + state[0] @ weight.T + bias), state[1]]


class LSTM(_Recurrent):
    """Gates in the order input, output, forget, cell."""

    _states = 2

    def _step(self, data: Any, state: Any, weight: Any, bias: Any, given: Any) -> list[np.ndarray]:
        i, o, f, c = np.split(data + state[0] @ weight.T + bias, 4, axis=-1)
        cell = _sigmoid(f) * state[1] + _sigmoid(i) * np.tanh(c)
        return [_sigmoid(o) * np.tanh(cell), cell]


class GRU(_Recurrent):
    """Gates in the order update, reset, hidden."""

    def _step(self, data: Any, state: Any, weight: Any, bias: Any, given: Any) -> list[np.ndarray]:
        hidden, (rz, rr, rh), (bz, br, bh) = state[0], np.split(weight, 3), np.split(bias, 3)
        z, r, h = np.split(data, 3, axis=-1)
        z, r = _sigmoid(z + hidden @ rz.T + bz), _sigmoid(r + hidden @ rr.T + br)
        inner = r * (hidden @ rh.T + bh) if given.get("linear_before_reset") else (r * hidden) @ rh.T + bh
        return [(1 - z) * np.tanh(h + inner) + z * hidden, state[1]]


def _sigmoid(value: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-value))


OPERATORS = (AveragePool, ConvTranspose, Erf, GRU, GlobalLpPool, GlobalMaxPool, LSTM, LpPool, MaxPool, RNN)
