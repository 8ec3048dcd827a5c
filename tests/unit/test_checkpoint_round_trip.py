from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import INDEX, Rejections, newest_whole, progress_of, same, save, state
from fake_cuda import fake_device
from safetensors.numpy import load_file
from thread_links import StreamedCuda

from ortflow.workflow.checkpoint import load as load_module
from ortflow.workflow.checkpoint.load import load, load_newest, newest_matching, window_for
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.tensors import PAGE, BufferSpec, file_layout
from ortflow.workflow.checkpoint.verify import CHUNK, read_manifest, verify
from ortflow.workflow.device.cpu import HostBuffer
from ortflow.workflow.device.shard import Shard
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex, Tensor, share


@pytest.mark.parametrize("written_by", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 63, 64, 1000, 4097])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path: Path, written_by: int, count: int) -> None:
    store, buffers = DirectoryStore(tmp_path), state(count, count)
    save(store, 1, buffers, written_by)
    loaded = load(store, 1)
    assert same(loaded.buffers, buffers)
    for world_size in (1, 2, 3, 4):
        again = {name: HostBuffer(array) for name, array in loaded.buffers.items()}
        save(store, 10 + world_size, again, world_size)
        out = {name: np.full(buffer.count, 7, buffer.dtype) for name, buffer in buffers.items()}
        found = load_newest(store, out)
        assert found is not None
        assert (found.manifest.step, found.manifest.world_size) == (10 + world_size, world_size)
        assert same(out, buffers)


@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_files_are_safetensors_of_the_shares(tmp_path: Path, world_size: int) -> None:
    store, buffers = DirectoryStore(tmp_path), state(0, 500)
    save(store, 7, buffers, world_size)
    for rank in range(world_size):
        tensors = load_file(store.place(7) / f"rank-{rank:04d}.safetensors")
        assert tensors.keys() == buffers.keys()
        for name, buffer in buffers.items():
            start, stop = share(buffer.count, rank, world_size)
            np.testing.assert_array_equal(tensors[name], buffer.array[start:stop], strict=True)


def test_data_starts_on_a_page_and_tensors_are_aligned() -> None:
    layout = file_layout({"a": BufferSpec("F16", 3), "b": BufferSpec("I64", 5), "c": BufferSpec("F32", 1)}, 0, 1)
    assert len(layout.header) % PAGE == 0
    assert [span.buffer for span in layout.spans] == ["b", "c", "a"]
    assert layout.spans[0].offset == len(layout.header)
    assert layout.size == layout.spans[-1].end == len(layout.header) + 5 * 8 + 4 + 3 * 2


def test_manifest_brings_back_index_and_progress(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    progress: dict[str, Any] = {
        "epoch": 3,
        "sample": 1 << 60,
        "loss": 0.1,
        "best": float("inf"),
        "état": ["\ud800", None, True],
    }
    save(store, 12, state(0), 2, **progress)
    manifest = read_manifest(store, 12)
    assert manifest.progress == progress_of(12, **progress)
    assert manifest.index.to_json() == INDEX.to_json()
    assert [file.name for file in manifest.files] == ["rank-0000.safetensors", "rank-0001.safetensors"]
    assert manifest.size == sum((store.place(12) / file.name).stat().st_size for file in manifest.files)


def test_buffers_not_asked_for_are_verified_and_left(tmp_path: Path) -> None:
    store, buffers = DirectoryStore(tmp_path), state(3, 1000)
    save(store, 1, buffers, 3)
    out = {"parameters": np.zeros(1000, np.float32)}
    load(store, 1, out)
    assert same(out, {"parameters": buffers["parameters"]})
    path = store.place(1) / "rank-0002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    rejections = Rejections()
    assert load_newest(store, out, rejections) is None
    assert rejections.paths == [path]


def test_large_buffers_cross_many_chunks(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    buffers = {"a": HostBuffer(np.arange(5_000_001, dtype=np.float32)), "b": HostBuffer(np.arange(3_000_000))}
    save(store, 1, buffers, 2)
    assert verify(store, 1) == []
    assert same(load(store, 1).buffers, buffers)


def test_nothing_there(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "none")
    assert store.steps() == []
    assert load_newest(store) is None
    assert newest_whole(store) is None
    assert store.clean() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"moment_2": np.zeros(3, np.float32)}, "no moment_2, only parameters, moment_1, counters"),
        ({"parameters": np.zeros(4, np.float32)}, "parameters .*192 .*float32 .*checkpoint .*4"),
        ({"parameters": np.zeros(192, np.float64)}, "and 192 of float64 here"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, np.ndarray], sentence: str) -> None:
    store, buffers = DirectoryStore(tmp_path), state(0, 192)
    save(store, 1, buffers)
    with pytest.raises(UserError, match=sentence):
        load_newest(store, {**{name: buffer.read() for name, buffer in buffers.items()}, **change})


