"""Weights that the run file names: whole, divided by columns, divided by rows; and what contradicts itself."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from divided import CHANNEL, divide_all, off, run, run_parts, training
from kernels import needs_kernels
from messages import mentions
from transformers_by_hand import Model, Sizes, transformer

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.division.divide import Divided, divide
from ortflow.workflow.graph.types import LOSS_SUM

pytestmark = needs_kernels


def chain() -> Model:
    """Four products, one behind the other."""
    random = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18]>
        g (float[n, 8] x, float[8, 12] a, float[12, 6] b, float[6, 12] c, float[12, 8] d) => (float "{LOSS_SUM}") {{
            ax = MatMul(x, a)
            ar = Tanh(ax)
            bx = MatMul(ar, b)
            br = Tanh(bx)
            cx = MatMul(br, c)
            cr = Tanh(cx)
            dx = MatMul(cr, d)
            squares = Mul(dx, dx)
            "{LOSS_SUM}" = ReduceSum <keepdims = 0> (squares)
        }}""")
    tensors = {
        name: random.normal(size=shape).astype("float32")
        for name, shape in {"a": (8, 12), "b": (12, 6), "c": (6, 12), "d": (12, 8)}.items()
    }
    batch = {"x": random.normal(size=(5, 8)).astype("float32")}
    return Model(onnx.shape_inference.infer_shapes(proto), tensors, batch)


def ways(divided: Divided) -> str:
    """The weights of `chain` with the axis along which each is divided."""
    return " ".join(f"{name}{'-' if region.axis is None else region.axis}" for name, region in divided.regions.items())


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, "a1 b0 c1 d0"),
        ({"rows": ["c"]}, "a- b1 c0 d-"),
        ({"columns": ["b"]}, "a- b1 c0 d-"),
        ({"columns": ["a"], "rows": ["d"]}, "a1 b0 c1 d0"),
        ({"whole": ["[ab]"]}, "a- b- c1 d0"),
        ({"whole": ["d"]}, "a1 b0 c- d-"),
        ({"whole": ["a"], "rows": ["c"]}, "a- b1 c0 d-"),
    ],
)
def test_weights_are_divided_as_they_are_named(named: dict[str, list[str]], expected: str) -> None:
    model = chain()
    names = list(model.tensors)
    divided = divide_all(model.proto, model.shapes, names, 2, named=named)
    assert ways(divided[0]) == expected
    graphs = [training(each.model, names, kernels=True) for each in divided]
    found = run_parts(graphs, divided, model.given)
    differences = off(found, run(training(model.proto, names, kernels=True), model.given))
    assert max(differences.values()) < 1e-5, differences
    evaluated = divide(model.proto, model.shapes, (), LOSS_SUM, 1, 2, CHANNEL, like=divided[1])
    assert evaluated.regions == divided[1].regions


@pytest.mark.parametrize(
    ("named", "where", "words"),
    [
        ({"whole": ["e"]}, "parallel.whole[0]", "the pattern 'e' matches no matrix"),
        ({"columns": ["a"], "rows": ["d", "a"]}, "parallel.rows[1]",
         "'a' … rows … parallel.columns[0] … columns … one of the lists"),
        ({"whole": ["*"], "rows": ["b"]}, "parallel.rows[0]", "'b' … rows … parallel.whole[0]"),
        ({"columns": ["a", "b"]}, "parallel.columns[0]",
         "'a' … columns … 'b' … columns by parallel.colu"),
        ({"columns": ["a"], "whole": ["b"]}, "parallel.columns[0]",
         "'a' … columns … 'b' … whole by parallel.whole[0]"),
        ({"rows": ["b"], "whole": ["a"]}, "parallel.rows[0]",
         "'b' … rows … 'a' … whole by parallel.whole[0]"),
        ({"rows": ["b", "c"]}, "parallel.rows[1]",
         "'c' … rows … 'b' … rows by parallel.rows[0]"),
        ({"rows": ["a"]}, "parallel.rows[0]", "'a' … rows … nothing"),
        ({"columns": ["d"]}, "parallel.columns[0]",
         "'d' … columns … no other product"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_with_the_reason(named: dict[str, list[str]], where: str, words: str) -> None:
    model = chain()
    with pytest.raises(UserError) as caught:
        divide_all(model.proto, model.shapes, list(model.tensors), 2, named=named)
    assert caught.value.where == where
    assert mentions(str(caught.value), words)


def test_what_prevents_a_division_is_named() -> None:
    model = transformer(Sizes(layers=1))
    names = list(model.tensors)
    # The norm between them is over the axis that would be divided.
    with pytest.raises(UserError, match=r"LayerNormalization.* reads a divided value") as caught:
        divide_all(model.proto, model.shapes, names, 2, named={"columns": ["*.attention.out.weight"]})
    assert caught.value.where == "parallel.columns[0]"
    with pytest.raises(UserError, match=r"did you mean '\*\.mlp\.down\.weight' or "):
        divide_all(model.proto, model.shapes, names, 2, named={"rows": ["*.mlp.dwn.weight"]})
    untied = transformer(Sizes(layers=1, tied=False))
    with pytest.raises(UserError, match="'table' cannot be divided by columns"):
        divide_all(untied.proto, untied.shapes, list(untied.tensors), 2, named={"columns": ["table"]})


def test_a_vocabulary_is_named_by_its_use() -> None:
    model = transformer(Sizes(layers=1, tied=False))
    names = list(model.tensors)
    regions = divide_all(model.proto, model.shapes, names, 2, named={"rows": ["table"], "columns": ["head*"]})[
        0
    ].regions
    assert not any(region.whole for name, region in regions.items() if name in ("table", "head.weight"))
    tied = transformer(Sizes(layers=1))
    for way in ("rows", "columns"):
        regions = divide_all(tied.proto, tied.shapes, list(tied.tensors), 2, named={way: ["table"]})[0].regions
        assert regions["table"].ranges == ((0, 35),)
