"""Which tensors are parameters: judged by place, name and value, stated by the export, overridden by the user."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from graph_small_models import graph, node, random
from messages import mentions, says
from onnx import TensorProto, helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.normalize.prepare import prepare
from ortflow.workflow.graph.patterns import nearest
from ortflow.workflow.graph.roles.decide import Roles, classify
from ortflow.workflow.graph.roles.guesses import judged_constants, refuse_guesses
from ortflow.workflow.graph.roles.role_heuristics import SINES
from ortflow.workflow.spec.model import ParameterPatterns

NONE = ParameterPatterns()


def judged(model: onnx.ModelProto, **patterns: list[str]) -> dict[str, str]:
    return {role.name: role.role for role in classify(model, ParameterPatterns(**patterns), [])}


def with_head(*nodes: onnx.NodeProto) -> list[onnx.NodeProto]:
    """Nodes that end in h, followed by a linear layer, so that something is trained."""
    return [*nodes, node("MatMul", "h", "head.weight")]


HEAD = {"head.weight": random(4, 4)}


class TestByPlace:
    @pytest.mark.parametrize("name", ["layer.weight", "onnx::MatMul_7", "val_3", "StatefulPartitionedCall/MatMul"])
    def test_linear_weights_whatever_their_name(self, name: str) -> None:
        assert judged(graph([node("MatMul", "x", name)], {name: random(4, 4)})) == {name: "trained"}

    @pytest.mark.parametrize("name", ["layer.bias", "onnx::Add_8", "val_3", "/Constant_output_0"])
    def test_bias_behind_a_product(self, name: str) -> None:
        model = graph(
            [node("MatMul", "x", "w", output="h"), node("Add", "h", name)], {"w": random(4, 4), name: random(4)}
        )
        assert judged(model) == {"w": "trained", name: "trained"}

    def test_bias_behind_a_product_that_was_rearranged(self) -> None:
        """tf2onnx writes a convolution along one axis as one along two, whose other axis it removes again."""
        nodes = [
            node("Conv", "x", "w", output="wide"),
            node("Squeeze", "wide", "last", output="h"),
            node("Add", "h", "const_fold_opt__209"),
        ]
        tensors = {"w": random(3, 2, 3, 1), "const_fold_opt__209": random(1, 3, 1), "last": np.array([3])}
        model = graph(nodes, tensors, {"x": (TensorProto.FLOAT, ["batch", 2, 8, 1])})
        assert judged(model) == {"w": "trained", "const_fold_opt__209": "trained", "last": "constant"}

    def test_convolution_and_its_norm(self) -> None:
        model = graph(
            [
                node("Conv", "x", "w", "b", output="h"),
                helper.make_node("BatchNormalization", ["h", "scale", "shift", "mean", "var"], ["y"], "norm"),
            ],
            {"w": random(3, 2, 3, 3), **{n: np.ones(3, np.float32) for n in ("b", "scale", "shift", "mean", "var")}},
            {"x": (TensorProto.FLOAT, ["batch", 2, 8, 8])},
        )
        assert judged(model) == {
            **dict.fromkeys(["w", "b", "scale", "shift"], "trained"),
            **dict.fromkeys(["mean", "var"], "state"),
        }

    def test_weight_behind_a_transposition(self) -> None:
        model = graph([node("Transpose", "w", output="t", perm=[1, 0]), node("MatMul", "x", "t")], {"w": random(4, 4)})
        assert judged(model) == {"w": "trained"}

    def test_embedding_and_positions(self) -> None:
        model = graph(
            [
                node("Gather", "wte", "x", output="e"),
                node("Gather", "wpe", "places", output="p"),
                node("Add", "e", "p", output="h"),
                node("MatMul", "h", "head.weight"),
            ],
            {"wte": random(10, 4), "wpe": random(3, 4), "places": np.arange(3), **HEAD},
            {"x": (TensorProto.INT64, ["batch", 3])},
        )
        assert judged(model) == {"wte": "trained", "wpe": "trained", "head.weight": "trained", "places": "constant"}

    def test_class_token_and_position_embedding(self) -> None:
        model = graph(
            [
                node("Unsqueeze", "x", "axis", output="u"),
                node("Concat", "cls_token", "u", output="c", axis=1),
                node("Add", "c", "pos_embed", output="h"),
                node("MatMul", "h", "head.weight"),
            ],
            {"axis": np.array([1]), "cls_token": random(1, 1, 4), "pos_embed": random(1, 2, 4), **HEAD},
            {"x": (TensorProto.FLOAT, [1, 4])},
        )
        assert judged(model) == {
            "axis": "constant",
            **dict.fromkeys(["cls_token", "pos_embed", "head.weight"], "trained"),
        }

    def test_layer_scale(self) -> None:
        model = graph(with_head(node("Mul", "x", "block.gamma", output="h")), {"block.gamma": random(4), **HEAD})
        assert judged(model)["block.gamma"] == "trained"

    def test_single_numbers(self) -> None:
        tensors = {"scale": np.float32(0.5), "one": np.ones(1, np.float32)}
        nodes = with_head(node("Mul", "x", "scale", output="a"), node("Add", "a", "one", output="h"))
        assert judged(graph(nodes, {**tensors, **HEAD})) == {
            "scale": "constant",
            "one": "constant",
            "head.weight": "trained",
        }

    def test_norms_without_parameters(self) -> None:
        """TorchScript writes GroupNorm as InstanceNormalization with ones and zeros of its own."""
        model = graph(
            [node("InstanceNormalization", "x", "/Constant_1_output_0", "/Constant_2_output_0", output="h"),
             node("Mul", "h", "gn.weight")],
            {
                "/Constant_1_output_0": np.ones(2, np.float32),
                "/Constant_2_output_0": np.zeros(2, np.float32),
                "gn.weight": np.ones((2, 1), np.float32),
            },
            {"x": (TensorProto.FLOAT, ["batch", 2, 8])},
        )  # fmt: skip
        roles = judged(model)
        assert roles["gn.weight"] == "trained"
        assert set(roles.values()) == {"trained", "constant"}
        assert list(roles.values()).count("constant") == 2

    def test_norms_of_groups_written_out(self) -> None:
        """In opset 21 form, with one scale per channel: the groups have none of their own."""
        tensors = {"gn.weight": random(6), "gn.bias": random(6)}
        model = graph(
            [node("GroupNormalization", "x", "gn.weight", "gn.bias", output="y", num_groups=2)],
            tensors,
            {"x": (TensorProto.FLOAT, ["batch", 6, 8])},
        )
        model.opset_import[0].version = 21
        roles = classify(prepare(model)[0], NONE, [])
        assert roles.trained == ["gn.weight", "gn.bias"]

    def test_weights_of_classes_looked_up_by_the_label(self) -> None:
        model = graph(
            [node("Gather", "class_weight", "label", output="g"), node("MatMul", "x", "w", output="h"),
             node("Mul", "h", "g")],
            {"class_weight": np.array([0.2, 0.8, 0.5], np.float32), "w": random(4, 1)},
            {"x": (TensorProto.FLOAT, [2, 4]), "label": (TensorProto.INT64, [2, 1])},
        )  # fmt: skip
        roles = classify(model, NONE, ["label"])
        assert (roles["class_weight"].role, roles["class_weight"].reason) == ("constant", "indexed by labels only")
        assert classify(model, NONE, [])["class_weight"].role == "trained"

    def test_rows_looked_up_by_the_label_are_learned(self) -> None:
        """A mean of each class in a flow, an embedding of the class in a generator."""
        model = graph(
            [node("Gather", "class_means", "label", output="g"), node("MatMul", "x", "w", output="h"),
             node("Sub", "h", "g")],
            {"class_means": random(3, 5), "w": random(4, 5)},
            {"x": (TensorProto.FLOAT, [2, 4]), "label": (TensorProto.INT64, [2])},
        )  # fmt: skip
        assert classify(model, NONE, ["label"])["class_means"].role == "trained"


class TestByName:
    @pytest.mark.parametrize(
        "name",
        ["model.rotary_emb.inv_freq", "attn.causal_mask", "rope.cos_cached", "embeddings.position_ids", "freqs_cis"],
    )
    def test_buffers(self, name: str) -> None:
        model = graph(with_head(node("Mul", "x", name, output="h")), {name: random(4), **HEAD})
        assert judged(model)[name] == "constant"

    @pytest.mark.parametrize(
        "name", ["val_12", "onnx::Mul_55", "/block/Constant_3_output_0", "_lifted_tensor_constant2"]
    )
    def test_made_up_names_where_a_parameter_need_not_be(self, name: str) -> None:
        model = graph(with_head(node("Mul", "x", name, output="h")), {name: random(4), **HEAD})
        assert judged(model)[name] == "constant"


class TestByValue:
    @pytest.mark.parametrize("low", [-np.inf, -1e4, np.finfo(np.float32).min])
    def test_masks(self, low: float) -> None:
        mask = np.triu(np.full((4, 4), low, np.float32), 1)
        model = graph(with_head(node("Add", "x", "bias", output="h")), {"bias": mask, **HEAD})
        role = classify(model, NONE, [])["bias"]
        assert (role.role, role.reason) == ("constant", "holds a mask")

    def test_zeros_and_ones(self) -> None:
        tensors = {"attn.bias": np.tril(np.ones((4, 4), np.float32)), **HEAD}
        assert judged(graph(with_head(node("Mul", "x", "attn.bias", output="h")), tensors))["attn.bias"] == "constant"

    def test_a_table_of_sines(self) -> None:
        angles = np.arange(32)[:, None] / 10000 ** (np.arange(8) / 8)
        table = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float32)
        nodes = [node("Gather", "positions.weight", "x", output="h"), node("MatMul", "h", "w")]
        model = graph(nodes, {"positions.weight": table, "w": random(16, 4)}, {"x": (TensorProto.INT64, ["n"])})
        assert judged(model) == {"positions.weight": "constant", "w": "trained"}

    def test_weights_that_look_like_none_stay_weights(self) -> None:
        """An identity matrix, a range and ones, as fresh weights of layers."""
        tensors = {"a": np.eye(4, dtype=np.float32), "b": np.arange(16, dtype=np.float32).reshape(4, 4)}
        model = graph([node("MatMul", "x", "a", output="h"), node("MatMul", "h", "b")], tensors)
        assert judged(model) == {"a": "trained", "b": "trained"}


class TestSaidByTheExport:
    def test_wins_over_judgement(self) -> None:
        model = graph(
            [node("MatMul", "x", "a", output="h"), node("Mul", "h", "mask", output="i"), node("MatMul", "i", "b")],
            {"a": random(4, 4), "mask": random(4), "b": random(4, 4)},
            properties={"ortflow.parameters": ["mask", "gone"], "ortflow.frozen": ["b"], "ortflow.constants": ["a"]},
        )
        assert judged(model) == {"a": "constant", "mask": "trained", "b": "frozen"}

    def test_running_statistics_are_state_whatever_it_says(self) -> None:
        names = ["scale", "shift", "mean", "var"]
        model = graph(
            [helper.make_node("BatchNormalization", ["x", *names], ["y"], "norm")],
            {name: np.ones(4, np.float32) for name in names},
            properties={"ortflow.constants": ["mean", "var"]},
        )
        assert judged(model) == {"scale": "trained", "shift": "trained", "mean": "state", "var": "state"}

    @pytest.mark.parametrize("value", ["no json", '{"a": 1}', "[1]"])
    def test_nonsense_is_refused(self, value: str) -> None:
        model = graph([node("MatMul", "x", "a")], {"a": random(4, 4)})
        model.metadata_props.add(key="ortflow.frozen", value=value)
        with pytest.raises(UserError, match=r"'ortflow\.frozen'.*export the model again"):
            classify(model, NONE, [])


class TestPatterns:
    def model(self) -> onnx.ModelProto:
        return graph(
            [node("MatMul", "x", "body.weight", output="a"), node("Mul", "a", "inv_freq", output="h"),
             node("MatMul", "h", "head.weight")],
            {"body.weight": random(4, 4), "inv_freq": random(4), **HEAD},
            properties={"ortflow.parameters": ["body.weight", "head.weight"], "ortflow.constants": ["inv_freq"]},
        )  # fmt: skip

    def test_win_over_all(self) -> None:
        assert judged(self.model(), train=["inv_*"], freeze=["body.*"]) == {
            "inv_freq": "trained",
            "body.weight": "frozen",
            "head.weight": "trained",
        }

    def test_a_later_list_wins(self) -> None:
        roles = judged(self.model(), train=["*"], freeze=["*.weight"], constant=["body.*"])
        assert roles == {"inv_freq": "trained", "body.weight": "constant", "head.weight": "frozen"}

    def test_that_match_nothing(self) -> None:
        with pytest.raises(UserError) as caught:
            judged(self.model(), freeze=["head.weight", "bdy.weight"])
        assert mentions(
            str(caught.value), "model.parameters.freeze[1]", "'bdy.weight'", "'body.weight' or 'head.weight'"
        )

    def test_nothing_left_to_train(self) -> None:
        with pytest.raises(UserError, match="no parameter to train"):
            judged(self.model(), freeze=["*.weight"])

    def test_what_cannot_be_a_parameter(self) -> None:
        model = graph(
            [node("Unsqueeze", "x", "axes", output="h"), node("MatMul", "h", "w")],
            {"axes": np.array([1]), "w": random(4, 4)},
        )
        with pytest.raises(UserError, match=r"model.parameters.train\[0\].*'axes' is int64"):
            judged(model, train=["axes"])

    def normalized(self, **properties: list[str]) -> onnx.ModelProto:
        """A part `layer1` with a weight, a BatchNormalization and an integer, and a head."""
        names = [f"layer1.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        return graph(
            [
                node("MatMul", "x", "layer1.weight", output="h"),
                helper.make_node("BatchNormalization", ["h", *names], ["i"], "norm"),
                node("Squeeze", "i", "layer1.axes", output="j"),
                node("MatMul", "j", "head.weight"),
            ],
            {
                "layer1.weight": random(4, 4),
                **{name: np.ones(4, np.float32) for name in names},
                "layer1.axes": np.array([1]),
                "head.weight": random(4, 2),
            },
            properties={f"ortflow.{key}": names for key, names in properties.items()},
        )

    def test_a_part_of_the_model_is_frozen_with_its_statistics(self) -> None:
        roles = judged(self.normalized(), freeze=["layer1.*"])
        assert roles.pop("layer1.axes") == "constant"
        assert roles.pop("head.weight") == "trained"
        assert set(roles.values()) == {"frozen"}

    def test_the_export_records_that_statistics_are_frozen(self) -> None:
        roles = judged(self.normalized(frozen=["layer1.norm.running_mean", "layer1.norm.running_var"]))
        assert roles["layer1.norm.running_mean"] == roles["layer1.norm.running_var"] == "frozen"
        assert roles["layer1.norm.weight"] == "trained"

    def test_statistics_in_evaluation_mode_beside_others_in_training_mode(self) -> None:
        """TorchScript's exporter keeps the mode of each module in training mode."""
        model = self.normalized()
        assert judged(model)["layer1.norm.running_mean"] == "state"
        other = [f"other.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
        trained = helper.make_node(
            "BatchNormalization", ["x", *other], ["n", "new_mean", "new_var"], "other", training_mode=1
        )
        model.graph.node.insert(0, trained)
        model.graph.node[1].input[0] = "n"
        model.graph.initializer.extend(numpy_helper.from_array(np.ones(4, np.float32), name) for name in other)
        roles = judged(model)
        assert roles["other.running_mean"] == "state"
        assert roles["layer1.norm.running_mean"] == roles["layer1.norm.running_var"] == "frozen"

    def test_one_of_two_statistics(self) -> None:
        with pytest.raises(UserError) as caught:
            judged(self.normalized(), freeze=["*.running_mean"])
        assert mentions(
            str(caught.value),
            "model.parameters.freeze",
            "'layer1.norm.running_mean'",
            "node 'norm'",
            "freeze 'layer1.norm.running_mean' and 'layer1.norm.running_var'",
        )

    def test_statistics_are_not_trained(self) -> None:
        assert judged(self.normalized(), train=["layer1.*"])["layer1.norm.running_mean"] == "state"
        with pytest.raises(UserError, match=r"model.parameters.train\[0\]: 'layer1.norm.running_mean' is state"):
            judged(self.normalized(), train=["*.running_mean"])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("layers1.*", ["layer1.*", "layer2.*"]),
        ("*.wieght", ["*.weight"]),
        ("layer1.con.weight", ["layer1.conv.weight"]),
        ("*norms*", ["*.norm.*"]),
        ("ENCODER.*", []),
    ],
)
def test_nearest_names(pattern: str, near: list[str]) -> None:
    names = ["layer1.conv.weight", "layer1.norm.weight", "layer1.norm.bias", "layer2.fc.weight"]
    assert nearest(pattern, names)[: len(near) or None] == near


