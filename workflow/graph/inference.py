"""Makes the inference graph, and writes it with trained weights at the end.

`infer_graph` is called by `build`; `export_inference` by the export step and offline from a checkpoint. Neither needs
ONNX Runtime.
"""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import onnx
import xxhash
from onnx import TensorProto, numpy_helper

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph import walk
from ortflow.workflow.graph.edit import make_outputs, prune, replace, used
from ortflow.workflow.graph.head import PRODUCER, check_export
from ortflow.workflow.graph.modes import evaluation_mode
from ortflow.workflow.rundir import sync_directory

EXTERNAL_BYTES = 1_500_000_000
"""Weights beyond this lie in a file beside the model: protobuf ends at 2 GB."""


def infer_graph(skeleton: onnx.ModelProto, labels: Collection[str]) -> onnx.ModelProto:
    """The prepared model without its parameters, in evaluation mode, under its own names.

    Outputs that need a label are left out, and label inputs with them. Raises UserError where no output is left.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(skeleton)
    graph = copy.graph
    kept = [value for value in graph.output if not _sources(graph, value.name).intersection(labels)]
    if not kept:
        raise UserError(
            "every output of the model needs its labels, so nothing is left to export",
            where="model.labels",
            fix="give the model an output for its predictions, or set export.enabled to false",
        )
    make_outputs(graph, [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in kept])
    evaluation_mode(graph)
    prune(graph)
    replace(graph.input, [value for value in graph.input if value.name not in labels])
    return copy


def export_inference(infer_path: Path, tensors: Mapping[str, np.ndarray], out: Path) -> None:
    """Write the inference graph at `infer_path` with its weights to `out`, checked, the whole file or the old one.

    Weights beyond EXTERNAL_BYTES go to `<stem>-<hash>.data` beside it. Raises UserError where `out` cannot be written
    or holds anything but an earlier export, OrtflowError where the result is no valid model.
    """
    check_export(out)
    model = onnx.load(infer_path)
    model.producer_name = PRODUCER
    graph = model.graph
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    known |= {name for node in graph.node for name in node.output}
    wanted = sorted(used(graph) - known)
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise OrtflowError(f"no weights for {', '.join(missing[:3])} of the inference graph {infer_path}")
    arrays = {name: np.ascontiguousarray(tensors[name], dtype=np.float32) for name in wanted}
    external = sum(array.nbytes for array in arrays.values()) > EXTERNAL_BYTES
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", where="export.path") from None
    try:
        data = _write_data(folder, out.stem, arrays, graph) if external else None
        if not external:
            graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
        _write(folder / out.name, model.SerializeToString(deterministic=True))
        try:
            onnx.checker.check_model(str(folder / out.name), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise OrtflowError(f"the exported model is not valid: {str(error).splitlines()[0]}") from None
        pattern = f"{glob.escape(out.stem)}-{'[0-9a-f]' * 16}.data"
        stale = {path for path in out.parent.glob(pattern) if out.exists() and not path.is_symlink()}
        if data is not None:
            os.replace(folder / data, out.parent / data)
        # From here on `out` is the new model; until here it is the old one, with the old one's data.
        os.replace(folder / out.name, out)
        sync_directory(out.parent)
        for path in stale - ({out.parent / data} if data else set()):
            path.unlink()
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", where="export.path") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sources(graph: onnx.GraphProto, output: str) -> set[str]:
    """Every name that an output is computed from."""
    makers = walk.producers(graph)
    seen, open_names = {output}, [output]
    while open_names:
        node = makers.get(open_names.pop())
        fresh = walk.inputs(node) - seen if node is not None else set()
        seen |= fresh
        open_names.extend(fresh)
    return seen


def _write_data(folder: Path, stem: str, arrays: Mapping[str, np.ndarray], graph: onnx.GraphProto) -> str:
    """Write the weights one behind the other, and point the graph's initializers there; returns the file's name."""
    digest = xxhash.xxh3_64()
    for array in arrays.values():
        digest.update(array.data)
    name = f"{stem}-{digest.hexdigest()}.data"
    offset = 0
    with (folder / name).open("wb") as file:
        for tensor_name, array in arrays.items():
            # Aligned to pages, so that a reader can map each tensor.
            offset = -(-offset // 4096) * 4096
            file.seek(offset)
            file.write(array.data)
            tensor = TensorProto(name=tensor_name, data_type=TensorProto.FLOAT, dims=array.shape)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", name), ("offset", offset), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            graph.initializer.append(tensor)
            offset += array.nbytes
        file.flush()
        os.fsync(file.fileno())
    return name


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
