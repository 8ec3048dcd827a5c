"""Where a run directory is while it is in use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ortflow.workflow.checkpoint.store import DirectoryStore
from ortflow.workflow.run.location import Location

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's names of open files")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "run"
    root.mkdir()
    return root


def test_renamed(root: Path) -> None:
    location = Location(root)
    assert location.intact()
    there = root.rename(root.with_name("other"))
    assert not location.intact()
    assert location.current() == there
    (location.path / "file").write_text("mine")
    assert (there / "file").read_text() == "mine"
    there.rename(root)
    assert location.intact(), "it may come back"


def test_replaced(root: Path) -> None:
    location = Location(root)
    there = root.rename(root.with_name("other"))
    root.mkdir()
    assert not location.intact()
    assert location.current() == there


def test_removed(root: Path) -> None:
    location = Location(root)
    root.rmdir()
    assert not location.intact()
    assert location.current() is None
    with pytest.raises(FileNotFoundError):
        DirectoryStore(root / "checkpoints", location).begin(1, 0)
    assert not root.exists()


def test_inodes_that_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in FUSE file systems without stable numbers."""
    location = Location(root)
    monkeypatch.setattr(os.path, "samestat", lambda one, other: False)
    assert location.intact()


def test_a_store_follows_the_directory_through_links(root: Path) -> None:
    link = root.with_name("link")
    link.symlink_to(root)
    store = DirectoryStore(link / "checkpoints", Location(root))
    assert store.path == root / "checkpoints"
    there = root.rename(root.with_name("other"))
    store.begin(7, 0)
    assert os.listdir(there / "checkpoints") == [".tmp-step-00000007-00"]
    assert not root.exists()