def test_a_parameter_that_is_infinite() -> None:
    weight = random(4, 4)
    weight[1, 1] = np.inf
    model = graph([node("MatMul", "x", "w")], {"w": weight})
    with pytest.raises(UserError, match=r"'w'.*1 non-finite"):
        classify(model, NONE, [])
    with pytest.raises(UserError, match="no parameter to train"):
        judged(model, constant=["w"])


def test_a_weight_of_bytes_is_quantised() -> None:
    tensors = {"w": np.ones((4, 4), np.int8), **HEAD}
    model = graph(with_head(node("Cast", "w", output="f", to=1), node("MatMul", "x", "f", output="h")), tensors)
    with pytest.raises(UserError, match=r"weight 'w' is int8.*train the float model"):
        classify(model, NONE, [])


class TestByUse:
    """Float initializers with names of their own are parameters wherever the outputs depend on them differentiably."""

    ROWS = (TensorProto.INT64, ["batch", 3, 1])

    def test_rows_of_a_table(self) -> None:
        for name in ("experts", "val_182"):
            nodes = with_head(node("GatherND", name, "x", output="h"))
            model = graph(nodes, {name: random(5, 4), **HEAD}, {"x": self.ROWS})
            assert judged(model)[name] == "trained"

    @pytest.mark.parametrize(
        "nodes",
        [
            [node("Exp", "table", output="e"), node("Mul", "x", "e", output="h")],
            [node("Softplus", "table", output="e"), node("Mul", "x", "e", output="h")],
            [node("GatherElements", "table", "places", output="e", axis=0), node("Mul", "x", "e", output="h")],
            [node("Neg", "table", output="e"), node("Mul", "x", "e", output="h")],
            [node("Max", "x", "table", output="h")],
        ],
    )
    def test_operands_of_any_operator_with_a_gradient(self, nodes: list[onnx.NodeProto]) -> None:
        places = {"places": np.array([[0, 0, 0, 0]])} if nodes[0].op_type == "GatherElements" else {}
        roles = judged(graph(with_head(*nodes), {"table": random(1, 4), **places, **HEAD}))
        assert roles["table"] == "trained"

    def test_parts_of_a_table(self) -> None:
        split = onnx.helper.make_node("Split", ["table"], ["a", "b"], "split", num_outputs=2)
        nodes = with_head(split, node("Mul", "x", "a", output="m"), node("Mul", "m", "b", output="h"))
        assert judged(graph(nodes, {"table": random(2, 4), **HEAD}))["table"] == "trained"

    def test_what_the_outputs_do_not_depend_on_differentiably_is_a_constant_for_certain(self) -> None:
        nodes = with_head(node("Greater", "x", "limits", output="g"), node("Cast", "g", output="h", to=1))
        roles = classify(graph(nodes, {"limits": random(4), **HEAD}), NONE, [])
        assert (roles["limits"].role, roles["limits"].confidence) == ("constant", "certain")

    def test_what_could_not_be_trained_stays_a_guess(self) -> None:
        nodes = with_head(node("Det", "table", output="d"), node("Mul", "x", "d", output="h"))
        roles = classify(graph(nodes, {"table": random(4, 65, 65), **HEAD}), NONE, [])
        assert (roles["table"].role, roles["table"].confidence) == ("constant", "guess")

    @pytest.mark.parametrize("wave", [np.cos, np.sin])
    def test_rotary_tables(self, wave: np.ufunc) -> None:
        angles = np.arange(6)[:, None] * np.array([1.0, 0.1, 1.0, 0.1])
        table = wave(angles)[None, None].astype(np.float32)
        model = graph(with_head(node("Mul", "x", "unsqueeze_14", output="h")), {"unsqueeze_14": table, **HEAD})
        role = classify(model, NONE, [])["unsqueeze_14"]
        assert (role.role, role.reason, role.confidence) == ("constant", f"holds {SINES}", "likely")

    @pytest.mark.parametrize("scale", [1e-6, 0.02, 0.3, 1.0])
    def test_small_values_are_not_a_rotary_table(self, scale: float) -> None:
        """A class token of timm's begins with a deviation of 1e-6."""
        token = (random(1, 4, 96) / 0.02 * scale).astype(np.float32)
        nodes = [node("Concat", "cls_token", "x", output="c", axis=1), node("MatMul", "c", "w")]
        model = graph(nodes, {"cls_token": token, "w": random(96, 4)}, {"x": (TensorProto.FLOAT, [1, "t", 96])})
        assert judged(model)["cls_token"] == "trained"


