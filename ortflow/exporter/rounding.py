"""PyTorch with rounding that went another way, for points at which rounding decides between equal elements.

Called by `ortflow.exporter.reference`. A result that is exact in single precision stays; any other moves by about its
last bit. Where that changes a gradient, as at a spectrum that is zero but for rounding, a file may differ as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_LAST_BIT = 1e-7


def other_rounding(seed: int) -> Any:
    """A context in which inexact results of PyTorch's operators move by their last bit."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    generator = np.random.default_rng(seed)
    elementwise = {torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default}

    precise = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def doubled(value: Any) -> Any:
        return value.to(precise.get(value.dtype, value.dtype)) if isinstance(value, torch.Tensor) else value

    def moved(result: torch.Tensor, by_element: bool) -> torch.Tensor:
        if not by_element:
            # What remains of a sum may be smaller than the error of its terms.
            sizes = result.abs().nan_to_num(0.0, 0.0, 0.0)
            scale = sizes.square().mean().sqrt()
        else:
            scale = result.abs()
        # PyTorch's own random numbers are a fixed sequence here.
        noise = torch.from_numpy(generator.standard_normal(tuple(result.shape), np.float32))
        return result + _LAST_BIT * scale * noise

    class Rounding(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            first = result[0] if isinstance(result, tuple) and result else result
            if (
                not isinstance(first, torch.Tensor)
                or first.dtype not in precise
                or func._schema.is_mutable
                or any(value.alias_info is not None for value in func._schema.returns)
                or torch.Tag.nondeterministic_seeded in func.tags
            ):
                return result
            try:
                exact = func(*pytree.tree_map(doubled, args), **pytree.tree_map(doubled, kwargs))
            except (RuntimeError, TypeError, NotImplementedError):
                return result
            exact = exact[0] if isinstance(exact, tuple) else exact
            if torch.equal(exact, first.to(exact.dtype)):
                return result
            other = moved(first, torch.Tag.pointwise in func.tags or func in elementwise)
            return (other, *result[1:]) if isinstance(result, tuple) else other

    return Rounding()
