"""Messages name the module and the line of Python that a node comes from, where the exporter noted them."""

from __future__ import annotations

import onnx
import pytest
from graph_build_models import kept_child, value
from onnx import helper

from ortflow.workflow.assembly.loading import check_loads
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.origin import CLASSES, SCOPES, STACK, torch_operator

STACK_OF_PYTORCH = (
    'File "/opt/lib/python3.11/site-packages/torch/nn/modules/container.py", line 259, in forward\n'
    '    input = module(input)\n  File "/home/me/my net/model.py", line 31, in forward\n    return F.gelu(x)\n'
    '  File "/opt/lib/python3.11/site-packages/torch/nn/functional.py", line 12, in gelu'
)
NOTED = {SCOPES: "['', 'layers.0', 'layers.0.act', 'det']", STACK: STACK_OF_PYTORCH}
PLACE = r"module 'layers.0.act', model.py line 31"


def node(op_type: str, *inputs: str, noted: dict[str, str] | None = None, name: str = "n") -> onnx.NodeProto:
    made = helper.make_node(op_type, inputs, [f"{name}_out"], name=name)
    for key, text in (NOTED if noted is None else noted).items():
        made.metadata_props.add(key=key, value=text)
    return made


def model_of(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    total = helper.make_node("ReduceSum", [nodes[-1].output[0]], ["loss"], keepdims=0)
    graph = helper.make_graph([*nodes, total], "forward", [value("a", [3, 3])], [value("loss", [])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize(
    ("noted", "named"),
    [
        (NOTED, f"node 'n' (Det; {PLACE})"),
        ({SCOPES: NOTED[SCOPES]}, "node 'n' (Det; module 'layers.0.act')"),
        ({STACK: 'File "C:\\\\me\\\\model.py", line 31'}, "node 'n' (Det; model.py line 31)"),
        ({SCOPES: "['', 'det']", STACK: 'File "/lib/torch/nn/functional.py", line 3'}, "node 'n' (Det)"),
        ({SCOPES: "__import__('os').abort()", STACK: "File model.py"}, "node 'n' (Det)"),
        ({SCOPES: "[" * 50_000, STACK: 'File "' * 10_000}, "node 'n' (Det)"),
        ({SCOPES: "{'a': 1}", STACK: ""}, "node 'n' (Det)"),
        ({SCOPES: "[1, 2]"}, "node 'n' (Det)"),
        ({SCOPES: "{[]: 1}"}, "node 'n' (Det)"),
        ({SCOPES: f"[0x{'f' * 400}+1j]"}, "node 'n' (Det)"),
        ({SCOPES: "-" * 50_000 + "1"}, "node 'n' (Det)"),
        ({SCOPES: "1+" * 40_000 + "1"}, "node 'n' (Det)"),
    ],
)
def test_place_in_the_name_of_a_node(noted: dict[str, str], named: str) -> None:
    assert walk.called(node("Det", "a", noted=noted)) == named


@pytest.mark.parametrize(
    ("noted", "operator"),
    [
        ("['', 'aten.max.dim']", "aten.max.dim"),
        ("[1]", ""),
        ("[]", ""),
        # Longer than Python turns into text.
        (f"[0x{'f' * 9_000}]", ""),
    ],
)
def test_operator_of_pytorch(noted: str, operator: str) -> None:
    assert torch_operator(node("Det", "a", noted={CLASSES: noted})) == operator


def test_place_of_a_node_without_a_name() -> None:
    made = node("Det", "a")
    made.name = ""
    assert walk.called(made) == f"the Det node that makes 'n_out' ({PLACE})"


def test_operator_that_cannot_be_differentiated() -> None:
    with pytest.raises(UserError, match=rf"node 'n' \(Unique; {PLACE}\) has no gradient here"):
        make_differentiable(model_of(node("Unique", "a")), ["a"], "loss")


def test_nodes_that_stand_in_for_another_have_its_place() -> None:
    """LpNormalization is composed of other operators before it is differentiated."""
    model, _ = make_differentiable(model_of(node("LpNormalization", "a")), ["a"], "loss")
    made = [node for node in model.graph.node if node.name.startswith("n/")]
    assert len(made) > 1
    assert {walk.called(node).split("; ")[1] for node in made} == {f"{PLACE})"}


def test_kernel_that_is_missing() -> None:
    """ONNX Runtime's error has only the name of a node that was created for the gradient."""
    nodes = [
        helper.make_node("Cast", ["a"], ["i"], to=onnx.TensorProto.UINT32),
        helper.make_node("ReduceSum", ["i"], ["e"], name="/up_Grad/ReduceSum_0"),
        helper.make_node("Cast", ["e"], ["f"], to=onnx.TensorProto.FLOAT),
    ]
    forward = model_of(node("Relu", "a", name="/up"))
    with pytest.raises(UserError, match=rf"node '/up' \(Relu; {PLACE}\) has a gradient, ReduceSum, that"):
        check_loads(kept_child(), model_of(*nodes).SerializeToString(), "training", forward)
