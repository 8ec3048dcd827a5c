"""Rule for the discrete Fourier transform.

The transform of N elements multiplies by a symmetric matrix F, whose adjoint is N times the inverse transform. Complex
numbers are pairs on the last axis; the gradient with respect to a real input is the real part.
"""

from __future__ import annotations

from ortflow.workflow.graph.rules.gradient import Backward, Gradients, gradient_rule
from ortflow.workflow.graph.rules.traits import Trait, describe

PARTS = 2
"""Numbers of a complex one."""


@gradient_rule("DFT")
def fourier(b: Backward) -> Gradients:
    dims = b.shape(0)
    axis = int(b.attribute("axis", 1)) % len(dims)
    inverse = bool(b.attribute("inverse", 0))
    length = b.input(1) or b("Squeeze", b("Slice", b.shape_of(b.input(0)), *(b.ints(at) for at in (axis, axis + 1))))
    # A one-sided transform dropped the last elements: those that the length adds again are zeros.
    spectrum = b("DFT", b.gradient(), length, axis=axis, inverse=int(not inverse))
    spectrum = b("Div" if inverse else "Mul", spectrum, b("Cast", length, to=b.element_type()))
    if dims[-1] != PARTS:
        spectrum = b("Slice", spectrum, b.ints(0), _size(b, len(dims) - 1), b.ints(-1))
    if b.input(1):
        # The input was padded to the length, or cut to it.
        padded = b("Concat", spectrum, b.zeros(b.input(0)), axis=axis)
        spectrum = b("Slice", padded, b.ints(0), _size(b, axis), b.ints(axis))
    yield 0, spectrum


def _size(b: Backward, axis: int) -> str:
    """Size of an axis of the input, an int64 [1]."""
    size = b.shape(0)[axis]
    if size is not None:
        return b.ints(size)
    return b("Slice", b("Shape", b.input(0)), b.ints(axis), b.ints(axis + 1))


describe(["STFT"], Trait.HEAVY)
