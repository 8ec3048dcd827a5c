"""A folder of checkpoints: what is in it, what is a stranger's, and names that are taken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ortflow.workflow.checkpoint.checkpoint_names import LOCK, MARKER, step_name
from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.run.location import Location


def saved(store: DirectoryStore, step: int, attempt: int = 0) -> Path:
    (store.begin(step, attempt) / "manifest.json").write_text("{}")
    return store.commit(step, attempt, b"mark")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "some" / "checkpoints")


def test_where_nothing_was_saved(store: DirectoryStore) -> None:
    assert (store.steps(), store.set_asides(), store.clean(), store.foreign()) == ([], [], [], None)
    assert not store.path.parent.exists(), "a question makes no folder"


def test_a_file_in_place_of_the_folder_is_a_stranger(store: DirectoryStore) -> None:
    store.path.parent.mkdir()
    store.path.write_text("mine")
    assert (store.steps(), store.set_asides(), store.clean()) == ([], [], [])
    assert store.foreign() == store.path
    store = DirectoryStore(store.path / "below")
    assert (store.steps(), store.foreign()) == ([], None)


def test_what_the_store_does_not_name_is_a_strangers(store: DirectoryStore) -> None:
    saved(store, 7)
    store.begin(8, 1)
    store.set_aside(7, 0)
    saved(store, 7)
    (store.path / LOCK).touch()
    (store.path / f".trash-{step_name(6)}.2").mkdir()
    assert store.foreign() is None
    for name in ("notes", "a-model.onnx"):
        (store.path / name).touch()
    assert store.foreign() == store.path / "a-model.onnx", "the first by name"


def test_steps_are_ordered_by_number_and_only_proper_names_count(store: DirectoryStore) -> None:
    for step in (1_000_000_000, 20, 3):
        saved(store, step)
    for name in ("step-0000000021", "step-22", "step-00000023.old", "old-step-00000024"):
        (store.path / name).mkdir()
    assert store.steps() == [3, 20, 1_000_000_000]


def test_a_name_that_is_taken_gets_a_number(store: DirectoryStore) -> None:
    names = []
    for _ in range(4):
        saved(store, 5)
        names.append(store.set_aside(5, 2).name)
    first = f"rejected-{step_name(5)}-02"
    assert names == [first, *(f"{first}.{number}" for number in (1, 2, 3))]
    assert [path.name for path in store.set_asides()] == names
    assert store.foreign() is None
    (store.path / first / "mine").touch()
    assert [path.name for path in store.remove_set_asides()] == names[1:], "a folder with a stranger's file stays"
    assert [path.name for path in store.set_asides()] == [first]


def test_free_space_is_that_of_the_folder_which_it_makes(store: DirectoryStore) -> None:
    for _ in range(2):
        free = store.free_bytes()
        assert abs(free - shutil.disk_usage(store.path).free) < 1 << 30
    assert store.path.is_dir()


def test_a_save_that_lacks_its_marker_only_is_completed(store: DirectoryStore) -> None:
    (saved(store, 4) / MARKER).rename(store.place(4) / ".unmarked")
    saved(store, 5)
    store.begin(6, 0)
    (store.path / f".trash-{step_name(3)}").mkdir()
    assert sorted(path.name for path in store.clean()) == [f".tmp-{step_name(6)}-00", f".trash-{step_name(3)}"]
    assert (store.place(4) / MARKER).read_bytes() == b"mark"
    assert store.steps() == [4, 5]


@pytest.mark.parametrize("call", range(1, 12))
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_step_that_is_saved_again_has_a_checkpoint_at_each_moment(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], call: int
) -> None:
    """Its save ends at one of the calls that change names: by a kill, behind which the next attempt cleans up, or a
    full disk."""
    (saved(store, 5) / "rank-0000.safetensors").write_text("old")
    folder = store.begin(5, 1)
    (folder / "rank-0000.safetensors").write_text("new")
    calls = 0

    def interrupted(function: Callable[..., object]) -> Callable[..., object]:
        def change(*arguments: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == call:
                raise error
            return function(*arguments, **options)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "rmdir", "fsync"):
            patch.setattr(os, name, interrupted(getattr(os, name)))
        try:
            store.commit(5, 1, b"mark")
        except error:
            assert calls >= call
        else:
            assert calls < call or error is OSError
    if error is KeyboardInterrupt:
        store.clean()
    assert store.steps() == [5]
    assert (store.place(5) / MARKER).is_file()
    assert (store.place(5) / "rank-0000.safetensors").read_text() in ("old", "new")
    assert store.foreign() is None
    store.clean()
    assert sorted(os.listdir(store.path)) == [step_name(5)]


def test_a_folder_in_the_run_directory_follows_it_and_another_does_not(tmp_path: Path) -> None:
    root = tmp_path.resolve() / "run"
    root.mkdir()
    location = Location(root)
    inside, outside = DirectoryStore(root / "checkpoints", location), DirectoryStore(tmp_path / "kept", location)
    root.rename(root.with_name("other"))
    assert saved(inside, 1).parent.samefile(tmp_path / "other" / "checkpoints")
    assert saved(outside, 1) == tmp_path / "kept" / step_name(1)
    assert not root.exists()
