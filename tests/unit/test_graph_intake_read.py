"""A model file is untrusted: its faults are named in one sentence, and no foreign data is read for it."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from messages import mentions, says
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.file.read import read_model
from ortflow.workflow.graph.ir.stops import stop, stopped_values

WEIGHT = np.arange(12, dtype=np.float32).reshape(4, 3)


def linear(weight: np.ndarray = WEIGHT, name: str = "weight") -> onnx.ModelProto:
    """y = relu(x weight)."""
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", name], ["h"], "product"),
            helper.make_node("Relu", ["h"], ["y"], "relu"),
        ],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        initializer=[numpy_helper.from_array(weight, name)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def external(location: str, *, length: int | None = None, offset: int = 0, dims: tuple[int, ...] = (4, 3)) -> bytes:
    """The model with its weight in another file."""
    model = linear()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    del tensor.dims[:]
    tensor.dims.extend(dims)
    tensor.data_location = TensorProto.EXTERNAL
    entries = {"location": location, "offset": str(offset)} | ({} if length is None else {"length": str(length)})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return model.SerializeToString()


def refused(path: Path) -> str:
    """The error for the file: one sentence that names it."""
    with pytest.raises(UserError) as caught:
        read_model(path)
    output = str(caught.value)
    assert output.startswith(f"{path}: ")
    assert "\n" not in output
    return output.removeprefix(f"{path}: ")


def refused_model(folder: Path, change: Callable[[onnx.ModelProto], None]) -> str:
    model = linear()
    change(model)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return refused(path)


def test_reads_a_model(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(linear().SerializeToString())
    assert read_model(path) == linear()


def test_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.onnx").startswith("there is no such model file")


def test_folder_and_pipe(tmp_path: Path) -> None:
    assert refused(tmp_path).startswith("is not a file")
    os.mkfifo(tmp_path / "pipe.onnx")
    assert refused(tmp_path / "pipe.onnx").startswith("is not a file")


@pytest.mark.parametrize(
    "content",
    [b"model: resnet\nlayers: 50\n", b"PK\x03\x04zip", linear().SerializeToString()[:-20], b"\x08\x08"],
    ids=["text", "zip", "cut short", "no graph"],
)
def test_no_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert says(refused(path), "… not an ONNX model")


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = linear().SerializeToString()
    path = tmp_path / "model.onnx"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            model = read_model(path)
        except UserError:
            continue
        # Cut between two fields after the graph, the model lacks only its imports, which fails elsewhere.
        assert model.graph == linear().graph


def test_empty(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"")
    assert refused(tmp_path / "model.onnx").startswith("the model file is empty")


def test_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.symlink_to(path)
    assert says(refused(path), "… cannot be read … Too many levels")


class TestExternalData:
    def test_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "weights.bin").write_bytes(b"....." + WEIGHT.tobytes())
        path = tmp_path / "model.onnx"
        path.write_bytes(external("sub/weights.bin", offset=5, length=48))
        model = read_model(path)
        np.testing.assert_array_equal(numpy_helper.to_array(model.graph.initializer[0]), WEIGHT)
        assert not model.graph.initializer[0].external_data

    @pytest.mark.parametrize(
        "location", ["../secret", "a/../../secret", "/etc/passwd", "..\\secret", "", "link", "in/s"]
    )
    def test_outside_is_refused(self, tmp_path: Path, location: str) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        (tmp_path / "secret").write_bytes(WEIGHT.tobytes())
        (folder / "link").symlink_to(tmp_path / "secret")
        (tmp_path / "s").write_bytes(WEIGHT.tobytes())
        (folder / "in").symlink_to(tmp_path)
        (folder / "model.onnx").write_bytes(external(location))
        output = refused(folder / "model.onnx")
        assert says(output, f"initializer 'weight' … {location!r} … not inside the model's")

    def test_link_within_the_folder_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
        (tmp_path / "link").symlink_to("weights.bin")
        (tmp_path / "model.onnx").write_bytes(external("link"))
        read_model(tmp_path / "model.onnx")

    def test_missing(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").write_bytes(external("weights.bin"))
        assert "cannot be read: No such file" in refused(tmp_path / "model.onnx")

    def test_pipe(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "weights.bin")
        (tmp_path / "model.onnx").write_bytes(external("weights.bin"))
        assert "is not a regular file" in refused(tmp_path / "model.onnx")

    @pytest.mark.parametrize(
        ("claim", "expected_text"),
        [
            ({"length": 44}, "[4, 3] … 48 bytes … 44 bytes … 'weights.bin'"),
            ({"offset": 1}, "1 to 49 … 'weights.bin' … 48"),
            ({"dims": (2**40, 2**40)}, "0 to 4835703278458516698824704 … 'weights.bin' … 48"),
            ({"dims": (2**40,), "length": 2**42}, "0 to 4398046511104 … 'weights.bin' … 48"),
            ({"dims": (-4, -3)}, "claims the shape [-4, -3]"),
        ],
    )
    def test_claims_beyond_the_file(self, tmp_path: Path, claim: dict[str, int], expected_text: str) -> None:
        (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
        (tmp_path / "model.onnx").write_bytes(external("weights.bin", **claim))
        assert says(refused(tmp_path / "model.onnx"), f"initializer 'weight' … {expected_text}")

    @pytest.mark.parametrize("text", ["-1", "1e3", "0x10", "９", "9" * 5000, " 1"])
    def test_offset_is_not_a_number(self, tmp_path: Path, text: str) -> None:
        model = onnx.ModelProto.FromString(external("weights.bin"))
        model.graph.initializer[0].external_data[1].value = text
        (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        assert "as the offset of its data" in refused(tmp_path / "model.onnx")

    def test_many_claims_on_the_same_bytes(self, tmp_path: Path) -> None:
        """Ten tensors of one file's bytes would take ten times the file."""
        model = onnx.ModelProto.FromString(external("weights.bin"))
        for i in range(9):
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(model.graph.initializer[0])
            tensor.name = f"copy {i}"
        (tmp_path / "weights.bin").write_bytes(WEIGHT.tobytes())
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        assert says(refused(tmp_path / "model.onnx"), "… 480 bytes … 'weights.bin' … 48")

    def test_a_file_of_holes_larger_than_memory(self, tmp_path: Path) -> None:
        with (tmp_path / "weights.bin").open("wb") as file:
            file.truncate(1 << 42)
        (tmp_path / "model.onnx").write_bytes(external("weights.bin", dims=(1 << 40,)))
        assert mentions(refused(tmp_path / "model.onnx"), "weights … 4096.0 GiB … machine")

    def test_data_of_a_node(self, tmp_path: Path) -> None:
        model = linear()
        node = helper.make_node("Constant", [], ["c"], "constant", value=numpy_helper.from_array(WEIGHT))
        node.attribute[0].t.data_location = TensorProto.EXTERNAL
        node.attribute[0].t.external_data.add(key="location", value="../secret")
        model.graph.node.insert(0, node)
        (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
        assert says(refused(tmp_path / "model.onnx"), "attribute 'value' … node 'constant' (Constant)")


class TestClaimsWithinTheFile:
    @pytest.mark.parametrize("dims", [[2**40, 2**20], [4, 4], [3], [2**63 - 1, 2**63 - 1]])
    def test_no_memory_is_allocated_for_missing_data(self, tmp_path: Path, dims: list[int]) -> None:
        def claim(model: onnx.ModelProto) -> None:
            del model.graph.initializer[0].dims[:]
            model.graph.initializer[0].dims.extend(dims)

        tracemalloc.start()
        output = refused_model(tmp_path, claim)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert output.startswith(f"initializer 'weight' claims the shape {dims} of ")
        assert says(output, "… 48 … export the model again")
        assert peak < 1 << 20

    def test_typed_data_is_counted_too(self, tmp_path: Path) -> None:
        def typed(model: onnx.ModelProto) -> None:
            model.graph.initializer[0].ClearField("raw_data")
            model.graph.initializer[0].float_data.extend([1.0] * 11)

        assert "of 48 bytes but has 44" in refused_model(tmp_path, typed)

    def test_split_claims_no_more_outputs_than_it_has(self, tmp_path: Path) -> None:
        def split(model: onnx.ModelProto) -> None:
            model.graph.node.append(helper.make_node("Split", ["h"], ["s"], "split", num_outputs=2**33))

        assert says(refused_model(tmp_path, split), "node 'split' (Split) … number of outputs")


def recursive(model: onnx.ModelProto) -> None:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for name, called in (("f", "g"), ("g", "f")):
        node = helper.make_node(called, ["a"], ["b"], domain="own")
        model.functions.append(helper.make_function("own", name, ["a"], ["b"], [node], opsets))
    model.graph.node.append(helper.make_node("f", ["h"], ["z"], "call", domain="own"))
    model.opset_import.append(opsets[1])


def exploding(model: onnx.ModelProto) -> None:
    """40 functions that each call the next one twice: 2^40 nodes."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    for i in range(40):
        kind = {"op_type": f"f{i + 1}", "domain": "own"} if i < 39 else {"op_type": "Relu"}
        nodes = [
            helper.make_node(inputs=["a"], outputs=["c"], **kind),
            helper.make_node(inputs=["c"], outputs=["b"], **kind),
        ]
        model.functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], nodes, opsets))
    model.graph.node.append(helper.make_node("f0", ["h"], ["z"], "call", domain="own"))
    model.opset_import.append(opsets[1])


def cycle(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "y"


def same_output(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Neg", ["x"], ["h"], "again"))


def same_initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.add().CopyFrom(model.graph.initializer[0])


def sparse(model: onnx.ModelProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "weight")
    indices = numpy_helper.from_array(np.zeros(1, np.int64))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4, 3]))
    del model.graph.initializer[:]


def not_a_number(model: onnx.ModelProto) -> None:
    weight = WEIGHT.copy()
    weight[1, 2] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, "weight"))


def custom(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Fancy", ["h"], ["z"], "fancy", domain="my.ops"))


def quantised(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("QuantizeLinear", ["h", "s"], ["z"], "quantise"))
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "s"))


def int4(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = TensorProto.INT4


def strings(model: onnx.ModelProto) -> None:
    model.graph.initializer[0].data_type = 1000


def dangling(model: onnx.ModelProto) -> None:
    model.graph.node[0].input[0] = "nowhere"


def no_output(model: onnx.ModelProto) -> None:
    del model.graph.output[:]


def output_of_nothing(model: onnx.ModelProto) -> None:
    model.graph.output[0].name = "nowhere"


def no_nodes(model: onnx.ModelProto) -> None:
    del model.graph.node[:]


def wrong_attribute(model: onnx.ModelProto) -> None:
    model.graph.node[1].attribute.append(helper.make_attribute("alpha", 0.5))


def long_name(model: onnx.ModelProto) -> None:
    model.graph.node[0].name = "many\nlines" * 1000
    model.graph.node[0].domain = "my\nops"


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        (cycle, "cycle … node 'product' (MatMul)"),
        (same_output, "'h' … twice … node 'product' (MatMul) … node 'again' (Neg)"),
        (same_initializer, "'weight' … twice … initializer … initializer"),
        (sparse, "initializer 'weight' … sparse … dense weights"),
        (not_a_number, "initializer 'weight' … 1 NaN … 12 values"),
        (custom, "node 'fancy' (my.ops.Fancy) … custom operator"),
        (quantised, "quantised … node 'quantise' (QuantizeLinear) … train the float model"),
        (int4, "initializer 'weight' … INT4 … train the float model"),
        (strings, "initializer 'weight' … type 1000"),
        (dangling, "node 'product' (MatMul) … 'nowhere' … no node produces"),
        (no_output, "the graph has no outputs"),
        (output_of_nothing, "output 'nowhere' is produced by no node"),
        (no_nodes, "the graph has no nodes"),
        (wrong_attribute, "node 'relu' … Unrecognized attribute: alpha"),
        (recursive, "function 'f' calls itself"),
        (exploding, "functions … more than 50000 nodes"),
        (long_name, "node 'many\\nlinesmany"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_by_name(tmp_path: Path, change: Callable[[onnx.ModelProto], None], expected_text: str) -> None:
    answer = refused_model(tmp_path, change)
    assert mentions(answer, expected_text)
    assert len(answer) < 600


def test_nodes_out_of_order_are_sorted(tmp_path: Path) -> None:
    model = linear()
    first = onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    del model.graph.node[0]
    model.graph.node.append(first)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert [node.op_type for node in read_model(tmp_path / "model.onnx").graph.node] == ["MatMul", "Relu"]


def test_names_that_are_not_text(tmp_path: Path) -> None:
    data = linear().SerializeToString().replace(b"product", b"pr\xffduct")
    (tmp_path / "model.onnx").write_bytes(data)
    assert "a name in it is not text" in refused(tmp_path / "model.onnx")


@pytest.mark.parametrize("place", ["node", "value", "input"])
def test_a_name_of_megabytes(tmp_path: Path, place: str) -> None:
    """Graphs are copied and searched by name many times: ten megabytes in one name took minutes."""
    long = "n" * 1_000_000
    names = {each: long if each == place else each for each in ("node", "value", "input")}
    graph = helper.make_graph(
        [
            helper.make_node("Relu", [names["input"]], [names["value"]], name=names["node"]),
            helper.make_node("Neg", [names["value"]], ["y"], name="last"),
        ],
        "model",
        [helper.make_tensor_value_info(names["input"], TensorProto.FLOAT, ["batch", 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    with pytest.raises(UserError) as caught:
        read_model(path)
    assert mentions(str(caught.value), "'nnnn", "1,000,000 characters")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("key", ["sizes", "shared_entropy", "replicas", "dropout", "layer", "a_later_one"])
def test_marks_that_only_passes_write(tmp_path: Path, key: str) -> None:
    """What a file says under such a key would be taken for a pass's own words."""
    model = linear()
    function = helper.make_function(
        "site", "twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"], "add")],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    function.node[0].metadata_props.add(key=f"ortflow.{key}", value="x")
    model.functions.append(function)
    for node in model.graph.node:
        node.metadata_props.add(key=f"ortflow.{key}", value="[3, 3]")
        node.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="kept")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    read = read_model(tmp_path / "model.onnx")
    assert [[prop.value for prop in node.metadata_props] for node in read.graph.node] == [["kept"], ["kept"]]
    assert not read.functions[0].node[0].metadata_props


def test_the_exporter_s_mark_stays(tmp_path: Path) -> None:
    model = linear()
    model.graph.node.append(stop("h", "stopped", "stop"))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert stopped_values(read_model(tmp_path / "model.onnx").graph) == ["stopped"]
