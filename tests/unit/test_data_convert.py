"""Conversions: every source is read back unchanged, the set is complete or absent, and the split is reproducible."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import mentions
from typer.testing import CliRunner
from unprivileged import unprivileged

from ortflow.cli.data import app, describe
from ortflow.workflow.data import arrays, text, write
from ortflow.workflow.data.dataset import Dataset
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.system.disk_space import OutOfDisk


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, OrtflowError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def fixed(path: Path, column: str) -> Any:
    dataset = Dataset.open(path)
    return dataset.read(column, np.arange(len(dataset)))


def lines_of(path: Path) -> list[bytes]:
    dataset = Dataset.open(path)
    return [sample.tobytes() for sample in dataset.read_ragged("tokens", np.arange(len(dataset)))]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small record batches, so that small sources have many."""
    for module in (arrays, text, write):
        monkeypatch.setattr(module, "BATCH_BYTES", 1000)


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((50, 3, 4), dtype=np.float32)
    y = np.arange(50) % 7
    for number, part in enumerate((slice(0, 30), slice(30, 50))):
        save(tmp_path / f"{number}.npz", x=x[part], y=y[part], turned=np.asfortranarray(x[part, 0]))
    run("convert", tmp_path / "0.npz", tmp_path / "1.npz", "-o", tmp_path / "set.arrow")
    assert np.array_equal(fixed(tmp_path / "set.arrow", "x"), x)
    assert np.array_equal(fixed(tmp_path / "set.arrow", "y"), y)
    assert np.array_equal(fixed(tmp_path / "set.arrow", "turned"), x[:, 0])
    assert len(list(Dataset.open(tmp_path / "set.arrow").scan("x"))) > 3


@pytest.mark.usefixtures("small_batches")
def test_npy(tmp_path: Path) -> None:
    images, labels = np.arange(600.0).reshape(50, 12), np.arange(50)
    np.save(tmp_path / "image.npy", images)
    np.save(tmp_path / "label.npy", labels)
    run("convert", tmp_path / "image.npy", tmp_path / "label.npy", "-o", tmp_path / "both.arrow")
    assert np.array_equal(fixed(tmp_path / "both.arrow", "image"), images)
    assert np.array_equal(fixed(tmp_path / "both.arrow", "label"), labels)
    run("convert", tmp_path / "image.npy", "--column", "x", "-o", tmp_path / "one.arrow")
    assert np.array_equal(fixed(tmp_path / "one.arrow", "x"), images)
    with pytest.raises(UserError, match="--column names the column of one"):
        run("convert", tmp_path / "image.npy", tmp_path / "label.npy", "--column", "x", "-o", tmp_path / "two.arrow")


