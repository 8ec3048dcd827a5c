"""Distinguishes names that exporters generate from names of a module's attributes. Must not import ONNX."""

from __future__ import annotations

import re

# Generated names: `val_12`, `onnx::Add_5`, `/encoder/Constant_1_output_0`, `_lifted_tensor_constant3`; also those of
# decomposed nodes: `norm/Constant.1`, and those of TensorFlow's fills: `lstm/zeros:0`.
_MADE_UP = re.compile(
    r"^\d+$|/Constant(\.\d+)?$|^val_\d+|^onnx::|_output_\d+$|(^|[/._])[Cc]onst(ant)?(_|\d|$)|^const_|lifted_tensor|^_?tensor_constant"
    r"|^_to_copy|^((new_)?(full|ones|zeros)(_like)?|arange|scalar_tensor|cat|expand|unsqueeze|slice)(_default)?(_\d+)?$"
    r"|(^|/)([Ff]ill|ones|zeros)(_like)?(__?\d+)?(:\d+)?$"
)


def is_made_up(name: str) -> bool:
    """Whether an exporter generated the name, so that no attribute of a module has it."""
    return _MADE_UP.search(name) is not None
