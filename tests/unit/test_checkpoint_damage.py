from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import INDEX, Rejections, changed, newest_whole, progress_of, same, save, state

from ortflow.workflow.checkpoint.load import load, load_newest
from ortflow.workflow.checkpoint.manifest import Damaged, FileRecord, Manifest, decode, digest, mark
from ortflow.workflow.checkpoint.reshape import merge, reshape
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.tensors import BufferSpec, file_layout
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.run.progress import REQUIRED

OLD, NEW = state(1), state(2)
FILES = ("COMMITTED", "manifest.json", "rank-0000.safetensors", "rank-0001.safetensors")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """An intact checkpoint of step 10, and one of step 20 to damage."""
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD)
    save(store, 20, NEW)
    return store


def assert_passed_over(store: DirectoryStore, name: str) -> None:
    """Check that the file is reported by name, and the checkpoint before it is loaded."""
    rejections = Rejections()
    found = load_newest(store, on_reject=rejections)
    assert found is not None
    assert found.manifest.step == 10
    assert same(found.buffers, OLD)
    assert rejections.paths == [store.place(20) / name]
    assert rejections.faults[0].reason


def test_sound(store: DirectoryStore) -> None:
    found = load_newest(store)
    assert found is not None
    assert found.manifest.step == 20
    assert same(found.buffers, NEW)
    assert newest_whole(store) == 20


@pytest.mark.parametrize("name", FILES)
def test_cut_short_at_any_byte(store: DirectoryStore, name: str) -> None:
    path = store.place(20) / name
    for length in reversed(places(path.stat().st_size)):
        os.truncate(path, length)
        assert [fault.path for fault in verify(store, 20)] == [path], length
        if length % 97 == 0:
            assert_passed_over(store, name)


@pytest.mark.parametrize("name", FILES)
def test_too_long(store: DirectoryStore, name: str) -> None:
    path = store.place(20) / name
    with changed(path, path.read_bytes() + b"\n"):
        assert_passed_over(store, name)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit(store: DirectoryStore, name: str) -> None:
    path = store.place(20) / name
    whole = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        for place, bit in flips(name, len(whole)):
            os.pwrite(file.fileno(), bytes([whole[place] ^ (1 << bit)]), place)
            faults = verify(store, 20)
            assert [fault.path for fault in faults] == [path], (place, bit)
            if place % 101 == bit:
                assert_passed_over(store, name)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert verify(store, 20) == []


def places(length: int) -> list[int]:
    """Every byte, but only every 16th of the spaces that pad a tensors' file to a page."""
    return [place for place in range(length) if place < 400 or place >= 4088 or place % 16 == 0]


def flips(name: str, length: int) -> Iterator[tuple[int, int]]:
    """Every bit of the small files; of the tensors' files one bit of a byte, and every bit of both ends."""
    for place in places(length):
        every = not name.startswith("rank") or place < 8 or place >= length - 32
        for bit in range(8) if every else (place % 8,):
            yield place, bit


@pytest.mark.parametrize("name", FILES)
def test_missing(store: DirectoryStore, name: str) -> None:
    (store.place(20) / name).unlink()
    assert_passed_over(store, name)
    assert "is missing" in verify(store, 20)[0].reason


def test_a_missing_marker_means_an_unfinished_save(store: DirectoryStore) -> None:
    (store.place(20) / "COMMITTED").unlink()
    assert "the save was never finished" in str(verify(store, 20)[0])


def test_every_bad_file_is_named(store: DirectoryStore) -> None:
    os.truncate(store.place(20) / "rank-0000.safetensors", 5000)
    (store.place(20) / "rank-0001.safetensors").unlink()
    rejections = Rejections()
    assert newest_whole(store, rejections) == 10
    assert [path.name for path in rejections.paths] == ["rank-0000.safetensors", "rank-0001.safetensors"]


def test_a_folder_in_a_files_place(store: DirectoryStore) -> None:
    path = store.place(20) / "manifest.json"
    path.unlink()
    path.mkdir()
    assert_passed_over(store, "manifest.json")


def test_files_of_two_checkpoints_mixed(store: DirectoryStore) -> None:
    shutil.copy(store.place(10) / FILES[2], store.place(20) / FILES[2])
    assert_passed_over(store, FILES[2])


