"""An ONNX graph as a transform: columns in, columns out, and random inputs of seed, epoch and sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from data_sets import feed, ragged, write_batches
from messages import mentions
from onnx import TensorProto, helper

from ortflow.workflow.data.augmented import Augmented, augmented
from ortflow.workflow.data.batches import Batches
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.draws import Draws
from ortflow.workflow.data.epoch_positions import Position
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.order import SampleOrder
from ortflow.workflow.data.pooled import pooled
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.workers import Workers
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSection
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import input_files, resolve_paths
from ortflow.workflow.spec.transforms import Transform

COUNT = 12
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Value = tuple[str, int, Sequence[Any]]
X: Value = ("x", FLOAT, [2, 3])
Y: Value = ("y", FLOAT, [2, 3])
DOUBLE = TensorProto.DOUBLE
SHIFTED = {"onnx": "augment.onnx", "columns": {"shifted": "x"}, "random": {"noise": "normal", "share": "uniform"}}


def graph(path: Path, nodes: Sequence[Any], inputs: Sequence[Value], outputs: Sequence[Value]) -> str:
    values = [[helper.make_tensor_value_info(*value) for value in values] for values in (inputs, outputs)]
    made = helper.make_graph(list(nodes), "augment", *values)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return str(path)


def shift(path: Path, *batch: Any) -> str:
    """x * share + noise, and the sum of that."""
    one = helper.make_tensor("flat", INT64, [len(batch)], [1] * len(batch))
    nodes = [
        helper.make_node("Mul", ["x", "share"], ["scaled"]),
        helper.make_node("Add", ["scaled", "noise"], ["shifted"]),
        helper.make_node("ReduceSum", ["shifted"], ["total"], keepdims=1),
        helper.make_node("Reshape", ["total", "flat"], ["sum"]),
        helper.make_node("Constant", [], ["flat"], value=one),
    ]
    nodes.insert(3, nodes.pop())
    inputs = [("x", FLOAT, [*batch, 2, 3]), ("noise", FLOAT, [*batch, 2, 3]), ("share", FLOAT, [*batch, 1, 1])]
    outputs = [("shifted", FLOAT, [*batch, 2, 3]), ("sum", FLOAT, list(batch))]
    return graph(path, nodes, inputs, outputs)


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    x = np.arange(COUNT * 6, dtype=np.float32).reshape(COUNT, 2, 3)
    return write_batches(tmp_path / "set.arrow", {"x": x, "n": np.arange(COUNT), "one": np.ones(COUNT, np.float32)})


def changed(samples: Samples, *items: dict[str, Any], seed: int = 3) -> Augmented:
    return augmented(samples, [Transform.model_validate(item) for item in items], seed, "data.train")


@pytest.mark.parametrize("batch", [(), ("batch",), (1,)])
def test_outputs_replace_and_add_columns(tmp_path: Path, samples: Samples, batch: Sequence[Any]) -> None:
    item = {**SHIFTED, "onnx": shift(tmp_path / "augment.onnx", *batch)}
    made = changed(samples, {"noise": 0.5, "column": "one"}, item).at(4)
    assert {name: str(column) for name, column in made.columns.items()} == {
        "x": "float32 2x3", "n": "int64 scalar", "one": "float32 scalar", "sum": "float32 scalar",
    }  # fmt: skip
    x = samples.read("x", np.arange(COUNT))
    for number in (0, 7):
        draws = Draws(Draws(3, 4, number, 2).word())
        noise = draws.normals(6).reshape(2, 3)
        share = np.float32((draws.word() >> 40) * 2.0**-24)
        one = np.array([number])
        np.testing.assert_array_equal(made.read("x", one)[0], x[number] * share + noise)
        np.testing.assert_allclose(made.read("sum", one)[0], (x[number] * share + noise).sum(), rtol=1e-5)


@pytest.mark.parametrize("batch", [(), ("batch",)])
def test_a_scalar_stays_one(batch: Sequence[Any], tmp_path: Path, samples: Samples) -> None:
    nodes = [helper.make_node("Add", ["one", "noise"], ["more"])]
    values: list[Value] = [(name, FLOAT, list(batch)) for name in ("one", "noise", "more")]
    path = graph(tmp_path / "add.onnx", nodes, values[:2], values[2:])
    made = changed(samples, {"onnx": path, "random": {"noise": "uniform"}})
    assert str(made.columns["more"]) == "float32 scalar"
    assert made.read("more", np.array([1, 2])).shape == (2,)


def test_ranks_resumes_and_workers_see_the_same_bits(tmp_path: Path, samples: Samples) -> None:
    item = {**SHIFTED, "onnx": shift(tmp_path / "augment.onnx", "batch")}
    section = DataSection.model_validate(
        {"train": {"path": str(samples.path), "transforms": [item]}, "micro_batch": 2, "workers": 2}
    )
    made = changed(samples, item)
    workers = Workers(2)
    slow = pooled(made, section, 3, "data.train", workers)
    feeds = [feed("x", "x", "float32"), feed("sum", "sum", "float32"), feed("n", "n")]
    bits: dict[tuple[int, int], set[bytes]] = {}
    try:
        for dataset, ranks, start in ((made, 1, 0), (made, 3, 6), (slow, 2, 4)):
            for rank in range(ranks):
                options: dict[str, Any] = {"micro_batch": 2, "accumulation": 1, "rank": rank, "world_size": ranks}
                batches = Batches(dataset, SampleOrder(COUNT, 3), feeds, last_batch="drop", **options)
                with batches.read_from(Position(0, start)) as reader:
                    for step in reader:
                        if step.epoch == 2:
                            break
                        for batch in step.micro_batches:
                            for row, number in enumerate(batch.arrays["n"].tolist()):
                                content = batch.arrays["x"][row].tobytes() + batch.arrays["sum"][row].tobytes()
                                bits.setdefault((step.epoch, number), set()).add(content)
    finally:
        workers.close()
    assert len(bits) == 2 * COUNT
    assert all(len(contents) == 1 for contents in bits.values())
    assert len({content for contents in bits.values() for content in contents}) == 2 * COUNT


def test_lists_keep_their_length(tmp_path: Path) -> None:
    tokens = ragged([[1, 2], [3, 4, 5]], "int64")
    samples = write_batches(tmp_path / "set.arrow", {"tokens": tokens})
    nodes = [helper.make_node("Neg", ["tokens"], ["negative"])]
    path = graph(tmp_path / "g.onnx", nodes, [("tokens", INT64, ["n"])], [("negative", INT64, ["n"])])
    made = changed(samples, {"onnx": path, "columns": {"negative": "tokens"}})
    assert [each.tolist() for each in made.read_ragged("tokens", np.arange(2))] == [[-1, -2], [-3, -4, -5]]
    # Values that a graph makes are checked as they are, not as the set stores them.
    given = BatchInput("tokens", "int64", (None, None), "data")
    with pytest.raises(UserError, match="holds -1"):
        check_inputs(
            made, [given], {}, Limits(bounds={"tokens": 9}), micro_batch=1, smaller_batch=False, key_path="data.train"
        )


def one_node(kind: str, *inputs: str, **attributes: Any) -> list[Any]:
    return [helper.make_node(kind, list(inputs), ["y"], **attributes)]


RESHAPED = [
    helper.make_node("Constant", [], ["one"], value=helper.make_tensor("one", INT64, [1], [1])),
    helper.make_node("Reshape", ["n", "one"], ["shape"]),
    helper.make_node("Reshape", ["x", "shape"], ["y"]),
]


@pytest.mark.parametrize(
    ("nodes", "inputs", "output", "more", "message"),
    [
        (one_node("Neg", "z"), [("z", FLOAT, [2, 3])], Y, {}, "takes 'z', which is not a column … random"),
        (one_node("Neg", "x"), [("x", DOUBLE, [2, 3])], ("y", DOUBLE, [2, 3]), {},
         "takes 'x' as float64, but column 'x' is float32 … Cast"),
        (one_node("Neg", "x"), [("x", FLOAT, [3])], ("y", FLOAT, [3]), {}, "takes 'x' of 1 axes … float32 2x3"),
        (one_node("Neg", "x"), [X], Y, {"columns": {"q": "x"}}, "has neither an input nor an output 'q'"),
        (one_node("Neg", "x"), [X], Y, {"random": {"q": "normal"}}, "has no input 'q'"),
        (one_node("Add", "x", "q"), [X, ("q", FLOAT, ["n"])], ("y", FLOAT, None), {"random": {"q": "normal"}},
         "takes 'q', whose shape it leaves open"),
        (one_node("RandomNormalLike", "x"), [X], Y, {}, "has RandomNormalLike, whose random … inputs"),
        (RESHAPED, [X, ("n", INT64, [])], ("y", FLOAT, None), {}, "cannot be computed for zeros"),
    ],
)  # fmt: skip
def test_a_graph_that_does_not_fit_is_refused(
    tmp_path: Path, samples: Samples, nodes: Any, inputs: Any, output: Any, more: Any, message: str
) -> None:
    path = graph(tmp_path / "g.onnx", nodes, inputs, [output])
    with pytest.raises(UserError) as refused:
        changed(samples, {"onnx": path, **more})
    assert mentions(str(refused.value), f"data.train.transforms[0].onnx: {path} {message}")


def test_files_and_results_that_are_wrong(tmp_path: Path, samples: Samples) -> None:
    with pytest.raises(UserError, match=r"gone.onnx no such file"):
        changed(samples, {"onnx": str(tmp_path / "gone.onnx")})
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match=r"bad.onnx (is not an ONNX file|cannot be opened)"):
        changed(samples, {"onnx": str(tmp_path / "bad.onnx")})
    nodes = [helper.make_node("NonZero", ["x"], ["places"])]
    path = graph(tmp_path / "g.onnx", nodes, [X], [("places", INT64, None)])
    with pytest.raises(UserError, match=r"output 'places' is \[2, 6\] for sample 2, not \[2, 0\]"):
        changed(samples, {"onnx": path}).read("places", np.array([2]))


def test_the_run_file(tmp_path: Path) -> None:
    def loaded(transform: str, other: str = "") -> Any:
        text = (
            "name: a\nmodel: {path: m.onnx, loss: {kind: mse, label: y}}\n"
            "train: {epochs: 1, optimizer: {name: sgd, lr: 1.0}}\n"
            f"data: {{micro_batch: 1, {other}train: {{path: a.arrow, transforms: [{transform}]}}}}\n"
        )
        return resolve_paths(load_run_text(text, "run.yaml"), tmp_path / "run.yaml", tmp_path)

    spec = loaded("{onnx: augment.onnx, random: {noise: normal}}")
    assert spec.data.train.transforms[0].onnx == f"{tmp_path}/augment.onnx"
    assert f"{tmp_path}/augment.onnx" in input_files(spec)
    of_other = "path: b.txt, text: {tokenizer: t.json}, transforms: [{onnx: own.onnx}]"
    further = f"eval: {{fraction: 0.5}}, eval_sets: {{other: {{{of_other}}}}}, "
    other = loaded("{flip: vertical}", further).data.eval_sets["other"]
    assert (other.transforms[0].onnx, other.text.tokenizer) == (f"{tmp_path}/own.onnx", f"{tmp_path}/t.json")
    with pytest.raises(UserError) as refused:
        loaded("{flip: vertical}", further.replace("onnx: own.onnx", ""))
    assert mentions(str(refused.value), "data.eval_sets.other.transforms[0]: has no kind")
    for transform, message in (
        ("{flip: vertical, random: {noise: normal}}", "data.train.transforms[0].random: is not for flip"),
        ("{onnx: a.onnx, column: x}", "data.train.transforms[0].column: is not for onnx … columns"),
        ("{onnx: a.onnx, flip: vertical}", "data.train.transforms[0]: has flip and onnx"),
    ):
        with pytest.raises(UserError) as refused:
            loaded(transform)
        assert mentions(str(refused.value), message)