@settings(deadline=None, max_examples=50)
@given(data=st.data(), length=st.integers(1, 40), block=st.integers(1, 300))
def test_windows(data: st.DataObject, length: int, block: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against a plain loop: every byte but the first is a target of exactly one window."""
    folder = tmp_path_factory.mktemp("text")
    pieces = data.draw(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
    for number, piece in enumerate(pieces):
        (folder / f"{number}.txt").write_bytes(piece)
    whole = b"".join(pieces)
    expected = [whole[at : at + length + 1] for at in range(0, len(whole) - length, length)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BATCH_BYTES", block)
        files = text.find_files([str(folder)])
        found = [row.tobytes() for part in text.windows(files, length) for row in part]
        assert text.count_windows(files, length) == len(found)
    assert found == expected


def test_text_of_files_folders_and_patterns(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep" / ".hidden").mkdir(parents=True)
    (source / "b.txt").write_bytes(b"bb")
    (source / "deep" / "a.py").write_bytes(b"aa")
    (source / "deep" / ".hidden" / "no.txt").write_bytes(b"no")
    (source / ".no.txt").write_bytes(b"no")

    def tokens(*sources: Path | str) -> bytes:
        run("convert", *sources, "--text", "--length", 1, "--force", "-o", tmp_path / "set.arrow")
        rows = fixed(tmp_path / "set.arrow", "tokens")
        return bytes(rows[:, 0].tolist() + rows[-1:, 1].tolist())

    assert tokens(source) == b"bbaa"
    assert tokens(f"{source}/**/*.py") == b"aa"
    assert tokens(source / "b.txt", f"{source}/*/*", source / "b.txt") == b"bbaa"
    with pytest.raises(UserError, match=r"nothing\*: no such file"):
        tokens(f"{source}/nothing*")


@pytest.mark.usefixtures("small_batches")
def test_lines(tmp_path: Path) -> None:
    content = b"one\n\ntwo\r\n\xc3\xa4\n" + b"".join(b"line %d\n" % n for n in range(400)) + b"no newline"
    (tmp_path / "a.txt").write_bytes(content)
    run("convert", tmp_path / "a.txt", "--lines", "-o", tmp_path / "set.arrow")
    expected = [line.rstrip(b"\r\n") + b"\n" for line in content.split(b"\n") if line.strip()]
    assert lines_of(tmp_path / "set.arrow") == expected
    run("convert", tmp_path / "a.txt", "--lines", "--eval-fraction", 0.25, "-o", tmp_path / "parts")
    train, held_out = lines_of(tmp_path / "parts" / "train.arrow"), lines_of(tmp_path / "parts" / "eval.arrow")
    assert sorted(train + held_out) == sorted(expected)
    assert len(held_out) == round(len(expected) / 4)


@pytest.mark.usefixtures("small_batches")
def test_dividing_arrays_is_scattered_exact_and_the_same_again(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", number=np.arange(1000), wide=np.arange(3000).reshape(1000, 3))
    for name in ("one", "two"):
        run("convert", tmp_path / "a.npz", "--eval-fraction", 0.2, "-o", tmp_path / name)
    train, held_out = (fixed(tmp_path / "one" / f"{part}.arrow", "number") for part in ("train", "eval"))
    assert len(held_out) == 200
    assert sorted([*train, *held_out]) == list(range(1000))
    assert 10 < (held_out < 100).sum() < 35
    assert np.array_equal(fixed(tmp_path / "one" / "eval.arrow", "wide")[:, 0], held_out * 3)
    assert (tmp_path / "one" / "eval.arrow").read_bytes() == (tmp_path / "two" / "eval.arrow").read_bytes()


def test_dividing_several_texts_keeps_files_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number:02}.txt").write_bytes(bytes([number]) * 100)
    run("convert", source, "--text", "--length", 10, "--eval-fraction", 0.3, "-o", tmp_path / "set")
    train, held_out = (set(fixed(tmp_path / "set" / f"{part}.arrow", "tokens").flat) for part in ("train", "eval"))
    assert not train & held_out
    # Not the first files by name, and the same in every version: a set that is converted again is divided as before.
    assert held_out == {2, 5, 8, 13, 16, 19}
    assert len(train | held_out) == 20


def test_dividing_one_text_sets_its_end_aside(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(201)))
    run("convert", tmp_path / "a.txt", "--text", "--length", 10, "--eval-fraction", 0.1, "-o", tmp_path / "set")
    assert fixed(tmp_path / "set" / "train.arrow", "tokens")[:, 0].tolist() == list(range(0, 180, 10))
    assert fixed(tmp_path / "set" / "eval.arrow", "tokens")[:, 0].tolist() == [180, 190]
    with pytest.raises(UserError, match="leaves none"):
        run("convert", tmp_path / "a.txt", "--text", "--length", 10, "--eval-fraction", 0.01, "-o", tmp_path / "no")


@pytest.mark.usefixtures("small_batches")
def test_shards(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(2500))
    run("convert", tmp_path / "x.npy", "--shard-samples", 700, "-o", tmp_path / "set")
    assert [file.name for file in sorted((tmp_path / "set").iterdir())] == [
        f"shard-{number:05d}.arrow" for number in range(4)
    ]
    assert Dataset.open(tmp_path / "set").shard_counts == [700, 700, 700, 400]
    assert fixed(tmp_path / "set", "x").tolist() == list(range(2500))
    run("convert", tmp_path / "x.npy", "--shard-samples", 700, "--eval-fraction", 0.1, "-o", tmp_path / "two")
    assert Dataset.open(tmp_path / "two" / "eval").shard_counts == [250]


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (24, 1), (47, 1), (48, 2), (1000, 10)])
def test_a_batch_of_arrays_has_the_rows_that_fit_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, rows: int
) -> None:
    """A row has 16 + 8 bytes."""
    monkeypatch.setattr(arrays, "BATCH_BYTES", batch)
    np.savez(tmp_path / "a.npz", x=np.arange(20).reshape(10, 2), y=np.arange(10))
    chunks = list(arrays.ArrayFiles([tmp_path / "a.npz"]).chunks())
    assert [len(chunk["y"]) for chunk in chunks] == [rows] * (10 // rows)
    assert np.concatenate([chunk["x"] for chunk in chunks]).tolist() == np.arange(20).reshape(10, 2).tolist()


def test_what_is_there_is_replaced_only_if_asked(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    np.save(tmp_path / "y.npy", np.arange(20))
    for options in ([], ["--shard-samples", 5]):
        output = tmp_path / f"set{len(options)}"
        run("convert", tmp_path / "x.npy", *options, "-o", output)
        with pytest.raises(UserError, match="exists already"):
            run("convert", tmp_path / "y.npy", *options, "-o", output)
        assert len(Dataset.open(output)) == 10
        run("convert", tmp_path / "y.npy", *options, "--force", "-o", output)
        assert len(Dataset.open(output)) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set0", "set2", "x.npy", "y.npy"]


def bad_sources(folder: Path) -> dict[str, tuple[list[Path], str]]:
    """Sources that cannot be converted: files and their error messages."""

    def saved(name: str, array: Any) -> Path:
        np.save(folder / name, array)
        return folder / name

    def written(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    def archive(name: str, **columns: Any) -> Path:
        np.savez(folder / name, **columns)
        return folder / name

    whole = saved("whole.npy", np.arange(100)).read_bytes()
    zipped = archive("zipped.npz", x=np.arange(1000)).read_bytes()
    with zipfile.ZipFile(folder / "text.npz", "w") as text_inside:
        text_inside.writestr("readme.txt", "hello")
    wide = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1099511627776), }".ljust(
        117
    )
    huge = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }".ljust(
        117
    )
    return {
        "objects": ([saved("o.npy", np.array([{}, 1], object))], r"o\.npy: array 'o' holds objects"),
        "objects in an archive": ([archive("o.npz", x=np.array([{}, 1], object))], r"array 'x' holds objects"),
        "a pickle": ([written("p.npy", pickle.dumps([1, 2]))], r"p\.npy: cannot be read"),
        "words": ([saved("w.npy", np.array(["a", "b"]))], "array 'w' holds <U1"),
        "named fields": ([saved("f.npy", np.zeros(2, [("a", "i4")]))], "array 'f' holds"),
        "a number": ([saved("n.npy", np.array(3))], "array 'n' holds one number"),
        "lengths": ([archive("l.npz", x=np.arange(3), y=np.arange(4))], "x has 3, y has 4"),
        "lengths of files": ([saved("a.npy", np.arange(3)), saved("b.npy", np.arange(4))], "a has 3, b has 4"),
        "other arrays": (
            [archive("1.npz", x=np.ones(3)), archive("2.npz", y=np.ones(3))],
            r"2\.npz: .*differ from those of \S+1\.npz",
        ),
        "cut short": ([written("c.npy", whole[:-8])], r"c\.npy: array 'c' is truncated"),
        "cut header": ([written("h.npy", whole[:20])], r"h\.npy: cannot be read"),
        "claims a terabyte": ([written("t.npy", huge + b"\n" + b"\0" * 64)], r"t\.npy: array 't' is truncated"),
        "claims a huge sample": ([written("s.npy", wide + b"\n" + b"\0" * 64)], r"s\.npy: array 's' is truncated"),
        "cut archive": ([written("z.npz", zipped[: len(zipped) // 2])], r"z\.npz: cannot be read"),
        "broken archive": ([written("k.npz", zipped[:300] + b"\xff" * 8 + zipped[308:])], r"k\.npz: cannot be read"),
        "no archive": ([written("e.npz", b"PK")], r"e\.npz: cannot be read"),
        "text in an archive": ([folder / "text.npz"], r"text\.npz: cannot be read"),
        "are both": ([folder / "whole.npy", folder / "zipped.npz"], "are both"),
        "text without --text": ([written("a.txt", b"hello")], r"a\.txt: is neither \.npz nor \.npy"),
        "no samples": ([saved("empty.npy", np.zeros((0, 3)))], "there is no sample to write"),
    }


CASES = [
    "objects",
    "objects in an archive",
    "a pickle",
    "words",
    "named fields",
    "a number",
    "lengths",
    "lengths of files",
    "other arrays",
    "cut short",
    "cut header",
    "claims a terabyte",
    "claims a huge sample",
    "cut archive",
    "broken archive",
    "no archive",
    "text in an archive",
    "are both",
    "text without --text",
    "no samples",
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("options", [[], ["--eval-fraction", "0.5"]])
def test_bad_sources_are_named_and_leave_nothing(case: str, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "sources").mkdir()
    sources, reported = bad_sources(tmp_path / "sources")[case]
    if case == "no samples" and options:
        reported = "leaves none"
    with pytest.raises(UserError, match=reported) as caught:
        run("convert", *sources, *options, "-o", tmp_path / "new" / "deep" / "set")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["sources"]


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--text"], "must be given together"),
        (["--length", "5"], "must be given together"),
        (["--text", "--lines", "--length", "5"], "cannot be combined"),
        (["--lines", "--length", "5"], "must be given together"),
        (["--text", "--length", "50"], "there is no sample to write"),
    ],
)
def test_options_that_contradict(options: list[str], reported: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"short")
    with pytest.raises(UserError, match=reported):
        run("convert", tmp_path / "a.txt", *options, "-o", tmp_path / "set")


def test_an_unwritable_folder(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    tmp_path.chmod(0o500)

    def refused() -> str:
        with pytest.raises(UserError) as raised:
            run("convert", tmp_path / "x.npy", "-o", tmp_path / "set")
        return str(raised.value)

    assert mentions(unprivileged(refused), str(tmp_path / "set"), "cannot be written")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    np.save(tmp_path / "x.npy", np.arange(3))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfDisk, match=r"out of disk on \S+/new/set, "):
        run("convert", tmp_path / "x.npy", "-o", tmp_path / "new" / "set")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_show(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([[1.5, 2.5], [3.0, 4.0]], np.float32), y=np.array([3, -4]))
    run("convert", tmp_path / "a.npz", "-o", tmp_path / "set.arrow")
    assert run("show", tmp_path / "set.arrow").splitlines() == [
        f"{tmp_path / 'set.arrow'}: 2 samples in 1 file",
        "  x: float32, shape [2], 1.5 to 4",
        "  y: int64, scalar, -4 to 3",
    ]
    reported = json.loads(run("show", tmp_path / "set.arrow", "--json"))
    assert (reported["samples"], reported["shards"]) == (2, 1)
    assert reported["columns"]["y"] == {"dtype": "int64", "shape": [], "variable": False, "minimum": -4, "maximum": 3}


def test_show_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\nbcd\n")
    run("convert", tmp_path / "a.txt", "--lines", "-o", tmp_path / "set.arrow")
    assert "tokens: uint8, 2 to 4 elements, 10 to 100" in run("show", tmp_path / "set.arrow")
    assert json.loads(run("show", tmp_path / "set.arrow", "--json"))["columns"]["tokens"]["lengths"] == [2, 4]


def test_show_of_offsets_that_run_backwards(tmp_path: Path) -> None:
    """Arrow compares only the first and the last offset with the values."""
    offsets = pa.py_buffer(np.array([0, 5, 2, 9], np.int64))
    values = pa.array(np.arange(9, dtype=np.int32))
    column = pa.LargeListArray.from_buffers(pa.large_list(pa.int32()), 3, [None, offsets], children=[values])
    batch = pa.record_batch([column], names=["tokens"])
    with pa.OSFile(str(tmp_path / "set.arrow"), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(UserError) as error:
        describe(Dataset.open(tmp_path / "set.arrow"))
    assert mentions(str(error.value), "set.arrow", "sample 1", "tokens")
