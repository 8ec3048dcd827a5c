"""Tar shards in the layout of WebDataset: any sample by its offset, and an index that is built once."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, pixels

from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.sources import open_samples, tar_shards
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))


def write(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def sample(number: int) -> dict[str, bytes]:
    fields = {"weight": number / 4, "age": number, "text": "left out"}
    return {
        f"part/{number:04}.png": encoded(pixels(number)),
        f"part/{number:04}.cls": str(number % 3).encode(),
        f"part/{number:04}.json": json.dumps(fields).encode(),
    }


def members(*numbers: int) -> dict[str, bytes]:
    return {name: data for number in numbers for name, data in sample(number).items()}


def opened(path: Path) -> Images:
    samples = open_samples(DataSet(path=str(path)))
    assert isinstance(samples, Images)
    return samples


def test_any_sample_is_read_by_its_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "set"
    write(folder / "b.tar", members(5, 6, 7))
    write(folder / "a.tar", members(0, 1, 2, 3, 4))
    samples, order = opened(folder), np.array([6, 0, 7, 4])
    assert list(samples.shard_counts) == [5, 3]
    for place, image in zip(order, samples.read("image", order), strict=True):
        np.testing.assert_array_equal(image, pixels(place).transpose(2, 0, 1).astype(np.float32) / np.float32(255))
    assert samples.read("label", order).tolist() == [0, 0, 1, 1]
    assert samples.read("age", order).tolist() == [6, 0, 7, 4]
    assert samples.read("weight", order).tolist() == [1.5, 0, 1.75, 1]
    assert set(samples.columns) == {"image", "label", "weight", "age"}
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(samples)).read("image", order), samples.read("image", order)
    )
    expected = digest_of(samples)

    monkeypatch.setattr(tar_shards, "_read", None)  # the headers are not read again
    assert digest_of(opened(folder)) == expected
    monkeypatch.undo()


def test_a_damaged_or_old_index_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    shard = write(tmp_path / "set" / "a.tar", members(0, 1))
    assert len(opened(shard)) == 2
    (index,) = (tmp_path / "cache" / "shards").iterdir()
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)
    assert len(opened(shard)) == 2
    write(shard, members(0, 1, 2))
    assert len(opened(shard)) == 3


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (members(0), "w:gz", r"a\.tar: is not a tar file, or is damaged .*; write it without compression"),
        ({"0.cls": b"1"}, "w", r"sample '0' has 0 images"),
        ({"0.png": b"", "0.jpg": b""}, "w", r"sample '0' has 2 images"),
        ({"0.png": b"", "0.cls": b"dog"}, "w", r"0\.cls is 'dog', not the number of a class"),
        ({"0.png": b"", "0.json": b"{"}, "w", r"0\.json cannot be read"),
        ({"0.png": b"", "0.cls": b"1", "1.png": b""}, "w", r"sample '1' has no numbers, sample '0' label"),
        ({"0.png": b"", "1.png": b"", "0.cls": b"1"}, "w", r"sample '0' is not in one piece"),
        ({}, "w", r"a\.tar: holds no sample"),
        ({"0.png": b"", "0.PNG": b""}, "w", r"0\.PNG is in it twice"),
        (
            {"0.png": b"", "0.cls": b"9223372036854775808"},
            "w",
            r"sample '0' has label 9223372036854775808, which exceeds",
        ),
        (
            {"0.png": b"", "0.json": b'{"id": 18446744073709551616}'},
            "w",
            r"sample '0' has id 184.*, which exceeds 64 bits",
        ),
    ],
)
def test_what_is_wrong_in_a_shard_is_named(tmp_path: Path, content: dict[str, bytes], mode: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(write(tmp_path / "set" / "a.tar", content, mode))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_no_missing_sample(tmp_path: Path, kind: bytes) -> None:
    shard = write(tmp_path / "set" / "a.tar", members(0))
    with tarfile.open(shard, "a") as archive:
        for end in ("png", "cls", "json"):
            link = tarfile.TarInfo(f"part/0001.{end}")
            link.type, link.linkname = kind, f"part/0000.{end}"
            archive.addfile(link)
    with pytest.raises(UserError, match=r"a\.tar: part/0001\.png is a link; write the files themselves: tar -h"):
        opened(shard)


def test_a_sparse_member_has_other_bytes_at_its_place(tmp_path: Path) -> None:
    file = tmp_path / "0.png"
    file.write_bytes(encoded(pixels(0)))
    os.truncate(file, 1 << 20)
    shard = tmp_path / "a.tar"
    subprocess.run(["tar", "--sparse", "-cf", shard, "-C", tmp_path, "0.png"], check=True)
    with pytest.raises(UserError, match=r"a\.tar: 0\.png is a sparse file"):
        opened(shard)


def test_a_read_that_returns_a_part_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of members over 2 GiB, of which one call returns no more: such a file takes minutes on a loaded machine."""
    shard = write(tmp_path / "a.tar", members(0, 101))
    read = os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, size, place: read(descriptor, min(size, 7), place))
    samples = opened(shard)
    image = pixels(101).transpose(2, 0, 1).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(samples.read("image", np.array([1]))[0], image)
    assert samples.read("age", np.array([1])).tolist() == [101]


def test_a_truncated_shard(tmp_path: Path) -> None:
    shard = write(tmp_path / "set" / "a.tar", members(0, 1))
    samples = opened(shard)
    shard.write_bytes(shard.read_bytes()[:600])
    with pytest.raises(UserError, match=r"a\.tar:part/0001: is truncated"):
        samples.read("image", np.array([1]))
    with pytest.raises(UserError, match=r"a\.tar: is not a tar file, or is damaged \(unexpected end of data\)"):
        opened(shard)
    with tarfile.open(write(shard, members(0, 1))) as archive:
        second = archive.getmember("part/0001.png").offset
    shard.write_bytes(shard.read_bytes()[:second])
    with pytest.raises(UserError, match=r"a\.tar: is truncated: its end is missing"):
        opened(shard)
