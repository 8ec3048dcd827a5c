"""A small file that requires much memory or time is refused before anything of that size is allocated."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.limits import check_constants
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.trainer.model_errors import about_model

GIB = 1 << 28
"""Elements of fp32 in a GiB."""
MEASURE = """
import json, resource, sys, time
from pathlib import Path
import onnx, numpy, onnx.reference
from ortflow.workflow.errors import UserError
from ortflow.workflow.assembly import build
from ortflow.workflow.graph.intake import inspect
from ortflow.workflow.spec.run import TrainerRunSpec

spec = TrainerRunSpec.model_validate(json.loads(sys.argv[2]))
begun = time.process_time()
try:
    if sys.argv[1] == "inspect":
        inspect.findings(Path(spec.model.path))
    else:
        build.build_graphs(spec, Path(spec.run_dir))
    said = ""
except UserError as error:
    said = str(error)
# The kernel counts what the parent had before this program was started to ru_maxrss of its own.
own = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
peak = max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(json.dumps([said, time.process_time() - begun, peak << 10]))
"""

node = helper.make_node


def ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def floats(name: str, *values: float) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.float32), name)


def model(nodes: Sequence[onnx.NodeProto], tensors: Sequence[onnx.TensorProto] = ()) -> onnx.ModelProto:
    """y = x w + the largest element of `big`, which the nodes compute."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        *nodes,
        node("Cast", ["big"], ["big.float"], to=TensorProto.FLOAT),
        node("ReduceMax", ["big.float"], ["most"], keepdims=0),
        node("Add", ["h", "most"], ["y"]),
    ]
    weight = numpy_helper.from_array(np.random.default_rng(0).random((4, 3), dtype=np.float32), "w")
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n, size in (("x", 4), ("y", 3)))
    graph = helper.make_graph(list(nodes), "hostile", [x], [y], initializer=[weight, *tensors])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def doubled(first: str, times: int) -> list[onnx.NodeProto]:
    """`first` concatenated with itself repeatedly."""
    names = [first, *(f"c{i}" for i in range(times - 1)), "big"]
    return [node("Concat", [a, a], [b], axis=0) for a, b in itertools.pairwise(names)]


def branch(name: str, size: str) -> onnx.GraphProto:
    output = helper.make_tensor_value_info(name, TensorProto.FLOAT, None)
    return helper.make_graph([node("ConstantOfShape", [size], [name])], name, [], [output])


def made(op_type: str, inputs: Sequence[str], *tensors: onnx.TensorProto, **attributes: Any) -> onnx.ModelProto:
    return model([node(op_type, inputs, ["big"], **attributes)], tensors)


