"""Temporary graphs are not made durable; files of a run are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from small_network import save_model
from tiny_runs import Tiny

from ortflow.workflow.planning.forecast import forecast
from ortflow.workflow.run.rundir import scratch_folder, sync_directory, write_atomically
from ortflow.workflow.spec.file.load import load_run_file
from ortflow.workflow.spec.file.paths import resolve_paths


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders that are fsynced from now on."""
    found: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: found.append(os.readlink(f"/proc/self/fd/{file}")))
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads names of open files as on Linux")


@needs_proc
def test_only_what_is_kept_is_synced(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch_folder("test-") as folder:
        write_atomically(folder / "graphs" / "a", b"a")
        sync_directory(folder)
        assert (folder / "graphs" / "a").read_bytes() == b"a"
        assert synced == []
        write_atomically(tmp_path / "b", b"b")
        assert len(synced) == 2, "the file and its folder"
    assert not folder.exists()
    write_atomically(folder / "a", b"a")
    assert len(synced) == 4


@needs_proc
def test_a_plan_syncs_nothing(tmp_path: Path, synced: list[str]) -> None:
    save_model(tmp_path / "unused.onnx")
    Tiny.make(tmp_path)
    synced.clear()
    run_file = tmp_path / "run.yaml"
    forecast(resolve_paths(load_run_file(run_file, [], files=True), run_file))
    assert synced == []


def test_a_name_of_the_greatest_length_can_be_replaced(tmp_path: Path) -> None:
    # Of bytes, of which a character may have several.
    for name in ("é" * 124 + ".json", "a" + "é" * 122 + ".json", "€" * 83 + ".json", "x" * 255):
        write_atomically(tmp_path / name, b"{}")
        assert [path.name for path in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()
