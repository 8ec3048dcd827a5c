"""How far a result of an exported file is from the module's, compared with PyTorch's own rounding. Pure.

Called by `ortflow.exporter.comparison` with arrays of the file, of the module in single and of the module in double
precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

RELATIVE, RELATIVE_ALONE = 1e-3, 2e-2
"""Allowed error relative to the norm; the second applies if the module does not run in double precision."""
GRADIENT = "the gradient of "
NOT_FINITE = "not finite"
_ROUNDING = 30.0
"""Allowed error of the file relative to double precision, as a multiple of the error of PyTorch's single precision."""
_FLOOR = 1e-4
"""Fraction of the largest gradient that counts as rounding: the gradient of a bias before a normalisation is zero.

Of the largest in either precision: where a chain of normalisations of equal rows multiplies rounding by 1e9, the
module's own single precision is as far off, and a gradient that happens to be 0 in it is not exact."""
_ABSOLUTE = 1e-7
"""Norm that counts as rounding: that of a difference of equal numbers near 1."""
_EXACT = 1e-4
"""Relative error of single precision up to which a small result is a value, and not rounding."""
_FLOOR_OF_EXACT, _ABSOLUTE_OF_EXACT = 1e-2, 1e-12
"""Factor of the floor, and the norm, that count as rounding of such a result: a model of small weights has outputs of
1e-9."""


def difference(values: Sequence[np.ndarray], relative: float, floor: float, rounding: float = _ROUNDING) -> str:
    """How a result differs by more than rounding; empty if it does not.

    `values`: of the file, and of the module in single and in double precision; the same array twice if there is one.
    `rounding`: the allowed error as a multiple of that between the two.
    """
    actual, single, double = values
    if actual.shape != double.shape:
        return f"of shape {list(actual.shape)}, not {list(double.shape)}"
    if not np.issubdtype(actual.dtype, np.floating):
        return ""  # rounding determines which of equal values is the largest
    if not np.isfinite(actual).all():
        return NOT_FINITE
    norm_, off, own_error = (
        norm(double),
        norm(actual.astype(np.float64) - double),
        norm(single.astype(np.float64) - double),
    )
    if single is not double and own_error <= _EXACT * norm_:
        absolute = _FLOOR_OF_EXACT * floor + _ABSOLUTE_OF_EXACT
    else:
        absolute = floor + _ABSOLUTE
    if off <= rounding * own_error + relative * norm_ + absolute:
        return ""
    return f"{off / norm_:.1%} off" if norm_ > absolute else f"of norm {norm(actual):.2g}, not 0"


def output_differences(
    names: Sequence[str],
    actual: Sequence[np.ndarray],
    single: Sequence[np.ndarray],
    double: Sequence[np.ndarray],
    relative: float,
) -> dict[str, str]:
    """The outputs that differ where the module's are finite, and how."""
    faults = {
        f"output {name!r}": difference(where_finite(*values), relative, 0.0)
        for name, *values in zip(names, actual, single, double, strict=True)
    }
    return {name: fault for name, fault in faults.items() if fault}


def gradient_differences(
    actual: Mapping[str, np.ndarray],
    single: Mapping[str, np.ndarray],
    double: Mapping[str, np.ndarray],
    relative: float,
    ignored: Mapping[str, int],
) -> dict[str, str]:
    """The gradients that differ where the module's are finite, and how; without the `ignored` row of a parameter."""
    floor = _FLOOR * max(largest(single.values()), largest(double.values()))
    faults = {}
    for name, gradient in actual.items():
        nothing = np.zeros_like(gradient)
        arrays = [gradient, single.get(name, nothing), double.get(name, nothing)]
        if name in ignored:
            arrays = [np.delete(array, ignored[name], axis=0) for array in arrays]
        if single is double:
            arrays[1] = arrays[2]
        faults[f"{GRADIENT}{name!r}"] = difference(where_finite(*arrays), relative, floor)
    return {name: fault for name, fault in faults.items() if fault}


def where_finite(actual: np.ndarray, single: np.ndarray, double: np.ndarray) -> list[np.ndarray]:
    """The arrays with 0 where the module's are infinite or NaN."""
    if not (actual.shape == single.shape == double.shape) or not np.issubdtype(single.dtype, np.floating):
        return [actual, single, double]
    finite = np.isfinite(single) & np.isfinite(double)
    if finite.all():
        return [actual, single, double]
    exact = np.where(finite, double, 0)
    return [np.where(finite, actual, 0), exact if single is double else np.where(finite, single, 0), exact]


def largest(gradients: Iterable[np.ndarray]) -> float:
    """The largest norm, of what is finite; 0 if there is none."""
    return max((norm(np.nan_to_num(gradient, posinf=0.0, neginf=0.0)) for gradient in gradients), default=0.0)


def norm(array: np.ndarray) -> float:
    """The Euclidean norm of all elements."""
    return float(np.linalg.norm(array.astype(np.float64).ravel()))
