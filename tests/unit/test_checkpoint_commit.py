from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import INDEX, Rejections, newest_whole, progress_of, same, save, state
from trees import tree

from ortflow.workflow.checkpoint.commit import SaveFailed, commit, no_room
from ortflow.workflow.checkpoint.load import load, load_newest
from ortflow.workflow.checkpoint.manifest import FileRecord
from ortflow.workflow.checkpoint.retain import prune
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.checkpoint.tensors import PAGE, file_layout
from ortflow.workflow.checkpoint.verify import verify
from ortflow.workflow.checkpoint.writer import Writer, specs
from ortflow.workflow.errors import UserError
from ortflow.workflow.layout import FlatIndex, Tensor
from ortflow.workflow.system import own_files
from ortflow.workflow.system.disk_space import RECORDS, OutOfDisk

OLD, NEW = state(1), state(2)


class Killed(BaseException):
    """Simulates the death of the process."""


def names(store: DirectoryStore) -> list[str]:
    return sorted(path.name for path in store.path.iterdir())


def written(store: DirectoryStore, step: int, attempt: int = 0) -> list[FileRecord]:
    """Files of one rank, not committed."""
    writer = Writer(store, NEW, rank=0, world_size=1, attempt=attempt)
    writer.start(step, urgent=True)
    record = writer.wait().record
    assert record is not None
    return [record]


def commit_new(store: DirectoryStore, step: int, records: list[FileRecord]) -> None:
    commit(store, step, 0, records, buffers=specs(NEW), index=INDEX, progress=progress_of(step), environment={})


def test_nothing_else_is_left(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 5, NEW, 3)
    assert names(store) == ["step-00000005"]
    assert sorted(os.listdir(store.place(5))) == [
        "COMMITTED", "manifest.json", "rank-0000.safetensors", "rank-0001.safetensors", "rank-0002.safetensors"
    ]  # fmt: skip


@pytest.mark.parametrize("victim", ["step", "prune"])
def test_killed_at_any_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    """Either the old or the new checkpoint is always intact, no partial one looks committed, clean removes the rest."""
    calls = ("open", "write", "fsync", "rename", "replace", "unlink", "rmdir")
    here = threading.get_ident()
    for death in range(1000):
        store = DirectoryStore(tmp_path / str(death))
        save(store, 10, OLD, 1)
        records = written(store, 20)
        count = -1

        def dying(real: Callable[..., Any], death: int = death) -> Callable[..., Any]:
            def dying_call(*arguments: Any, **options: Any) -> Any:
                nonlocal count
                if threading.get_ident() == here:  # threads of other tests still watch their runs
                    count += 1
                    if count == death:
                        raise Killed
                return real(*arguments, **options)

            return dying_call

        survived = False
        with monkeypatch.context() as patch:
            for call in calls:
                patch.setattr(os, call, dying(getattr(os, call)))
            try:
                commit_new(store, 20, records)
                if victim == "prune":
                    prune(store, 1)
                survived = True
            except Killed:
                pass
        rejections = Rejections()
        found = load_newest(store, on_reject=rejections)
        assert found is not None, death
        assert same(found.buffers, NEW if found.manifest.step == 20 else OLD)
        for path in rejections.paths:
            assert path == store.place(20) / "COMMITTED"
        renamed = store.place(20).exists()
        store.clean()
        assert set(names(store)) <= {"step-00000010", "step-00000020"}
        assert [step for step in store.steps() if verify(store, step)] == []
        assert store.place(20).exists() == renamed
        save(store, 20, NEW, 2, attempt=1)
        assert newest_whole(store) == 20
        if survived:
            assert death > 10
            return
    raise AssertionError("the commit never ended")


