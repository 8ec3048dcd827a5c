"""The description of a training program's checkpoint: read as it was written, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from ortflow.workflow.checkpoint import manifest as manifests
from ortflow.workflow.checkpoint.manifest import FileRecord
from ortflow.workflow.checkpoint.program import ProgramManifest, decode_program, is_inside

FILES = (FileRecord("model/0.pt", 7, "a" * 32), FileRecord("rng", 5, "b" * 32))
MANIFEST = ProgramManifest(30, 2, FILES, 1000.5, {"python": "3.11"}, {"id": "a"})


def test_it_is_read_as_it_was_written() -> None:
    assert decode_program(MANIFEST.encode()) == MANIFEST
    assert MANIFEST.size == 12


def changed(**changes: Any) -> bytes:
    body = manifests.unseal(MANIFEST.encode(), "ortflow-program-checkpoint", 1)
    return manifests.seal({key: value for key, value in (body | changes).items() if value is not None})


def one_file(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "rng", "size": 5, "hash": "b" * 32} | changes]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "ortflow-checkpoint"}, "is not a checkpoint's manifest"),
        ({"version": 2}, "has format version 2, this ortflow reads 1"),
        ({"step": None}, "lacks keys"),
        ({"files": [{"name": "rng"}]}, "lacks keys"),
        ({"files": 3}, "lacks keys"),
        ({"files": one_file(name="../rng")}, "has '../rng' for a file"),
        ({"files": one_file(name=3)}, "has '3' for a file"),
        ({"files": one_file(size=-1)}, "has 'rng' for a file"),
        ({"files": one_file(size=1.5)}, "has 'rng' for a file"),
        ({"files": [*one_file(), *one_file(name="/x" * 30)]}, f"has '{'/x' * 20}' for a file"),
    ],
)
def test_what_was_not_written_so_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        decode_program(changed(**changes))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a", True),
        ("a/b.c", True),
        ("..a/b..", True),
        ("", False),
        (".", False),
        ("/", False),
        ("/a", False),
        ("a/..", False),
        ("../a", False),
        ("a/../b", False),
        ("./a", False),
        ("a//b", False),
        ("a/", False),
    ],
)
def test_names_of_files_are_paths_inside_the_folder(name: str, inside: bool) -> None:
    assert is_inside(name) is inside
