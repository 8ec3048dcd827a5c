"""Predicted memory: liveness, the arena, shapes, and the measured memory of a rank on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import run_file
from in_process import command_here
from kernels import needs_kernels
from messages import says
from onnx import TensorProto, helper
from run_files import spec_of
from small_network import save_model
from tiny_runs import Tiny

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.assembly.saving import batch_shapes
from ortflow.workflow.assembly.updates import write_forms
from ortflow.workflow.data.inputs import BatchInput
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.graph.memory.arena import UNIT, Arena
from ortflow.workflow.graph.memory.concrete import concrete
from ortflow.workflow.graph.memory.peak_memory import length, peak_of, sizes_of
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.planning.forecast import activations, forecast
from ortflow.workflow.planning.layout import Layout
from ortflow.workflow.planning.rates import Link, Rates
from ortflow.workflow.planning.receive_buffers import Exchange, buffers_of, exchange_of
from ortflow.workflow.planning.survey import survey
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer import overlap, peer_sums

pytestmark = pytest.mark.rotates("memory")

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


ROWS = 1 << 16
CHAIN = """
import re, sys
from pathlib import Path
import numpy as np
from ortflow.workflow.device.cpu import CpuDevice
from ortflow.workflow.sessions.session import Sessions

def memory(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

session = Sessions(CpuDevice(), 1, "error").open(sys.stdin.buffer.read())
x = np.ones((int(sys.argv[1]), 256), np.float32)
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
session.run(None, {"x": x})
print(memory("VmHWM") - before)
"""


def graph_of(*nodes: onnx.NodeProto, outputs: tuple[str, ...] = ("y",)) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 256])]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([*nodes], "g", inputs, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def planned(model: onnx.ModelProto, batch: int = 4) -> Any:
    types = concrete(model, {"x": (batch, 256)})
    bound = {value.name for value in (*model.graph.input, *model.graph.output)}
    return peak_of(model.graph, sizes_of(types), bound)


def test_values_live_from_their_maker_to_their_last_reader() -> None:
    """a and b are dead when e is computed; d is written over c; the output has its own memory."""
    node = helper.make_node
    peak = planned(graph_of(
        node("Softmax", ["x"], ["a"]), node("Softmax", ["x"], ["b"]), node("Concat", ["a", "b"], ["c"], axis=1),
        node("Relu", ["c"], ["d"]), node("Concat", ["d", "d"], ["e"], axis=1, name="last"),
        node("ReduceSum", ["e"], ["y"]),
    ))  # fmt: skip
    row = 4 * 256 * 4
    assert peak.size == 6 * row
    assert peak.values == (("e", 4 * row), ("c", 2 * row))
    assert (peak.node, peak.unknown) == ("last", ())


def test_views_keep_their_source_alive() -> None:
    node = helper.make_node
    flat = helper.make_tensor("flat", TensorProto.INT64, [1], [-1])
    model = graph_of(
        node("Softmax", ["x"], ["a"]), node("Reshape", ["a", "flat"], ["b"]), node("Softmax", ["x"], ["c"]),
        node("Reshape", ["c", "flat"], ["d"]), node("Add", ["b", "d"], ["e"]), node("Shape", ["a"], ["s"]),
        node("Softmax", ["e"], ["y"]), outputs=("y", "s"),
    )  # fmt: skip
    model.graph.initializer.append(flat)
    peak = planned(model)
    assert [name for name, _ in peak.values] == ["a", "c", "e"]
    assert peak.size == 3 * 4 * 256 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")
@pytest.mark.parametrize("operator", ["Tanh", "Clip", "Exp", "Add", "Mul"])
def test_operators_are_computed_in_place_where_the_runtime_does(operator: str) -> None:
    """Measured: the chain takes 64 MB in place, twice as much otherwise."""
    node, pairs = helper.make_node, operator in ("Add", "Mul")
    model = graph_of(
        node("Softmax", ["x"], ["a"]), node(operator, ["a", "a"] if pairs else ["a"], ["b"]),
        node("ReduceSum", ["b"], ["y"], keepdims=0),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CHAIN, str(ROWS)], input=model.SerializeToString(), capture_output=True, check=True
    )
    predicted, measured = planned(model, ROWS).held, int(done.stdout)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_axes_of_computed_length() -> None:
    axes = {"batch": 8, "sequence": 5}
    assert length("batch*sequence", axes) == 40
    assert length("floor(sequence/2 - 1/2) + 1", axes) == 3
    for text in ("other", "batch*other", "__import__('os')", "batch**9", "", "-batch"):
        assert length(text, axes) is None, text
    # A number that no floating-point number holds, and more signs than the parser takes.
    for text in (f"0x{'f' * 400}", f"0x{'f' * 400}/2", "-" * 50_000 + "1"):
        assert length(text, axes) is None, text[:9]


def test_the_arena_splits_joins_and_grows() -> None:
    arena = Arena()
    held = [arena.take(size) for size in (1000, 5000, 1000)]
    assert arena.reserved == 1024 + 5120 + 1024
    arena.give(held[1])
    assert arena.take(2 * UNIT) == held[1], "the best fit is split"
    rest = arena.take(5120 - 2 * UNIT)
    assert (rest, arena.reserved) == (held[1] + 2 * UNIT, 1024 + 5120 + 1024)
    arena.give(rest)
    arena.give(held[1])
    assert arena.take(5120) == held[1], "its halves are one piece again"
    arena.give(held[0])
    arena.give(held[2])
    arena.take(2048)
    assert arena.reserved == 1024 + 5120 + 1024 + 2048, "two regions are never one piece"


def gpt(folder: Path) -> Path:
    sizes = {"layers": 2, "width": 256, "heads": 8, "context": 256, "vocabulary": 3000}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    program = ROOT / "examples/gpt/model.py"
    subprocess.run([sys.executable, program, "--output", folder / "m.onnx", *words], check=True, capture_output=True)
    return folder / "m.onnx"


def images(folder: Path) -> Path:
    program = ROOT / "examples/digits/model.py"
    subprocess.run([sys.executable, program, "--output", folder / "m.onnx"], check=True, capture_output=True)
    return folder / "m.onnx"


SHAPES = {
    gpt: {"tokens": (16, 256), "labels": (16, 256)},
    images: {"image": (256, 1, 32, 32), "labels": (256,)},
}


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")
@pytest.mark.parametrize("model", [gpt, images])
def test_what_is_then_measured(tmp_path: Path, model: Any) -> None:
    """Within 10%, on a graph of a transformer and one of convolutions."""
    spec = run_file(model(tmp_path))
    graphs = build_graphs(spec, tmp_path / "graphs", 256)
    peak = activations(graphs, spec, SHAPES[model])
    assert peak.unknown == ()
    program = [sys.executable, SUPPORT / "measured_run.py", tmp_path / "graphs", "auto", json.dumps(SHAPES[model])]
    measured = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    print(f"{model.__name__}: predicted {peak.held:,}, measured {measured:,}: {peak.held / measured:.3f}")
    assert measured > 100e6, "large enough to be seen"
    assert 0.9 <= peak.held / measured <= 1.1


@pytest.mark.parametrize("model", [gpt, images])
def test_shapes_are_those_that_the_runtime_has(tmp_path: Path, model: Any) -> None:
    """Every value of the training graph, for two rows, as an output."""
    graphs = build_graphs(run_file(model(tmp_path)), tmp_path / "graphs", 256)
    small = {name: (2, *shape[1:]) for name, shape in SHAPES[model].items()}
    whole = onnx.load(graphs.train)
    types = concrete(whole, small)
    made = [name for node in whole.graph.node for name in node.output if name]
    assert [name for name in made if name not in types] == []
    there = {value.name for value in whole.graph.output}
    whole.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in made if name not in there)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in session.get_inputs():
        shape = small.get(value.name, [size if isinstance(size, int) else 1 for size in value.shape])
        feeds[value.name] = np.zeros(shape, np.float32 if value.type == "tensor(float)" else np.int64)
    names = [value.name for value in session.get_outputs()]
    for name, array in zip(names, session.run(names, feeds), strict=True):
        assert types[name] == (helper.np_dtype_to_tensor_dtype(array.dtype), array.shape), name


def test_the_graph_of_a_gpu_is_followed_too(tmp_path: Path) -> None:
    """It contains fused kernels, which onnx does not know."""
    spec = run_file(gpt(tmp_path)).model_copy(deep=True)
    resources = spec.resources.model_copy(update={"gpus_per_rank": 1})
    graphs = build_graphs(spec, tmp_path / "graphs", 256)
    plain = activations(graphs, spec.model_copy(update={"resources": resources}), SHAPES[gpt])
    (tmp_path / "graphs/optimizer.onnx").write_bytes(graphs.train.read_bytes())
    write_forms(graphs)
    fused = activations(graphs, spec.model_copy(update={"resources": resources}), SHAPES[gpt])
    assert fused.unknown == ()
    assert fused.size < plain.size


def gpt_on_a_gpu(folder: Path, rows: int, **model: Any) -> TrainerRunSpec:
    """A run with a micro-batch of these rows; `model` adds keys to the run file's section."""
    path = gpt(folder)
    tokens = np.random.default_rng(0).integers(0, 3000, (rows, 257))
    write_set(folder / "train.arrow", [record_batch({"tokens": tokens})])
    return spec_of(
        model={"path": str(path), "loss": {"kind": "cross_entropy"}, **model},
        data={
            "train": {
                "path": str(folder / "train.arrow"),
                "columns": {"tokens": "tokens[:-1]", "labels": "tokens[1:]"},
            },
            "micro_batch": rows,
        },
        resources={"gpus_per_rank": 1},
        export={"enabled": False},
    )


def test_half_precision_takes_half(tmp_path: Path) -> None:
    """Every value of the graph in half precision is known, and most take half the memory of fp32."""
    spec = gpt_on_a_gpu(tmp_path, 16)
    whole = forecast(spec)
    half = forecast(spec.model_copy(update={"train": spec.train.model_copy(update={"precision": "bf16"})}))
    assert (whole.device, whole.peak.unknown, half.peak.unknown) == ("cuda", (), ())
    assert 0.25 * whole.peak.size < half.peak.size < 0.65 * whole.peak.size
    assert whole.parts["parameters"] == half.parts["parameters"], "master weights are in fp32"
    assert whole.largest == "activations"
    sharded = forecast(spec.model_copy(update=of_zero_3(spec, accumulation=1)))
    accumulated = forecast(spec.model_copy(update=of_zero_3(spec, accumulation=2)))
    assert sharded.peak.unknown == ()
    for part in ("parameters", "gradients"):
        assert sharded.parts[part] == pytest.approx(half.parts[part] / 2, rel=1e-3)
    # Layers arrive among the values of the graph; memory for further gradients is a layer's.
    assert sharded.parts["messages"] == 0 < accumulated.parts["messages"] < half.parts["parameters"]
    assert "of a layer's gradients" in accumulated.formulas["messages"]


def of_zero_3(spec: TrainerRunSpec, accumulation: int) -> dict[str, Any]:
    """What changes on two ranks in bf16."""
    train = spec.train.model_copy(update={"precision": "bf16", "gradient_accumulation": accumulation})
    resources = spec.resources.model_copy(update={"ranks_per_node": 2})
    data = spec.data.model_copy(update={"micro_batch": 8 // accumulation})
    return {
        "train": train,
        "resources": resources,
        "data": data,
        "parallel": spec.parallel.model_copy(update={"zero": 3}),
    }


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports resident memory")
def test_recomputed_layers_take_what_is_predicted(tmp_path: Path) -> None:
    """Both sides within 10%; the layers are a part of the memory that must be seen to go."""
    path = gpt(tmp_path)
    tokens = np.random.default_rng(0).integers(0, 3000, (16, 257))
    write_set(tmp_path / "train.arrow", [record_batch({"tokens": tokens})])
    columns = {"tokens": "tokens[:-1]", "labels": "tokens[1:]"}
    spec = spec_of(
        model={"path": str(path), "loss": {"kind": "cross_entropy"}, "recompute": "layers"},
        data={"train": {"path": str(tmp_path / "train.arrow"), "columns": columns}, "micro_batch": 16},
        export={"enabled": False},
    )
    found = forecast(spec)
    assert found.saving is not None
    predicted = {"layers": found.parts["activations"], "kept": found.saving.activations}
    measured = {}
    for name, layers in (("layers", "layers"), ("kept", [])):
        section = spec.onnx_model.model_copy(update={"recompute": layers})
        graphs = build_graphs(spec.model_copy(update={"model": section}), tmp_path / name, 256)
        noted = [line for line in graphs.notes if line.startswith("model.recompute, predicted: ")]
        if layers:
            sizes = [f"{count / 1e6:.1f} MB" for count in (predicted["layers"], predicted["kept"])]
            more = f"{found.saving.operations - 1:.0%} more operations"
            assert says(noted[0], f"model.recompute, predicted: activations {sizes[0]} … {sizes[1]} … {more} …"), noted
        assert len(noted) == bool(layers)
        program = [sys.executable, SUPPORT / "measured_run.py", tmp_path / name, "auto", json.dumps(SHAPES[gpt])]
        measured[name] = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    print(predicted, measured)
    for name, held in predicted.items():
        assert 0.9 <= held / measured[name] <= 1.1, (predicted, measured)
    assert measured["layers"] < 0.9 * measured["kept"]
    assert 1.1 < found.saving.operations < 4 / 3, "at most another forward pass"
    shown = found.to_json()["without_recompute"]
    assert shown == {"activations": predicted["kept"], "operations": found.saving.operations}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_log_and_the_plan_predict_the_same_saving_on_gpus(precision: str, tmp_path: Path) -> None:
    spec = gpt_on_a_gpu(tmp_path, 4, recompute="layers")
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"precision": precision})})
    found = forecast(spec)
    assert found.saving is not None
    notes = build_graphs(spec, tmp_path / "graphs", 256).notes
    (line,) = (line for line in notes if line.startswith("model.recompute, predicted: "))
    assert says(
        line,
        f"… activations {found.parts['activations'] / 1e6:.1f} MB … {found.saving.activations / 1e6:.1f} MB … "
        f"{found.saving.operations - 1:.0%} more operations …",
    ), (line, found.saving)


