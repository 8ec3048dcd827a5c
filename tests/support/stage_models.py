"""Models to cut into stages, and their stages run one behind the other without ranks or buffers."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from graph_build_models import run_file, run_graph, save_model, value
from kernels import LIBRARY
from onnx import helper

from ortflow.workflow.assembly.evaluating import batch_input, eval_graph
from ortflow.workflow.assembly.stages import Division, StageGraphs, build_stages
from ortflow.workflow.assembly.training import with_loss
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.intake.source import Source, read_source
from ortflow.workflow.graph.objective.loss import outputs_of
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.types import LOSS_SUM
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.parallel.stage import gradient_from_next, gradient_of
from ortflow.workflow.spec.run import TrainerRunSpec

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Config, build

Array = npt.NDArray[Any]
TOKENS, VOCABULARY, CLASSES, WIDE = 16, 11, 3, 256


@dataclass(frozen=True)
class Model:
    """A model before it is cut, and what it needs to run."""

    spec: TrainerRunSpec
    source: Source
    prepared: onnx.ModelProto
    evaluate: onnx.ModelProto

    def divided(self, division: Division, root: Path) -> StageGraphs:
        """Its stages."""
        tensors = self.source.tensors
        return build_stages(self.prepared, self.evaluate, tensors, self.source.roles.trained, division, root)

    def undivided(self, batch: Mapping[str, Array], *, kernels: bool = False) -> dict[str, Array]:
        """Loss, statistics and gradients of the one training graph, with ortflow's kernels or without."""
        model, _ = make_differentiable(self.prepared, self.source.roles.trained, LOSS_SUM)
        rewrites.before(model.graph)
        model, _ = differentiate(model, self.source.roles.trained, LOSS_SUM)
        feeds = {**self.source.tensors, **batch}
        if kernels:
            return run_graph(compose(with_kernels(model)), feeds, kernels=LIBRARY.path)
        return run_graph(compose(model), feeds)


def opened(path: Path, loss: Mapping[str, Any] | None = None, **changes: Any) -> Model:
    """What `build_graphs` has before it differentiates."""
    spec = run_file(path, loss, **changes)
    source = read_source(spec.onnx_model)
    forward = source.forward([*outputs_of(source.skeleton.graph, spec.onnx_model.loss).values()])
    batch = batch_input(forward.graph, source)
    prepared, _ = with_loss(forward, spec, source, batch)
    evaluate, _ = eval_graph([forward.graph.output[0].name], spec, source, batch)
    return Model(spec, source, prepared, evaluate)


def transformer(path: Path, *, layers: int = 4, dropout: float = 0.0, width: int = 32, vocabulary: int = 0) -> Path:
    """A decoder with its output weights tied to the embedding."""
    onnx.save(build(Config(layers, width, 2, TOKENS, vocabulary or VOCABULARY, dropout)), path)
    return path


def convolutions(path: Path, blocks: int = 4) -> Path:
    """Convolution, BatchNormalization and Relu several times over, for images of 8 x 8."""
    random = np.random.default_rng(0)
    tensors, nodes, x, width = {}, [], "x", 3
    for number in range(blocks):
        tensors |= {
            f"{number}.weight": random.normal(size=(6, width, 3, 3)) / 3, f"{number}.bias": random.normal(size=6),
            f"{number}.scale": random.normal(size=6) + 2, f"{number}.shift": random.normal(size=6),
            f"{number}.mean": random.normal(size=6), f"{number}.var": random.uniform(1, 2, 6),
        }  # fmt: skip
        convolved, normal, result = f"{number}.convolved", f"{number}.normal", f"{number}.result"
        statistics = [f"{number}.{name}" for name in ("scale", "shift", "mean", "var")]
        nodes += [
            helper.make_node("Conv", [x, f"{number}.weight", f"{number}.bias"], [convolved], pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", [convolved, *statistics], [normal]),
            helper.make_node("Relu", [normal], [result]),
        ]
        x, width = result, 6
    tensors["out"] = random.normal(size=(6, CLASSES))
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "out"], ["y"]),
    ]
    arrays = {name: array.astype("float32") for name, array in tensors.items()}
    return save_model(path, nodes, [value("x", ["batch", 3, 8, 8])], [value("y", ["batch", CLASSES])], arrays)


