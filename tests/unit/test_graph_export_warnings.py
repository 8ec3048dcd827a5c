"""Signs of an export for inference: each kind is found in a minimal file with it, and in no right file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from graph_build_models import built, save_model, value
from graph_small_models import graph, node, random
from messages import alike, mentions, says
from onnx import TensorProto, helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.roles.decide import classify
from ortflow.workflow.graph.roles.export_warnings import find_export_warnings, renamed_weights
from ortflow.workflow.spec.model import ParameterPatterns

ONES, ZEROS = np.ones(4, np.float32), np.zeros(4, np.float32)
IMAGE = {"x": (TensorProto.FLOAT, ["batch", 2, 8, 8])}
MERGED = "exporter merged parameters of equal value"
SCOPES = "pkg.torch.onnx.name_scopes"
SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"


def signs(model: onnx.ModelProto) -> list[str]:
    return find_export_warnings(model, classify(model, ParameterPatterns(), []))


def chain(
    names: list[str],
    norm: str = "LayerNormalization",
    *,
    scopes: list[str] | None = None,
    titles: list[str] | None = None,
    **tensors: np.ndarray,
) -> onnx.ModelProto:
    """Linear layers, each behind a normalisation of the scale named; `tensors` adds to or replaces the initializers."""
    nodes, held, last = [], dict.fromkeys(names, ONES), "x"
    for i, name in enumerate(names):
        others = [] if norm in ("Mul", "PRelu") else [f"b{i}"]
        nodes.append(node(norm, last, name, *others, output=f"n{i}"))
        if scopes:
            nodes[-1].metadata_props.add(key=SCOPES, value=str(["", scopes[i], f"call_{i}"]))
        if titles:
            nodes[-1].name = titles[i]
        last = f"v{i}" if i + 1 < len(names) else "y"
        nodes.append(node("MatMul", f"n{i}", f"w{i}", output=last))
        held |= {other: random(4) for other in others} | {f"w{i}": random(4, 4)}
    shape = ["batch", 4, 4] if norm == "InstanceNormalization" else ["batch", 4]
    return graph(nodes, held | tensors, {"x": (TensorProto.FLOAT, shape)})


class TestMerged:
    @pytest.mark.parametrize("norm", ["LayerNormalization", "InstanceNormalization", "Mul", "PRelu"])
    def test_a_scale_of_several_layers(self, norm: str) -> None:
        assert alike(signs(chain(["scale", "scale"], norm)), [f"parameter 'scale' … 2 places ({norm}) … {MERGED}"])

    def test_a_single_number(self) -> None:
        assert len(signs(chain(["slope", "slope"], "PRelu", slope=np.float32([0.25])))) == 1

    def test_biases_of_different_layers(self) -> None:
        nodes = [node("MatMul", "x", "w0", output="a"), node("Add", "a", "bias", output="b"),
                 node("Gemm", "b", "w1", "bias")]  # fmt: skip
        (sign,) = signs(graph(nodes, {"w0": random(4, 4), "w1": random(4, 4), "bias": ZEROS}))
        assert says(sign, f"parameter 'bias' … 2 places (Add, Gemm) … {MERGED}")

    def test_a_scale_and_a_running_variance(self) -> None:
        norm = helper.make_node("BatchNormalization", ["h", "ones", "zeros", "mean", "ones"], ["y"], "norm")
        tensors = {"w": random(4, 4), "ones": ONES, "zeros": ZEROS, "mean": random(4)}
        (sign,) = signs(graph([node("MatMul", "x", "w", output="h"), norm], tensors))
        assert says(sign, f"parameter 'ones' … 2 places (BatchNormalization) … {MERGED}")

    def test_operators_of_one_input(self) -> None:
        nodes = [node("Exp", "rates", output="e"), node("Mul", "x", "e", output="a"), node("Neg", "rates", output="n"),
                 node("Mul", "a", "n", output="b"), node("MatMul", "b", "w")]  # fmt: skip
        (sign,) = signs(graph(nodes, {"rates": ONES, "w": random(4, 4)}))
        assert says(sign, f"parameter 'rates' … 2 places (Exp, Neg) … {MERGED}")

    def test_scales_of_their_own(self) -> None:
        assert signs(chain(["s0", "s1"])) == []

    def test_a_scale_that_is_shared_where_equal_ones_are_not(self) -> None:
        assert signs(chain(["s0", "s0", "s1"])) == []

    def test_values_that_no_two_parameters_have_by_chance(self) -> None:
        assert signs(chain(["scale", "scale"], scale=random(4))) == []

    def test_layers_that_are_shared(self) -> None:
        nodes = [node("LayerNormalization", "x", "s", "b", output="n"), node("MatMul", "n", "w", output="v"),
                 node("LayerNormalization", "v", "s", "b", output="m"), node("MatMul", "m", "w", output="u"),
                 node("MatMul", "u", "head", output="h"), node("MatMul", "h", "last")]  # fmt: skip
        tensors = {name: random(4, 4) for name in ("w", "head", "last")}
        assert signs(graph(nodes, {"s": ONES, "b": ZEROS, **tensors})) == []

    def test_a_bias_of_a_layer_that_runs_once_a_time_step(self) -> None:
        nodes, last = [], "x"
        for i in range(3):
            nodes += [node("MatMul", last, "w", output=f"m{i}"), node("Add", f"m{i}", "b", output=f"s{i}")]
            last = f"s{i}"
        heads = [node("MatMul", last, "u", output="h"), node("MatMul", "h", "t")]
        assert signs(graph([*nodes, *heads], {name: random(4, 4) for name in "wut"} | {"b": ZEROS})) == []

    @pytest.mark.parametrize("second", ["a.norm", "b.norm"])
    def test_modules_of_the_dynamo_exporter_decide(self, second: str) -> None:
        found = signs(chain(["a.norm.weight"] * 2, scopes=["a.norm", second]))
        assert bool(found) == (second != "a.norm")

    def test_a_module_under_several_names(self) -> None:
        nodes = [node("Gemm", "x", "a.weight", "a.bias", output="h"), node("Gemm", "h", "a.weight", "a.bias")]
        for gemm, module in zip(nodes, "ab", strict=True):
            gemm.metadata_props.add(key=SCOPES, value=str(["", module, "linear"]))
        norm = [node("Mul", "x", "scale", output="h0"), *nodes]
        nodes[0].input[0] = "h0"
        assert signs(graph(norm, {"scale": ONES, "a.weight": random(4, 4), "a.bias": ZEROS})) == []

    @pytest.mark.parametrize("second", ["/a/norm_1/Layer", "/b/norm/Layer"])
    def test_modules_of_torchscript_decide(self, second: str) -> None:
        """onnxsim and similar tools drop the Identity that TorchScript's exporter writes for merged weights."""
        found = signs(chain(["module.a.norm.weight"] * 2, titles=["/a/norm/Layer", second]))
        assert bool(found) == ("/b/" in second)


