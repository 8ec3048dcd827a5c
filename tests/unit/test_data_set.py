"""Reading sets: any order, without a copy; a damaged file is reported in one sentence that names it."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from data_sets import numbered, ragged, write_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.data.schema import Column, Ragged, UnusableError, column_of, view
from ortflow.workflow.data.write import record_batch, write_set
from ortflow.workflow.errors import UserError


def write_arrow(path: Path, batch: pa.RecordBatch, **options: Any) -> Path:
    """A file as another program would write it."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema, **options) as writer:
        writer.write_batch(batch)
    return path


@pytest.mark.parametrize(
    "dtype",
    ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_samples_come_back_as_written(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 100, (7, *shape)).astype(dtype)
    dataset = write_batches(tmp_path / "set.arrow", {"x": values[:4]}, {"x": values[4:]})
    column = dataset.columns["x"]
    assert (column.dtype, column.shape, column.variable) == (np.dtype(dtype), shape, False)
    assert (column.minimum, column.maximum) == (values.min().item(), values.max().item())
    order = np.array([6, 0, 3, 3, 5])
    assert np.array_equal(dataset.read("x", order), values[order])


@settings(deadline=None)
@given(data=st.data())
def test_any_order_over_any_batches_and_shards(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    count = data.draw(st.integers(1, 40))
    cuts = sorted(data.draw(st.lists(st.integers(1, count - 1), max_size=4, unique=True))) if count > 1 else []
    wide = data.draw(st.booleans())
    values = np.arange(count * (2000 if wide else 2), dtype=np.int32).reshape(count, -1)
    samples = [[*range(n % 4), n] for n in range(count)]
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, count], strict=True)]
    batches: list[dict[str, Any]] = [{"x": values[part], "tokens": ragged(samples[part])} for part in parts]
    folder = tmp_path_factory.mktemp("set")
    shard = data.draw(st.none() | st.integers(1, count))
    dataset = write_batches(folder / "set", *batches, shard_samples=shard)
    assert len(dataset) == count
    assert shard is None or dataset.shard_counts == [min(shard, count - start) for start in range(0, count, shard)]
    order = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), dtype=np.int64)
    assert np.array_equal(dataset.read("x", order), values[order])
    assert [sample.tolist() for sample in dataset.read_ragged("tokens", order)] == [samples[i] for i in order]
    assert dataset.lengths("tokens").tolist() == list(map(len, samples))
    assert dataset.columns["tokens"].maximum == count - 1


def test_files_of_other_programs(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "list": pa.array([[1, 2], [3]], pa.list_(pa.int16())),
            "fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.float32(), 2)),
            "scalar": pa.array([1.5, 2.5]),
        }
    )
    dataset = Dataset.open(write_arrow(tmp_path / "set.arrow", batch))
    assert [str(column) for column in dataset.columns.values()] == ["int16 variable", "float32 2", "float64 scalar"]
    assert dataset.read("fixed", np.array([1, 0])).tolist() == [[3, 4], [1, 2]]
    assert dataset.read_ragged("list", np.array([1]))[0].tolist() == [3]
    assert dataset.columns["scalar"].minimum is None


def test_reading_takes_no_memory_of_the_file(tmp_path: Path) -> None:
    """The system can drop the file's pages: a process's own memory does not grow with what it reads."""

    def owned() -> int:
        return next(
            int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line
        )

    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc")
    path = tmp_path / "set.arrow"
    write_set(path, (record_batch({"x": np.full((256, 65536), n, np.uint8)}) for n in range(8)))
    assert path.stat().st_size > 128 << 20
    before = owned()
    dataset = Dataset.open(path)
    for start in range(0, len(dataset), 16):
        assert dataset.read("x", np.arange(start, start + 16))[0, 0] == start // 256
    assert owned() - before < 16 << 10, "kilobytes"


def test_a_file_cut_short_anywhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "whole.arrow"
    numbered(path, 1000)
    whole = path.read_bytes()
    cut = tmp_path / "cut.arrow"
    for size in {0, 1, 5, 6, 8, 100, len(whole) // 2, *range(len(whole) - 12, len(whole))}:
        cut.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"cut\.arrow: .*(truncated|not an Arrow)") as caught:
            Dataset.open(cut)
        assert "\n" not in str(caught.value)


