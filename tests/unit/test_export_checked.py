"""The exported model is compared with its source graph: right models are exported, wrong ones refused."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import Array, built, linear, run_graph, save_model, tensors_of, value
from onnx import helper

from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.binding import Binding
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.export.inference import FlatTensors, export_checked, relative

RNG = np.random.default_rng(7)
OWN = {"kind": "output", "output": "loss"}


def normal(*shape: int) -> Array:
    return RNG.normal(size=shape).astype("float32")


def parameters(graphs: GraphSet) -> HostBuffer:
    buffer = CpuDevice().allocate(graphs.index.size, np.float32)
    for name, array in tensors_of(graphs).items():
        entry = graphs.index[name]
        buffer.slice(entry.offset, entry.end).write(array)
    return buffer


def export(
    graphs: GraphSet, out: Path, arrays: Mapping[str, Array], tolerance: float | None = None, *, trial: bool = False
) -> float | None:
    batch = MicroBatch(arrays, len(next(iter(arrays.values()))))
    sessions = Sessions(CpuDevice(), 1, "fatal")
    return export_checked(graphs, parameters(graphs), sessions, out, [batch], tolerance, trial=trial)


def test_a_model_with_a_loss_of_its_own(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["y", "labels"], ["loss"]),
    ]
    inputs = [value("x", ["batch", 4]), value("labels", ["batch"], "int64")]
    outputs = [value("loss", []), value("y", ["batch", 5])]
    path = save_model(tmp_path / "m.onnx", nodes, inputs, outputs, {"w": normal(4, 5)})
    graphs = built(path, OWN, model__labels=["labels"])
    difference = export(graphs, tmp_path / "out.onnx", {"x": normal(3, 4), "labels": np.array([0, 1, 2])})
    assert difference is not None
    assert difference < 1e-6
    assert [o.name for o in onnx.load(tmp_path / "out.onnx").graph.output] == ["y"]


def test_a_scalar_output(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0),
    ]
    outputs = [value("mean", []), value("y", ["batch", 5])]
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 4])], outputs, {"w": normal(4, 5)})
    graphs = built(path, {"kind": "cross_entropy", "output": "y"})
    assert export(graphs, tmp_path / "out.onnx", {"x": normal(3, 4)}) is not None
    assert relative(np.float32(1.0), np.array(1.5)) == pytest.approx(0.2)


def test_a_parameter_without_axes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Mul", ["xw", "scale"], ["y"]),
    ]
    tensors = {"w": normal(4, 5), "scale": np.array(2.5, np.float32)}
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 4])], [value("y", ["batch", 5])], tensors)
    model = onnx.load(path)
    helper.set_model_props(model, {"ortflow.parameters": json.dumps(["w", "scale"])})
    onnx.save(model, path)
    graphs = built(path)
    assert graphs.index["scale"].tensor.shape == ()
    x = normal(3, 4)
    assert export(graphs, tmp_path / "out.onnx", {"x": x}) is not None
    (dims,) = (t.dims for t in onnx.load(tmp_path / "out.onnx").graph.initializer if t.name == "scale")
    assert list(dims) == []
    np.testing.assert_allclose(run_graph(tmp_path / "out.onnx", {"x": x})["y"], x @ tensors["w"] * 2.5, rtol=1e-5)


@pytest.mark.parametrize("turned", [False, True])
def test_normalization_behind_a_product(turned: bool, tmp_path: Path) -> None:
    """As in LeViT: ONNX Runtime fuses it to a Gemm, which does not load, or mixes up the channels."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["product"])]
    if turned:
        nodes.append(helper.make_node("Transpose", ["product"], ["rows"], perm=[0, 2, 1]))
    else:
        nodes.append(helper.make_node("Reshape", ["product", "flat"], ["rows"]))
    nodes += [
        helper.make_node("BatchNormalization", ["rows", "scale", "bias", "mean", "variance"], ["normal"]),
        helper.make_node("Reshape", ["normal", "shape"], ["y"]),
    ]
    statistics = {"mean": normal(5), "variance": 1 + normal(5) ** 2, "scale": normal(5), "bias": normal(5)}
    constants = {"flat": np.array([-1, 5]), "shape": np.array([-1, 15])}
    tensors = {"w": normal(4, 5), **statistics, **constants}
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 3, 4])], [value("y", ["batch", 15])], tensors)
    graphs, x = built(path, {"kind": "mse"}), normal(2, 3, 4)
    assert export(graphs, tmp_path / "out.onnx", {"x": x}) is not None
    product = x.astype("float64") @ tensors["w"]
    expected = (product - statistics["mean"]) / np.sqrt(statistics["variance"] + 1e-5) * statistics["scale"]
    expected += statistics["bias"]
    expected = (expected.transpose(0, 2, 1) if turned else expected).reshape(2, 15)
    np.testing.assert_allclose(run_graph(tmp_path / "out.onnx", {"x": x})["y"], expected, rtol=1e-4, atol=1e-5)