def test_a_clone_of_a_parameter_keeps_its_name() -> None:
    """torchvision's Swin v2 copies the bias of its query, key and value before it clears a part."""
    nodes = [node("MatMul", "x", "w", output="h"), node("Identity", "bias", output="clone"), node("Add", "h", "clone")]
    model = graph(nodes, {"w": random(4, 4), "bias": ZEROS})
    assert [role.name for role in classify(model, ParameterPatterns(), []) if role.role == "trained"] == ["w", "bias"]


class TestFolded:
    @pytest.mark.parametrize(
        ("how", "names", "output"),
        [
            ("torchscript", ["onnx::Conv_24", "onnx::Conv_25"], "y"),
            ("dynamo", ["conv.weight", "conv.weight_bias"], "y"),
            ("dynamo", ["conv.weight"], "getitem_3"),
            ("computed", ["val_7", "conv.bias"], "y"),
            ("rule", ["conv.weight", "conv.bias"], "y"),
            ("plain", ["conv.weight", "conv.bias"], "y"),
            ("plain", ["conv.weight"], "conv2d_3"),
        ],
    )
    def test_batch_norm(self, how: str, names: list[str], output: str) -> None:
        nodes = [node("Conv", "x", *names, output=output)]
        if output != "y":
            nodes.append(node("Relu", output))
        if how == "rule":
            nodes[0].metadata_props.add(key="pkg.onnxscript.rewriter.rule_name", value="A, FuseBatchNormIntoConv")
        tensors = dict(zip(names, (random(3, 2, 3, 3), random(3)), strict=False))
        found = signs(graph(nodes, tensors, IMAGE))
        if how == "plain":
            assert found == []
        else:
            assert alike(found, [f"BatchNormalization … folded … 1 layer … node 'conv-{output}' (Conv)"])

    @pytest.mark.parametrize(
        ("scale", "shift", "found"),
        [
            ("onnx::Mul_45", "onnx::Add_46", 1),
            ("val_21", "val_23", 1),
            ("/norm/Constant_3_output_0", "/norm/Constant_4_output_0", 0),
            ("norm.weight", "norm.bias", 0),
        ],
    )
    def test_scale_of_a_group_norm(self, scale: str, shift: str, found: int) -> None:
        """Exporters write GroupNorm(2, 4) as an InstanceNormalization of groups, a scale and a shift of channels."""
        tensors = {
            "groups": np.array([0, 2, -1]), "channels": np.array([0, 4, 8, 8]),
            "one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32),
            "conv.weight": random(4, 2, 1, 1), scale: ONES.reshape(4, 1, 1), shift: ZEROS.reshape(4, 1, 1),
        }  # fmt: skip
        nodes = [
            node("Conv", "x", "conv.weight", output="c"),
            node("Reshape", "c", "groups", output="g"),
            node("InstanceNormalization", "g", "one", "zero", output="n"),
            node("Reshape", "n", "channels", output="m"),
            node("Mul", "m", scale, output="s"),
            node("Add", "s", shift),
        ]
        model = graph(nodes, tensors, IMAGE)
        assert len(signs(model)) == found
        if scale == "val_21":  # the normalisation had no parameters: all of the module's are here
            listed = "\n# inputs\np_conv_weight: PARAMETER target='conv.weight'\n"
            model.graph.metadata_props.add(key=SIGNATURE, value=listed)
            assert signs(model) == []