def test_everything_is_on_the_disk_before_the_name_that_vouches_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    renamed: dict[str, str] = {}

    def record_fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        fsync(descriptor)
        done.append(("fsync", name))

    def record_rename(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(("rename", Path(target).name))

    def record_replace(source: str, target: Path) -> None:
        replace(source, target)
        renamed[Path(source).name] = Path(target).name

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    monkeypatch.setattr(os, "replace", record_replace)
    save(DirectoryStore(tmp_path / "checkpoints"), 5, NEW, 2)
    order = [(verb, renamed.get(name, name)) for verb, name in done]
    moved, marked = order.index(("rename", "step-00000005")), order.index(("rename", "COMMITTED"))
    before = {name for verb, name in order[:moved] if verb == "fsync"}
    files = {"rank-0000.safetensors", "rank-0001.safetensors", "manifest.json", ".unmarked"}
    assert before == {*files, ".tmp-step-00000005-00"}
    assert ("fsync", "checkpoints") in order[moved:marked]
    assert order[-1] == ("fsync", "step-00000005")
    assert marked == len(order) - 2


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 3)
    save(store, 10, NEW, 1)
    assert names(store) == ["step-00000010"]
    assert same(load(store, 10).buffers, NEW)


def test_a_damaged_one_in_its_place_is_set_aside(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    for attempt in range(2):
        save(store, 10, OLD, 2, attempt=attempt)
        os.truncate(store.place(10) / "rank-0001.safetensors", 4100)
        save(store, 10, NEW, 2, attempt=1)
        assert verify(store, 10) == []
    aside = ["rejected-step-00000010-01", "rejected-step-00000010-01.1"]
    assert names(store) == [*aside, "step-00000010"]
    assert [path.name for path in store.set_asides()] == aside
    assert (store.path / aside[0] / "rank-0001.safetensors").stat().st_size == 4100
    assert len(store.remove_set_asides()) == 2
    assert names(store) == ["step-00000010"]


def test_one_that_was_never_marked_is_replaced(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 2)
    (store.place(10) / "COMMITTED").unlink()
    save(store, 10, NEW, 1)
    assert names(store) == ["step-00000010"]
    assert same(load(store, 10).buffers, NEW)


@pytest.mark.parametrize("call", ["rename", "fsync", "replace"])
def test_an_error_of_the_disk_fails_the_save_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 1)
    records = written(store, 20)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(SaveFailed, match=r"checkpoint of step 20: .*Input/output error"):
            commit_new(store, 20, records)
    assert names(store) == ["step-00000010"]
    assert newest_whole(store) == 10


def test_an_error_while_marking_leaves_no_unmarked_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 1)
    records = written(store, 20)
    rename = os.rename

    def fail_to_mark(source: Path, target: Path) -> None:
        if target.name == "COMMITTED":
            raise OSError(5, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_to_mark)
        with pytest.raises(SaveFailed, match="Input/output error"):
            commit_new(store, 20, records)
    assert names(store) == ["step-00000010"]


def test_a_file_that_rank_0_does_not_see(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    records = written(store, 20)
    (store.begin(20, 0) / records[0].name).unlink()
    with pytest.raises(SaveFailed, match=r"rank-0000\.safetensors: No such file"):
        commit_new(store, 20, records)
    records = written(store, 20)
    os.truncate(store.begin(20, 0) / records[0].name, 10)
    with pytest.raises(SaveFailed, match="size"):
        commit_new(store, 20, records)
    assert names(store) == []


def test_clean_removes_what_dead_attempts_left_and_no_more(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 1)
    written(store, 20, attempt=4)
    store.abandon(30, 4)
    (tmp_path / "step-00000020").mkdir()
    (tmp_path / "mine").mkdir()
    assert [path.name for path in store.clean()] == [".tmp-step-00000020-04"]
    assert names(store) == ["mine", "step-00000010", "step-00000020"]


def test_an_abandoned_save_is_gone(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    written(store, 20)
    assert names(store) == [".tmp-step-00000020-00"]
    store.abandon(20, 0)
    assert names(store) == []


def test_free_space_is_checked_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "checkpoints")
    buffers = specs(state(0, 10_000))
    index = FlatIndex.place([])
    assert no_room(store, buffers, 3, index) is None
    files = sum(file_layout(buffers, rank, 3).size for rank in range(3))
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: files + (1 << 18))
    assert no_room(store, buffers, 3, index) is None, "little more than the written size"
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: files)
    lack = no_room(store, buffers, 3, index)
    assert isinstance(lack, OutOfDisk)
    assert str(lack) == f"out of disk on {tmp_path / 'checkpoints'}, {lack.needed_bytes / 1e6:.1f} MB needed"


