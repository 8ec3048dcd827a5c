"""A checkpoint rewritten for other ranks, or as one file: no bit changes, and failures leave nothing."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, same, save, state
from safetensors.numpy import load_file

from ortflow.workflow.checkpoint import reshape as module
from ortflow.workflow.checkpoint.identity import Identity
from ortflow.workflow.checkpoint.load import load
from ortflow.workflow.checkpoint.manifest import Damaged, mark
from ortflow.workflow.checkpoint.reshape import merge, reshape
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.verify import read_manifest, verify
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.layout import Entry, FlatIndex, Tensor
from ortflow.workflow.system.disk_space import OutOfDisk


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "checkpoints")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_any_number_of_ranks_becomes_any_other(store: DirectoryStore, tmp_path: Path) -> None:
    chance = random.Random(0)
    for step in range(1, 21):
        buffers = state(step, chance.choice([INDEX.size, 1000, 70_000]))
        saved = save(store, step, buffers, chance.randint(1, 7), epoch=step)
        target = DirectoryStore(tmp_path / "reshaped")
        written = reshape(store, step, chance.randint(1, 7), target)
        assert not verify(target, step)
        loaded = load(target, step)
        assert same(loaded.buffers, buffers)
        assert (written.progress, written.environment) == (saved.progress, saved.environment)
        assert loaded.manifest.world_size == written.world_size


def test_it_is_the_checkpoint_that_those_ranks_would_have_written(store: DirectoryStore, tmp_path: Path) -> None:
    save(store, 1, state(1), 3)
    reshape(store, 1, 2, DirectoryStore(tmp_path / "reshaped"))
    save(direct := DirectoryStore(tmp_path / "direct"), 1, state(1), 2)
    for rank in range(2):
        name = f"rank-{rank:04d}.safetensors"
        assert (tmp_path / "reshaped/step-00000001" / name).read_bytes() == (direct.place(1) / name).read_bytes()


def test_merged_tensors_have_their_names_and_shapes(store: DirectoryStore, tmp_path: Path) -> None:
    buffers = state(5)
    buffers["moment_2"] = state(6)["parameters"]
    save(store, 5, buffers, 3)
    size = merge(store, 5, tmp_path / "model.safetensors")
    assert size == (tmp_path / "model.safetensors").stat().st_size
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {"weight", "bias"}
    merge(store, 5, tmp_path / "all.safetensors", moments=True)
    whole = load_file(tmp_path / "all.safetensors")
    assert whole.keys() == {"weight", "bias", "moment_2/weight", "moment_2/bias", "moment_1", "counters"}
    for entry in INDEX:
        for prefix, buffer in (("", "parameters"), ("moment_2/", "moment_2")):
            expected = buffers[buffer].array[entry.offset : entry.end].reshape(entry.tensor.shape)
            assert np.array_equal(whole[prefix + entry.name], expected)
        assert np.array_equal(tensors[entry.name], whole[entry.name])
    assert np.array_equal(whole["counters"], buffers["counters"].array)


PROGRAM = """
import sys
from pathlib import Path
from ortflow.workflow.checkpoint.reshape import merge, reshape
from ortflow.workflow.checkpoint.store import DirectoryStore

def held(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

store, output = DirectoryStore(Path(sys.argv[1])), Path(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = held("VmRSS")
reshape(store, 1, 2, DirectoryStore(output / "reshaped"))
merge(store, 1, output / "model.safetensors", moments=True)
print(held("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the highest memory of a process from /proc")
def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    """No tensor is held whole: the resident memory of a process is half of the largest one at most.

    Measured: four pieces that are read in parallel, and what threads and files need, together up to 27 MB, by how many
    files are read at the same moment. The states are 192 MB and 448 MB.
    """
    largest = 16 << 20
    for count in (8, 40):
        counts = [largest, *[1 << 20] * count]
        index = FlatIndex.place(Tensor(f"t{number}", (each,), "decay") for number, each in enumerate(counts))
        buffers = {name: HostBuffer(np.ones(index.size, np.float32)) for name in ("parameters", "moment_1")}
        save(DirectoryStore(tmp_path / str(count) / "from"), 1, buffers, 4, index=index)
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / str(count) / "from"), str(tmp_path / str(count))],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        print(f"{count + 1} tensors: {int(done.stdout):,} bytes")
        assert int(done.stdout) < 4 * largest / 2, f"{count + 1} tensors"
        shutil.rmtree(tmp_path / str(count))


def test_a_damaged_source_is_named_and_nothing_is_written(store: DirectoryStore, tmp_path: Path) -> None:
    save(store, 1, state(1))
    file = store.place(1) / "rank-0001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    for write in (
        lambda: reshape(store, 1, 3, DirectoryStore(tmp_path / "new")),
        lambda: merge(store, 1, tmp_path / "new"),
    ):
        with pytest.raises(Damaged, match=r"rank-0001\.safetensors: is corrupt"):
            write()
        assert not (tmp_path / "new").exists()


