"""The check of a set against the graph's inputs: every mismatch is reported, with the sample and the value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
from data_sets import ragged, write_batches
from messages import mentions

from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.feed import Feed
from ortflow.workflow.data.inputs import BatchInput, LabelSequences, Limits
from ortflow.workflow.data.schema import Ragged
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.mapping import ColumnReference, parse_reference

Shape = tuple[int | None, ...]


def data(name: str, shape: Shape, dtype: str = "int64", role: Literal["data", "label"] = "data") -> BatchInput:
    return BatchInput(name, dtype, shape, role)


def check(
    dataset: Dataset,
    inputs: Sequence[BatchInput],
    columns: Mapping[str, str] | None = None,
    bounds: Mapping[str, int] | None = None,
    *,
    ignore_index: int | None = None,
    pad_value: Mapping[str, float] | None = None,
    truths: Sequence[str] = (),
    signs: Sequence[str] = (),
    counts: Sequence[str] = (),
    classes: Sequence[str] = (),
    sequences: Mapping[str, LabelSequences] | None = None,
    **changed: Any,
) -> tuple[Feed, ...]:
    limits = Limits(bounds or {}, ignore_index, pad_value, truths, signs, classes, counts, sequences or {})
    options: dict[str, Any] = {"micro_batch": 2, "smaller_batch": False, "key_path": "data.train"} | changed
    return check_inputs(dataset, inputs, columns or {}, limits, **options)


def faults(dataset: Dataset, inputs: Sequence[BatchInput], *rest: Any, **options: Any) -> list[str]:
    with pytest.raises(Faults) as caught:
        check(dataset, inputs, *rest, **options)
    assert not any("\n" in str(fault) for fault in caught.value.faults)
    return [str(fault) for fault in caught.value.faults]


@pytest.fixture
def tokens(tmp_path: Path) -> Dataset:
    values = np.arange(50, dtype=np.uint8).reshape(5, 10)
    return write_batches(tmp_path / "set.arrow", {"tokens": values[:3]}, {"tokens": values[3:]})


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("tokens", ColumnReference("tokens")),
        ("tokens[:-1]", ColumnReference("tokens", None, -1)),
        ("tokens[1:]", ColumnReference("tokens", 1, None)),
        ("a b.c[-3:12]", ColumnReference("a b.c", -3, 12)),
        ("x[:]", ColumnReference("x")),
    ],
)
def test_references(text: str, reference: ColumnReference) -> None:
    assert parse_reference(text) == reference
    assert parse_reference(str(reference)) == reference


@pytest.mark.parametrize(
    "text", ["", "x[", "x[1]", "x[::2]", "x[1:2:3]", "x[a:]", "x[1:] ", " x", "x[1:][2:]", "[1:]", "x[1.5:]", "x[ 1:]"]
)
def test_invalid_references(text: str) -> None:
    with pytest.raises(UserError, match=r"here: .*write column"):
        parse_reference(text, "here")


def test_a_set_that_fits(tokens: Dataset) -> None:
    inputs = [data("input_ids", (None, 9)), data("labels", (2, None), role="label")]
    feeds = check(
        tokens, inputs, {"input_ids": "tokens[:-1]", "labels": "tokens[1:]"}, {"input_ids": 50}, ignore_index=-100
    )
    assert [(feed.input, str(feed.source), feed.dtype.name) for feed in feeds] == [
        ("input_ids", "tokens[:-1]", "int64"),
        ("labels", "tokens[1:]", "int64"),
    ]


def test_all_faults_are_reported_together(tokens: Dataset) -> None:
    inputs = [data("input_ids", (None, 8)), data("mask", (None, 10)), data("labels", (None,), "float32")]
    reported = faults(tokens, inputs, {"input_ids": "tokens[:-1]", "label": "tokens", "labels": "token"})
    assert len(reported) == 4
    assert mentions(reported[0], "data.train.columns", "'label'", "'labels'")
    assert mentions(reported[1], "column 'tokens[:-1]' … shape [9] … input 'input_ids' … shape [8]")
    assert mentions(reported[2], "column 'mask' … input 'mask' … tokens")
    assert reported[2].startswith("data.train.columns.mask: ")
    assert mentions(reported[3], "column 'token' … input 'labels' … 'tokens'?")


@pytest.mark.parametrize(
    ("column", "shape", "reported"),
    [
        ("scalar", (None, 1), "scalars … input 'x' … shape [1]"),
        ("scalar[1:]", (None,), "which cannot be sliced"),
        ("image", (None, 3, None), "shape [3, 4, 5] … input 'x' … shape [3, any]"),
        ("image[:2]", (None, 3, 4, 5), "shape [2, 4, 5]"),
        ("image[3:]", (None, None, 4, 5), "holds samples without elements"),
        ("image", (), "has no batch axis"),
        ("variable", (None,), "float32 variable … input 'x' … scalars"),
        (
            "variable",
            (None, 2),
            "sample 1 … column 'variable' … 3 elements … input 'x' … shape [2]",
        ),
        ("variable[2:]", (None, None), "sample 0 … column 'variable[2:]' … no element"),
    ],
)
def test_shapes(column: str, shape: Shape, reported: str, tmp_path: Path) -> None:
    variable = ragged([[1, 2], [1, 2, 3], [1, 2]], "float32")
    image = np.zeros((3, 3, 4, 5), np.float32)
    dataset = write_batches(
        tmp_path / "set.arrow", {"scalar": np.zeros(3, np.float32), "image": image, "variable": variable}
    )
    assert mentions(faults(dataset, [data("x", shape, "float32")], {"x": column})[0], reported)


@pytest.mark.parametrize(
    ("part", "lengths"), [("[1:]", 2), ("[:-1]", 2), ("[-2:]", 2), ("[:1]", 1), ("[-9:9]", 3), ("[1:-1]", 1)]
)
def test_a_variable_column_that_just_fits(part: str, lengths: int, tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": ragged([[1, 2, 3], [4, 5, 6]])})
    assert check(dataset, [data("x", (None, lengths))], {"x": f"x{part}"})[0].length == lengths
    if lengths > 1:
        assert "elements, but" in faults(dataset, [data("x", (None, lengths - 1))], {"x": f"x{part}"})[0]


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("uint8", "int64"),
        ("uint16", "int32"),
        ("int32", "int64"),
        ("float16", "float32"),
        ("int64", "int64"),
        ("uint8", "bool"),
        ("int64", "bool"),
        ("int64", "int32"),
        ("uint64", "int64"),
        ("int8", "uint8"),
        ("float64", "float32"),
        ("uint8", "float32"),
        ("int64", "float32"),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_types_that_hold_every_value(stored: str, wanted: str, known: bool, tmp_path: Path) -> None:
    dataset = one_column(tmp_path, np.array([0, 1, 1], stored), known=known)
    assert check(dataset, [data("x", (None,), wanted)])[0].dtype == np.dtype(wanted)


def one_column(folder: Path, values: np.ndarray, *, known: bool) -> Dataset:
    """A set of the column x, with or without its range in the file."""
    if known:
        return write_batches(folder / "set.arrow", {"x": values})
    batch = pa.record_batch({"x": pa.array(values)})
    with pa.OSFile(str(folder / "set.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return Dataset.open(folder / "set.arrow")


@pytest.mark.parametrize(
    ("stored", "value", "wanted", "expected_text"),
    [
        ("int64", 2**31, "int32", "2147483648 … int32 of input 'x' … -2147483648 to 2147483647"),
        ("uint64", 2**63, "int64", "9223372036854775808 … int64 of input 'x'"),
        ("int8", -1, "uint8", "-1 … uint8 of input 'x' … 0 to 255"),
        ("int64", 2, "bool", "2 … bool of input 'x' … 0 and 1"),
        ("float64", 1e39, "float32", "1e+39 … float32 of input 'x' … -3.40282e+38 to"),
        (
            "uint8",
            255,
            "float32",
            "255 … float32 of input 'x' … 0 and 1",
        ),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_a_value_that_the_type_cannot_hold(
    stored: str, value: float, wanted: str, expected_text: str, known: bool, tmp_path: Path
) -> None:
    dataset = one_column(tmp_path, np.array([0, value, 1], stored), known=known)
    assert mentions(faults(dataset, [data("x", (None,), wanted)])[0], "sample 1", "column 'x'", stored, expected_text)


@pytest.mark.parametrize("wanted", ["int64", "bool"])
def test_floats_are_not_integers(wanted: str, tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": np.array([0, 1], np.float32)})
    assert mentions(faults(dataset, [data("x", (None,), wanted)])[0], f"column 'x' … float32 … {wanted} of input 'x'")


def test_doubles_that_are_not_finite_are_accepted(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": np.array([np.nan, -np.inf, 1.0])})
    assert check(dataset, [data("x", (None,), "float32")])


def test_integer_labels_of_a_float_input(tmp_path: Path) -> None:
    """For a regression any that fp32 holds, for binary cross-entropy 0 and 1."""
    dataset = write_batches(tmp_path / "set.arrow", {"x": np.array([0, 7, 1])})
    label = data("x", (None,), "float32", "label")
    assert check(dataset, [label])
    assert "takes only 0 and 1" in faults(dataset, [label], truths=["x"])[0]
    large = write_batches(tmp_path / "large.arrow", {"x": np.array([0, 2**24 + 1])})
    assert "holds 16777217" in faults(large, [label])[0]


@pytest.mark.parametrize(("wanted", "most"), [("float32", 1 << 24), ("float16", 1 << 11)])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_a_float_rounds_are_no_labels(wanted: str, most: int, sign: int, tmp_path: Path) -> None:
    label = data("x", (None,), wanted, "label")
    for name, value, fits in (("most", most, True), ("more", most + 1, False)):
        dataset = write_batches(tmp_path / f"{name}.arrow", {"x": np.array([sign * value, 0])})
        if fits:
            assert check(dataset, [label])
        else:
            assert mentions(faults(dataset, [label])[0], "sample 0", f"{sign * value}, … -{most} to {most};")


@pytest.mark.parametrize("stored", ["float32", "float64", "float16"])
@pytest.mark.parametrize(
    ("value", "fits"), [(1.0, True), (1.0000005, True), (1.5, False), (-0.25, False), (37.0, False)]
)
def test_float_labels_of_a_binary_cross_entropy_are_probabilities(
    stored: str, value: float, fits: bool, tmp_path: Path
) -> None:
    values = np.full(5000, 0.5, stored)
    values[4500] = value
    dataset = write_batches(tmp_path / "set.arrow", {"x": values})
    label = data("x", (None,), "float32", "label")
    assert check(dataset, [label])
    if fits:
        assert check(dataset, [label], truths=["x"])
    else:
        reported = faults(dataset, [label], truths=["x"])[0]
        assert mentions(reported, "sample 4500 … column 'x'", str(value), "0 to 1", "model.loss.kind")


@pytest.mark.parametrize("stored", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("value", "fits"), [(1.0, True), (0.5, False), (-1.0, False), (2.0, False), (np.nan, True)])
def test_labels_of_a_hinge_loss_are_0_and_1(stored: str, value: float, fits: bool, tmp_path: Path) -> None:
    """Between, the loss is a constant without a gradient."""
    values = np.zeros(5000, stored)
    values[4500] = value
    dataset = write_batches(tmp_path / "set.arrow", {"x": values})
    label = data("x", (None,), "float32", "label")
    if fits:
        assert check(dataset, [label], signs=["x"])
    else:
        reported = faults(dataset, [label], signs=["x"])[0]
        assert mentions(reported, f"sample 4500 … column 'x' holds {value}", "'x' are 0 or 1", "model.loss.kind")


@pytest.mark.parametrize("role", ["data", "label"])
@pytest.mark.parametrize("kind", ["fixed", "variable", "slice"])
@pytest.mark.parametrize("nothing", [np.nan, np.inf])
def test_a_column_without_a_number_is_refused(
    role: Literal["data", "label"], kind: str, nothing: float, tmp_path: Path
) -> None:
    values = np.full((5000, 2), nothing, np.float32)
    columns, shape = {"x": "x"}, (None, 2)
    if kind == "slice":
        values[:, 1], columns, shape = 1, {"x": "x[:1]"}, (None, 1)
    stored = {"x": ragged(values.tolist(), "float32") if kind == "variable" else values}
    dataset = write_batches(tmp_path / "set.arrow", stored)
    reported = faults(dataset, [data("x", shape, "float32", role)], columns)
    assert len(reported) == 1
    assert mentions(reported[0], str(tmp_path / "set.arrow"), "column 'x' holds nothing but NaN and infinity")
    # One row is enough to train on.
    values[4990] = 1
    stored = {"x": ragged(values.tolist(), "float32") if kind == "variable" else values}
    assert check(write_batches(tmp_path / "one.arrow", stored), [data("x", shape, "float32", role)], columns)


def test_the_padding_of_probabilities_is_one(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": ragged([[1.0, 0.0], [1.0]])})
    label = data("x", (None, None), "float32", "label")
    assert check(dataset, [label], truths=["x"], pad_value={"x": 1})
    assert mentions(faults(dataset, [label], truths=["x"], pad_value={"x": 2})[0], "data.pad_value.x", "0 to 1")


@pytest.mark.parametrize("stored", ["float32", "float64", "int64", "uint8"])
def test_labels_of_a_poisson_loss_are_not_negative(stored: str, tmp_path: Path) -> None:
    values = np.arange(5000).astype(stored)
    label = data("x", (None,), "float32", "label")
    assert check(write_batches(tmp_path / "counts.arrow", {"x": values}), [label], counts=["x"])
    if stored != "uint8":
        values[4500] = -2
        dataset = write_batches(tmp_path / "set.arrow", {"x": values})
        assert check(dataset, [label])
        reported = faults(dataset, [label], counts=["x"])[0]
        assert mentions(reported, "sample 4500 … column 'x' holds -2", "counts or rates, at least 0", "model.loss.kind")


def test_the_padding_of_counts_is_none_below_0(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": ragged([[1.0, 0.0], [1.0]])})
    label = data("x", (None, None), "float32", "label")
    assert check(dataset, [label], counts=["x"], pad_value={"x": 7})
    assert mentions(faults(dataset, [label], counts=["x"], pad_value={"x": -1})[0], "data.pad_value.x", "0 or more")


WRONG_LABELS = [(0, 0, None), (7, 0, 6), (3, 3, None), (6, 0, 6)]
"""A label, the blank, and the number of classes."""


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize(("label", "blank", "classes"), WRONG_LABELS)
def test_a_sequence_has_neither_blanks_nor_unknown_classes(
    label: int, blank: int, classes: int | None, variable: bool, tmp_path: Path
) -> None:
    rows = np.full((5000, 4), 2)
    rows[:, 3] = -1
    given = [data("y", (None, None), role="label"), data("n", (None,))]
    options: dict[str, Any] = {"bounds": {"y": classes} if classes else None}
    for name, lengths, fits in (("all", None, False), ("first", "n", True), ("both", "n", False)):
        values, sequences = rows.copy(), {"y": LabelSequences(blank, lengths)}
        values[4500, 1] = label
        columns = {"y": ragged(values.tolist()) if variable else values, "n": np.full(5000, 1 if fits else 2)}
        dataset = write_batches(tmp_path / f"{name}.arrow", columns)
        if fits:
            assert check(dataset, given, sequences=sequences, **options)
        else:
            reported = faults(dataset, given, sequences=sequences, **options)[0]
            assert mentions(reported, f"sample 4500 … column 'y' holds {label}", f"without the blank, {blank}")


def test_a_label_behind_padding_is_not_among_those_that_count(tmp_path: Path) -> None:
    """The loss takes the first two places of a row with two labels."""
    dataset = write_batches(tmp_path / "set.arrow", {"y": np.array([[1, 2, -1], [1, -1, 2]])})
    given = [data("y", (None, None), role="label")]
    reported = faults(dataset, given, sequences={"y": LabelSequences(0)})[0]
    assert mentions(reported, "sample 1 … column 'y' holds -1", "pad shorter sequences with a number below 0")


def test_a_sequence_is_padded_by_what_does_not_count(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"y": ragged([[1, 2], [3]])})
    given, sequences = [data("y", (None, None), role="label")], {"y": LabelSequences(0)}
    (feed,) = check(dataset, given, sequences=sequences, bounds={"y": 4})
    assert feed.pad == -1
    assert mentions(
        faults(dataset, given, sequences=sequences, pad_value={"y": 0})[0], "data.pad_value.y", "counts as a label"
    )


def test_labels_of_classes(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"y": np.array([0, 2, 3, -3, -100])})
    label = data("y", (None,), role="label")
    reported = faults(dataset, [label], bounds={"y": 3}, classes=["y"], ignore_index=-100)[0]
    assert mentions(reported, "sample 2 … 'y' holds 3", "3 classes, 0 to 2", "-100")
    assert "vocabulary" not in reported
    unknown_number = faults(dataset, [label], classes=["y"], ignore_index=-100)[0]
    assert mentions(unknown_number, "sample 3 … 'y' holds -3", "from 0 on")


@pytest.mark.parametrize("known", [True, False])
def test_a_token_beyond_the_vocabulary(known: bool, tmp_path: Path) -> None:
    """With or without ranges in the file, the first sample that has one is named."""
    values = np.full((9000, 4), 7)
    values[8500, 3], values[8600, 0] = 256, -2
    if known:
        dataset = write_batches(tmp_path / "set.arrow", {"tokens": values[:100]}, {"tokens": values[100:]})
    else:
        storage = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 4)
        batch = pa.record_batch({"tokens": storage})
        with pa.OSFile(str(tmp_path / "set.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        dataset = Dataset.open(tmp_path / "set.arrow")
    assert (dataset.columns["tokens"].maximum is not None) == known

    def reported(name: str, source: str, bound: int, **options: Any) -> list[str]:
        inputs = [data(name, (None, None), role="label" if name == "labels" else "data")]
        return faults(dataset, inputs, {name: source}, {name: bound}, **options)

    assert mentions(reported("ids", "tokens", 256)[0], "sample 8500", "'tokens' holds 256", "0 to 255")
    assert mentions(reported("ids", "tokens[:3]", 256)[0], "sample 8600 … column 'tokens' … -2")
    assert mentions(reported("labels", "tokens", 257, ignore_index=-100)[0], "sample 8600 … column 'tokens' … -2")
    assert check(dataset, [data("ids", (None, 2))], {"ids": "tokens[1:3]"}, {"ids": 256})
    labels = [data("labels", (None, 4), role="label")]
    assert check(dataset, labels, {"labels": "tokens"}, {"labels": 257}, ignore_index=-2)


def test_a_token_beyond_the_vocabulary_in_variable_samples(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": ragged([[1, 2], [3]])}, {"x": ragged([[4], [5, 9, 6]])})
    assert mentions(faults(dataset, [data("x", (None, None))], {}, {"x": 8})[0], "sample 3 … column 'x' … 9")
    assert check(dataset, [data("x", (None, None))], {"x": "x[:1]"}, {"x": 8})


def test_what_variable_samples_are_padded_with(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": ragged([[1, 2], [3]])})
    inputs = [data("ids", (None, None)), data("labels", (None, None), role="label")]
    columns = {"ids": "x", "labels": "x"}
    bounds = {"ids": 10, "labels": 10}
    feeds = check(dataset, inputs, columns, bounds, ignore_index=-100)
    assert [feed.pad for feed in feeds] == [0, -100]
    assert check(dataset, inputs, columns, bounds, pad_value={"ids": 9})[0].pad == 9
    wrong = faults(dataset, inputs, columns, bounds, pad_value={"ids": 10, "labels": 0.5, "idz": 1})
    assert [fault.split(":")[0] for fault in wrong] == ["data.pad_value", "data.pad_value.ids", "data.pad_value.labels"]


def test_a_fixed_batch_axis(tokens: Dataset) -> None:
    columns = {"x": "tokens"}
    assert check(tokens, [data("x", (2, 10))], columns)
    assert mentions(faults(tokens, [data("x", (4, 10))], columns)[0], "4 samples … 2")
    assert mentions(
        faults(tokens, [data("x", (2, 10))], columns, smaller_batch=True)[0], "data.last_batch", "'x'", "2 samples"
    )
    assert check(tokens, [data("x", (2, 10))], columns, smaller_batch=True, samples=4)


def test_short_lists_of_measurements_are_not_filled_up_with_zeros(tmp_path: Path) -> None:
    lists = Ragged(np.arange(9, dtype=np.float32), np.array([0, 5, 9]))
    path = tmp_path / "x.arrow"
    write_batches(path, {"x": lists})
    taken = [BatchInput("x", "float32", (None, 5))]
    kinds: dict[str, Any] = {"micro_batch": 1, "smaller_batch": False, "key_path": "data.train"}
    with pytest.raises(Faults, match="sample 1 of column 'x' has 4 elements, but input 'x' takes 5"):
        check_inputs(Dataset.open(path), taken, {}, Limits(), **kinds)
    check_inputs(Dataset.open(path), taken, {}, Limits(pad_value={"x": 0.0}), **kinds)
    check_inputs(Dataset.open(path), [BatchInput("x", "float32", (None, None))], {}, Limits(), **kinds)


def test_a_vector_of_a_table_s_columns_is_named_as_the_way(tmp_path: Path) -> None:
    """Else each of the columns is refused in turn, and nothing says that a list of them becomes one vector."""
    dataset = write_batches(tmp_path / "set.arrow", {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)})
    vector, scalar = data("x", (None, 2), "float32"), data("x", (None,), "float32")
    assert faults(dataset, [vector])[0].endswith("name one of: a, b, or of a table several, [A, B]")
    assert faults(dataset, [scalar])[0].endswith("name one of: a, b")
    assert faults(dataset, [vector], {"x": "a"})[0].endswith("or several of a table: {x: [A, B]}")