def test_nothing_is_predicted_of_samples_that_vary() -> None:
    tokens, image = BatchInput("tokens", "int64", (None, None)), BatchInput("image", "float32", (None, 3, 8, 8))
    assert batch_shapes([tokens, image], 2, 16, {}) == {"tokens": (2, 16), "image": (2, 3, 8, 8)}
    assert batch_shapes([tokens], 2, 16, {"tokens": 12}) == {"tokens": (2, 12)}
    assert batch_shapes([tokens], 2, 0, {}) is None
    assert batch_shapes([BatchInput("x", "float32", (None, None, None))], 2, 16, {}) is None


def test_the_command(tmp_path: Path) -> None:
    save_model(tmp_path / "unused.onnx")
    tiny = Tiny.make(tmp_path)

    def inspected(*words: str) -> subprocess.CompletedProcess[str]:
        return command_here("inspect", *words, folder=tmp_path)

    done = inspected("--plan", "run.yaml")
    assert done.returncode == 0, done.stderr
    assert "memory of a rank on the CPU, predicted" in done.stdout
    assert "the largest part: " in done.stdout
    reported = json.loads(inspected("--json", "--plan", "run.yaml", "data.micro_batch=2").stdout)
    assert (reported["device"], reported["micro_batch"], reported["unknown"]) == ("cpu", 2, [])
    assert reported["total"] == sum(reported["parts"].values())
    ranks = ("resources.ranks_per_node=2", "train.gradient_accumulation=2")
    plain, first, second, third = (
        json.loads(inspected("--json", "--plan", "run.yaml", f"parallel.zero={stage}", *ranks).stdout)
        for stage in range(4)
    )
    assert first["formulas"]["moments"] == "2 x 4 B x 320 / 2 rank(s)"
    assert first["parts"]["moments"] == 2 * 4 * 192, "half of 320, rounded up to a multiple of 64"
    assert plain["parts"]["moments"] == 2 * 4 * 320
    assert second["formulas"]["gradients"] == "4 B x (320 + 320 / 2 rank(s) + 2 x 128)"
    assert second["parts"]["gradients"] == 4 * (320 + 192 + 2 * 128)
    assert first["parts"]["gradients"] == plain["parts"]["gradients"] == 4 * (320 + 320 + 2 * 128)
    assert third["parts"]["gradients"] == 4 * (192 + 2 * 128)
    assert third["parts"]["parameters"] == 4 * (192 + 128 + 256), "half of 448 is 224, rounded up"
    assert third["formulas"]["parameters"] == "4 B x (320 / 2 rank(s) + 128 + 448 / 2 rank(s))"
    assert third["parts"]["messages"] == 4 * (77 + 77)
    assert says(third["formulas"]["messages"], "4 B x (77 … + 77 …")
    assert third["parts"]["activations"] >= plain["parts"]["activations"] + 4 * 77, "the layers are values of the graph"
    assert f"  = {plain['formulas']['moments']}" in inspected("--plan", "run.yaml", *ranks).stdout
    on_gpu = ("resources.gpus_per_rank=1", "train.offload=optimizer", "parallel.zero=1", *ranks)
    host = json.loads(inspected("--json", "--plan", "run.yaml", *on_gpu).stdout)
    assert host["parts"]["offloaded"] == first["parts"]["moments"]
    # Two pieces of the first rank's 192 elements, with and without weight decay, each with its slot.
    assert host["parts"]["moments"] <= 3 * 2 * 4 * 192
    assert host["parts"]["checkpoint"] == 4 * (3 * 320 + 128) // 2, "half of the state, copied to the host"
    assert host["total"] == sum(host["parts"].values()) - host["parts"]["offloaded"] - host["parts"]["checkpoint"]
    assert "the host's memory, which `in all` leaves out" in host["formulas"]["checkpoint"]
    assert "checkpoint" not in first["formulas"], "on CPUs it is a part like the others"
    assert says(host["formulas"]["offloaded"], "2 x 4 B x 320 / 2 rank(s) … host's memory")
    wrong = inspected()
    assert (wrong.returncode, "one model file is needed" in wrong.stderr) == (2, True)
    broken = inspected("--plan", "run.yaml", "train.steps=no")
    assert broken.returncode == 2
    assert not tiny.run_dir.exists()