def test_a_changed_byte_is_an_error_or_other_values(tmp_path: Path) -> None:
    path = tmp_path / "set.arrow"
    write_set(path, [record_batch({"x": np.arange(12).reshape(4, 3), "y": ragged([[1], [2, 3], [4], [5]])})])
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (255 if at % 2 else 32)]) + whole[at + 1 :])
        try:
            dataset = Dataset.open(path)
        except UserError as error:
            refused += 1
            assert str(path) in str(error)  # noqa: PT017
            continue
        for name, column in dataset.columns.items():
            (dataset.read_ragged if column.variable else dataset.read)(name, np.arange(len(dataset)))
    assert refused > 100


def test_more_samples_claimed_than_there_are(tmp_path: Path) -> None:
    path = tmp_path / "set.arrow"
    numbered(path, 1237)
    whole = path.read_bytes()
    assert whole.count(struct.pack("<q", 1237)) >= 2
    path.write_bytes(whole.replace(struct.pack("<q", 1237), struct.pack("<q", 10**9)))
    with pytest.raises(UserError, match="truncated or damaged"):
        Dataset.open(path)


@pytest.mark.parametrize(
    ("batch", "options", "reported"),
    [
        ({"x": pa.array([1, None])}, {}, "column 'x' has missing values"),
        ({"x": pa.array([[1], None])}, {}, "column 'x' has missing values"),
        ({"x": pa.array([[1, None], [3, 4]], pa.list_(pa.int8(), 2))}, {}, "column 'x' has missing values"),
        ({"x": pa.array(["a", "b"])}, {}, "column 'x' is of string"),
        ({"x": pa.array([True, False])}, {}, "column 'x' is of bool.*uint8"),
        ({"x": pa.array([[[1]]])}, {}, "column 'x' is of list"),
        ({"x": pa.array(range(9000))}, {"options": pa.ipc.IpcWriteOptions(compression="zstd")}, "is compressed"),
        ({"x": pa.array([], pa.int8())}, {}, "holds no sample"),
    ],
)
def test_what_cannot_be_read_is_named(
    batch: dict[str, pa.Array], options: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    path = write_arrow(tmp_path / "set.arrow", pa.record_batch(batch), **options)
    with pytest.raises(UserError, match=rf"set\.arrow: {reported}"):
        Dataset.open(path)


def test_an_invalid_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file"):
        Dataset.open(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no \.arrow file"):
        Dataset.open(tmp_path)
    (tmp_path / "text.arrow").write_text("no columns here")
    with pytest.raises(UserError, match=r"text\.arrow: is not an Arrow IPC file"):
        Dataset.open(tmp_path)


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(UserError, match="two columns have the same name"):
        Dataset.open(write_arrow(tmp_path / "set.arrow", batch))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array([1])}).replace_schema_metadata({"ortflow.version": "2"})
    with pytest.raises(UserError, match="is of version 2 of the format"):
        Dataset.open(write_arrow(tmp_path / "set.arrow", batch))


def test_a_version_that_is_not_text(tmp_path: Path) -> None:
    batch = pa.record_batch({"x": pa.array([1])}).replace_schema_metadata({b"ortflow.version": b"\xff2"})
    with pytest.raises(UserError, match=r"is of version \\xff2 of the format"):
        Dataset.open(write_arrow(tmp_path / "set.arrow", batch))


def test_shards_must_agree(tmp_path: Path) -> None:
    numbered(tmp_path / "a.arrow", 3)
    write_batches(tmp_path / "b.arrow", {"number": np.arange(3, dtype=np.int32)})
    with pytest.raises(UserError, match=r"b\.arrow.*number \(int32 scalar\).*a\.arrow"):
        Dataset.open(tmp_path)


def test_shards_are_one_set_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, start in (("b", 10), ("a", 0), (".hidden", 99)):
        write_batches(tmp_path / f"{name}.arrow", {"x": np.arange(start, start + 5)})
    dataset = Dataset.open(tmp_path)
    assert dataset.read("x", np.arange(10)).tolist() == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert (dataset.columns["x"].minimum, dataset.columns["x"].maximum) == (0, 14)


def test_nan_is_reported_but_not_a_fault(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"x": np.array([1.0, np.nan])}, {"x": np.array([5.0, 6.0])})
    assert str((dataset.columns["x"].minimum, dataset.columns["x"].maximum)) == "(nan, nan)"


