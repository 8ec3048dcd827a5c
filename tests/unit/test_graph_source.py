"""Weights in files of their own are mapped, not copied, if the graphs use them as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import built, linear, run_file
from onnx import numpy_helper

from ortflow.workflow.graph.intake.source import read_source


def outside(model: Path, path: Path) -> Path:
    """The same model with its weights in a file beside it."""
    onnx.save(onnx.load(model), path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    return path


def test_weights_in_a_file_of_their_own_are_mapped(tmp_path: Path) -> None:
    inside = linear(tmp_path / "m.onnx")
    stored = outside(inside, tmp_path / "stored.onnx")
    source, plain = (read_source(run_file(path).onnx_model) for path in (stored, inside))
    assert source.tensors.keys() == plain.tensors.keys()
    for name, array in source.tensors.items():
        assert isinstance(array, np.memmap), name
        assert not isinstance(plain.tensors[name], np.memmap)
        np.testing.assert_array_equal(array, plain.tensors[name])


def test_the_graphs_are_those_of_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    inside = linear(tmp_path / "one" / "m.onnx")
    files = []
    for path in (inside, outside(inside, tmp_path / "two" / "m.onnx")):
        graphs = built(path)
        files.append({each.name: each.read_bytes() for each in graphs.root.iterdir() if each.is_file()})
    assert files[0] == files[1]
    assert "initial.safetensors" in files[0]


def test_weights_that_are_converted_are_not_mapped(tmp_path: Path) -> None:
    model = onnx.load(linear(tmp_path / "m.onnx"))
    for tensor in model.graph.initializer:
        half = numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    onnx.save(model, tmp_path / "double.onnx")
    source = read_source(run_file(outside(tmp_path / "double.onnx", tmp_path / "stored.onnx")).onnx_model)
    assert source.tensors
    for name, array in source.tensors.items():
        assert array.dtype == np.float32
        assert not isinstance(array, np.memmap), name


READ = """
import sys, threading
from pathlib import Path
import numpy as np, onnx
from onnx import helper, numpy_helper
sys.path.insert(0, SUPPORT)
from graph_build_models import run_file
from ortflow.workflow.graph.intake.source import read_source

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def model(path, count, width=1024):
    nodes = [helper.make_node("MatMul", [f"y{i}" if i else "x", f"w{i}"], [f"y{i + 1}"]) for i in range(count)]
    ends = [helper.make_tensor_value_info(name, 1, ["batch", width]) for name in ("x", f"y{count}")]
    weights = [numpy_helper.from_array(np.full((width, width), i, np.float32), f"w{i}") for i in range(count)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(made, path, save_as_external_data=True, location=path.name + ".data")

folder = Path(sys.argv[1])
if sys.argv[2] == "write":
    model(folder / "small.onnx", 1)
    model(folder / "large.onnx", 24)
    raise SystemExit
read_source(run_file(folder / "small.onnx", {"kind": "mse"}).onnx_model)  # loads what is loaded once
before, seen, ended = held(), [], threading.Event()

def watch():
    while not ended.wait(0.001):
        seen.append(held())

thread = threading.Thread(target=watch, daemon=True)
thread.start()
source = read_source(run_file(folder / "large.onnx", {"kind": "mse"}).onnx_model)
ended.set()
thread.join()
print(max(*seen, held()) - before)  # the thread may not have had a turn while all is there
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc")
def test_weights_are_in_memory_once_while_they_are_read(tmp_path: Path) -> None:
    program = READ.replace("SUPPORT", repr(str(Path(__file__).parent.parent / "support")))
    for what in ("write", "read"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path), what],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    weights = 24 * 4 * 1024 * 1024
    assert 0.9 * weights < int(done.stdout) < 1.3 * weights