def hostile() -> dict[str, onnx.ModelProto]:
    """Models of a few kilobytes that would take 2 GiB and more."""
    n = 2 * GIB
    one, square = floats("one", 1), numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "square")
    scalars = [numpy_helper.from_array(np.array(v, np.float32), k) for k, v in {"a": 0, "b": n, "c": 1}.items()]
    cube = [
        numpy_helper.from_array(np.ones([1024 if i == axis else 1 for i in range(3)], np.int64), name)
        for axis, name in enumerate("abc")
    ]
    truth = numpy_helper.from_array(np.ones((1024, 1, 1), bool), "a")
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    return {
        "ConstantOfShape": made("ConstantOfShape", ["s"], ints("s", n)),
        "ConstantOfShape of a product": model(
            [node("Mul", ["a", "b"], ["s"]), node("ConstantOfShape", ["s"], ["big"])],
            [ints("a", 1 << 15), ints("b", 1 << 14)],
        ),
        "ConstantOfShape of an exponential": model(
            [
                node("Exp", ["a"], ["e"]),
                node("Cast", ["e"], ["s"], to=TensorProto.INT64),
                node("ConstantOfShape", ["s"], ["big"]),
            ],
            [floats("a", 20.2)],
        ),
        "ConstantOfShape beyond 64 bits": made("ConstantOfShape", ["s"], ints("s", *[1 << 31] * 3)),
        "ConstantOfShape for each sample": model(
            [
                node("Shape", ["x"], ["sx"]),
                node("Concat", ["sx", "s"], ["t"], axis=0),
                node("ConstantOfShape", ["t"], ["big"]),
            ],
            [ints("s", GIB)],
        ),
        "Expand": made("Expand", ["one", "s"], one, ints("s", n)),
        "Expand of a weight": made("Expand", ["w", "s"], ints("s", 1 << 26, 4, 3)),
        "Tile": made("Tile", ["one", "s"], one, ints("s", n)),
        "Range": made("Range", ["a", "b", "c"], *scalars),
        "Pad": made("Pad", ["one", "s"], one, ints("s", n, 0)),
        "Resize": made("Resize", ["square", "", "s"], square, floats("s", 1, 1, 1 << 15, 1 << 14), mode="nearest"),
        "OneHot": made("OneHot", ["i", "d", "v"], ints("i", 0), ints("d", n), floats("v", 0, 1)),
        "HannWindow": made("HannWindow", ["s"], numpy_helper.from_array(np.array(n, np.int64), "s")),
        "RandomNormal": made("RandomNormal", [], shape=[n]),
        "EyeLike": model(
            [node("ConstantOfShape", ["s"], ["z"]), node("EyeLike", ["z"], ["big"])], [ints("s", 1 << 15, 1 << 14)]
        ),
        "ScatterND": model(
            [node("ConstantOfShape", ["s"], ["z"]), node("ScatterND", ["z", "i", "u"], ["big"])],
            [ints("s", n), numpy_helper.from_array(np.array([[0]], np.int64), "i"), floats("u", 1)],
        ),
        "Where of three axes": made("Where", ["a", "b", "c"], truth, *cube[1:]),
        "Max of three axes": made("Max", ["a", "b", "c"], *cube),
        "Concat of floats": model(doubled("c", 28), [floats("c", 1, 2, 3, 4)]),
        "Concat of integers": model(doubled("c", 28), [ints("c", 1, 2, 3, 4)]),
        "Concat of shapes": model([node("Shape", ["x"], ["c"]), *doubled("c", 28)]),
        "many of 128 MiB": model(
            [
                *(node("ConstantOfShape", ["s"], [f"z{i}"]) for i in range(40)),
                node("Sum", [f"z{i}" for i in range(40)], ["big"]),
            ],
            [ints("s", 1 << 25)],
        ),
        "a branch of If": model(
            [
                node("ReduceMax", ["h"], ["top"], keepdims=0),
                node("Greater", ["top", "zero"], ["positive"]),
                node("If", ["positive"], ["big"], then_branch=branch("t", "s"), else_branch=branch("e", "o")),
            ],
            [ints("s", n), ints("o", 1), zero],
        ),
        "axes": model(
            [
                node("Identity", ["one"], ["u0"]),
                *(node("Unsqueeze", [f"u{i}", "i"], [f"u{i + 1}"]) for i in range(200)),
                node("Identity", ["u200"], ["big"]),
            ],
            [one, ints("i", 0)],
        ),
        "a shape of thousands": model(
            [
                *(node("Reshape", ["one", "s"], [f"r{i}"]) for i in range(200)),
                node("Sum", [f"r{i}" for i in range(200)], ["big"]),
            ],
            [one, ints("s", *[1] * 4000)],
        ),
    }


def spec_of(path: Path) -> dict[str, Any]:
    return {
        "name": "r", "run_dir": str(path.parent / "run"),
        "model": {"path": str(path), "loss": {"kind": "mse", "output": "y", "label": "t"}},
        "data": {"train": {"path": "d"}, "micro_batch": 1},
        "train": {"steps": 1, "optimizer": {"name": "sgd", "lr": 0.1}}, "resources": {"kernels": "onnxruntime"},
    }  # fmt: skip