class TestLost:
    def lost(self, listed: list[str], weight: str = "linear.weight") -> list[str]:
        model = graph([node("MatMul", "x", weight)], {weight: random(4, 4)})
        text = "\n".join(f"p_{i}: PARAMETER target='{name}'" for i, name in enumerate(listed))
        model.graph.metadata_props.add(key=SIGNATURE, value=f"\n# inputs\n{text}\nx: USER_INPUT\n")
        return signs(model)

    def test_a_bias_of_zero(self) -> None:
        (sign,) = self.lost(["linear.weight", "linear.bias"])
        assert says(sign, "1 parameter … 'linear.bias' … not in the file")

    def test_a_parametrised_weight(self) -> None:
        names = [f"linear.parametrizations.weight.original{i}" for i in range(2)]
        assert self.lost(names, "val_3")[0].startswith("2 parameters of the module")

    def test_a_token_that_is_a_constant_now(self) -> None:
        nodes = [node("Concat", "expand", "x", output="c", axis=0), node("MatMul", "c", "head.weight")]
        model = graph(nodes, {"expand": random(1, 4), "head.weight": random(4, 4)})
        listed = "p_0: PARAMETER target='head.weight'\np_1: PARAMETER target='token'"
        model.graph.metadata_props.add(key=SIGNATURE, value=listed)
        assert len(signs(model)) == 1
        assert self.lost(["linear.weight", "token"]) == []

    def test_a_tied_tensor(self) -> None:
        nodes = [node("Gemm", "x", "a.weight", "b.bias", output="h"), node("Gemm", "h", "b.weight", "b.bias")]
        for gemm, module in zip(nodes, "ab", strict=True):
            gemm.metadata_props.add(key=SCOPES, value=str(["", module, "linear"]))
        model = graph(nodes, {"a.weight": random(4, 4), "b.weight": random(4, 4), "b.bias": random(4)})
        listed = "\n".join(f"p: PARAMETER target='{m}.{kind}'" for m in "ab" for kind in ("weight", "bias"))
        model.graph.metadata_props.add(key=SIGNATURE, value=listed)
        assert signs(model) == []

    def test_what_is_there_under_another_name_or_never_used(self) -> None:
        assert self.lost(["linear.weight", "pooler.weight", "pooler.bias"]) == []
        assert self.lost(["linear.weight"], "val_3") == []


def test_weights_that_lost_their_names() -> None:
    model = graph([node("MatMul", "x", "val_3", output="h"), node("MatMul", "h", "val_12")],
                  {"val_3": random(4, 20), "val_12": random(20, 4)})  # fmt: skip
    assert signs(model) == []
    (sentence,) = renamed_weights(model, classify(model, ParameterPatterns(), []))
    assert says(sentence, "2 trained weights … 'val_3' … names")


def test_what_export_for_training_wrote_has_no_signs() -> None:
    model = chain(["scale", "scale"])
    model.metadata_props.add(key="ortflow.parameters", value='["scale", "b0", "b1", "w0", "w1"]')
    assert signs(model) == []


class TestRefusal:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        nodes = [helper.make_node("LayerNormalization", ["x", "s", "b0"], ["n"]),
                 helper.make_node("MatMul", ["n", "w0"], ["v"]),
                 helper.make_node("LayerNormalization", ["v", "s", "b1"], ["m"]),
                 helper.make_node("MatMul", ["m", "w1"], ["y"])]  # fmt: skip
        tensors = {"s": ONES, "b0": random(4), "b1": random(4), "w0": random(4, 4), "w1": random(4, 4)}
        ends = [value("x", ["batch", 4])], [value("y", ["batch", 4])]
        return save_model(tmp_path / "m.onnx", nodes, *ends, tensors)

    def test_names_the_sign_and_both_ways_out(self, file: Path) -> None:
        with pytest.raises(UserError) as caught:
            built(file)
        output = str(caught.value)
        assert mentions(output, "parameter 's' … 2 places (LayerNormalization)")
        assert mentions(output, "ortflow.export_for_training … model.accept_inference_export: true")
        assert str(file) in output
        assert "\n" not in output
        assert not (file.parent / "graphs").exists()

    def test_the_key_makes_it_a_warning(self, file: Path) -> None:
        graphs = built(file, model__accept_inference_export=True)
        assert [sentence.partition(" is used")[0] for sentence in graphs.warnings] == ["parameter 's'"]
        assert type(graphs).load(graphs.root).warnings == graphs.warnings
