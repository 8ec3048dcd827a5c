"""Names that no run file can hold, and names that are too long: one sentence, whichever verb meets them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tiny_runs import Tiny, has_traceback

RAW = os.fsdecode(b"caf\xe9")
LONG = "x" * 300


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    made = Tiny.make(tmp_path_factory.mktemp("p"))
    for name in ("run.yaml", "set.arrow"):
        shutil.copy(made.folder / name, made.folder / f"{RAW}{Path(name).suffix}")
    return made


@pytest.mark.parametrize(
    "words",
    [
        ["run", f"{RAW}.yaml"], ["validate", f"{RAW}.yaml"], ["render", "-b", "slurm", f"{RAW}.yaml"],
        ["run", "run.yaml", "--runs-dir", RAW], ["data", "show", f"{RAW}.arrow"], ["status", "tiny", "--runs-dir", RAW],
        ["run", f"{LONG}.yaml"], ["run", "run.yaml", "--runs-dir", LONG], ["run", "run.yaml", f"run_dir={LONG}"],
        ["data", "show", LONG], ["status", LONG], ["inspect", LONG],
    ],
    ids=lambda words: ascii(" ".join(words))[1:40],
)  # fmt: skip
def test_one_sentence_that_names_it(tiny: Tiny, words: list[str]) -> None:
    before = sorted(tiny.folder.iterdir())
    done = tiny.command(*words)
    assert done.code == 2, done.said
    assert not has_traceback(done.said)
    (line,) = done.err.splitlines()
    assert line.startswith("error: ")
    assert "caf\\udce9" in line or LONG[:20] in line
    assert sorted(tiny.folder.iterdir()) == before


def test_a_folder_whose_name_is_not_text(tiny: Tiny, tmp_path: Path) -> None:
    """Nothing of a run is left in it."""
    folder = tmp_path / RAW
    shutil.copytree(tiny.folder, folder)
    done = Tiny(folder).command("run", "run.yaml")
    assert done.code == 2, done.said
    (line,) = done.err.splitlines()
    assert "caf\\udce9" in line
    assert "not UTF-8" in line
    assert not (folder / "runs").exists()
