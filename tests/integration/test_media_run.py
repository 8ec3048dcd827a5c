"""A run on two folders of images, one of them damaged, with a random ONNX transform: interrupted or not, one curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import yaml
from caches import cache_without_gradients
from messages import mentions
from onnx import TensorProto, helper
from pictures import write_classes
from project import command, of_kind
from small_network import save_model


def save_augmentation(path: Path) -> None:
    """image [1, 1, 5] + noise, as the column x [5]."""
    nodes = [
        helper.make_node("Reshape", ["image", "shape"], ["flat"]),
        helper.make_node("Add", ["flat", "noise"], ["x"]),
    ]
    inputs = [("image", [1, 1, 5]), ("noise", [5])]
    graph = helper.make_graph(
        nodes,
        "augment",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])],
        [helper.make_tensor("shape", TensorProto.INT64, [1], [5])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_run(folder: Path, name: str, steps: int, ranks: int) -> None:
    train = {
        "path": ["old", "new"],
        "images": {"resize": [1, 5], "channels": 1},
        "bad_rows": 0.1,
        "columns": {"labels": "label"},
        "transforms": [{"onnx": "augment.onnx", "random": {"noise": "normal"}}],
    }
    run = {
        "name": name,
        "model": {"path": "model.onnx", "loss": {"kind": "cross_entropy", "label": "labels"}},
        "data": {"train": train, "micro_batch": 2, "workers": 1},
        "train": {"steps": steps, "global_batch": 4, "optimizer": {"name": "adamw", "lr": 1e-2}},
        "monitor": {"every_steps": 1},
        "resources": {"ranks_per_node": ranks, "cpus_per_rank": 1},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))


def run(folder: Path, cache: Path, name: str, steps: int, ranks: int) -> list[dict[str, Any]]:
    write_run(folder, name, steps, ranks)
    done = command("run", f"{name}.yaml", folder=folder, XDG_CACHE_HOME=str(cache))
    assert done.returncode == 0, done.stdout + done.stderr
    return of_kind(folder / "runs" / name, "step")


def test_a_resumed_run_on_other_ranks_sees_the_same_samples(tmp_path: Path) -> None:
    save_model(tmp_path / "model.onnx")
    save_augmentation(tmp_path / "augment.onnx")
    write_classes(tmp_path / "old", {"cat": 6, "dog": 6})
    write_classes(tmp_path / "new", {"dog": 4, "owl": 5})
    (tmp_path / "new/owl/003.png").write_bytes(b"no image")
    cache = cache_without_gradients(tmp_path / "cache")
    whole = run(tmp_path, cache, "whole", 12, 1)
    run(tmp_path, cache, "parts", 5, 2)
    parts = run(tmp_path, cache, "parts", 12, 1)
    assert [record["step"] for record in parts] == list(range(1, 13))
    for one, other in zip(whole, parts, strict=True):
        assert abs(one["loss"] - other["loss"]) < 1e-5
    reported = [*of_kind(tmp_path / "runs/whole", "bad_rows"), *of_kind(tmp_path / "runs/parts", "bad_rows")]
    assert len(reported) == 3
    for record in reported:
        assert (record["skipped"], record["samples"]) == (1, 20)
        assert mentions(record["first"], f"{tmp_path}/new/owl/003.png: cannot be decoded")