def measured(verb: str, path: Path) -> tuple[str, float, int]:
    """The error for a model, CPU seconds and peak memory, in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, verb, json.dumps(spec_of(path))],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    output, seconds, peak = json.loads(done.stdout)
    return output, seconds, peak


@pytest.mark.parametrize("name", list(hostile()))
def test_what_asks_for_much_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hostile.onnx"
    onnx.save(hostile()[name], path)
    assert path.stat().st_size < 64_000
    with pytest.raises(UserError) as error:
        prepare(read_model(path), str(path))
    output = str(error.value)
    assert output.startswith(f"{path}: ")
    assert "node" in output
    assert "\n" not in output


@pytest.mark.rotates
@pytest.mark.parametrize("verb", ["inspect", "build"])
@pytest.mark.parametrize("name", ["ConstantOfShape", "ConstantOfShape of an exponential", "Concat of shapes"])
def test_a_refusal_takes_less_than_a_second_and_500_mb(tmp_path: Path, name: str, verb: str) -> None:
    path = tmp_path / "hostile.onnx"
    onnx.save(hostile()[name], path)
    output, seconds, peak = measured(verb, path)
    assert "makes a value of" in output
    assert seconds < 1
    assert peak < 500_000_000


def held(dims: Sequence[int], data: bytes = b"") -> onnx.ModelProto:
    tensor = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=dims, raw_data=data)
    return model([node("Identity", ["t"], ["big"])], [tensor])


def declared(part: str) -> onnx.ModelProto:
    found = model([node("Identity", ["h"], ["big"])])
    if part == "value_info":
        found.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, [1]))
    value = getattr(found.graph, part)[0]
    for _ in range(1000):
        value.type.tensor_type.shape.dim.add(dim_value=1)
    return found


@pytest.mark.parametrize(
    ("strange", "message"),
    [
        (held([1 << 40]), r"shape \[1099511627776\] .*4398046511104 bytes .*0"),
        (held([1 << 62, 1 << 62]), "claims the shape .* but has 0"),
        (held([0, 1 << 62]), r"claims the shape \[0, 4611686018427387904\]"),
        (held([1] * 100_000, bytes(4)), "initializer 't' has 100000 axes, more than 64"),
        (declared("input"), "value 'x' has 1002 axes"),
        (declared("output"), "value 'y' has 1002 axes"),
        (declared("value_info"), "value 'h' has 1001 axes"),
        (model([node("Gather", ["w", "i"], ["g"]), node("Gather", ["g", "i"], ["big"], axis=1)],
               [ints("i", *[0] * 20_000)]), "makes a value of 1.5 GiB from constants"),
    ],
    ids=["no data", "overflow", "an axis of none", "axes", "input", "output", "value_info", "a long index"],
)  # fmt: skip
def test_shapes_that_no_model_has(tmp_path: Path, strange: onnx.ModelProto, message: str) -> None:
    onnx.save(strange, tmp_path / "m.onnx")
    with pytest.raises(UserError, match=message):
        prepare(read_model(tmp_path / "m.onnx"), "m.onnx")


def test_constants_that_runtime_would_compute_are_refused(tmp_path: Path) -> None:
    """They come from an untrained buffer in the file, so that only the graph without parameters shows it."""
    index = numpy_helper.from_array(np.zeros((5000, 1), np.int64), "index")
    wide = numpy_helper.from_array(np.arange(20_000, dtype=np.int64).reshape(1, -1), "wide")
    onnx.save(made("Add", ["index", "wide"], index, wide), tmp_path / "m.onnx")
    output, seconds, peak = measured("build", tmp_path / "m.onnx")
    assert "0.7 GiB" in output
    assert seconds < 2
    assert peak < 500_000_000


def test_a_value_for_one_sample_may_be_large_and_not_absurd() -> None:
    """The machine that checks a model may have less memory than those that train it."""
    table = numpy_helper.from_array(np.random.default_rng(0).random((1, 8192), dtype=np.float32), "table")
    for axis, absurd in ((1 << 20, False), (1 << 32, True)):
        large = model([node("Expand", ["table", "s"], ["big"])], [table, ints("s", axis, 8192)])
        if not absurd:
            prepare(large, "m.onnx")
            continue
        with pytest.raises(UserError, match=r"131,072\.0 GiB"):
            prepare(large, "m.onnx")


def test_a_constant_of_unknown_size_is_refused() -> None:
    nodes = [node("Gelu", ["a"], ["s"], domain="com.microsoft"), node("ConstantOfShape", ["s"], ["big"])]
    with pytest.raises(UserError, match=r"Gelu.*size"):
        check_constants(model(nodes, [ints("a", 1)]), "m.onnx")


@pytest.mark.parametrize("attribute", [{"value_int": 3}, {"value_ints": [2, 3]}, {"value_float": 3.0}])
def test_sizes_follow_from_every_kind_of_constant(attribute: dict[str, Any]) -> None:
    nodes = [
        node("Constant", [], ["c"], **attribute),
        node("Cast", ["c"], ["whole"], to=TensorProto.INT64),
        node("Reshape", ["whole", "flat"], ["list"]),
        node("Concat", ["list", "list"], ["twice"], axis=0),
        node("Split", ["twice"], ["first", "last"], num_outputs=2),
        node("ConstantOfShape", ["last"], ["big"]),
    ]
    check_constants(model(nodes, [ints("flat", -1)]), "m.onnx")
    nodes.insert(-1, node("Mul", ["last", "much"], ["more"]))
    nodes[-1] = node("ConstantOfShape", ["more"], ["big"])
    with pytest.raises(UserError, match="makes a value of"):
        check_constants(model(nodes, [ints("flat", -1), ints("much", 1 << 30)]), "m.onnx")


def test_small_constants_and_large_weights_stay(tmp_path: Path) -> None:
    """A causal mask computed in the graph, and a weight that is expanded over a fixed batch."""
    nodes = [
        node("ConstantOfShape", ["s"], ["ones"], value=helper.make_tensor("v", TensorProto.FLOAT, [1], [1.0])),
        node("Trilu", ["ones"], ["big"], upper=0),
        node("Expand", ["table", "many"], ["wide"]),
        node("ReduceMean", ["wide"], ["mean"], keepdims=0),
        node("Add", ["h", "mean"], ["unused"]),
    ]
    table = numpy_helper.from_array(np.random.default_rng(0).random((1, 8192), dtype=np.float32), "table")
    onnx.save(model(nodes, [ints("s", 1024, 1024), ints("many", 4096, 8192), table]), tmp_path / "m.onnx")
    prepare(read_model(tmp_path / "m.onnx"), "m.onnx")
    output, _, _ = measured("build", tmp_path / "m.onnx")
    assert output == ""


def calling(levels: int) -> onnx.ModelProto:
    """Functions that each call the previous one twice."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    functions = [helper.make_function("own", "f0", ["a"], ["b"], [node("Relu", ["a"], ["b"])], opsets)]
    for i in range(1, levels + 1):
        body = [node(f"f{i - 1}", ["a"], ["m"], domain="own"), node(f"f{i - 1}", ["m"], ["b"], domain="own")]
        functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], body, opsets))
    found = model([node(f"f{levels}", ["h"], ["big"], domain="own")])
    found.opset_import.append(opsets[1])
    found.functions.extend(functions)
    return found


