"""Gradient of If: both branches against finite differences, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gradients import differences_of, gradients_of
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.expand import make_differentiable, undifferentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.normalize.randomness import seed_random_operators
from ortflow.workflow.graph.roles.decide import classify
from ortflow.workflow.graph.types import SEED
from ortflow.workflow.onnx_runtime import onnxruntime
from ortflow.workflow.spec.model import ParameterPatterns
from ortflow.workflow.trainer.obstacles import obstacle_in

Values = Mapping[str, np.ndarray]
RANDOM = np.random.default_rng(0)
X, W, V = (RANDOM.standard_normal((2, 3)) for _ in range(3))


@dataclasses.dataclass(frozen=True)
class Branch:
    """Nodes `operator inputs -> outputs`, in one string each, and the names of the branch's outputs."""

    nodes: Sequence[onnx.NodeProto]
    outputs: Sequence[str]
    constants: Values = dataclasses.field(default_factory=dict)


def node(text: str, **attributes: Any) -> onnx.NodeProto:
    operator, rest = text.split(" ", 1)
    inputs, outputs = (part.split() for part in rest.split("->"))
    return helper.make_node(
        operator, [name.strip("_") for name in inputs], outputs, f"{operator}.{outputs[0]}", **attributes
    )


def choice(condition: str, then: Branch, other: Branch, outputs: str, real: int = TensorProto.FLOAT) -> onnx.NodeProto:
    graphs = [
        helper.make_graph(
            branch.nodes,
            name,
            [],
            [helper.make_tensor_value_info(output, real, None) for output in branch.outputs],
            [tensor(value, key, real) for key, value in branch.constants.items()],
        )
        for name, branch in (("then", then), ("else", other))
    ]
    return node(f"If {condition} -> {outputs}", then_branch=graphs[0], else_branch=graphs[1])


def tensor(value: np.ndarray, name: str, real: int) -> onnx.TensorProto:
    array = np.asarray(value)
    kind = helper.tensor_dtype_to_np_dtype(real) if array.dtype.kind == "f" else array.dtype
    return numpy_helper.from_array(array.astype(kind), name)


