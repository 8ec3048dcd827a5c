"""Exports of weights that are read one at a time: the same file, compared without a second copy of it in memory."""

from __future__ import annotations

import errno
import subprocess
import sys
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from graph_build_models import Array, built, linear, save_model, tensors_of, value
from onnx import helper
from real_ranks import all_good

from ortflow.workflow.device.cpu import CpuDevice, HostBuffer
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.export import inference, model_file
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.system.disk_space import OutOfDisk
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.export import mapped_export
from ortflow.workflow.trainer.export.inference import export_checked
from ortflow.workflow.trainer.export.mapped_export import export_mapped

RNG = np.random.default_rng(7)
X = RNG.normal(size=(3, 4)).astype("float32")


class OneByOne(Mapping[str, Array]):
    """Tensors of which only one is alive at a time."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors, self._before = tensors, lambda: None

    def __getitem__(self, name: str) -> Array:
        assert self._before() is None, "the tensor before is still held"
        made = self._tensors[name].copy()
        self._before = weakref.ref(made)  # type: ignore[assignment]
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def export(
    graphs: GraphSet, out: Path, x: Array = X, tolerance: float | None = None, *, trial: bool = False
) -> float | None:
    sessions, batch = Sessions(CpuDevice(), 1, "fatal"), MicroBatch({"x": x}, len(x))
    return export_mapped(graphs, OneByOne(tensors_of(graphs)), sessions, out, [batch], tolerance, trial=trial)


def checked(graphs: GraphSet, out: Path, x: Array = X) -> float | None:
    buffer = HostBuffer(np.zeros(graphs.index.size, np.float32))
    for name, array in tensors_of(graphs).items():
        buffer.slice(graphs.index[name].offset, graphs.index[name].end).write(array)
    return export_checked(graphs, buffer, Sessions(CpuDevice(), 1, "fatal"), out, [MicroBatch({"x": x}, len(x))], None)


@pytest.mark.parametrize("limit", [inference.EXTERNAL_BYTES, 1])
def test_the_files_are_those_of_an_export_from_memory(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "EXTERNAL_BYTES", limit)
    graphs = built(linear(tmp_path / "m.onnx"))
    difference, before = export(graphs, tmp_path / "mapped/out.onnx"), checked(graphs, tmp_path / "whole/out.onnx")
    assert difference is not None
    assert before is not None
    assert difference < 1e-6
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("mapped", "whole")
    ]  # fmt: skip
    assert files[0] == files[1]
    assert len(files[0]) == (1 if limit > 1 else 2)
    export(graphs, tmp_path / "none/out.onnx", trial=True)
    assert not (tmp_path / "none").exists()


def test_the_tolerance_follows_the_rounding_of_the_model(tmp_path: Path) -> None:
    """The difference is above the fixed tolerance, and below what moved weights make."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Mul", ["h", "large"], ["y"])]
    tensors = {"w": RNG.normal(size=(2048, 5)).astype("float32"), "large": np.full(5, 1e6, np.float32)}
    path = save_model(tmp_path / "m.onnx", nodes, [value("x", ["batch", 2048])], [value("y", ["batch", 5])], tensors)
    graphs, x = built(path, {"kind": "mse"}), RNG.normal(size=(3, 2048)).astype("float32")
    moved: list[Path] = []
    whole = mapped_export.MappedTensors.moved

    def noted(self: mapped_export.MappedTensors, file: Path) -> mapped_export.MappedTensors:
        moved.append(file)
        return whole(self, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_export.MappedTensors, "moved", noted)
        patch.setattr("ortflow.workflow.trainer.export.inference.TOLERANCE", -1.0)
        difference = export(graphs, tmp_path / "out.onnx", x)
    assert difference is not None
    assert len(moved) == 1
    with pytest.raises(UserError, match=r"export.tolerance: .*more than -1"):
        export(graphs, tmp_path / "other.onnx", x, -1.0)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graphs", "m.onnx", "out.onnx"]


def test_a_file_with_other_bits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, out = built(linear(tmp_path / "m.onnx")), tmp_path / "out.onnx"
    export(graphs, out)
    before, whole = out.read_bytes(), model_file.write_array
    monkeypatch.setattr(model_file, "write_array", lambda file, array: whole(file, array * np.float32(1 + 1e-7)))
    with pytest.raises(OrtflowError, match=r"out\.onnx .*'\w+' as it was written"):
        export(graphs, out)
    assert out.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graphs", "m.onnx", "out.onnx"]