def test_names_are_found_in_linear_time(tmp_path: Path) -> None:
    onnx.save(calling(12), tmp_path / "m.onnx")
    prepared, _ = prepare(read_model(tmp_path / "m.onnx"))
    assert len({one.name for one in prepared.graph.node}) == len(prepared.graph.node) > 4096
    onnx.save(calling(16), tmp_path / "m.onnx")
    with pytest.raises(UserError, match="50000 nodes"):
        read_model(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("where", "key", "file"),
    [
        ("/m/model.onnx", "model.path", "/m/model.onnx"),
        (None, "model.path", "/m/model.onnx"),
        ("model", "model.path", "/m/model.onnx"),
        ("model.loss.output", "model.loss.output", "/m/model.onnx"),
        ("/m/train.onnx", "model.graphs.train", "/m/train.onnx"),
        ("model.graphs.train", "model.graphs.train", "/m/train.onnx"),
        ("data.micro_batch", "data.micro_batch", "/m/model.onnx"),
    ],
)
def test_a_refusal_of_a_model_names_key_and_file(where: str | None, key: str, file: str) -> None:
    values = spec_of(Path("/m/model.onnx"))
    values["model"]["graphs"] = {"train": "/m/train.onnx"}
    output = str(about_model(UserError("is wrong", where=where, fix="mend it"), TrainerRunSpec.model_validate(values)))
    assert output == f"{key}: {file}: is wrong; mend it"