def skipping(path: Path) -> Path:
    """A perceptron whose first layer is read by the last of its five, and by the third."""
    random = np.random.default_rng(0)
    tensors, nodes, x = {}, [], "x"
    for number in range(5):
        tensors[f"{number}.weight"] = (random.normal(size=(6, 6)) / 2).astype("float32")
        nodes.append(helper.make_node("MatMul", [x, f"{number}.weight"], [f"{number}.product"]))
        nodes.append(helper.make_node("Tanh", [f"{number}.product"], [f"{number}.result"]))
        x = f"{number}.result"
        if number in (2, 4):
            nodes.append(helper.make_node("Add", [x, "0.result"], [f"{number}.sum"]))
            x = f"{number}.sum"
    tensors["out"] = random.normal(size=(6, CLASSES)).astype("float32")
    nodes.append(helper.make_node("MatMul", [x, "out"], ["y"]))
    return save_model(path, nodes, [value("x", ["batch", 6])], [value("y", ["batch", CLASSES])], tensors)


def slow_at_first(path: Path, products: int = 8) -> Path:
    """Products of equal size. Behind the first lie eight `Asinh`, which count as 3% of its operations each and take
    several times as long."""
    random, tensors, nodes, x = np.random.default_rng(0), {}, [], "x"
    for number in range(products):
        tensors[f"{number}.weight"] = (random.normal(size=(WIDE, WIDE)) / 16).astype("float32")
        nodes.append(helper.make_node("MatMul", [x, f"{number}.weight"], [f"{number}.product"]))
        x = f"{number}.product"
        for place in range(0 if number else 8):
            nodes.append(helper.make_node("Asinh", [x], [f"asinh.{place}"]))
            x = f"asinh.{place}"
    tensors["out"] = random.normal(size=(WIDE, CLASSES)).astype("float32")
    nodes.append(helper.make_node("MatMul", [x, "out"], ["y"]))
    return save_model(path, nodes, [value("x", ["batch", WIDE])], [value("y", ["batch", CLASSES])], tensors)


def needing_its_weights(path: Path) -> Path:
    """Rows of a table with a single row are looked up by a vector of zeros, which is a frozen weight."""
    random = np.random.default_rng(0)
    tensors = {f"{number}.weight": random.normal(size=(WIDE, WIDE)).astype("float32") for number in range(4)}
    tensors |= {"table": np.ones((1, WIDE), np.float32), "rows": np.zeros(8, np.float32)}
    tensors["out"] = random.normal(size=(WIDE, CLASSES)).astype("float32")
    nodes, x = [], "x"
    for number in range(4):
        nodes.append(helper.make_node("MatMul", [x, f"{number}.weight"], [f"{number}.product"]))
        x = f"{number}.product"
    nodes += [
        helper.make_node("Cast", ["rows"], ["indices"], to=7),
        helper.make_node("Gather", ["table", "indices"], ["found"]),
        helper.make_node("ReduceMean", ["found"], ["mean"], keepdims=0),
        helper.make_node("Mul", [x, "mean"], ["scaled"]),
        helper.make_node("MatMul", ["scaled", "out"], ["y"]),
    ]
    return save_model(path, nodes, [value("x", ["batch", WIDE])], [value("y", ["batch", CLASSES])], tensors)


