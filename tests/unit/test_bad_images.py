"""Damaged images: the first stops by default; up to a share they are left out, the same ones everywhere."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from messages import mentions
from pictures import write_classes

from ortflow.workflow.data.augmented import augmented
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.samples import Samples, reading_of
from ortflow.workflow.data.sources import open_evaluation, open_samples, open_training, pictures
from ortflow.workflow.data.sources.damaged import readable
from ortflow.workflow.data.sources.images import Images
from ortflow.workflow.errors import Faults, UserError
from ortflow.workflow.spec.data import DataSection, DataSet
from ortflow.workflow.spec.transforms import Transform

IMAGES = {"resize": [8, 8]}
ORIGINALS: list[bytes] = []


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twenty images, of which two are damaged."""
    monkeypatch.setenv("ORTFLOW_CACHE", str(tmp_path / "cache"))
    root = write_classes(tmp_path / "animals", {"cat": 10, "dog": 10})
    ORIGINALS[:] = [(root / "dog/009.png").read_bytes()]
    (root / "cat/003.png").write_bytes((root / "cat/003.png").read_bytes()[:100])
    (root / "dog/009.png").write_bytes(bytes((root / "dog/009.png").stat().st_size))
    return root


def opened(folder: Path, bad_rows: float) -> Samples:
    return open_samples(DataSet.model_validate({"path": str(folder), "images": IMAGES, "bad_rows": bad_rows}))


def test_damaged_images_up_to_a_share_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"cat/003.png: cannot be decoded"):
        opened(folder, 0).read("image", np.arange(20))
    with pytest.raises(Faults) as refused:
        opened(folder, 0.05)
    assert mentions(
        str(refused.value), "cat/003.png: cannot be decoded", "dog/009.png: …", "2 of 20 files are bad", "5.00%"
    )
    samples = opened(folder, 0.1)
    assert (len(samples), samples.read("label", np.arange(18)).tolist()) == (18, [0] * 9 + [1] * 9)
    assert samples.read("image", np.arange(18)).shape == (18, 3, 8, 8)
    assert isinstance(samples, Images)
    assert samples.blobs.name(3) == str(folder / "cat/004.png")
    flipped = augmented(samples, [Transform(flip="horizontal")], 0, "data.train")
    for each in (samples, flipped):
        assert reading_of(each).skipped == 2
        assert mentions("; ".join(reading_of(each).bad_rows), f"{folder}/cat/003.png: cannot … {folder}/dog/009.png:")


def test_a_resumed_run_leaves_out_the_same_ones_without_decoding_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    first = opened(folder, 0.1)
    sample = pictures.Preparation.sample
    monkeypatch.setattr(
        pictures.Preparation, "sample", lambda self, *given: [decoded.append(given[1]), sample(self, *given)][1]
    )
    again = opened(folder, 0.1)
    assert digest_of(again) == digest_of(first)
    assert sorted(Path(name).name for name in decoded) == ["003.png", "009.png"]  # by several threads
    # A repaired image of the same size is one of the samples again, so the run would continue with others.
    (folder / "dog/009.png").write_bytes(ORIGINALS.pop())
    repaired = opened(folder, 0.1)
    assert len(repaired) == 19
    assert digest_of(repaired) != digest_of(first)


def test_held_out_images_are_of_the_good_ones(folder: Path) -> None:
    values: dict[str, Any] = {"path": str(folder), "images": IMAGES, "bad_rows": 0.1}
    data = DataSection.model_validate(
        {"train": values, "eval": {"fraction": 0.5, "stratify": "label"}, "micro_batch": 1}
    )
    training, evaluation = open_training(data, 0), open_evaluation(data, 0)
    assert evaluation is not None
    assert len(training) + len(evaluation) == 18
    for part in (training, evaluation):
        part.read("image", np.arange(len(part)))
        assert reading_of(part).skipped == 2


def test_images_of_shards_and_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for number in range(4):
            shard.add(folder / f"cat/{number:03}.png", f"{number}.png")
    samples = opened(tmp_path / "a.tar", 0.25)
    assert len(samples) == 3
    (reported,) = reading_of(samples).bad_rows
    assert mentions(reported, f"{tmp_path}/a.tar:3: cannot be decoded")
    # What another attempt may read is not left out.
    assert isinstance(samples, Images)
    names = DataSet.model_validate({"path": str(folder), "images": IMAGES})
    whole = open_samples(names)
    assert isinstance(whole, Images)
    (folder / "dog/001.png").unlink()
    with pytest.raises(UserError, match=r"dog/001.png: No such file"):
        readable(whole, 0.5)
