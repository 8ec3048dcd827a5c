"""Records in an exported file what each entry of the module's `state_dict` became.

Called by `export`. Entries are matched by identity: an entry of a tied tensor is the tensor under its first name, and
an entry that no output depends on keeps its value in the record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from ortflow.workflow.weights.table import LARGEST_VALUES, PROPERTY, Entry, to_json

if TYPE_CHECKING:
    import torch

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip
"""PyTorch's element types, and safetensors'."""


def write_state_dict(model: Any, module: torch.nn.Module, learned: Collection[str]) -> str | None:
    """Write the table of PyTorch's names into the metadata; returns a warning if it is not complete.

    `learned`: initializers that a run may change.
    """
    present = set(model.graph.initializers)
    entries = list(_entries(module, present.intersection(learned), present))
    absent = [entry.name for entry in entries if entry.tensor is None and entry.value is None]
    model.metadata_props[PROPERTY] = to_json(entries)
    if not absent:
        return None
    rest = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return f"not in the ONNX model, so a state_dict of its weights will lack it: {', '.join(absent[:3])}{rest}"


def _entries(module: torch.nn.Module, learned: Collection[str], present: Collection[str]) -> Iterator[Entry]:
    import torch

    tensors = (*module.named_parameters(), *module.named_buffers())
    first = {id(tensor): name for name, tensor in reversed(tensors)}
    room = LARGEST_VALUES
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            # get_extra_state of a module may return anything.
            yield Entry(name, "U8", (0,))
            continue
        dtype, shape = DTYPES.get(str(tensor.dtype).removeprefix("torch."), ""), tuple(tensor.shape)
        stored = first.get(id(tensor))
        if stored in learned:
            yield Entry(name, dtype, shape, stored)
            continue
        size = tensor.numel() * tensor.element_size()
        # A hook of state_dict may make an entry of parameters, which change.
        if stored is None or not dtype or size > room or tensor.device.type == "meta":
            yield Entry(name, dtype or "U8", shape, is_constant=stored in present)
            continue
        room -= size
        plain = tensor.detach().cpu().contiguous()
        # numpy has no bfloat16, and PyTorch has unsigned bits only since 2.3.
        value = plain.view(torch.int16).numpy().view("u2") if dtype == "BF16" else plain.numpy()
        yield Entry(name, dtype, shape, value=value, is_constant=stored in present)