def reading_statistics(path: Path) -> Path:
    """A layer multiplies by the running mean that BatchNormalization moves, so that its gradient reads it, too."""
    random = np.random.default_rng(0)
    tensors = {
        "weight": random.normal(size=(6, 6)), "scale": np.ones(6), "shift": np.zeros(6),
        "mean": random.normal(size=6), "var": np.ones(6), "out": random.normal(size=(6, CLASSES)),
    }  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "scale", "shift", "mean", "var"], ["n"]),
        helper.make_node("Mul", ["n", "mean"], ["z"]),
        helper.make_node("Tanh", ["z"], ["t"]),
        helper.make_node("MatMul", ["t", "out"], ["y"]),
    ]
    arrays = {name: array.astype("float32") for name, array in tensors.items()}
    return save_model(path, nodes, [value("x", ["batch", 6])], [value("y", ["batch", CLASSES])], arrays)


def batch_of(name: str, seed: int = 0, rows: int = 4) -> dict[str, Array]:
    """A micro-batch for one of the models above, by its function's name."""
    random = np.random.default_rng(seed)
    if name == "transformer":
        window = random.integers(0, VOCABULARY, (rows, TOKENS + 1))
        return {"tokens": window[:, :-1], "labels": window[:, 1:]}
    shape = (rows, 3, 8, 8) if name == "convolutions" else (rows, 6)
    return {"x": random.normal(size=shape).astype("float32"), "labels": random.integers(0, CLASSES, rows)}


def chain(
    made: StageGraphs, feeds: Mapping[str, Array], *, kernels: bool = False, library: Path | None = None
) -> dict[str, Array]:
    """Loss, statistics and gradients of one micro-batch: all forward passes, then all backward passes.

    `kernels`: of the graphs with ortflow's operators for CPUs. `library`: those that other graphs need.
    """
    form, library = (Form.KERNELS.of, LIBRARY.path) if kernels else (_same, library)
    known: list[dict[str, Array]] = []
    arriving: dict[str, Array] = {}
    results: dict[str, Array] = {}
    for stage in made.stages.stages:
        model = onnx.load_from_string(made.files[form(made.stages.forward(stage.number))])
        outputs = run_graph(model, {**feeds, **arriving}, kernels=library)
        known.append({**feeds, **arriving, **outputs})
        arriving = {sent.name: known[-1][sent.name] for sent in stage.sends}
        results |= {name: array for name, array in outputs.items() if is_result(name)}
    back: dict[str, Array] = {}
    for stage, values in zip(reversed(made.stages.stages), reversed(known), strict=True):
        next_ones = {gradient_from_next(name): array for name, array in back.items()}
        outputs = {}
        path = form(made.stages.backward(stage.number))
        if path in made.files:
            outputs = run_graph(onnx.load_from_string(made.files[path]), {**values, **next_ones}, kernels=library)
        for name in stage.trained:
            found = outputs[gradient_of(name)]
            results[gradient_of(name)] = results[gradient_of(name)] + found if gradient_of(name) in results else found
        back = {
            each.name: outputs[gradient_of(each.name)] if each.name not in stage.passed else back[each.name]
            for each in stage.receives
            if each.gradient
        }
    return results


def is_result(name: str) -> bool:
    """Whether an output is the loss's or a running statistic, and no activation."""
    return name.startswith("ortflow.loss_") or name.endswith("_new")


def evaluated(made: StageGraphs, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Loss and metrics of the stages of the evaluation graph."""
    arriving: dict[str, Array] = {}
    outputs: dict[str, Array] = {}
    for stage in made.stages.stages:
        model = onnx.load_from_string(made.files[made.stages.eval(stage.number)])
        outputs = run_graph(model, {**feeds, **arriving})
        arriving = {sent.name: {**arriving, **outputs}[sent.name] for sent in stage.eval_sends}
    return outputs


def assert_same(
    found: Mapping[str, Array],
    expected: Mapping[str, Array],
    names: Sequence[str] | None = None,
    tolerance: float = 1e-6,
) -> None:
    """Equal to `tolerance` of each tensor's largest element."""
    assert found.keys() == expected.keys()
    for name in names or expected:
        scale = max(1.0, float(np.abs(expected[name]).max(initial=0)))
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=tolerance * scale, err_msg=name)


def _same(path: Path) -> Path:
    return path
