"""The layout of a rank's file, read by the safetensors library."""

from __future__ import annotations

import pytest
import safetensors

from ortflow.workflow.checkpoint.tensors import ITEM_SIZES, PAGE, BufferSpec, file_layout


@pytest.mark.parametrize("dtype", ITEM_SIZES)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
def test_safetensors_reads_every_type(dtype: str, rank: int, world_size: int) -> None:
    buffers = {"a": BufferSpec("U8", 5), "b": BufferSpec(dtype, 1000), "c": BufferSpec("F32", 7)}
    layout = file_layout(buffers, rank, world_size)
    assert len(layout.header) % PAGE == 0
    data = layout.header + bytes(layout.size - len(layout.header))
    tensors = dict(safetensors.deserialize(data))
    assert {name: tensor["dtype"] for name, tensor in tensors.items()} == {n: s.dtype for n, s in buffers.items()}
    sizes = [ITEM_SIZES[buffers[span.buffer].dtype] for span in layout.spans]
    assert sizes == sorted(sizes, reverse=True), "wide types first"
    assert all(span.offset % size == 0 for span, size in zip(layout.spans, sizes, strict=True))
    assert {span.buffer: span.stop - span.start for span in layout.spans} == {
        name: tensor["shape"][0] for name, tensor in tensors.items()
    }