class TestWhatIsLeftUntrainedByJudgement:
    def roles(self, size: int, **patterns: list[str]) -> Roles:
        """For a head of 16 values and a constant of `size` under a name that an exporter generated."""
        nodes = with_head(node("Mul", "x", "val_3", output="h"))
        model = graph(nodes, {"val_3": random(size, 1), **HEAD})
        return classify(model, ParameterPatterns(**patterns), [])

    def test_one_sentence_with_the_share(self) -> None:
        (sentence,) = judged_constants(self.roles(4))
        assert says(sentence, "not trained … constant: 'val_3' … Mul … 4 values, 20.00%")

    def test_refused_above_a_hundredth(self) -> None:
        with pytest.raises(UserError) as caught:
            refuse_guesses(self.roles(4), "m.onnx")
        assert mentions(
            str(caught.value), "m.onnx", "'val_3'", "20.00%", "model.parameters.train, .freeze or .constant"
        )

    @pytest.mark.parametrize("name", ["zeros_3", "val_3"])
    def test_zeros_are_a_constant_that_is_reported(self, name: str) -> None:
        """T5 adds such a position bias in each layer that has none of its own."""
        nodes = with_head(node("Add", "x", name, output="h"))
        model = graph(nodes, {name: np.zeros((4, 4), np.float32), **HEAD}, {"x": (TensorProto.FLOAT, [4, 4])})
        roles = classify(model, NONE, [])
        refuse_guesses(roles, "m.onnx")
        (sentence,) = judged_constants(roles)
        assert says(sentence, f"not trained … constant: '{name}' (zeros in Add with a generated name)")
        own = graph(with_head(node("Add", "x", "shift", output="h")), {"shift": np.zeros((4, 4), np.float32), **HEAD})
        assert judged(own)["shift"] == "trained"

    @pytest.mark.parametrize("key", ["train", "freeze", "constant"])
    def test_settled_by_the_run_file(self, key: str) -> None:
        roles = self.roles(4, **{key: ["val_*"]})
        refuse_guesses(roles, "m.onnx")
        assert judged_constants(roles) == []

    def test_accepted_below(self) -> None:
        nodes = with_head(node("Mul", "x", "val_3", output="a"), node("MatMul", "a", "w", output="h"))
        model = graph(nodes, {"val_3": random(1, 4), "w": random(4, 4), "head.weight": random(4, 200)})
        roles = classify(model, NONE, [])
        refuse_guesses(roles, "m.onnx")
        assert "4 values, 0.49% of the model's" in judged_constants(roles)[0]

    @pytest.mark.parametrize(("values", "reported"), [(np.tril(np.ones((4, 4))), False), (random(4, 4), True)])
    def test_a_mask_by_name_and_values(self, values: np.ndarray, reported: bool) -> None:
        nodes = with_head(node("Mul", "x", "causal_mask", output="h"))
        model = graph(nodes, {"causal_mask": values.astype(np.float32), **HEAD}, {"x": (TensorProto.FLOAT, [4, 4])})
        assert bool(judged_constants(classify(model, NONE, []))) == reported

    def test_nothing_to_report(self) -> None:
        assert judged_constants(classify(graph([node("MatMul", "x", "w")], {"w": random(4, 4)}), NONE, [])) == []


