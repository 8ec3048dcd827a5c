"""Names that exporters make up for tensors, derived from those of a module's attributes. Must not import ONNX."""

from __future__ import annotations

import re

# Names that exporters make up: `val_12`, `onnx::Add_5`, `/encoder/Constant_1_output_0`, `_lifted_tensor_constant3`;
# and those of nodes that we wrote out: `norm/Constant.1`.
_MADE_UP = re.compile(
    r"^\d+$|/Constant(\.\d+)?$|^val_\d+|^onnx::|_output_\d+$|(^|[/._])[Cc]onst(ant)?(_|\d|$)|^const_|lifted_tensor|^_?tensor_constant"
    r"|^_to_copy|^(arange|scalar_tensor|full|ones|zeros|cat|expand|unsqueeze|slice)(_default)?(_\d+)?$"
)


def is_made_up(name: str) -> bool:
    """Whether an exporter made the name up, so that it belongs to no attribute of a module."""
    return _MADE_UP.search(name) is not None