def test_what_exists_is_not_replaced(store: DirectoryStore, tmp_path: Path) -> None:
    save(store, 1, state(1))
    with pytest.raises(UserError, match="exists"):
        reshape(store, 1, 3, store)
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        merge(store, 1, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_text() == "mine"
    assert not verify(store, 1)


def test_a_folder_with_other_files_is_not_written_to(store: DirectoryStore, tmp_path: Path) -> None:
    save(store, 10, state(1))
    notes = tmp_path / "mine" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        reshape(store, 10, 1, DirectoryStore(notes.parent))
    with pytest.raises(UserError, match="other files"):
        reshape(store, 10, 1, DirectoryStore(notes))
    assert sorted(tmp_path.rglob("*.txt")) == [notes]
    assert os.listdir(notes.parent) == ["notes.txt"]


def test_a_folder_with_another_runs_checkpoints_is_not_written_to(store: DirectoryStore, tmp_path: Path) -> None:
    target = DirectoryStore(tmp_path / "target")
    for place, step, run in ((store, 10, "one"), (target, 20, "two")):
        identity = Identity(run, run, "", "0", "", "")
        save(place, step, state(1))
        manifest = replace(read_manifest(place, step), run=identity.to_json()).encode()
        (place.place(step) / "manifest.json").write_bytes(manifest)
        (place.place(step) / "COMMITTED").write_bytes(mark(manifest))
    save(target, 15, state(1))
    (target.place(15) / "manifest.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="another run"):
        reshape(store, 10, 1, target)
    assert target.steps() == [15, 20]
    reshape(store, 10, 3, DirectoryStore(tmp_path / "new"))
    assert read_manifest(DirectoryStore(tmp_path / "new"), 10).run["id"] == "one"


def test_an_index_outside_the_parameters(store: DirectoryStore, tmp_path: Path) -> None:
    index = FlatIndex([*INDEX, Entry(Tensor("more", (1 << 20,), "state"), INDEX.size)])
    save(store, 10, state(1), index=index)
    with pytest.raises(Damaged, match="outside the parameters"):
        merge(store, 10, tmp_path / "all.safetensors")
    assert not (tmp_path / "all.safetensors").exists()


def test_a_full_disk(store: DirectoryStore, small_disk: Path) -> None:
    save(store, 1, state(1, 100_000))
    with pytest.raises(OutOfDisk, match=r"out of disk on .*disk.*, \d+\.\d MB needed"):
        reshape(store, 1, 1, DirectoryStore(small_disk / "new"))
    with pytest.raises(OutOfDisk, match=r"out of disk on .*disk.*, 0\.4 MB needed"):
        merge(store, 1, small_disk / "new.safetensors", moments=True)
    assert os.listdir(small_disk) == []


def test_a_disk_that_fills_up_meanwhile(
    store: DirectoryStore, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "no_room", lambda *_: None)
    monkeypatch.setattr(module, "has_room", lambda *_: True)
    save(store, 1, state(1, 100_000))
    with pytest.raises(OutOfDisk) as raised:
        reshape(store, 1, 2, DirectoryStore(small_disk / "new"))
    assert raised.value.needed_bytes == 0, "it is not known"
    with pytest.raises(OutOfDisk, match=r", 0\.4 MB needed"):
        merge(store, 1, small_disk / "new.safetensors", moments=True)
    assert os.listdir(small_disk) == []


def test_a_commit_that_fails_leaves_nothing(
    store: DirectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", "manifest.json")

    save(store, 1, state(1, 100))
    monkeypatch.setattr("ortflow.workflow.checkpoint.commit.write_atomically", refuse)
    with pytest.raises(OrtflowError, match=r"manifest\.json: Input/output error"):
        reshape(store, 1, 2, DirectoryStore(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_a_place_where_nothing_can_be_written(store: DirectoryStore, tmp_path: Path) -> None:
    save(store, 1, state(1))
    (tmp_path / "file").write_text("")
    for write in (
        lambda: reshape(store, 1, 3, DirectoryStore(tmp_path / "file" / "new")),
        lambda: merge(store, 1, tmp_path / "file" / "new"),
    ):
        with pytest.raises(OrtflowError, match=r"cannot write .*file"):
            write()
