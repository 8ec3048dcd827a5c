"""Builds the graphs of a run from its model file. The entry point of this package for step `configure`.

Called once, by rank 0. Writes nothing until everything has succeeded, and graphs.json last. The same run file and model
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

from ortflow.workflow.assembly.child import Child
from ortflow.workflow.assembly.files import write_files
from ortflow.workflow.assembly.loading import check_loads, kernels_fault
from ortflow.workflow.device import HALF_PRECISIONS
from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.autodiff.compose import compose
from ortflow.workflow.graph.autodiff.expand import make_differentiable
from ortflow.workflow.graph.autodiff.reverse import differentiate
from ortflow.workflow.graph.export.inference import infer_graph
from ortflow.workflow.graph.file.limits import check_constants
from ortflow.workflow.graph.intake.source import Source, read_source
from ortflow.workflow.graph.intake.user_graphs import user_eval_graph, user_optimizer_graph, user_train_graph
from ortflow.workflow.graph.ir.collective import drop_copies, finish, has_collectives
from ortflow.workflow.graph.ir.edit import Editor, make_outputs, replace, scalar, used
from ortflow.workflow.graph.ir.order import prune
from ortflow.workflow.graph.objective import evaluation
from ortflow.workflow.graph.objective.loss import attach, output_of
from ortflow.workflow.graph.objective.metrics import with_outputs
from ortflow.workflow.graph.objective.modes import train_mode
from ortflow.workflow.graph.objective.signature import batch_inputs, check_batches
from ortflow.workflow.graph.objective.synced import Replicas
from ortflow.workflow.graph.objective.vocabulary import table_bounds
from ortflow.workflow.graph.optimize import rewrites
from ortflow.workflow.graph.optimize.layers import mark_layers
from ortflow.workflow.graph.optimize.order import results_first
from ortflow.workflow.graph.optimize.recompute import recompute
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.graph.roles.role_heuristics import recurrent_biases
from ortflow.workflow.graph.types import (
    LOSS_SCALE,
    LOSS_SUM,
    LOSS_WEIGHT,
    SEED,
    VALID,
    GraphSet,
    fused_of,
    half_of,
    placed_of,
    synced_of,
    with_kernels_of,
)
from ortflow.workflow.kernels.graph import with_kernels
from ortflow.workflow.kernels.library import library_for
from ortflow.workflow.layout import FlatIndex, Group, Tensor
from ortflow.workflow.parallel.division import STATISTICS
from ortflow.workflow.spec.model import CrossEntropy
from ortflow.workflow.spec.run import RunSpec


def build_graphs(spec: RunSpec, device: str, out: Path, length: int = 0) -> GraphSet:
    """Make the training, evaluation and inference graph and the initial tensors of a run, and write them into `out`.

    `spec` has absolute paths. `length` is the samples' if the model's second axis is dynamic and it is known. Raises
    UserError if the model and the run file do not fit together.
    """
    section, padded = spec.onnx_model, spec.data.last_batch == "pad"
    # Sessions are tested in a separate process, which starts while the model is read.
    with Child() as child, ThreadPoolExecutor(1) as beside:
        # The first call compiles for a second or two.
        library = beside.submit(library_for, spec.kernels)
        source = read_source(section)
        check_constants(source.skeleton, section.path)
        notes, warnings = list(source.notes), list(source.warnings)
        forward = source.forward(output_of(source.skeleton.graph, section.loss))
        batch = batch_input(forward.graph, source)
        if section.graphs.train:
            train, trained = user_train_graph(section.graphs.train, source)
            faster = placed = halves = prepared = None
        else:
            prepared, more = with_loss(forward, spec, source, batch)
            notes += more + mark_layers(prepared, section.recomputed_layers, source.roles.trained, LOSS_SUM)
            train, faster, placed, trained, more = gradient_graphs(prepared, spec, source, length)
            notes += more
            halves, more = _in_half(prepared, spec, trained)
            notes += more
        left = [name for name in source.roles.trained if name not in trained]
        if left:
            values = sum(source.roles[name].count for name in left)
            share = values / sum(role.count for role in source.roles if role.role == "trained")
            warnings.append(
                f"not trained, because the training graph has no gradient for it: {_some(left)}, {values:,} values,"
                f" {share:.2%} of the parameters"
            )
        evaluate, bounds = eval_graph(forward, spec, source, batch)
        data = [value.name for value in source.skeleton.graph.input if value.name not in source.labels]
        inputs = batch_inputs([train.graph, evaluate.graph], source.tensors, data)
        check_batches(inputs, spec.data)
        unread = [name for name in data if name not in {i.name for i in inputs}]
        if unread:
            notes.append(f"omitted from training, because the loss does not depend on it: input {', '.join(unread)}")
        known = {value.name: value for graph in (forward.graph, evaluate.graph, train.graph) for value in graph.input}
        added = [*([VALID] if padded else []), *([SEED] if SEED in known else [])]
        order = [known[name] for name in (*(i.name for i in inputs), *added, *source.tensors)]
        infer = _infer_graph(spec, source)
        files = {"train.onnx": _bytes(train, order), "eval.onnx": _bytes(evaluate, order)}
        if spec.synced_ranks and prepared is not None:
            files |= _synced(forward, spec, source, batch, length, order)
        if infer is not None:
            files["infer.onnx"] = infer.SerializeToString(deterministic=True)
        for graph in (train, evaluate):
            check_constants(graph, section.path)
        check_loads(child, files["train.onnx"], "training", device, forward)
        check_loads(child, files["eval.onnx"], "evaluation", device, forward)
        if section.graphs.optimizer:
            update = user_optimizer_graph(section.graphs.optimizer)
            files["optimizer.onnx"] = update.SerializeToString(deterministic=True)
            check_loads(child, files["optimizer.onnx"], "optimizer", device, update)
        if placed is not None:
            files[placed_of(Path("train.onnx")).name] = _bytes(placed, order)
        if halves is not None:
            scale = [value for value in halves.graph.input if value.name == LOSS_SCALE]
            files[half_of(Path("train.onnx")).name] = _bytes(halves, [*order, *scale])
        if faster is not None:
            content = _bytes(faster, order)
            fault = kernels_fault(child, content, library.result(), device)
            if fault is None:
                files[with_kernels_of(Path("train.onnx")).name] = content
            else:
                notes.append(f"trained with ONNX Runtime's own kernels, because it rejects ortflow's ({fault})")
    index = _index(spec, source, trained)
    if spec.divides and prepared is not None:
        from ortflow.workflow.assembly.divide import divide

        def train_graph(forward: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
            return training_forms(forward, spec, source, length, trained)

        divided = divide(spec, out, index, prepared, evaluate, trained, length, train_graph)
        notes += divided.notes
        files |= divided.files
    integers = [i.name for i in inputs if np.issubdtype(np.dtype(i.dtype), np.integer)]
    result = GraphSet(
        root=out,
        index=index,
        inputs=inputs,
        notes=tuple(notes),
        warnings=tuple(warnings),
        vocabulary={**table_bounds(forward.graph, integers), **bounds},
        metrics=with_outputs(section.metrics),
        padded=padded,
        user_optimizer_graph=section.graphs.optimizer is not None,
    )
    write_files(result, files, source.tensors)
    return result


def batch_input(graph: onnx.GraphProto, source: Source) -> str:
    """A data input that the loss depends on: its first axis is the batch."""
    read = used(graph)
    names = [str(v.name) for v in graph.input if v.name in read and v.name not in {SEED, *source.tensors}]
    if not names:
        raise UserError("the loss depends on no input of the model", where="model.loss", fix="name another output")
    return min(names, key=lambda name: name in source.labels)


def with_loss(
    forward: onnx.ModelProto, spec: RunSpec, source: Source, batch: str, replicas: Replicas | None = None
) -> tuple[onnx.ModelProto, list[str]]:
    """The forward graph in training mode, its outputs the loss and the new states, and log lines.

    With `replicas`, statistics of the batch run over the ranks.
    """
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    graph = model.graph
    notes, updates = train_mode(graph, source.roles.frozen, replicas)
    attach(graph, spec.onnx_model.loss, batch, spec.data.last_batch == "pad")
    edit = Editor(graph)
    outputs = [scalar(LOSS_SUM), scalar(LOSS_WEIGHT)]
    for name in source.roles.state:
        new = edit("Identity", updates.get(name, name), output=f"{name}_new")
        described = onnx.helper.make_tensor_value_info(new, onnx.TensorProto.FLOAT, source.tensors[name].shape)
        outputs.append(described)
    make_outputs(graph, outputs)
    prune(graph)
    return model, notes


def gradient_graphs(
    prepared: onnx.ModelProto, spec: RunSpec, source: Source, length: int
) -> tuple[onnx.ModelProto, onnx.ModelProto, onnx.ModelProto | None, list[str], list[str]]:
    """The training graph, its variants with ortflow's operators for CPUs and, if wanted, GPUs, the parameters with
    gradients, and log lines.
    """
    model, notes = make_differentiable(prepared, source.roles.trained, LOSS_SUM)
    rewrites.before(model.graph)
    model, trained = differentiate(model, source.roles.trained, LOSS_SUM)
    if spec.on_gpus:
        drop_copies(model.graph)
    notes += recompute(model.graph, spec.onnx_model.recomputed_scopes)
    faster, placed = with_kernels(model, length), None
    if spec.on_gpus:
        from ortflow.workflow.cuda.place import completed

        placed = completed(model)
    for each in (model, faster):
        rewrites.after(each.graph)
    model, faster = compose(model), compose(faster)
    for each in (model, faster):
        results_first(each.graph)
    return model, faster, placed, trained, notes


def training_forms(
    forward: onnx.ModelProto, spec: RunSpec, source: Source, length: int, trained: Sequence[str]
) -> dict[str, onnx.ModelProto]:
    """The forms of the training graph of a part of the model, by the names of their files."""
    from ortflow.workflow.assembly.stage_forms import fused
    from ortflow.workflow.graph.optimize.on_cuda import on_cuda

    path = Path("train.onnx")
    plain, own, placed, *_ = gradient_graphs(forward, spec, source, length)
    forms = {path.name: plain, with_kernels_of(path).name: own}
    if placed is not None:
        forms[fused_of(path).name] = fused(on_cuda(placed))
    halves, _ = _in_half(forward, spec, trained)
    return forms if halves is None else {**forms, half_of(path).name: halves}


def _synced(
    forward: onnx.ModelProto,
    spec: RunSpec,
    source: Source,
    batch: str,
    length: int,
    inputs: Sequence[onnx.ValueInfoProto],
) -> dict[str, bytes]:
    """The training graphs whose statistics run over all ranks, by file name.

    Raises UserError if the model has no BatchNormalization that computes statistics.
    """
    replicas = Replicas(STATISTICS, spec.synced_ranks)
    prepared, _ = with_loss(forward, spec, source, batch, replicas)
    if not has_collectives(prepared):
        raise UserError(
            "is true, and the model has no BatchNormalization that computes statistics of the batch",
            where="train.sync_batch_norm",
            fix="remove the key",
        )
    mark_layers(prepared, spec.onnx_model.recomputed_layers, source.roles.trained, LOSS_SUM)
    plain, faster, *_ = gradient_graphs(prepared, spec, source, length)
    path = synced_of(Path("train.onnx"))
    files = {}
    for name, model in ((path.name, plain), (with_kernels_of(path).name, faster)):
        replace(model.graph.input, inputs)
        finish(model)
        files[name] = bytes(model.SerializeToString(deterministic=True))
    return files


def _in_half(
    prepared: onnx.ModelProto, spec: RunSpec, trained: Sequence[str]
) -> tuple[onnx.ModelProto | None, list[str]]:
    """The training graph in the requested half precision, and log lines; None if none is requested."""
    if spec.train.precision not in HALF_PRECISIONS:
        return None, []
    from ortflow.workflow.fusion.halved import halved

    return halved(prepared, trained, spec.train.precision, spec.onnx_model.recomputed_scopes)


def eval_graph(
    forward: onnx.ModelProto, spec: RunSpec, source: Source, batch: str
) -> tuple[onnx.ModelProto, dict[str, int]]:
    """The evaluation graph, and the number of classes if labels are classes and it is known."""
    section = spec.onnx_model
    model = onnx.ModelProto()
    model.CopyFrom(forward)
    padded = spec.data.last_batch == "pad"
    target = evaluation.complete(model.graph, section.loss, section.metrics, batch, padded)
    bounds = {}
    if isinstance(section.loss, CrossEntropy) and target.classes is not None:
        bounds[section.loss.label] = target.classes
    if section.graphs.eval:
        outputs = [value.name for value in model.graph.output if value.name.startswith("ortflow.")]
        model = user_eval_graph(section.graphs.eval, source, outputs)
    return model, bounds


def _infer_graph(spec: RunSpec, source: Source) -> onnx.ModelProto | None:
    """The inference graph; None if the model does not permit one and none is requested."""
    try:
        return infer_graph(source.skeleton, source.labels)
    except UserError:
        if spec.export.enabled:
            raise
        return None


def _bytes(model: onnx.ModelProto, inputs: Sequence[onnx.ValueInfoProto]) -> bytes:
    """The model with exactly these inputs, in this order, including inputs that it does not read."""
    replace(model.graph.input, inputs)
    return bytes(model.SerializeToString(deterministic=True))


def _index(spec: RunSpec, source: Source, trained: Collection[str]) -> FlatIndex:
    patterns = spec.train.optimizer.no_decay
    named: set[str] = set()
    for place, pattern in enumerate(patterns or []):
        named.update(matches(pattern, trained, f"train.optimizer.no_decay[{place}]", "trained parameter"))
    state = set(source.roles.state)
    biases = recurrent_biases(source.skeleton.graph)

    def group(name: str, shape: tuple[int, ...]) -> Group:
        if name not in trained:
            return "state" if name in state else "frozen"
        excluded = (len(shape) <= 1 or name in biases) if patterns is None else name in named
        return "no_decay" if excluded else "decay"

    return FlatIndex.place(
        Tensor(name, array.shape, group(name, array.shape)) for name, array in source.tensors.items()
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and the number of others."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
