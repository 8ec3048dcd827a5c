"""The rule for Loop and Scan, against central differences in double precision, computed by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import run_graph
from onnx import TensorProto, helper, numpy_helper

import ortflow
from ortflow.workflow.errors import UserError
from ortflow.workflow.onnx_runtime import onnxruntime

STEP = 1e-5
Values = Mapping[str, np.ndarray]
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def node(text: str, **attributes: Any) -> onnx.NodeProto:
    """A node from "Operator inputs -> outputs", `_` for an omitted one."""
    operator, *names = text.split()
    middle = names.index("->")
    given, made = (["" if name == "_" else name for name in part] for part in (names[:middle], names[middle + 1 :]))
    return helper.make_node(operator, given, made, f"{operator}-{made[0] or made[-1]}", **attributes)


def body(nodes: Sequence[onnx.NodeProto], inputs: str, outputs: str, real: int, ranks: Mapping[str, int]) -> Any:
    """A graph; names that begin with i are int64, with c booleans, all others real. `ranks`: 2 if not listed."""

    def described(name: str) -> onnx.ValueInfoProto:
        kind = {"i": INT64, "c": BOOL}.get(name[0], real)
        return helper.make_tensor_value_info(name, kind, [None] * ranks.get(name, 0 if kind != real else 2))

    return helper.make_graph(list(nodes), "body", *([described(n) for n in part.split()] for part in (inputs, outputs)))


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Values, outputs: str, real: int = FLOAT, unknown: bool = False
) -> onnx.ModelProto:
    """A model whose `loss` is the sum of the sines of `outputs`."""
    kinds = {"f": real, "i": INT64, "b": BOOL}
    given = [
        helper.make_tensor_value_info(n, kinds[a.dtype.kind], [None] * a.ndim if unknown and a.ndim else a.shape)
        for n, a in inputs.items()
    ]
    ends = []
    for name in outputs.split():
        ends += [node(f"Sin {name} -> {name}_sin"), node(f"ReduceSum {name}_sin -> {name}_sum", keepdims=0)]
    ends.append(node(" ".join(["Sum", *(f"{name}_sum" for name in outputs.split()), "-> loss"])))
    graph = helper.make_graph([*nodes, *ends], "case", given, [helper.make_tensor_value_info("loss", real, [])])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)])


def differences(model: onnx.ModelProto, inputs: Values, wanted: Sequence[str]) -> dict[str, np.ndarray]:
    given = {n: a.astype(np.float64) if a.dtype.kind == "f" else a for n, a in inputs.items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = {}
    for name in wanted:
        found[name] = np.zeros(given[name].shape)
        for place in np.ndindex(given[name].shape):
            losses = []
            for step in (STEP, -STEP):
                moved = given[name].copy()
                moved[place] += step
                losses.append(float(session.run(["loss"], {**given, name: moved})[0]))
            found[name][place] = (losses[0] - losses[1]) / (2 * STEP)
    return found


def check(
    build: Any, inputs: Values, wanted: Sequence[str], outputs: str, unknown: Sequence[bool] = (False, True)
) -> None:
    expected = differences(
        model_of(build(TensorProto.DOUBLE), inputs, outputs, TensorProto.DOUBLE, False), inputs, wanted
    )
    for each in unknown:
        made = ortflow.grad(model_of(build(FLOAT), inputs, outputs, FLOAT, each), "loss", wanted)
        onnx.checker.check_model(made, full_check=True)
        assert not any(node.domain for node in made.graph.node)
        feeds = {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in inputs.items()}
        found = run_graph(made, feeds)
        for name in wanted:
            scale = max(1.0, float(np.abs(expected[name]).max(initial=0)))
            np.testing.assert_allclose(
                found[f"{name}_grad"], expected[name], rtol=3e-4, atol=3e-5 * scale, err_msg=name
            )


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape)


def recurrence(real: int, *, stop: bool = False) -> list[onnx.NodeProto]:
    """h = tanh(h w + x), its squares stacked; a second state is replaced by h in each iteration, an int is counted."""
    nodes = [
        node("MatMul h w -> hw"),
        node("Add hw x -> s"),
        node("Tanh s -> h2"),
        node("Mul h2 h -> out"),
        node("Add i_n i_step -> i_m"),
        node("Mul h2 h2 -> old2"),
        node("Mul old h2 -> out2"),
    ]
    nodes.append(node("Less i_m i_limit -> c_out") if stop else node("Identity c_in -> c_out"))
    inner = body(nodes, "i_t c_in h old i_n", "c_out h2 old2 i_m out out2", real, {})
    return [
        node("Constant -> i_step", value=numpy_helper.from_array(np.array(2))),
        node("Constant -> i_zero", value=numpy_helper.from_array(np.array(0))),
        node("Loop count _ x0 o0 i_zero -> y last i_done stack stack2", body=inner),
    ]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_states_sums_and_stacked_outputs(count: int) -> None:
    inputs = {
        "count": np.array(count),
        "x0": normal(2, 3),
        "o0": normal(2, 3, seed=5),
        "w": normal(3, 3),
        "x": normal(1, 3),
    }
    check(recurrence, inputs, ["x0", "o0", "w", "x"], "y last stack" if count else "y last")


def test_a_loop_that_ends_by_its_condition() -> None:
    """The count of iterations is known only when the loop has run."""
    inputs = {"count": np.array(100), "i_limit": np.array(7), "x0": normal(2, 3), "o0": normal(2, 3, seed=5)}
    inputs |= {"w": normal(3, 3), "x": normal(1, 3)}
    check(lambda real: recurrence(real, stop=True), inputs, ["x0", "o0", "w", "x"], "y last stack stack2")


def test_the_number_of_the_iteration_chooses_a_branch_and_an_element() -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        one = helper.make_graph(
            [node("Sin v -> a")], "then", [], [helper.make_tensor_value_info("a", real, [None, None])]
        )
        two = helper.make_graph(
            [node("Mul v w -> b")], "else", [], [helper.make_tensor_value_info("b", real, [None, None])]
        )
        nodes = [
            node("Gather xs i_t -> v", axis=1),
            node("Constant -> i_two", value=numpy_helper.from_array(np.array(2))),
            node("Mod i_t i_two -> i_odd"),
            node("Cast i_odd -> c_odd", to=BOOL),
            node("If c_odd -> r", then_branch=one, else_branch=two),
            node("Mul h r -> h2"),
            node("Identity c_in -> c_out"),
        ]
        inner = body(nodes, "i_t c_in h", "c_out h2 r", real, {})
        return [node("Loop count _ h0 -> y stack", body=inner)]

    inputs = {"count": np.array(3), "h0": normal(2, 2), "xs": normal(2, 3, 2), "w": normal(2, 2, seed=4)}
    check(build, inputs, ["h0", "xs", "w"], "y stack")


def test_a_loop_in_a_loop() -> None:
    def build(real: int) -> list[onnx.NodeProto]:
        nodes = [node("MatMul g w -> gw"), node("Sin gw -> g2"), node("Identity c_b -> c_inner")]
        inner = body(nodes, "i_s c_b g", "c_inner g2", real, {})
        outer = [
            node("Loop count _ h -> g_last", body=inner),
            node("Add g_last x -> h2"),
            node("Identity c_a -> c_outer"),
        ]
        return [node("Loop count _ h0 -> y", body=body(outer, "i_t c_a h", "c_outer h2", real, {}))]

    check(
        build,
        {"count": np.array(2), "h0": normal(2, 2), "w": normal(2, 2, seed=1), "x": normal(1, 2)},
        ["h0", "w", "x"],
        "y",
    )


def test_what_a_body_has_is_decomposed() -> None:
    """LpNormalization has a decomposition and no rule."""

    def build(real: int) -> list[onnx.NodeProto]:
        nodes = [node("MatMul h w -> hw"), node("LpNormalization hw -> h2", axis=1), node("Identity c_in -> c_out")]
        return [node("Loop count _ h0 -> y", body=body(nodes, "i_t c_in h", "c_out h2", real, {}))]

    check(build, {"count": np.array(3), "h0": normal(2, 3), "w": normal(3, 3)}, ["h0", "w"], "y")


@pytest.mark.parametrize("seed", range(12))
def test_scans(seed: int) -> None:
    """Random axes, directions and sizes; two states, of which one is passed on; two scan inputs and outputs."""
    random = np.random.default_rng(seed)
    steps, batch, width = (int(n) for n in random.integers(1, 5, 3))
    in_axes, out_axes = random.integers(0, 3, 2), random.integers(0, 3, 2)
    directions = random.integers(0, 2, 4)

    def sliced(array: np.ndarray, axis: int) -> np.ndarray:
        return np.moveaxis(array, 0, axis)

    def build(real: int) -> list[onnx.NodeProto]:
        nodes = [
            node("MatMul h w -> hw"),
            node("Mul hw a -> s"),
            node("Add s b -> p"),
            node("Tanh p -> h2"),
            node("Identity k -> k2"),
            node("Mul h2 k -> q"),
            node("Add h a -> r"),
        ]
        inner = body(nodes, "h k a b", "h2 k2 q r", real, {})
        options = {
            "num_scan_inputs": 2,
            "scan_input_axes": in_axes.tolist(),
            "scan_output_axes": out_axes.tolist(),
            "scan_input_directions": directions[:2].tolist(),
            "scan_output_directions": directions[2:].tolist(),
        }
        if seed % 3 == 0:
            for kind in ("axes", "directions"):
                del options[f"scan_output_{kind}"]
        return [node("Scan x0 k0 as bs -> y k1 q_all r_all", body=inner, **options)]

    inputs = {
        "x0": random.normal(size=(batch, width)),
        "k0": random.normal(size=(batch, width)),
        "as": sliced(random.normal(size=(steps, batch, width)), in_axes[0]),
        "bs": sliced(random.normal(size=(steps, batch, width)), in_axes[1]),
        "w": random.normal(size=(width, width)),
    }
    ends = ["y q_all", "y k1 q_all r_all", "r_all q_all", "y"][seed % 4]
    check(build, inputs, ["x0", "w", "as", "bs", *(["k0"] if "q_all" in ends else [])], ends)


def refused(nodes: Sequence[onnx.NodeProto], inner: Sequence[onnx.NodeProto]) -> str:
    graph = body([*inner, node("Identity c_in -> c_out")], "i_t c_in h", "c_out h2", FLOAT, {})
    inputs = {"count": np.array(2), "h0": normal(2, 2)}
    model = model_of([*nodes, node("Loop count _ h0 -> y", body=graph)], inputs, "y")
    with pytest.raises(UserError) as caught:
        ortflow.grad(model, "loss", "h0")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_refused_is_named() -> None:
    # An operator without a rule; and one that would draw other numbers when the backward pass computes it again.
    pool = [
        node("Unsqueeze h i_axes -> image"),
        node("MaxRoiPool image regions -> pooled", pooled_shape=[1, 1]),
        node("ReduceSum pooled -> total", keepdims=0),
        node("Mul h total -> h2"),
    ]
    before = [
        node("Constant -> i_axes", value=numpy_helper.from_array(np.array([0, 1]))),
        node("Constant -> regions", value=numpy_helper.from_array(np.zeros((1, 5), np.float32))),
    ]
    assert "(MaxRoiPool) has no gradient here" in refused(before, pool)
    noise = [node("RandomNormal -> n", shape=[2, 2]), node("Mul h n -> h2")]
    message = refused([], noise)
    assert "Loop-y' (Loop) has no gradient here" in message
    assert "(RandomNormal) in its body would draw other random numbers again" in message