@pytest.mark.parametrize("what", ["write_bytes", "moved"])
def test_a_disk_that_fills_up_during_the_comparison_leaves_nothing(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    graphs = built(linear(tmp_path / "m.onnx"))
    monkeypatch.setattr(*((Path, what) if what == "write_bytes" else (mapped_export.MappedTensors, what)), full)
    monkeypatch.setattr("ortflow.workflow.trainer.export.inference.TOLERANCE", -1.0)
    with pytest.raises(OutOfDisk):
        export(graphs, tmp_path / "export" / "out.onnx")
    assert not (tmp_path / "export").exists()


def test_the_files_of_a_killed_comparison_are_removed(tmp_path: Path) -> None:
    graphs = built(linear(tmp_path / "m.onnx"))
    left = tmp_path / "export" / ".out.onnx.abcdefgh"
    left.mkdir(parents=True)
    for name in ("out.onnx", *inference.SCRATCH):
        (left / name).write_bytes(b"x")
    export(graphs, tmp_path / "export" / "out.onnx")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["out.onnx"]


STREAM = """
import sys, threading, time
from pathlib import Path
import numpy as np, onnx
from onnx import helper
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.sessions.session import Sessions
from ortflow.workflow.trainer import MicroBatch
from ortflow.workflow.trainer.export.mapped_export import export_mapped

class Tensors(dict):
    def __getitem__(self, name):
        return np.full(self.get(name), 1 / 1024, np.float32)

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

def export(folder, count, width=1024):
    names = [f"w{i}" for i in range(count)]
    # Every other weight is transposed, as in many exports: ONNX Runtime would compute that in advance.
    nodes, given = [], "x"
    for i, name in enumerate(names):
        if i % 2:
            nodes.append(helper.make_node("Transpose", [name], [f"t{i}"], perm=[1, 0]))
        nodes.append(helper.make_node("MatMul", [given, f"t{i}" if i % 2 else name], [f"y{i}"]))
        given = f"y{i}"
    ends = [helper.make_tensor_value_info(name, 1, ["batch", width]) for name in ("x", given)]
    model = helper.make_model(helper.make_graph(nodes, "g", ends[:1], ends[1:]), ir_version=8,
                              opset_imports=[helper.make_opsetid("", 18)])
    folder.mkdir()
    onnx.save(model, folder / "infer.onnx")
    index = FlatIndex.place(Tensor(name, (width, width), "decay") for name in names)
    graphs, batch = GraphSet(folder, index, ()), MicroBatch({"x": np.ones((2, width), np.float32)}, 2)
    sessions, shapes = Sessions(CpuDevice(), 1, "error"), {name: (width, width) for name in names}
    assert export_mapped(graphs, Tensors(shapes), sessions, folder / "out.onnx", [batch], None) < 1e-5

export(Path(sys.argv[1]) / "small", 2)  # loads what is loaded once
before, highest, ended = held(), [0], threading.Event()

def watch():
    while not ended.wait(0.001):
        highest[0] = max(highest[0], held())

thread = threading.Thread(target=watch, daemon=True)
thread.start()
export(Path(sys.argv[1]) / "large", 24)
ended.set()
thread.join()
print(highest[0] - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's memory from /proc")
def test_neither_the_file_nor_the_comparison_holds_the_weights(tmp_path: Path) -> None:
    """In memory that the system cannot take back: 24 weights of 4 MB, of which three at most are there."""
    done = subprocess.run(
        [sys.executable, "-c", STREAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16e6


LEND = """
import numpy as np
from ortflow.workflow.comm.mpi import MpiCommunicator
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.layout import FlatIndex, Tensor, share
from ortflow.workflow.trainer.export import lent_tensors

world = MpiCommunicator()
lent_tensors.PIECE = 7
shapes = [(5, 30), (), (0, 3), (64,), (700,)]
index = FlatIndex.place([Tensor(f"t{n}", shape, "decay") for n, shape in enumerate(shapes)])
whole = np.arange(index.size, dtype=np.float32)
first, last = share(index.size, world.rank, world.world_size)
lent = lent_tensors.LentTensors(
    world, index, lambda rank: [share(index.size, rank, world.world_size)],
    Shard(HostBuffer(whole[first:last].copy()), first, index.size),
)
for names in (["t4", "t0", "t1", "t2", "t3", "t0"], [], ["t3"]):
    if world.rank:
        lent.lend()
        continue
    for name in names:
        entry = index[name]
        expected = whole[entry.offset : entry.end].reshape(entry.tensor.shape)
        assert lent[name].shape == expected.shape
        assert np.array_equal(lent[name], expected), name
    lent.end()
print("good")
world.close()
"""


@pytest.mark.rotates
@pytest.mark.parametrize("ranks", [2, 4])
def test_rank_0_reads_what_others_lend(ranks: int) -> None:
    all_good(ranks, LEND)
