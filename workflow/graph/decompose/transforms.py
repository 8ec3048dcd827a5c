"""STFT as a DFT of its frames."""

from __future__ import annotations

import onnx

from ortflow.workflow.graph.ir.replacement import Context, Replacement


def short_time_fourier(node: onnx.NodeProto, context: Context) -> list[onnx.NodeProto]:
    """Frame f of the signal, of L samples and every S samples, times the window, transformed.

    A signal of [batch, samples] or [batch, samples, 1 or 2] becomes frames [batch, frames, L, 1 or 2] by a Gather at
    the indices f S + i. Frames that would reach beyond the signal are left out, as ONNX defines it.
    """
    w = Replacement(node, context)
    signal, step, window = w.input(0), _scalar(w, w.input(1)), w.input(2)
    if w.rank(0) == 2:
        signal = w("Unsqueeze", signal, w.ints(-1))
    if not w.input(3) and not window:
        raise w.refusal("it has neither a window nor a length of frames")
    length = _scalar(w, w.input(3) or w("Shape", window))
    samples = _scalar(w, w("Shape", signal, start=1, end=2))
    one, zero = w.constant(1, "int64"), w.constant(0, "int64")
    frames = w("Add", w("Div", w("Sub", samples, length), step), one)
    starts = w("Mul", w("Range", zero, frames, one), step)
    places = w("Add", w("Unsqueeze", starts, w.ints(1)), w("Range", zero, length, one))
    rows = w("Gather", signal, places, axis=1)
    if window:
        rows = w("Mul", rows, w("Unsqueeze", window, w.ints(-1)))
    return w.done(w("DFT", rows, axis=2, onesided=int(w.attribute("onesided", 1))))


def _scalar(w: Replacement, value: str) -> str:
    """One number, of shape [] or [1], as an int64 scalar."""
    return w("Reshape", w.cast(value, onnx.TensorProto.INT64), w.ints())