def test_a_checkpoint_under_another_steps_name(store: DirectoryStore) -> None:
    os.rename(store.place(20), store.place(30))
    rejections = Rejections()
    assert newest_whole(store, rejections) == 10
    assert "is that of step 20" in rejections.faults[0].reason


def test_foreign_things_in_the_folder(store: DirectoryStore) -> None:
    for name in ("README", "step-abc", "step-1", "step-000000030", "latest", ".DS_Store"):
        (store.path / name).write_text("not ours")
    (store.place(20) / "notes.txt").write_text("not ours")
    assert store.steps() == [10, 20]
    assert newest_whole(store) == 20
    (store.path / "step-00000040").write_text("not a folder")
    (store.path / "step-00000050").mkdir()
    rejections = Rejections()
    found = load_newest(store, on_reject=rejections)
    assert found is not None
    assert found.manifest.step == 20
    assert [path.parent.name for path in rejections.paths] == ["step-00000050", "step-00000040"]
    assert store.clean() == []
    assert (store.path / "README").exists()


def test_reading_changes_nothing(store: DirectoryStore) -> None:
    os.truncate(store.place(20) / FILES[2], 100)
    (store.path / ".tmp-step-00000030-00").mkdir()

    def listing() -> list[tuple[str, int, int]]:
        return [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(store.path.rglob("*"))]

    before = listing()
    load_newest(store)
    newest_whole(store)
    assert listing() == before


def claim(store: DirectoryStore, manifest: Manifest) -> None:
    """A checkpoint of step 20 with valid hashes and false contents."""
    data = manifest.encode()
    (store.place(20) / "manifest.json").write_bytes(data)
    (store.place(20) / "COMMITTED").write_bytes(mark(data))


def test_no_memory_is_allocated_for_missing_data(store: DirectoryStore) -> None:
    buffers = {"parameters": BufferSpec("F32", 1 << 50)}
    size = file_layout(buffers, 0, 1).size
    files = (FileRecord("rank-0000.safetensors", size, "xxh3_128:0"),)
    claim(store, Manifest(20, 1, buffers, INDEX, progress_of(20), files, 0.0))
    assert_passed_over(store, "rank-0000.safetensors")
    os.truncate(store.place(20) / "manifest.json", 1 << 40)
    assert_passed_over(store, "manifest.json")


