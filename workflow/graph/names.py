"""Distinguishes names that exporters and ortflow generate from names of a module's attributes. Must not import ONNX."""

from __future__ import annotations

import re

# Generated names: `val_12`, `onnx::Add_5`, `/encoder/Constant_1_output_0`, `_lifted_tensor_constant3`; also those of
# decomposed nodes: `norm/Constant.1`, and those of TensorFlow's fills: `lstm/zeros:0`.
_MADE_UP = re.compile(
    r"^\d+$|/Constant(\.\d+)?$|^val_\d+|^onnx::|_output_\d+$|(^|[/._])[Cc]onst(ant)?(_|\d|$)|^const_|lifted_tensor|^_?tensor_constant"
    r"|^_to_copy|^((new_)?(full|ones|zeros)(_like)?|arange|scalar_tensor|cat|expand|unsqueeze|slice)(_default)?(_\d+)?$"
    r"|(^|/)([Ff]ill|ones|zeros)(_like)?(__?\d+)?(:\d+)?$"
)

OWN = "ortflow.constant"
"""How the names of constants end that ortflow writes itself, before a number."""
_OWN = re.compile(rf"(^|/){re.escape(OWN)}(\.\d+)?$")


def is_own(name: str) -> bool:
    """Whether ortflow has written the constant of this name."""
    return _OWN.search(name) is not None


def is_made_up(name: str) -> bool:
    """Whether an exporter or ortflow generated the name, so that no attribute of a module has it."""
    return _MADE_UP.search(name) is not None or is_own(name)
