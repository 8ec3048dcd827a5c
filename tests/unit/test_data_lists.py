"""Lists of paths and patterns: one set in every format, with the first file that differs named."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from data_sets import write_batches
from messages import mentions
from pictures import encoded, pixels, write_classes
from pyarrow import parquet

from ortflow.workflow.data.samples import Samples
from ortflow.workflow.data.sources import open_samples
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.data import DataSet
from ortflow.workflow.spec.file.load import load_run_text
from ortflow.workflow.spec.file.paths import check_files, input_files, resolve_paths
from ortflow.workflow.spec.media import ImagesSection, TextSection, TokensSection

COUNT = 4
Write = Callable[[Path, int], Path]


def opened(paths: list[Path] | Path, **keys: object) -> Samples:
    path = [str(each) for each in paths] if isinstance(paths, list) else str(paths)
    return open_samples(DataSet.model_validate({"path": path, **keys}))


def csv(path: Path, start: int) -> Path:
    path.with_suffix(".csv").write_text("x\n" + "".join(f"{start + row}\n" for row in range(COUNT)))
    return path.with_suffix(".csv")


def json_lines(path: Path, start: int) -> Path:
    path.with_suffix(".jsonl").write_text("".join(f'{{"x": {start + row}}}\n' for row in range(COUNT)))
    return path.with_suffix(".jsonl")


def columnar(path: Path, start: int) -> Path:
    parquet.write_table(pa.table({"x": range(start, start + COUNT)}), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def arrow(path: Path, start: int) -> Path:
    write_batches(path.with_suffix(".arrow"), {"x": np.arange(start, start + COUNT)})
    return path.with_suffix(".arrow")


def archive(path: Path, start: int) -> Path:
    np.savez(path.with_suffix(".npz"), x=np.arange(start, start + COUNT))
    return path.with_suffix(".npz")


def folder_of_arrays(path: Path, start: int) -> Path:
    path.mkdir()
    np.save(path / "x.npy", np.arange(start, start + COUNT))
    return path


@pytest.mark.parametrize("write", [csv, json_lines, columnar, arrow, archive, folder_of_arrays])
def test_files_of_a_list_and_of_patterns_follow_each_other(tmp_path: Path, write: Write) -> None:
    files = [write(tmp_path / f"{name}-part", 10 * number) for number, name in enumerate("cab")]
    samples = opened(files)
    order = np.array([11, 0, 4, 5, 8])
    assert samples.read("x", order).tolist() == [23, 0, 10, 11, 20]
    assert len(samples) == 3 * COUNT
    # The list has its own order, a pattern that of the names.
    by_name = opened([tmp_path / f"[ab]-part{files[0].suffix}", files[0]])
    assert by_name.read("x", np.arange(12)).tolist() == [*range(10, 14), *range(20, 24), *range(4)]


def test_tokens_and_text_never_run_from_one_file_into_the_next(tmp_path: Path) -> None:
    for number in range(2):
        np.arange(10 * number, 10 * number + 7, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    samples = opened(tmp_path / "*.bin", tokens=TokensSection(length=3))
    assert samples.read("tokens", np.arange(4)).tolist() == [
        [0, 1, 2, 3], [3, 4, 5, 6], [10, 11, 12, 13], [13, 14, 15, 16],
    ]  # fmt: skip
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1}, "a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in "ba":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    text = TextSection(tokenizer=str(tmp_path / "tokenizer.json"))
    documents = opened([tmp_path / "b.txt", tmp_path / "a.txt"], text=text)
    assert [each.tolist() for each in documents.read_ragged("tokens", np.arange(2))] == [[1], [0]]


def test_folders_of_images_share_their_classes(tmp_path: Path) -> None:
    old, new = (
        write_classes(tmp_path / "old", {"cat": 2, "dog": 1}),
        write_classes(tmp_path / "new", {"ant": 1, "dog": 2}),
    )
    samples = opened([old, new], images=ImagesSection(channels=3))
    assert isinstance(samples, Images)
    assert samples.classes == ("ant", "cat", "dog")
    assert samples.read("label", np.arange(6)).tolist() == [1, 1, 2, 0, 2, 2]
    alone = opened(new)
    np.testing.assert_array_equal(samples.read("image", np.array([3, 5])), alone.read("image", np.array([0, 2])))
    assert samples.blobs.name(5) == str(new / "dog/001.png")
    files = opened(new / "dog/*.png")
    np.testing.assert_array_equal(files.read("image", np.array([1])), alone.read("image", np.array([2])))
    assert "label" not in files.columns
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/a.png").write_bytes(encoded(pixels(0)))
    with pytest.raises(UserError) as refused:
        opened([old, tmp_path / "plain"])
    assert mentions(str(refused.value), f"{tmp_path}/plain: has no classes, unlike {old}")


def test_shards_of_a_list(tmp_path: Path) -> None:
    for number in range(2):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as shard:
            for end, data in (("png", encoded(pixels(number))), ("cls", str(number).encode())):
                (tmp_path / "member").write_bytes(data)
                shard.add(tmp_path / "member", f"{number}.{end}")
    samples = opened([tmp_path / "1.tar", tmp_path / "0.tar"])
    assert samples.read("label", np.arange(2)).tolist() == [1, 0]


def other_column(path: Path) -> Path:
    file = path.with_suffix(".csv")
    file.write_text("y\n1\n")
    return file


@pytest.mark.parametrize(
    ("write", "other", "message"),
    [
        (csv, other_column, "{other}: has the columns y, but first.csv has x"),
        (csv, lambda path: arrow(path, 0), "{other}: is read as Arrow IPC, but {first} as a table"),
        (csv, lambda path: columnar(path, 0), "names files of several formats"),
        (csv, lambda path: path.parent / "first.csv", "{other}: is named twice"),
        (csv, lambda path: path.parent / "*.none", "{other}: no file has such a name"),
        (archive, lambda path: folder_of_arrays(path, 0), "holds .npz and .npy files"),
        (
            folder_of_arrays,
            lambda path: Path(np.save(path.with_suffix(".npy"), np.arange(3)) or path.with_suffix(".npy")),
            "{other}: is a file among folders",
        ),
        (arrow, lambda path: path.parent / "gone.arrow", "{other}: no such file or folder"),
    ],
)
def test_a_file_that_differs_is_named(
    tmp_path: Path, write: Write, other: Callable[[Path], Path], message: str
) -> None:
    first = write(tmp_path / "first", 0)
    second = other(tmp_path / "second")
    with pytest.raises(UserError) as refused:
        opened([first, second])
    assert mentions(str(refused.value), message.format(first=first, other=second))


@pytest.mark.parametrize("paths", [["set", "set/a.npz"], ["link", "set/a.npz"], ["set/**"], ["set/a.npz", "set"]])
def test_a_file_that_is_named_with_its_folder_is_refused(paths: list[str], tmp_path: Path) -> None:
    """Its samples would count twice."""
    (tmp_path / "set/more").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "set")
    for name in ("a", "more/b"):
        np.savez(tmp_path / f"set/{name}.npz", x=np.arange(3))
    with pytest.raises(UserError) as refused:
        opened([tmp_path / path for path in paths])
    assert mentions(str(refused.value), f"set/a.npz: is in {tmp_path}/set, which is named, too")
    assert len(opened([tmp_path / "set/**/*.npz"])) == len(opened([tmp_path / "set", tmp_path / "set/more"])) == 6


def test_a_folder_of_classes_inside_another_is_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "animals", {"cat": 1, "dog": 1})
    write_classes(tmp_path / "animals/dog", {"small": 1})
    with pytest.raises(UserError) as refused:
        opened([tmp_path / "animals/dog", tmp_path / "animals"])
    assert mentions(str(refused.value), f"{tmp_path}/animals/dog: is in {tmp_path}/animals, which is named, too")


def test_paths_of_a_list_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "model.onnx").touch()
    text = (
        "name: lists\nmodel: {path: model.onnx, loss: {kind: mse, label: y}}\n"
        "train: {epochs: 1, optimizer: {name: sgd, lr: 1.0}}\n"
        "data: {micro_batch: 1, train: {path: [a.csv, '*.csv', gone.csv, b/*.csv]}}\n"
    )
    spec = resolve_paths(load_run_text(text, "run.yaml"), tmp_path / "run.yaml", tmp_path)
    assert spec.data is not None
    assert spec.data.train.paths == [f"{tmp_path}/{name}" for name in ("a.csv", "*.csv", "gone.csv", "b/*.csv")]
    assert input_files(spec) == [f"{tmp_path}/model.onnx", *spec.data.train.paths]
    named = [problem.what for problem in check_files(spec)]
    assert named == [f"there is no file {tmp_path}/{name}" for name in ("gone.csv", "b/*.csv")]