@pytest.mark.parametrize(
    ("columns", "reported"),
    [
        ({"x": np.arange(3), "y": np.arange(4)}, "x has 3, y has 4"),
        ({"x": np.array([object()])}, "array 'x' holds objects"),
        ({"x": np.array(["a"])}, "array 'x' holds <U1"),
        ({"x": np.array([1j])}, "complex"),
        ({"x": np.array(5)}, "array 'x' holds one number"),
        ({"x": np.ones((3, 0))}, r"array 'x' holds samples of shape \[0\]"),
        ({"x": np.ones((3, 2, 0))}, r"samples of shape \[2, 0\]"),
    ],
)
def test_invalid_columns_are_not_written(columns: Any, reported: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reported):
        write_set(tmp_path / "set.arrow", (record_batch(columns) for _ in range(1)))
    assert list(tmp_path.iterdir()) == []


def test_foreign_byte_order_and_booleans_are_stored_as_numbers(tmp_path: Path) -> None:
    dataset = write_batches(
        tmp_path / "set.arrow", {"big": np.arange(3, dtype=">i4"), "flag": np.array([True, False, True])}
    )
    assert dataset.read("big", np.arange(3)).tolist() == [0, 1, 2]
    assert (dataset.columns["flag"].dtype.name, dataset.columns["flag"].maximum) == ("uint8", 1)


def test_slices_of_lists_keep_their_own_range() -> None:
    numbers = pa.array(np.arange(24, dtype=np.int32))
    lists = pa.FixedSizeListArray.from_arrays(numbers, 3)
    column = column_of(pa.field("x", lists.type))
    np.testing.assert_array_equal(view(lists.slice(2, 4), "x", column), np.arange(6, 18).reshape(4, 3))
    pairs = pa.list_(pa.int32(), 2)
    behind = [pa.array([1, 2, 3, 4], pa.int32()), pa.array([1, 2, None, None], pa.int32())]
    for missing in (
        pa.array([[1, 2], None, [3, 4]], pairs),
        pa.Array.from_buffers(pairs, 2, [pa.py_buffer(b"\1")], children=behind[:1]),
        pa.Array.from_buffers(pairs, 2, [None], children=behind[1:]),
    ):
        with pytest.raises(UnusableError, match="missing"):
            view(missing, "x", column_of(pa.field("x", missing.type)))


def test_a_rank_does_not_pay_for_unused_functions(tmp_path: Path) -> None:
    """pyarrow.compute takes a tenth of the time in which a rank imports everything."""
    write_batches(tmp_path / "set.arrow", {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, np.int64)})
    program = (
        "import sys; from ortflow.workflow.data.dataset import Dataset; "
        f"Dataset.open({str(tmp_path / 'set.arrow')!r}); sys.exit('pyarrow.compute' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_ragged_slices_keep_their_own_range(tmp_path: Path) -> None:
    samples = ragged([[1], [100, 2], [3]])
    part = Ragged(samples.values, samples.offsets[2:])
    assert write_batches(tmp_path / "set.arrow", {"x": part}).columns["x"].maximum == 3


@pytest.mark.parametrize(
    ("least", "most", "finite"),
    [
        (-1.0, 2.0, True),
        (None, None, False),
        (None, 2.0, False),
        (-1.0, None, False),
        (-1.0, float("inf"), False),
        (float("-inf"), 2.0, False),
        (float("nan"), float("nan"), False),
    ],
)
def test_only_a_recorded_range_shows_that_all_is_finite(least: float | None, most: float | None, finite: bool) -> None:
    assert Column(np.dtype(np.float32), (), minimum=least, maximum=most).is_finite == finite


def test_whether_every_column_has_a_recorded_range(tmp_path: Path) -> None:
    numbers, batch = np.arange(3.0), pa.record_batch({"x": pa.array([1.5, 2.5])})
    assert write_batches(tmp_path / "own.arrow", {"x": numbers, "y": numbers}).has_ranges
    assert not Dataset.open(write_arrow(tmp_path / "foreign.arrow", batch)).has_ranges


def test_a_sample_may_be_empty(tmp_path: Path) -> None:
    dataset = write_batches(tmp_path / "set.arrow", {"tokens": ragged([[], [1, 2], []])})
    assert dataset.lengths("tokens").tolist() == [0, 2, 0]
    assert [sample.tolist() for sample in dataset.read_ragged("tokens", np.arange(3))] == [[], [1, 2], []]
