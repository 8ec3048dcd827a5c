"""`model.start_from`: the weights of other files become the initial tensors of a run, or one sentence says why not."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_build_models import Array
from onnx import numpy_helper
from safetensors.numpy import load_file, save_file
from small_network import save_model

from ortflow.workflow.assembly.build import build_graphs
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.types import GraphSet
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.weights.file import encoded
from ortflow.workflow.weights.kept import read_kept, read_record
from ortflow.workflow.weights.table import PROPERTY, Entry, to_json


def begun(folder: Path, section: Mapping[str, Any] | None, *, resumed: bool = False) -> GraphSet:
    model = {"path": str(folder / "model.onnx"), "loss": {"kind": "cross_entropy"}, "start_from": section}
    spec = TrainerRunSpec.model_validate(
        {
            "name": "unit",
            "model": model,
            "data": {"train": {"path": "unused"}, "micro_batch": 1},
            "train": {"steps": 1, "optimizer": {"name": "adamw", "lr": 0.1}},
        }
    )
    return build_graphs(spec, folder / "graphs", resumed=resumed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "model.onnx")
    return tmp_path


def tensors(folder: Path) -> dict[str, Array]:
    model = onnx.load(folder / "model.onnx")
    return {t.name: np.array(numpy_helper.to_array(t)) for t in model.graph.initializer}


def other(folder: Path) -> dict[str, Array]:
    random = np.random.default_rng(3)
    return {n: random.uniform(0.5, 1, a.shape).astype(np.float32) for n, a in tensors(folder).items()}


def initial(graphs: GraphSet) -> dict[str, Array]:
    return load_file(graphs.initial)


def same(a: Mapping[str, Array], b: Mapping[str, Array]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def refusal(folder: Path, section: Mapping[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        begun(folder, section)
    assert not (folder / "graphs").exists()
    return str(caught.value)


def test_every_kind_of_file_gives_its_values(folder: Path) -> None:
    new = other(folder)
    save_file(new, folder / "w.safetensors")
    assert same(initial(begun(folder, {"path": str(folder / "w.safetensors")})), new)
    record = read_record(folder / "graphs")
    assert record is not None
    assert len(record.digest) == 64
    model = onnx.load(folder / "model.onnx")
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(new[tensor.name] / 2, tensor.name))
    onnx.save(model, folder / "other.onnx")
    assert same(initial(begun(folder, {"path": str(folder / "other.onnx")})), {n: a / 2 for n, a in new.items()})
    shards = {name: f"model-0000{place % 2}.safetensors" for place, name in enumerate(new)}
    for file in set(shards.values()):
        save_file({n: new[n] for n in new if shards[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert same(initial(begun(folder, {"path": str(folder)})), new)


def test_narrow_and_wide_types_are_cast_and_the_log_says_it(folder: Path) -> None:
    new = other(folder)
    bits = {n: (a.view(np.uint32) >> 16).astype(np.uint16) for n, a in new.items()}
    (folder / "w.safetensors").write_bytes(encoded(((n, "BF16", a) for n, a in bits.items()), {}))
    graphs = begun(folder, {"path": str(folder / "w.safetensors")})
    assert same(initial(graphs), {n: (a.astype(np.uint32) << 16).view(np.float32) for n, a in bits.items()})
    assert any("cast to fp32 from BF16" in note for note in graphs.notes)
    save_file({n: a.astype(np.float64) for n, a in new.items()}, folder / "d.safetensors")
    assert same(initial(begun(folder, {"path": str(folder / "d.safetensors")})), new)
    save_file({n: np.full(a.shape, 1e300) for n, a in new.items()}, folder / "d.safetensors")
    with pytest.raises(UserError, match="single precision cannot represent"):
        begun(folder, {"path": str(folder / "d.safetensors")})


def test_names_are_mapped_and_a_new_head_keeps_its_values(folder: Path) -> None:
    new = other(folder)
    renamed = {f"module.{'kernel' if n == 'w' else n}": a for n, a in new.items() if n != "u"}
    renamed["module.u"] = np.zeros((7, 1000), np.float32)
    renamed["optimizer"] = np.zeros(3, np.float32)
    save_file(renamed, folder / "w.safetensors")
    names = {"module.kernel": "w", "module.*": "*"}
    section = {"path": str(folder / "w.safetensors"), "names": names, "missing": ["u"], "unexpected": ["optim*"]}
    assert same(initial(begun(folder, section)), {**new, "u": tensors(folder)["u"]})


def test_wrong_names_shapes_and_patterns_are_one_sentence(folder: Path) -> None:
    new = other(folder)
    path = folder / "w.safetensors"

    def message(contents: Mapping[str, Array], **keys: Any) -> str:
        save_file(dict(contents), path)
        return refusal(folder, {"path": str(path), **keys})

    assert "no value for w, b, scale and 4 more of 7 tensors" in message({f"net.{n}": a for n, a in new.items()})
    assert "`names: {'net.*': '*'}`" in message({f"net.{n}": a for n, a in new.items()})
    assert "w (5 x 7 in the model, 7 x 5 in the file)" in message({**new, "w": new["w"].T.copy()})
    assert "no tensor for extra of 8 entries" in message({**new, "extra": new["b"]})
    assert "'heat' matches no tensor of the model" in message(new, missing=["heat"])
    assert "'heat' matches no entry of the file" in message(new, unexpected=["heat"])
    assert "'heat' matches no entry of the file" in message(new, names={"heat": "w"})
    assert "more asterisks" in message(new, names={"w": "*"})
    assert "type I8" in message({**new, "w": np.zeros((5, 7), np.int8)})
    assert "has no checkpoints" in message(new, step=3)


def test_damaged_files_are_one_sentence(folder: Path) -> None:
    path = folder / "w.safetensors"
    save_file(other(folder), path)
    whole = path.read_bytes()
    for content in (b"", b"\x00" * 4, whole[:20], whole[:-5], b"\xff" * 20, whole.replace(b"F32", b"F99", 1)):
        path.write_bytes(content)
        assert "is not a valid safetensors file" in refusal(folder, {"path": str(path)})
    assert "cannot be read (No such file" in refusal(folder, {"path": str(folder / "none.safetensors")})
    (folder / "empty").mkdir()
    assert "there are no weights in" in refusal(folder, {"path": str(folder / "empty")})
    (folder / "x.index.json").write_text(json.dumps({"weight_map": {"w": "../w.safetensors"}}))
    assert "not beside it" in refusal(folder, {"path": str(folder / "x.index.json")})


def test_code_in_a_pickle_is_not_run(folder: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(folder / "attacked"),)

    for value in (Attack(), {"w": Attack()}):
        with zipfile.ZipFile(folder / "w.pt", "w") as archive:
            archive.writestr("w/data.pkl", pickle.dumps(value, 2))
        assert "mkdir, which is not part of a tensor and is not run" in refusal(folder, {"path": str(folder / "w.pt")})
    assert not (folder / "attacked").exists()
    (folder / "w.pt").write_bytes(pickle.dumps({"w": 1}))
    assert "not a zip archive" in refusal(folder, {"path": str(folder / "w.pt")})


def with_table(folder: Path, entries: list[Entry]) -> None:
    model = onnx.load(folder / "model.onnx")
    model.metadata_props.add(key=PROPERTY, value=to_json(entries))
    onnx.save(model, folder / "model.onnx")


def test_ties_and_entries_that_the_graph_lacks(folder: Path) -> None:
    own = tensors(folder)
    rows = [Entry(f"net.{name}", "F32", array.shape, name) for name, array in own.items()]
    rows += [Entry("head.w", "F32", (5, 7), "w"), Entry("count", "I64", (), value=np.array(4))]
    rows += [Entry("codes", "I64", (2,), value=np.array([1, 2]), is_constant=True)]
    with_table(folder, rows)
    assert read_kept(begun(folder, None).root) is not None
    new = other(folder)
    named = {f"net.{name}": array for name, array in new.items()}
    path = folder / "w.safetensors"
    section = {"path": str(path)}
    save_file({**named, "head.w": new["w"].copy(), "count": np.array(9), "codes": np.array([1, 2])}, path)
    graphs = begun(folder, section)
    assert same(initial(graphs), new)
    kept = {entry.name: entry.value for entry in read_kept(graphs.root) or ()}
    assert kept["count"] == 9
    save_file({**named, "head.w": new["w"] + 1}, path)
    with pytest.raises(UserError, match=r"head.w and net.w are one tensor of the model \(w\) and have different"):
        begun(folder, section)
    save_file({**named, "codes": np.array([1, 3])}, path)
    with pytest.raises(UserError, match="other values for codes, which are constants"):
        begun(folder, section)


def test_a_restart_does_not_read_the_file_again(folder: Path) -> None:
    path = folder / "w.safetensors"
    new = other(folder)
    save_file(new, path)
    section = {"path": str(path)}
    first = read_record(begun(folder, section).root)
    save_file({name: array * 2 for name, array in new.items()}, path)
    assert same(initial(begun(folder, section, resumed=True)), new)
    path.unlink()
    graphs = begun(folder, section)
    assert same(initial(graphs), new)
    assert read_record(graphs.root) == first
    save_file({name: array * 2 for name, array in new.items()}, path)
    assert same(initial(begun(folder, section)), {name: array * 2 for name, array in new.items()})