def on_two_gpus(spec: TrainerRunSpec) -> TrainerRunSpec:
    resources = {"gpus_per_rank": 1, "ranks_per_node": 2}
    return spec.model_copy(update={"resources": spec.resources.model_copy(update=resources)})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_rows_that_gpus_exchange_are_counted(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 x 256 indices of 8 bytes and rows of 256 elements, from each of two ranks. In fp32, where the gradient of a
    shared table is the sum of two whole ones, none.
    """
    monkeypatch.setattr(overlap, "LEAST", 100_000)
    monkeypatch.setattr(peer_sums, "LEAST", 1 << 20)
    spec = on_two_gpus(gpt_on_a_gpu(tmp_path, 8))
    train = spec.train.model_copy(update={"precision": precision})
    data = spec.data.model_copy(update={"micro_batch": 4})
    spec = spec.model_copy(update={"train": train, "data": data})
    found, entries = forecast(spec), 4 * 256
    rows = 2 * entries * (8 + 256 * 2) if precision == "bf16" else 0
    received = found.parts["messages"] - rows
    assert received >= peer_sums.SLOTS * 4 * 100_000 / 2, "a half of each part of a bucket"
    told = f"… {rows:,} B … looked-up rows of wte.weight …"
    assert says(found.formulas["messages"], told) == (precision == "bf16"), found.formulas
    assert found.total == sum(count for name, count in found.parts.items() if name != "checkpoint")
    listed = survey(spec, lambda *_: Rates(1.0, 1.0, Link(1.0, 0.0), Link(1.0, 0.0)))
    memories = {each.layout: each.memory.parts.get("messages", 0) for each in listed.candidates}
    assert memories[Layout(2)] == found.parts["messages"]
    assert memories[Layout(2, zero=1)] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"resources": {"gpus_per_rank": 1}},
        {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2, "nodes": 2}},
        {"resources": {"gpus_per_rank": 1, "ranks_per_node": 9}},
        {"resources": {"gpus_per_rank": 1, "ranks_per_node": 2, "kernels": "onnxruntime"}},
        {"resources": {"ranks_per_node": 2}},
        {"train": {"steps": 1, "optimizer": {"name": "adam", "lr": 0.1}, "gradient_accumulation": 2}},
        {"parallel": {"zero": 1}},
    ],
)
def test_other_runs_exchange_no_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    spec = spec_of(**{"resources": {"gpus_per_rank": 1, "ranks_per_node": 2}, **changes})
    index = FlatIndex.place([Tensor("w", (6, 1 << 22), "decay")])
    assert exchange_of(spec, tmp_path / "unread.onnx", index, {}) == Exchange()


def gradients_of(*names: str) -> onnx.ModelProto:
    """A training graph whose gradients are made one after the other, the last tensor's first."""
    nodes = [helper.make_node("Softmax", ["x"], [f"{name}_grad"]) for name in reversed(names)]
    return graph_of(*nodes, outputs=tuple(f"{name}_grad" for name in names))


@pytest.mark.parametrize(
    ("rows", "ranks", "received"),
    [
        # Of 3 buckets of 24M elements, two are summed beside the pass, less the last of these. A part has 8 Mi, of
        # which each of 2 ranks sums a half; there is room for 4 parts and for a flag a part, rank and phase.
        ([24, 24, 24], 2, 4 * 4 * (4 << 20) + 256),
        ([24, 24, 24], 4, 4 * 3 * 4 * (2 << 20) + 256),
        ([24], 2, 0),
        ([4, 4, 4], 2, 0),
    ],
)
def test_gpus_of_one_machine_receive_gradients(rows: list[int], ranks: int, received: int) -> None:
    names = "abc"[: len(rows)]
    index = FlatIndex.place(Tensor(name, (n, 1 << 20), "decay") for name, n in zip(names, rows, strict=True))
    assert buffers_of(gradients_of(*names), index, {}, ranks) == Exchange(received)
