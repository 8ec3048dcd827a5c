"""Arrays and tokens are read where they are: every sample equals numpy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import feed, numbered

from ortflow.workflow.data.feed import collate
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.media import TokensSection


def opened(path: Path, **tokens: Any) -> Samples:
    return open_samples(DataSet(path=str(path), tokens=TokensSection(**tokens) if tokens else None))


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(13, 2, 3)).astype(np.float32),
        "labels": random.integers(0, 5, 13),
        "mask": random.integers(0, 2, (13, 7)).astype(bool),
        "f": np.asfortranarray(random.normal(size=(13, 4))),
    }


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_members_of_an_archive_are_columns(tmp_path: Path, arrays: dict[str, np.ndarray], save: Any) -> None:
    save(tmp_path / "set.npz", **arrays)
    samples, order = opened(tmp_path / "set.npz"), np.array([12, 0, 5, 5])
    assert len(samples) == 13
    for name, array in arrays.items():
        expected = array[order].astype(np.uint8) if array.dtype == bool else array[order]
        np.testing.assert_array_equal(samples.read(name, order), expected)
        assert samples.read(name, order).dtype == expected.dtype
    ((_, scanned),) = samples.scan("x")
    np.testing.assert_array_equal(scanned, arrays["x"])


def test_a_folder_of_arrays_is_columns_and_one_of_archives_shards(
    tmp_path: Path, arrays: dict[str, np.ndarray]
) -> None:
    columns, shards = tmp_path / "columns", tmp_path / "shards"
    columns.mkdir(), shards.mkdir()
    for name, array in arrays.items():
        np.save(columns / f"{name}.npy", array)
    for number, part in enumerate((slice(0, 4), slice(4, 13))):
        np.savez(shards / f"{number}.npz", **{name: array[part] for name, array in arrays.items()})
    order = np.array([3, 12, 4, 0])
    for folder in (columns, shards):
        np.testing.assert_array_equal(opened(folder).read("x", order), arrays["x"][order])
    assert list(opened(shards).shard_counts) == [4, 9]
    assert [(first, len(part)) for first, part in opened(shards).scan("x")] == [(0, 4), (4, 9)]
    np.save(tmp_path / "one.npy", arrays["x"])
    assert list(opened(tmp_path / "one.npy").columns) == ["one"]


def test_windows_of_a_token_file_are_views(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype="<u2") * 7
    (tmp_path / "a.bin").write_bytes(b"head" + tokens.tobytes())
    samples = opened(tmp_path / "a.bin", dtype="uint16", length=10, offset=4)
    assert len(samples) == 99  # windows of 11 that begin every 10 tokens
    ((_, view),) = samples.scan("tokens")
    assert view.base is not None
    assert not view.flags.owndata
    order = np.array([98, 0, 41])
    (batch,) = collate(samples, [feed("x", "tokens[:-1]"), feed("y", "tokens[1:]")], [order])
    for row, number in enumerate(order):
        np.testing.assert_array_equal(batch["x"][row], tokens[number * 10 : number * 10 + 10])
        np.testing.assert_array_equal(batch["y"][row], tokens[number * 10 + 1 : number * 10 + 11])
    assert len(opened(tmp_path / "a.bin", length=10, stride=1, offset=4)) == 990
    np.save(tmp_path / "a.npy", tokens)
    np.testing.assert_array_equal(
        opened(tmp_path / "a.npy", length=10).read("tokens", order), samples.read("tokens", order)
    )


def test_windows_do_not_reach_into_another_file(tmp_path: Path) -> None:
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        np.arange(first, first + (3 if name == "b" else 9), dtype="<u2").tofile(tmp_path / f"{name}.bin")
    samples = opened(tmp_path, length=4)
    assert samples.read("tokens", np.arange(len(samples)))[:, 0].tolist() == [0, 4, 200, 204]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"123", "a.bin: has 3 bytes behind byte 0, not a multiple of the 2 of uint16; correct tokens.dtype"),
        ("a.bin", b"1234", "has 2 tokens, fewer than a window of 5; lower length"),
        ("a.npz", b"PK\x03\x04nothing", "a.npz: cannot be read"),
        ("a.npy", b"\x93NUMPY\x01\x00", "a.npy: cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        opened(tmp_path / name, length=4)
    assert message in str(error.value)


def test_other_files_beside_arrow_files_do_not_change_the_format(tmp_path: Path) -> None:
    numbered(tmp_path / "set.arrow", 3)
    for name in ("README.txt", "notes.npy", "model.bin", "old.tar"):
        (tmp_path / name).write_text("x")
    assert list(opened(tmp_path).columns) == ["number"]


def test_a_preparation_that_a_format_has_not_is_refused(tmp_path: Path) -> None:
    numbered(tmp_path / "set.arrow", 3)
    with pytest.raises(
        UserError, match=r"set\.arrow: is read as Arrow IPC, which has no tokens; correct the path, or remove tokens"
    ):
        opened(tmp_path / "set.arrow", length=4)


def test_objects_other_byte_orders_and_cut_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, {}], object), allow_pickle=True)
    np.save(tmp_path / "big.npy", np.arange(3, dtype=">i4"))
    np.savez(tmp_path / "uneven.npz", a=np.ones(3), b=np.ones(4))
    np.save(tmp_path / "cut.npy", np.arange(30))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-8])
    (tmp_path / "plain.bin").write_bytes(bytes(8))
    for name, message in (
        ("objects.npy", "holds objects"),
        ("big.npy", "of the other byte order; save it as int32"),
        ("uneven.npz", "arrays differ in their number of samples: a has 3, b has 4"),
        ("cut.npy", "array 'cut' is truncated"),
        ("plain.bin", "holds tokens of an unknown type; add tokens"),
        ("missing.npz", "no such file"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path / name)