def faults_conditioned(path: Path) -> Path:
    """A convolution of large values whose small differences a normalization makes large: it is folded at export."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["conv"]),
        helper.make_node("BatchNormalization", ["conv", "scale", "bias", "mean", "variance"], ["y"]),
    ]
    w = 1 + 1e-3 * normal(6, 8, 3, 3)
    tensors = {"w": w, "scale": np.ones(6, np.float32), "bias": np.zeros(6, np.float32)}
    tensors |= {"mean": np.full(6, 72, np.float32), "variance": np.full(6, 1e-5, np.float32)}
    return save_model(path, nodes, [value("x", ["batch", 8, 9, 9])], [value("y", ["batch", 6, 7, 7])], tensors)


def test_the_tolerance_follows_the_rounding_of_the_model(tmp_path: Path) -> None:
    graphs = built(faults_conditioned(tmp_path / "m.onnx"), {"kind": "mse"})
    x = 1 + 1e-3 * normal(2, 8, 9, 9)
    difference = export(graphs, tmp_path / "out.onnx", {"x": x})
    assert difference is not None
    assert difference > 1e-4
    with pytest.raises(UserError, match=r"export.tolerance: .*0.0001"):
        export(graphs, tmp_path / "other.onnx", {"x": x}, 1e-4)
    assert not (tmp_path / "other.onnx").exists()


def test_a_wrong_model_is_refused_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, out, x = built(linear(tmp_path / "m.onnx")), tmp_path / "out.onnx", normal(3, 4)
    export(graphs, out, {"x": x})
    before = out.read_bytes()
    right = FlatTensors.__getitem__
    monkeypatch.setattr(FlatTensors, "__getitem__", lambda self, name: right(self, name) * np.float32(1.001))
    with pytest.raises(UserError, match="from the graph it was made from"):
        export(graphs, out, {"x": x})
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graphs", "m.onnx", "out.onnx"]


def test_a_trial_leaves_nothing(tmp_path: Path) -> None:
    graphs, x = built(linear(tmp_path / "m.onnx")), normal(3, 4)
    for out in ("out.onnx", "export/deep/out.onnx"):
        assert export(graphs, tmp_path / out, {"x": x}, trial=True) is not None
        assert sorted(path.name for path in tmp_path.iterdir()) == ["graphs", "m.onnx"]


def test_a_refused_model_leaves_no_folder_but_those_that_were_there(tmp_path: Path) -> None:
    graphs, x = built(linear(tmp_path / "m.onnx")), normal(3, 4)
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="from the graph it was made from"):
        export(graphs, tmp_path / "export/deep/out.onnx", {"x": x}, tolerance=-1.0)
    assert list((tmp_path / "export").iterdir()) == []


def test_an_input_without_data_is_not_compared(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Neg", ["z"], ["other"])]
    inputs, outputs = [value("x", ["batch", 4]), value("z", [2])], [value("y", ["batch", 5]), value("other", [2])]
    path = save_model(tmp_path / "m.onnx", nodes, inputs, outputs, {"w": normal(4, 5)})
    graphs = built(path, {"kind": "cross_entropy", "output": "y"})
    assert export(graphs, tmp_path / "out.onnx", {"x": normal(2, 4)}) is None
    assert (tmp_path / "out.onnx").exists()


STREAM = """
import re, sys
from pathlib import Path
import numpy as np
import onnx
from onnx import helper
from ortflow.workflow.graph.export.inference import export_inference

class Tensors(dict):
    def __getitem__(self, name):
        return np.full(self.get(name), float(name[1:]), np.float32)

def held(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

count, width = int(sys.argv[2]), int(sys.argv[3])
names = [f"w{i}" for i in range(count)]
nodes = [helper.make_node("Add", ["x" if i == 0 else f"y{i - 1}", name], [f"y{i}"]) for i, name in enumerate(names)]
ends = [helper.make_tensor_value_info(name, 1, [width]) for name in ("x", f"y{count - 1}")]
graph = helper.make_graph(nodes, "g", ends[:1], ends[1:])
folder = Path(sys.argv[1])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), folder / "infer.onnx")
shapes = dict.fromkeys(names, (width,))
np.ones(1)
before = held("VmHWM")
export_inference(folder / "infer.onnx", Tensors(shapes), folder / "out.onnx", shapes=shapes)
print(held("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_the_weights_are_written_one_by_one(tmp_path: Path) -> None:
    count, width = 12, 1 << 21
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path), str(count), str(width)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 4 * 4 * width
    x = np.ones(width, np.float32)
    total = run_graph(tmp_path / "out.onnx", {"x": x})[f"y{count - 1}"]
    np.testing.assert_array_equal(total, 1 + sum(range(count)))
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)


def test_a_binding_keeps_the_memory_that_it_is_tied_to(tmp_path: Path) -> None:
    """ONNX Runtime gets addresses: a buffer without another reference was freed, and its memory read afterwards."""
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", [4])], [value("y", [4])], {})
    device = CpuDevice()
    binding = Binding(Sessions(device, 1, "error").open(path), device)
    read, written = (device.allocate(4, np.float32) for _ in range(2))
    arrays = [weakref.ref(buffer.array) for buffer in (read, written)]
    binding.read_from("x", read, (4,))
    binding.write_to("y", written, (4,))
    del read, written
    gc.collect()
    assert all(array() is not None for array in arrays)
    del binding
    gc.collect()
    assert all(array() is None for array in arrays)