class TestListedByTheDynamoExporter:
    """Its files record which tensors are parameters and which are buffers, but not which parameters are frozen."""

    def roles(self, listed: str, producer: str = "pytorch") -> Roles:
        nodes = with_head(node("Mul", "x", "scale", output="a"), node("MatMul", "a", "filter", output="b"),
                          node("Mul", "b", "val_3", output="h"))  # fmt: skip
        tensors = {"scale": np.float32(2), "filter": random(4, 4), "val_3": random(1, 4), **HEAD}
        model = graph(nodes, tensors)
        model.producer_name = producer
        if listed:
            key = "pkg.torch.export.ExportedProgram.graph_signature"
            model.graph.metadata_props.add(key=key, value=f"\n# inputs\n{listed}\n")
        return classify(model, NONE, [])

    def test_a_parameter_of_one_number(self) -> None:
        assert self.roles("p_scale: PARAMETER target='scale'")["scale"].role == "trained"

    def test_a_buffer_that_multiplies(self) -> None:
        assert self.roles("b_filter: BUFFER target='filter' persistent=True")["filter"].role == "constant"

    @pytest.mark.parametrize(("producer", "reported"), [("pytorch", True), ("by hand", False)])
    def test_a_number_that_may_be_one(self, producer: str, reported: bool) -> None:
        role = self.roles("", producer)["scale"]
        assert (role.role, role.confidence) == ("constant", "likely" if reported else "certain")

    def test_a_number_that_the_exporter_named(self) -> None:
        assert self.roles("p_filter: PARAMETER target='filter'")["scale"].confidence == "certain"
