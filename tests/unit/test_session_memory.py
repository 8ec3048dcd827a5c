"""A session holds a value from the node that computes it to its last reader."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from graph_build_models import save_model, value
from onnx import helper

from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

WIDTH = 1 << 22
PROGRAM = """
import re, sys
from pathlib import Path
import numpy as np
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions

def held(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

device = CpuDevice()
binding = Binding(Sessions(device, 1, "error").open(Path(sys.argv[1])), device)
binding.feed("x", np.ones(int(sys.argv[2]), np.float32))
before = held("VmRSS")
binding.fetch([*binding.outputs])
print(held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_dead_value_takes_no_memory(tmp_path: Path) -> None:
    # Large values of four shapes one after the other, twice: the memory of one is enough.
    nodes, total = [], "zero"
    for place, rows in enumerate((1, 2, 4, 8) * 2):
        nodes += [
            helper.make_node("Reshape", ["x", f"shape_{rows}"], [f"x_{place}"]),
            helper.make_node("Add", [f"x_{place}", total], [f"large_{place}"]),
            helper.make_node("ReduceSum", [f"large_{place}"], [f"sum_{place}"], keepdims=0),
        ]
        total = f"sum_{place}"
    tensors = {f"shape_{rows}": np.array([rows, -1]) for rows in (1, 2, 4, 8)}
    tensors["zero"] = np.array(0, np.float32)
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", [WIDTH])], [value(total, [])], tensors)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), str(WIDTH)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 1.5 * 4 * WIDTH


def test_what_is_bound_lives_as_long_as_the_binding(tmp_path: Path) -> None:
    """ONNX Runtime is given addresses alone: freed memory would be read, or be unmapped."""
    node = helper.make_node("Neg", ["x"], ["y"])
    path = save_model(tmp_path / "m.onnx", [node], [value("x", [WIDTH])], [value("y", [WIDTH])], {})
    device = CpuDevice()
    binding = Binding(Sessions(device, 1, "error").open(path), device)
    x, y = HostBuffer(np.ones(WIDTH, np.float32)), HostBuffer(np.zeros(WIDTH, np.float32))
    kept = [weakref.ref(buffer.array) for buffer in (x, y)]
    binding.read_from("x", x, (WIDTH,))
    binding.write_to("y", y, (WIDTH,))
    del x, y
    assert all(array() is not None for array in kept)
    binding.run()
    result = kept[1]()
    assert result is not None
    assert result.max() == -1.0