def test_training_continues_only_with_the_same_tensors_and_buffers(tmp_path: Path) -> None:
    store, buffers = DirectoryStore(tmp_path), state(0)
    save(store, 1, buffers)
    out = {name: buffer.read() for name, buffer in buffers.items()}
    assert load_newest(store, out, index=INDEX) is not None
    other = FlatIndex.place([Tensor("weight", (7, 5), "decay"), Tensor("bias", (3,), "no_decay")])
    with pytest.raises(UserError, match="tensor weight has another shape"):
        load_newest(store, out, index=other)
    shorter = FlatIndex(INDEX.entries[:1])
    with pytest.raises(UserError, match="tensor bias has another"):
        load_newest(store, out, index=shorter)
    del out["moment_1"]
    with pytest.raises(UserError, match="the checkpoint also has moment_1"):
        load_newest(store, out, index=INDEX)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_a_rank_holds_is_read_straight_into_its_buffers(tmp_path: Path, world_size: int) -> None:
    """Not by way of a second copy, as which a state needs as much memory again."""
    store, count = DirectoryStore(tmp_path), 16 << 20
    buffers = {"parameters": HostBuffer(np.random.default_rng(0).standard_normal(count, np.float32))}
    save(store, 1, buffers, world_size)
    start, stop = share(count, 0, 2)
    held = {"parameters": Shard(HostBuffer(np.empty(stop - start, np.float32)), start, count)}
    tracemalloc.start()
    try:
        load(store, 1, {name: window_for(shard) for name, shard in held.items()})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(held["parameters"].part.read(), buffers["parameters"].array[start:stop])
    assert peak < (world_size + 1) * CHUNK < 4 * (stop - start)


def test_a_gpus_buffers_are_filled_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "CHUNK", 1 << 10)
    store, buffers = DirectoryStore(tmp_path), state(5, 5000)
    save(store, 1, buffers, 3)
    device = fake_device(StreamedCuda())
    held: dict[str, Any] = {}
    for name, buffer in buffers.items():
        start, stop = share(buffer.count, 1, 2) if name != "counters" else (0, buffer.count)
        held[name] = Shard(device.allocate(stop - start, buffer.dtype), start, buffer.count)
    load(store, 1, {name: window_for(shard) for name, shard in held.items()})
    for name, shard in held.items():
        found = shard.part.read()
        np.testing.assert_array_equal(found, buffers[name].array[shard.start : shard.start + shard.part.count])


@pytest.mark.parametrize("saved", [1, 3])
def test_a_new_run_begins_as_it_would_without_damaged_checkpoints(tmp_path: Path, saved: int) -> None:
    store = DirectoryStore(tmp_path)
    for step in range(1, saved + 1):
        save(store, step, state(step, 1000), 2)
        damage = store.place(step) / "rank-0001.safetensors"
        content = bytearray(damage.read_bytes())
        content[-1] ^= 1
        damage.write_bytes(content)
    initial = state(9, 1000)
    held = {name: HostBuffer(buffer.array.copy()) for name, buffer in initial.items()}
    windows, rejections = {name: window_for(buffer) for name, buffer in held.items()}, Rejections()
    assert newest_matching(store, windows, rejections, index=INDEX) is None
    assert len(rejections.faults) == saved
    assert same({name: buffer.array for name, buffer in held.items()}, initial)
    save(store, 9, state(3, 1000), 2)
    found = newest_matching(store, windows, rejections, index=INDEX)
    assert found is not None
    assert found.step == 9
    assert same({name: buffer.array for name, buffer in held.items()}, initial)
