"""The order of a product of several tensors by `torch.einsum`, found from the example's sizes.

Called by `ortflow.exporter.trace`. Where the package opt_einsum is installed (JAX requires it), PyTorch 2.15 lets it
choose the order of three and more operands. It converts each size to an int, which fixes the batch while a module is
traced: the export is refused, on machines with that package only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_UNKNOWN = 4096
"""For a size that depends on values."""


@contextlib.contextmanager
def contraction_order() -> Iterator[None]:
    """Let opt_einsum read the example's sizes, which fixes none, inside the block."""
    import torch.backends.opt_einsum as backend

    package = backend.get_opt_einsum()
    if package is None:
        yield
        return
    before = package.contract_path
    package.contract_path = _by_example(before)
    try:
        yield
    finally:
        package.contract_path = before


def _by_example(original: Callable[..., Any]) -> Callable[..., Any]:
    def contract_path(equation: Any, *operands: Any, **options: Any) -> Any:
        import torch

        if not all(isinstance(operand, torch.Tensor) for operand in operands):
            return original(equation, *operands, **options)
        sizes = [tuple(_size(size) for size in operand.shape) for operand in operands]
        return original(equation, *sizes, shapes=True, **options)

    return contract_path


def _size(size: Any) -> int:
    """An axis' size in the example; reading it leaves the axis free."""
    if isinstance(size, int):
        return size
    hint = size.node.hint if size.node.has_hint() else None
    return _UNKNOWN if hint is None else int(hint)