def test_free_space_for_files_descriptions_and_records_in_whole_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DirectoryStore(tmp_path / "checkpoints")
    buffers = specs(NEW)
    # Its description is longer than a page, and the files are no whole pages.
    index = FlatIndex.place([Tensor(f"weight.{number}", (1,), "decay") for number in range(200)])
    described = len(json.dumps(index.to_json()))
    sizes = [file_layout(buffers, rank, 2).size for rank in range(2)]
    assert described > PAGE
    assert all(size % PAGE for size in sizes)
    needed = sum(-(-size // PAGE) * PAGE for size in (*sizes, described)) + RECORDS
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: needed)
    assert no_room(store, buffers, 2, index) is None
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: needed - 1)
    lack = no_room(store, buffers, 2, index)
    assert isinstance(lack, OutOfDisk)
    assert lack.needed_bytes == needed


def test_free_space_in_an_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trouble = no_room(DirectoryStore(tmp_path / "file"), specs(NEW), 1, FlatIndex.place([]))
    assert isinstance(trouble, FileExistsError)
    assert trouble.filename == str(tmp_path / "file")


def test_a_deletion_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path)
    save(store, 10, OLD, 2)

    def die(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(own_files, "clear", die)
        with pytest.raises(Killed):
            store.remove(10)
    assert store.steps() == []
    assert [path.name for path in store.clean()] == [".trash-step-00000010"]
    assert names(store) == []


def littered(folder: Path) -> DirectoryStore:
    """A folder with foreign files under checkpoints' names, and links that lead out of it."""
    outside, store = folder / "outside", DirectoryStore(folder / "store")
    outside.mkdir()
    (outside / "rank-0000.safetensors").write_text("precious")
    save(store, 10, OLD, 1)
    save(store, 20, OLD, 1)
    (store.place(20) / "notes.txt").write_text("precious")
    for name in (
        "step-00000030",
        ".tmp-step-00000060-00",
        ".trash-step-00000010",
        "rejected-step-00000010-00",
        ".replaced-step-00000010",
        ".replaced-step-00000070",
    ):
        (store.path / name).mkdir()
        (store.path / name / "thesis.txt").write_text("precious")
    for name in (".tmp-mine", ".trash-can", "rejected-papers"):
        (store.path / name).mkdir()
        (store.path / name / "manifest.json").write_text("precious")
    for name in ("step-00000040", ".trash-step-00000040", "rejected-step-00000040-00"):
        (store.path / name).symlink_to(outside)
    (store.path / "step-00000050").mkdir()
    (store.path / "step-00000050" / "rank-0000.safetensors").symlink_to(outside / "rank-0000.safetensors")
    return store


def test_only_folders_of_checkpoint_files_are_deleted(tmp_path: Path) -> None:
    store = littered(tmp_path)
    before = tree(tmp_path)
    assert store.clean() == []
    assert store.remove_set_asides() == []
    store.abandon(60, 0)
    for step in (20, 30, 40, 50):
        with pytest.raises(UserError, match="contains other files than a checkpoint's"):
            store.remove(step)
    assert tree(tmp_path) == before
    save(store, 70, NEW, 1)
    assert prune(store, 1) == [10]
    top = {name.split("/")[1] for name in before if name.startswith("store/")}
    assert set(names(store)) == (top | {"step-00000070"}) - {"step-00000010"}


def test_a_stranger_in_the_place_of_a_checkpoint_is_set_aside(tmp_path: Path) -> None:
    store = littered(tmp_path)
    before = tree(store.path)
    for step in (20, 30, 40, 50):
        save(store, step, NEW, 1, attempt=3)
        assert verify(store, step) == []
        place, aside = f"step-{step:08d}", f"rejected-step-{step:08d}-03"
        moved = {name.replace(aside, place): text for name, text in tree(store.path).items() if name.startswith(aside)}
        assert moved == {name: text for name, text in before.items() if name.startswith(place)}
    assert (tmp_path / "outside" / "rank-0000.safetensors").read_text() == "precious"
