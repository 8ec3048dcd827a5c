"""A share of a folder of images is held out: the same classes, and each image in one of the two sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pictures import write_classes

from ortflow.workflow.data.classes import classes_of
from ortflow.workflow.data.digest import digest_of
from ortflow.workflow.data.sources import open_evaluation, open_training
from ortflow.workflow.spec.data import DataSection


def test_images_are_held_out_once(tmp_path: Path) -> None:
    root = write_classes(tmp_path, {"cat": 12, "dog": 8})
    section = DataSection.model_validate(
        {
            "train": {"path": str(root), "transforms": [{"flip": "horizontal"}]},
            "eval": {"fraction": 0.25, "stratify": "label"},
            "micro_batch": 1,
        }
    )
    train, held_out = open_training(section, 3), open_evaluation(section, 3)
    assert held_out is not None
    assert section.eval is not None
    assert section.eval.transforms == []
    assert (len(train), len(held_out)) == (15, 5)
    everything = [samples.read("image", np.arange(len(samples))).tobytes() for samples in (train, held_out)]
    whole = DataSection.model_validate({"train": {"path": str(root)}, "micro_batch": 1})
    images = open_training(whole, 3)
    assert classes_of(train) == classes_of(held_out) == classes_of(images)
    size = len(everything[0]) // 15
    parts = [part[i : i + size] for part in everything for i in range(0, len(part), size)]
    assert sorted(parts) == sorted(images.read("image", np.array([i])).tobytes() for i in range(20))
    labels = held_out.read("label", np.arange(5))
    assert np.bincount(labels).tolist() == [3, 2]
    assert len({digest_of(samples) for samples in (train, held_out, images)}) == 3