def model_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Values,
    constants: Values | None = None,
    *,
    unknown: bool = False,
    real: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model of `nodes`, the last of which makes `y`; its `loss` is the sum of the squares of `y`."""
    given = []
    for name, array in inputs.items():
        kind = real if array.dtype.kind == "f" else helper.np_dtype_to_tensor_dtype(array.dtype)
        given.append(helper.make_tensor_value_info(name, kind, [None] * array.ndim if unknown else array.shape))
    graph = helper.make_graph(
        [*nodes, node("Mul y y -> squares"), node("ReduceSum squares -> loss", keepdims=0)],
        "case",
        given,
        [helper.make_tensor_value_info("loss", real, [])],
        [tensor(value, name, real) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


def check(
    build: Any,
    inputs: Values,
    parameters: Sequence[str],
    constants: Values | None = None,
    *,
    decompose: bool = False,
    unknown: Sequence[bool] = (False, True),
) -> None:
    """Compares the gradients of `parameters` with differences, with known and with unknown sizes.

    `build` takes the element type of real numbers and returns the nodes.
    """
    precise = model_of(build(TensorProto.DOUBLE), inputs, constants, real=TensorProto.DOUBLE)
    expected = differences_of(precise, inputs, parameters)
    for each in unknown:
        model = model_of(build(TensorProto.FLOAT), inputs, constants, unknown=each)
        if decompose:
            model, _ = make_differentiable(model, parameters, "loss")
        found = gradients_of(model, inputs, parameters)
        for name in parameters:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


both = pytest.mark.parametrize("condition", [np.array(True), np.array(False)], ids=["then", "else"])


@both
def test_values_of_one_branch_of_both_and_from_outside(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        then = Branch([node("Mul x w -> a"), node("Tanh a -> t")], ["t"])
        other = Branch([node("Sin x -> a"), node("Mul a v -> e")], ["e"])
        return [choice("c", then, other, "chosen", real), node("Mul chosen x -> z"), node("Add z w -> y")]

    check(build, {"c": condition, "x": X, "w": W, "v": V}, ["x", "w", "v"])


@both
def test_a_parameter_that_no_branch_reads_differentiably_has_no_gradient(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        ignored = [node("Shape v -> s"), node("ConstantOfShape s -> zeros"), node("Cast zeros -> z", to=real)]
        then = Branch([*ignored, node("Add x z -> t")], ["t"])
        return [choice("c", then, Branch([node("Neg x -> e")], ["e"]), "y", real)]

    inputs = {"c": condition, "x": X, "v": V}
    check(build, inputs, ["x"])
    assert differentiate(model_of(build(TensorProto.FLOAT), inputs), ["x", "v"], "loss")[1] == ["x"]


@both
def test_of_several_outputs_some_have_a_gradient(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        # The second output is not read by the loss; the first and the third of `else` are one value.
        then = Branch([node("Mul x w -> a"), node("Exp a -> b"), node("Cos x -> d")], ["a", "b", "d"])
        other = Branch([node("Sub x w -> f"), node("Sigmoid v -> g"), node("Identity f -> h")], ["f", "g", "h"])
        return [choice("c", then, other, "p q r", real), node("Mul p r -> y")]

    inputs = {"c": condition, "x": X, "w": W, "v": V}
    check(build, inputs, ["x", "w"])
    assert differentiate(model_of(build(TensorProto.FLOAT), inputs), ["v", "w"], "loss")[1] == ["w"]


@both
@pytest.mark.parametrize("inner", [np.array(True), np.array(False)], ids=["inner then", "inner else"])
def test_nested(condition: np.ndarray, inner: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        # Both inner branches, and the outer ones, use the same names, which ONNX allows.
        first = Branch([node("Mul u w -> i"), node("Tanh i -> j")], ["j"])
        second = Branch([node("Mul u v -> i"), node("Sin i -> k")], ["k"])
        then = Branch([node("Add x w -> u"), choice("d", first, second, "t", real)], ["t"])
        other = Branch([node("Mul x x -> u"), choice("d", second, first, "e", real), node("Mul e u -> m")], ["m"])
        return [choice("c", then, other, "y", real)]

    check(build, {"c": condition, "d": inner, "x": X, "w": W, "v": V}, ["x", "w", "v"])


@pytest.mark.parametrize("steps", [1, 3])
def test_the_squeeze_that_torchscript_writes(steps: int) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        then = Branch([node("Squeeze h axis -> t")], ["t"])
        return [
            node("Mul x w -> h"),
            node("Shape x -> s"),
            node("Gather s axis -> size"),
            node("Equal size one -> is_one"),
            choice("is_one", then, Branch([node("Identity h -> e")], ["e"]), "chosen", real),
            node("Sin chosen -> y"),
        ]

    data = {"x": RANDOM.standard_normal((2, steps)), "w": RANDOM.standard_normal((2, 1))}
    check(build, data, ["x", "w"], {"axis": np.array([1]), "one": np.array([1])}, unknown=[True])


@both
def test_constants_of_a_branch_and_known_values_around_it(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        then = Branch([node("Slice x starts ends axes -> p"), node("Mul p k -> t")], ["t"], {"k": W[:, :2]})
        exponent = tensor(np.array(3.0), "", real)
        other = Branch(
            [node("Constant -> n", value=exponent), node("Pow x n -> o"), node("Slice o starts ends axes -> e")], ["e"]
        )
        return [choice("c", then, other, "y", real)]

    limits = {"starts": np.array([1]), "ends": np.array([3]), "axes": np.array([1])}
    check(build, {"c": condition, "x": X}, ["x"], limits)


@both
def test_operators_of_a_branch_are_decomposed(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        inner = Branch([node("Einsum x w -> i", equation="ij,ij->ij")], ["i"])
        then = Branch(
            [choice("c", inner, Branch([node("Neg x -> n")], ["n"]), "m", real), node("LpNormalization m -> t")], ["t"]
        )
        return [choice("c", then, Branch([node("LpNormalization x -> e", axis=0)], ["e"]), "z", real),
                node("Mul z v -> y")]  # fmt: skip

    inputs = {"c": condition, "x": X, "w": W, "v": V}
    check(build, inputs, ["x", "w", "v"], decompose=True)
    ready, notes = make_differentiable(model_of(build(TensorProto.FLOAT), inputs), ["x", "w"], "loss")
    assert "1 Einsum decomposed for training" in notes
    assert not {each.op_type for each in walk.all_nodes(ready)} & {"Einsum", "LpNormalization"}


def test_a_branch_may_give_a_captured_value() -> None:
    """ONNX Runtime wants an Identity there, which the branches of the gradient have."""
    other = Branch([node("Mul x w -> e")], ["e"])
    model = model_of([choice("c", Branch([], ["x"]), other, "y")], {"c": np.array(True), "x": X, "w": W})
    derived, reached = differentiate(model, ["x", "w"], "loss")
    assert reached == ["x", "w"]
    (gradient,) = (each for each in derived.graph.node if each.op_type == "If" and len(each.output) == 2)
    for branch in walk.subgraphs(gradient):
        made = {name for each in branch.node for name in each.output}
        assert made.issuperset(value.name for value in branch.output)


def test_a_branch_without_gradient_names_its_node() -> None:
    unique = Branch([node("Unique m -> t")], ["t"])
    model = model_of([choice("c", unique, Branch([node("ReduceSum m -> e", keepdims=0)], ["e"]), "y")],
                     {"c": np.array(True), "m": np.eye(2)})  # fmt: skip
    assert undifferentiable(model, ["m"], ["loss"]) == ["node 'Unique.t' (Unique)"]
    with pytest.raises(
        UserError, match=r"node 'Unique\.t' \(Unique\) has no gradient here: Unique cannot be differentiated"
    ):
        make_differentiable(model, ["m"], "loss")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([node("Dropout x ratio on -> t")], r"'Dropout\.t' \(Dropout\) in one of its branches would draw other random"),
        (
            [node("RandomNormal -> r", shape=[2, 3]), node("Mul x r -> t")],
            r"'RandomNormal\.r' .* in one of its branches would draw other random numbers again",
        ),
        (
            [node("BatchNormalization x s s s s -> t m v", training_mode=1)],
            r"'BatchNormalization\.t' \(BatchNormalization\) in one of its branches is in training mode",
        ),
    ],
    ids=["dropout", "random", "statistics"],
)
def test_what_would_differ_when_it_is_computed_again_is_refused(nodes: list[onnx.NodeProto], message: str) -> None:
    constants = {"ratio": np.array(0.5), "on": np.array(True), "s": np.ones(3)}
    inputs = {"c": np.array(True), "x": X}
    other = Branch([node("Neg x -> e")], ["e"])
    model = model_of([choice("c", Branch(nodes, ["t"]), other, "y")], inputs, constants)
    with pytest.raises(UserError, match=r"node 'If\.y' \(If\) has no gradient here: node " + message):
        differentiate(model, ["x"], "loss")


def test_seeded_random_numbers_are_the_same_when_they_are_drawn_again() -> None:
    then = Branch([node("RandomNormal -> r", shape=[2, 3]), node("Mul r w -> t")], ["t"])
    chosen = choice("c", then, Branch([node("Neg w -> e")], ["e"]), "y")
    inputs = {"c": np.array(True), "w": W}
    model = model_of([chosen], inputs)
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    assert seed_random_operators(model)
    derived, _ = differentiate(model, ["w"], "loss")
    session = onnxruntime.InferenceSession(derived.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"c": inputs["c"], "w": W.astype(np.float32), SEED: np.array([7])}
    drawn, gradient = session.run(["y", "w_grad"], feeds)
    np.testing.assert_allclose(gradient, 2 * drawn * (drawn / feeds["w"]), rtol=1e-5)


@both
def test_dropout_in_evaluation_mode_passes_the_gradient(condition: np.ndarray) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        then = Branch([node("Dropout x ratio off -> d"), node("Sin d -> t")], ["t"])
        return [choice("c", then, Branch([node("Neg x -> e")], ["e"]), "y", real)]

    check(build, {"c": condition, "x": X}, ["x"], {"ratio": np.array(0.5), "off": np.array(False)})


def test_weights_in_branches_are_parameters() -> None:
    def branch(weight: str, output: str) -> Branch:
        value = numpy_helper.from_array(V.T.astype(np.float32))
        nodes = [node(f"Constant -> {weight}", value=value), node(f"Gemm x {weight} bias -> {output}")]
        return Branch(nodes, [output], {"bias": np.array([1.0, 2.0])})

    added = [node("Constant -> inner.bias", value_floats=[3.0, 4.0]), node("MatMul x v -> m"),
             node("Add m inner.bias -> u")]  # fmt: skip
    inner = choice("d", branch("net.a", "t"), Branch(added, ["u"]), "i")
    nodes = [choice("c", Branch([inner], ["i"]), branch("net.b", "e"), "y")]
    inputs = {"c": np.array(True), "d": np.array(False), "x": X}
    model, _ = prepare(model_of(nodes, inputs, {"v": V.T}))
    roles = classify(model, ParameterPatterns(), [])
    assert {role.name: role.reason for role in roles if role.role == "trained"} == {
        "v": "weight of MatMul", "inner.bias": "bias",
        "net.a": "weight of Gemm", "net.b": "weight of Gemm",
        "bias.1": "weight of Gemm", "bias.2": "weight of Gemm",
    }  # fmt: skip
    _, reached = differentiate(model, roles.trained, "loss")
    assert sorted(reached) == sorted(roles.trained)


def test_readers_in_branches_stand_for_the_if() -> None:
    inner = choice("d", Branch([node("Mul x w -> t")], ["t"]), Branch([node("Neg x -> e")], ["e"]), "i")
    nodes = [choice("c", Branch([inner], ["i"]), Branch([node("Add w x -> f")], ["f"]), "y")]
    found = walk.readers(model_of(nodes, {"c": np.array(True), "d": np.array(False), "x": X, "w": W}).graph)
    assert [(each.op_type, place) for each, place in found["w"]] == [("Add", 0), ("Mul", 1)]
    assert [(each.op_type, place) for each, place in found["d"]] == [("If", 0)]


def test_a_branch_chosen_by_numbers_is_not_captured(tmp_path: Path) -> None:
    then, other = Branch([node("Neg x -> t")], ["t"]), Branch([node("Sin x -> e")], ["e"])
    by_number = [node("ReduceMax x -> m", keepdims=0), node("Less m zero -> c"), choice("c", then, other, "y")]
    by_size = [node("Size x -> n"), node("Equal n one -> c"), choice("c", then, other, "y")]
    constants = {"zero": np.array(0.0), "one": np.array(1)}
    found = []
    for place, nodes in enumerate([by_number, by_size]):
        onnx.save(model_of(nodes, {"x": X}, constants), path := tmp_path / f"{place}.onnx")
        found.append(obstacle_in(path))
    assert found == ["node 'If.y' (If) would take the same branch every time", ""]


@pytest.mark.parametrize("condition", [True, False])
def test_a_parameter_whose_gradient_is_that_of_an_output(condition: bool) -> None:
    """The sum's gradient gets the name of v's, and the branches of the gradient read it."""

    def build(real: int) -> Sequence[onnx.NodeProto]:
        then, other = Branch([node("Mul x w -> a")], ["a"]), Branch([node("Mul w w -> b")], ["b"])
        return [choice("condition", then, other, "chosen", real), node("Add chosen v -> y")]

    check(build, {"condition": np.array(condition), "x": X, "w": W, "v": V}, ["w", "v"], unknown=[False])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", [0, 1])
def test_the_mode_of_a_dropout_in_a_branch_is_read_from_its_own_constant(training: bool, place: int) -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        mode = node("Constant -> mode", value=numpy_helper.from_array(np.array(training)))
        other_constant = numpy_helper.from_array(np.array(not training))
        constants = [mode]
        constants.insert(place, node("Constant -> other", value=other_constant))
        nodes = [node("Dropout x ratio mode -> d"), node("Sin d -> s"), node("Where other s x -> t")]
        then = Branch([*constants, *nodes], ["t"])
        return [choice("c", then, Branch([node("Neg x -> e")], ["e"]), "y", real)]

    inputs, constants = {"c": np.array(True), "x": X}, {"ratio": np.array(0.5)}
    if not training:
        check(build, inputs, ["x"], constants)
        return
    with pytest.raises(UserError, match=r"'Dropout\.d' \(Dropout\) in one of its branches would draw other random"):
        differentiate(model_of(build(TensorProto.FLOAT), inputs, constants), ["x"], "loss")
