"""Builds the inference graph, and writes it with trained weights at the end of a run.

`infer_graph` is called by `assembly`; `export_inference` by the export step, and offline for a checkpoint. Neither
needs ONNX Runtime.
"""

from __future__ import annotations

import fcntl
import glob
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from ortflow.workflow.errors import OrtflowError, UserError
from ortflow.workflow.graph.export.label_sizes import sizes_without_labels
from ortflow.workflow.graph.export.model_file import ITEM, Shapes, Tensors, Written, refer, write_data, write_model
from ortflow.workflow.graph.head import PRODUCER, check_export
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import make_outputs, replace, used
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.normalize import tidy
from ortflow.workflow.graph.normalize.fusions import avoid_wrong_normalizations
from ortflow.workflow.graph.objective.modes import evaluation_mode
from ortflow.workflow.run.rundir import sync_directory
from ortflow.workflow.system.disk_space import RECORDS, OutOfDisk, is_full
from ortflow.workflow.system.own_files import is_folder, name_start, remove

EXTERNAL_BYTES = 1_500_000_000
"""Weights above this size are written to a file beside the model: protobuf is limited to 2 GB."""
SCRATCH = (".mapped.onnx", ".moved.data")
"""Files that a check may write beside the new model, and that are removed with its folder."""


def infer_graph(skeleton: onnx.ModelProto, labels: Collection[str]) -> onnx.ModelProto:
    """Return the prepared model without its parameters, in evaluation mode, with the file's names.

    Outputs that depend on a label are left out, and so are label inputs. Raises UserError if no output is left.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(skeleton)
    graph = copy.graph
    sizes_without_labels(graph, labels)
    tidy.constants_to_initializers(copy)
    outputs = [value for value in graph.output if not _sources(graph, value.name).intersection(labels)]
    if not outputs:
        raise UserError(
            "every output of the model depends on its labels, so there is nothing to export",
            where="model.labels",
            fix="give the model an output for its predictions, or set export.enabled to false",
        )
    make_outputs(graph, [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in outputs])
    evaluation_mode(graph)
    prune(graph)
    avoid_wrong_normalizations(copy)
    replace(graph.input, [value for value in graph.input if value.name not in labels])
    return copy


def as_function(infer_path: Path, shapes: Shapes) -> tuple[onnx.ModelProto, list[str]]:
    """Return the inference graph at `infer_path` with its weights as further inputs, and the names of these inputs.

    Parameters
    ----------
    infer_path
        File that `infer_graph` was saved to.
    shapes
        Shapes of all available tensors.

    Raises
    ------
    UserError
        If there is no such graph.
    OrtflowError
        If a tensor of the graph is missing.
    """
    if not infer_path.exists():
        raise UserError(
            "the run has no inference graph, because it was configured with export.enabled: false",
            where=str(infer_path),
            fix="start the run from the beginning with export.enabled: true",
        )
    model = onnx.load(infer_path)
    graph = model.graph
    sources = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    sources |= {name for node in graph.node for name in node.output}
    weight_names = sorted(used(graph) - sources)
    missing = [name for name in weight_names if name not in shapes]
    if missing:
        raise OrtflowError(f"no weights for {', '.join(missing[:3])} of the inference graph {infer_path}")
    graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, shapes[name]) for name in weight_names)
    return model, weight_names


def _sweep(out: Path) -> None:
    """Remove the temporary files of killed exports to the same path; each is a copy of the model."""
    pattern = re.compile(rf"\.{re.escape(name_start(out.name))}\.[a-z0-9_]{{8}}")
    for leftover in out.parent.iterdir():
        if pattern.fullmatch(leftover.name) and is_folder(leftover) and (lock := _held(leftover)) is not None:
            ours_too = "|".join(map(re.escape, SCRATCH))
            remove(
                leftover, re.compile(rf"{re.escape(out.name)}|{re.escape(out.stem)}(-[0-9a-f]{{16}})?\.data|{ours_too}")
            )
            os.close(lock)


def _held(folder: Path) -> int | None:
    """Lock a folder while it is written to; None if another process holds the lock, or locks are not supported."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unwritable(out: Path, error: OSError, weights: Shapes) -> OrtflowError:
    if is_full(error):
        return OutOfDisk(out, sum(math.prod(shape) for shape in weights.values()) * ITEM + RECORDS)
    return UserError(f"cannot write {out}: {error.strerror}", where="export.path")


def export_inference(
    infer_path: Path,
    tensors: Tensors,
    out: Path,
    check: Callable[[Written], None] = lambda written: None,
    *,
    shapes: Shapes | None = None,
    trial: bool = False,
) -> None:
    """Write the inference graph at `infer_path` with its weights to `out`, checked; atomic.

    Parameters
    ----------
    infer_path
        File that `infer_graph` was saved to.
    tensors
        fp32 weights by name, read one at a time.
    out
        Path of the exported model. Weights beyond EXTERNAL_BYTES are written beside it, to `<stem>-<hash>.data`.
    check
        Called with the new file before it replaces `out`; raises to reject it. It may write `SCRATCH` beside the file.
    shapes
        Shapes of the tensors, if known; otherwise every tensor is read for its shape.
    trial
        Do everything except replacing `out`.

    Raises
    ------
    UserError
        If `out` cannot be written, or exists and is not an earlier export. New folders are removed again.
    OrtflowError
        If the result is not a valid model.
    """
    check_export(out)
    shapes = {name: array.shape for name, array in tensors.items()} if shapes is None else shapes
    model, weight_names = as_function(infer_path, shapes)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise OrtflowError(f"the exported model is not valid: {str(error).splitlines()[0]}") from None
    graph = model.graph
    del graph.input[len(graph.input) - len(weight_names) :]
    model.producer_name = PRODUCER
    weights = {name: shapes[name] for name in weight_names}
    new_folders = [path for path in (out.parent, *out.parent.parents) if not path.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{name_start(out.name)}.", dir=out.parent))
        lock = _held(folder)
    except OSError as error:
        raise _unwritable(out, error, weights) from error
    try:
        data = None
        if sum(math.prod(shape) for shape in weights.values()) * ITEM > EXTERNAL_BYTES:
            data, offsets = write_data(folder, out.stem, weights, tensors)
            refer(graph, weights, data, offsets)
            write_model(folder / out.name, model, {}, tensors)
        else:
            offsets = write_model(folder / out.name, model, weights, tensors)
        check(Written(folder / out.name, folder / (data or out.name), offsets))
        if trial:
            return
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
        raise _unwritable(out, error, weights) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)
        with suppress(OSError):  # not empty: `out` exists
            for path in new_folders:
                path.rmdir()


def _sources(graph: onnx.GraphProto, output: str) -> set[str]:
    """All names that an output is computed from."""
    makers = walk.producers(graph)
    sources, open_names = {output}, [output]
    while open_names:
        node = makers.get(open_names.pop())
        fresh = walk.inputs(node) - sources if node is not None else set()
        sources |= fresh
        open_names.extend(fresh)
    return sources