@pytest.mark.parametrize("key", ["data_offsets", "dtype", "shape", "name"])
def test_a_header_that_differs_from_the_manifest(
    store: DirectoryStore, key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other programs read the header: a file is damaged if it says something else, although its hash is right."""
    path = store.place(20) / "rank-0001.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + length])
    names = [name for name in tensors if name != "__metadata__"]
    first, second = tensors[names[0]], tensors[names[1]]
    if key == "name":
        tensors[names[0]], tensors[names[1]] = second, first
    else:
        first[key], second[key] = {"dtype": ("I32", "I32"), "shape": ([1], [2])}.get(key, (second[key], first[key]))
    header = json.dumps(tensors, separators=(",", ":")).encode().ljust(length)
    assert len(header) == length
    changed_data = data[:8] + header + data[8 + length :]
    path.write_bytes(changed_data)
    manifest = decode((store.place(20) / "manifest.json").read_bytes())
    files = tuple(
        replace(file, hash=digest(changed_data)) if file.name == path.name else file for file in manifest.files
    )
    claim(store, replace(manifest, files=files))
    assert [fault.path for fault in verify(store, 20)] == [path]
    for written in ("merged.safetensors", "reshaped"):
        out = tmp_path_factory.mktemp("out") / written
        with pytest.raises(Damaged, match=r"rank-0001\.safetensors"):
            merge(store, 20, out) if written.startswith("merged") else reshape(store, 20, 3, DirectoryStore(out))
        assert not out.exists()
    assert_passed_over(store, path.name)


@pytest.mark.parametrize(
    ("name", "size"),
    [("../../etc/passwd", 0), ("rank-0001.safetensors", 0), ("rank-0000.safetensors", 17)],
)
def test_files_that_do_not_hold_the_buffers(store: DirectoryStore, name: str, size: int) -> None:
    buffers = {"parameters": BufferSpec("F32", 64)}
    size = size or file_layout(buffers, 0, 1).size
    claim(store, Manifest(20, 1, buffers, INDEX, progress_of(20), (FileRecord(name, size, "xxh3_128:0"),), 0.0))
    assert_passed_over(store, "manifest.json")


@pytest.mark.parametrize(("world_size", "files"), [(0, 0), (2, 1), (1, 2), (-1, 0)])
def test_another_number_of_files_than_of_ranks(store: DirectoryStore, world_size: int, files: int) -> None:
    buffers = {"parameters": BufferSpec("F32", 64)}
    records = tuple(
        FileRecord(f"rank-{rank:04d}.safetensors", file_layout(buffers, rank, files).size, "xxh3_128:0")
        for rank in range(files)
    )
    claim(store, Manifest(20, world_size, buffers, INDEX, progress_of(20), records, 0.0))
    assert_passed_over(store, "manifest.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("progress", wrong) for wrong in ([], None, "{}", 7, {}, {"step": 20})],
        *[(f"progress.{name}", wrong) for name in REQUIRED for wrong in ("20", 20.0, True, None, -1, [20])],
        ("progress.step", 0),
        ("progress.stopped_early", 0),
        ("progress.best_metric", "0.5"),
        ("step", 20.0),
        ("step", "20"),
        ("world_size", True),
        ("world_size", 2.0),
        ("time", None),
        *[("buffers", wrong) for wrong in ([], None, {"parameters": None}, {"parameters": {"dtype": "F32"}})],
        *[("buffers.parameters.dtype", wrong) for wrong in ("F31", ["F32"], None)],
        *[("buffers.parameters.count", wrong) for wrong in (-64, 64.0, "64", True)],
        *[("files", wrong) for wrong in ({}, None, [None, None], [{}, {}])],
        *[("index", wrong) for wrong in ({}, None, [None], [{"name": "weight"}])],
        *[("index.0.shape", wrong) for wrong in (35, [5, -7], ["5", 7], None)],
        *[("index.0.group", wrong) for wrong in ("other", [], None)],
        *[("index.0.offset", wrong) for wrong in (-1, 0.0, None)],
        ("index.0.name", 5),
        *[(name, wrong) for name in ("environment", "run") for wrong in ([], None, "mine")],
    ],
)
def test_what_is_of_another_type_is_damage_although_its_hash_is_right(
    store: DirectoryStore, key: str, value: object
) -> None:
    """An empty progress would start again at step 0, with trained parameters."""
    set_in_manifest(store, key, value)
    assert_passed_over(store, "manifest.json")
    (fault,) = verify(store, 20)
    assert key.split(".")[0] in fault.reason or key == "step"


def set_in_manifest(store: DirectoryStore, key: str, value: object) -> None:
    """Another value under a dotted key, with right hashes."""
    path = store.place(20) / "manifest.json"
    body = json.loads(path.read_bytes())
    del body["hash"]
    *parents, last = key.split(".")
    place = body
    for parent in parents:
        place = place[int(parent) if isinstance(place, list) else parent]
    place[last] = value
    text = json.dumps(body, separators=(",", ":"))
    data = f'{text[:-1]},"hash":"{digest(text.encode())}"}}'.encode()
    path.write_bytes(data)
    (store.place(20) / "COMMITTED").write_bytes(mark(data))


@pytest.mark.parametrize(("value", "shown"), [("x" * 38, "'" + "x" * 38 + "'"), ("x" * 39, "'" + "x" * 36 + "...")])
def test_a_long_value_is_cut_in_the_reason(store: DirectoryStore, value: str, shown: str) -> None:
    set_in_manifest(store, "time", value)
    (fault,) = verify(store, 20)
    assert shown in fault.reason


@pytest.mark.parametrize("data", [b"", b"\0" * 50, b"[]", b'{"a":1}', b"[" * 100_000, b"\xff\xfe", b"null"])
def test_invalid_manifests(data: bytes) -> None:
    with pytest.raises(ValueError, match="is not"):
        decode(data)


def test_a_later_format_is_refused_by_its_number(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.place(20) / "manifest.json"
    manifest = decode(path.read_bytes())
    with monkeypatch.context() as patch:
        patch.setattr("ortflow.workflow.checkpoint.manifest.VERSION", 2)
        claim(store, manifest)
    assert json.loads(path.read_bytes())["version"] == 2
    assert_passed_over(store, "manifest.json")
    with pytest.raises(Damaged, match="format version 2, this ortflow reads 1"):
        load(store, 20)


def test_an_unreadable_file(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", fail)
        faults = verify(store, 20)
    assert [fault.path.name for fault in faults] == list(FILES[2:])
    assert "cannot be read: Input/output error" in str(faults[0])
