"""Builds the graphs of a run from its model file. The entry point of this package for step `configure`.

Called once, by rank 0. Writes nothing until everything has succeeded, and graphs.json last. The same run file and model
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx

from ortflow.workflow.assembly.child import Child
from ortflow.workflow.assembly.evaluating import batch_input, eval_graph, inference_graph
from ortflow.workflow.assembly.files import serialized, write_files
from ortflow.workflow.assembly.groups import check_groups
from ortflow.workflow.assembly.loading import check_loads, has_kernels, kernels_fault
from ortflow.workflow.assembly.saving import batch_shapes, saving, without_recomputation
from ortflow.workflow.assembly.starting import started_from
from ortflow.workflow.assembly.timing import Timing, costs_of, wants_costs, why_counted
from ortflow.workflow.assembly.torch_names import torch_names
from ortflow.workflow.assembly.training import TRAIN, Training, synced_files, training_forms, training_of
from ortflow.workflow.graph.file.limits import check_constants
from ortflow.workflow.graph.forms import Form
from ortflow.workflow.graph.intake.lora import with_lora
from ortflow.workflow.graph.intake.source import Source, read_source
from ortflow.workflow.graph.intake.user_graphs import user_optimizer_graph
from ortflow.workflow.graph.objective.logits import logits_note, unproved_logits
from ortflow.workflow.graph.objective.loss import outputs_of
from ortflow.workflow.graph.objective.metrics import with_outputs
from ortflow.workflow.graph.objective.signature import batch_inputs, check_batches
from ortflow.workflow.graph.objective.vocabulary import table_bounds
from ortflow.workflow.graph.objective.weighted_sum import check_sum
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.graph.roles.role_heuristics import recurrent_biases
from ortflow.workflow.graph.stages.node_costs import NAME as COSTS
from ortflow.workflow.graph.types import SEED, VALID, GraphSet
from ortflow.workflow.kernels.library import Library, library_for
from ortflow.workflow.layout import FlatIndex, Group, Tensor
from ortflow.workflow.spec.model import single_losses
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.weights.kept import FILE as STATE_DICT
from ortflow.workflow.weights.kept import kept_file


def build_graphs(
    spec: TrainerRunSpec,
    out: Path,
    length: int = 0,
    lengths: Mapping[str, int] | None = None,
    timing: Timing | None = None,
    *,
    resumed: bool = False,
) -> GraphSet:
    """Make the training, evaluation and inference graph and the initial tensors of a run, and write them into `out`.

    `spec` has absolute paths. `length` is the samples' if the model's second axis is dynamic and it is known, and
    `lengths` has it for each input whose samples all have one length. `timing` measures the nodes of a model that is
    cut automatically, unless `out` has a record of them. `resumed`: the run continues from a checkpoint. Raises
    UserError if the model and the run file do not fit together.
    """
    section = spec.onnx_model
    # Sessions are tested in a separate process, which starts while the model is read.
    with Child() as child, ThreadPoolExecutor(1) as executor:
        # The first call compiles for a second or two.
        library = executor.submit(library_for, spec.kernels)
        read = read_source(section)
        started = started_from(section.start_from, read, torch_names(read), out, resumed=resumed)
        source = with_lora(started.source, section.lora, spec.seed)
        check_constants(source.skeleton, section.path)
        outputs = outputs_of(source.skeleton.graph, section.loss)
        check_sum(source.skeleton.graph, spec, outputs)
        forward = source.forward([*outputs.values()])
        batch = batch_input(forward.graph, source)
        training = training_of(forward, spec, source, batch, length)
        losses = single_losses(section.loss)
        logits = [line for key, loss in losses.items() for line in logits_note(forward.graph, loss, outputs[key])]
        notes = [*started.notes, *source.notes, *logits, *training.notes]
        warnings = [*source.warnings, *_untrained(source, training.trained)]
        evaluate, bounds = eval_graph([*outputs.values()], spec, source, batch)
        data = [value.name for value in source.skeleton.graph.input if value.name not in source.labels]
        inputs = batch_inputs([training.plain.graph, evaluate.graph], source.tensors, data)
        check_batches(inputs, spec.data)
        unread = [name for name in data if name not in {i.name for i in inputs}]
        if unread:
            notes.append(f"omitted from training, because the loss does not depend on it: input {', '.join(unread)}")
        order = _in_order(spec, source, [i.name for i in inputs], (forward, evaluate, training.plain))
        infer = inference_graph(spec, source)
        files = {TRAIN.name: serialized(training.plain, order), "eval.onnx": serialized(evaluate, order)}
        if spec.synced_ranks and training.prepared is not None:
            files |= synced_files(forward, spec, source, batch, length, order)
        files |= started.files
        if started.table is not None:
            files[STATE_DICT] = kept_file(started.table)
        if infer is not None:
            files["infer.onnx"] = infer.SerializeToString(deterministic=True)
        for graph in (training.plain, evaluate):
            check_constants(graph, section.path)
        # Ranks open the graph with ortflow's operators where it loads, and never this one.
        replaced = Form.KERNELS in training.forms and has_kernels(library.result())
        check_loads(child, files[TRAIN.name], "training", forward, optimized=not replaced)
        check_loads(child, files["eval.onnx"], "evaluation", forward)
        if section.graphs.optimizer:
            update = user_optimizer_graph(section.graphs.optimizer)
            files["optimizer.onnx"] = update.SerializeToString(deterministic=True)
            check_loads(child, files["optimizer.onnx"], "optimizer", update)
        form_files, fault = _forms(training, order, child, library.result())
        files |= form_files
        if fault is not None:
            check_loads(child, files[TRAIN.name], "training", forward)
            notes.append(f"trained with ONNX Runtime's own kernels, because it rejects ortflow's ({fault})")
        if section.recompute:
            shapes = batch_shapes(inputs, spec.data.micro_batch, length, lengths or {})
            unrecomputed = training_of(forward, without_recomputation(spec), source, batch, length) if shapes else None
            if shapes and unrecomputed:
                kernels = Form.KERNELS.of(TRAIN).name in files and library.result() is not None
                kernels = spec.resources.kernels == "auto" if spec.on_gpus else kernels
                scope = " for the undivided model" if spec.divides else ""
                notes.append(saving(training, unrecomputed, shapes, order, kernels=kernels, whole=scope))
        measured = None
        if wants_costs(spec) and training.prepared is not None:
            measured = costs_of(training.prepared, source.tensors, inputs, spec, length, out, child, timing)
            if measured is not None:
                files[COSTS] = measured.to_bytes()
                warnings += [why_counted(measured)] if measured.fault else []
    index = _index(spec, source, training.trained)
    if spec.divides and training.prepared is not None:
        from ortflow.workflow.assembly.divide import divide

        def train_graph(forward: onnx.ModelProto) -> dict[str, onnx.ModelProto]:
            return training_forms(forward, spec, source, length, training.trained)

        divided = divide(
            spec, out, index, training.prepared, evaluate, training.trained, length, train_graph, lengths=lengths,
            measured=measured,
        )  # fmt: skip
        notes += divided.notes
        files |= divided.files
    integers = [i.name for i in inputs if np.issubdtype(np.dtype(i.dtype), np.integer)]
    unproved = (unproved_logits(forward.graph, loss, outputs[key]) for key, loss in losses.items())
    result = GraphSet(
        root=out,
        index=index,
        inputs=inputs,
        notes=tuple(notes),
        warnings=tuple(warnings),
        vocabulary={**table_bounds(forward.graph, integers), **bounds},
        metrics=with_outputs(section.metrics),
        padded=spec.data.last_batch == "pad",
        lengths={i.name: lengths[i.name] for i in inputs if lengths and i.name in lengths},
        user_optimizer_graph=section.graphs.optimizer is not None,
        unproved_logits="" if section.graphs.train else next(filter(None, unproved), ""),
    )
    write_files(result, files, source.tensors)
    return result


def _forms(
    training: Training, order: Sequence[onnx.ValueInfoProto], child: Child, library: Library | None
) -> tuple[dict[str, bytes], str | None]:
    """The forms of the training graph by file name, and why ONNX Runtime rejects ortflow's kernels, if it does."""
    files, fault = {}, None
    for form in (Form.PLACED, Form.HALF, Form.KERNELS):
        if form not in training.forms:
            continue
        content = serialized(training.forms[form], order)
        fault = kernels_fault(child, content, library) if form is Form.KERNELS else None
        if fault is None:
            files[form.of(TRAIN).name] = content
    return files, fault


def _untrained(source: Source, trained: Collection[str]) -> list[str]:
    """A warning if the training graph has no gradient for some of the parameters that should be trained."""
    untrained = [name for name in source.roles.trained if name not in trained]
    if not untrained:
        return []
    values = sum(source.roles[name].count for name in untrained)
    share = values / sum(role.count for role in source.roles if role.role == "trained")
    return [
        f"not trained, because the training graph has no gradient for it: {_some(untrained)}, {values:,} values,"
        f" {share:.2%} of the parameters"
    ]


def _in_order(
    spec: TrainerRunSpec, source: Source, inputs: Sequence[str], models: Sequence[onnx.ModelProto]
) -> list[onnx.ValueInfoProto]:
    """The inputs of every graph, in order: the batch's, what the trainer adds, the model's tensors."""
    inputs_by_name = {value.name: value for model in models for value in model.graph.input}
    added = [*([VALID] if spec.data.last_batch == "pad" else []), *([SEED] if SEED in inputs_by_name else [])]
    return [inputs_by_name[name] for name in (*inputs, *added, *source.tensors)]


def _index(spec: TrainerRunSpec, source: Source, trained: Collection[str]) -> FlatIndex:
    """Where each tensor lies in the flat buffers, by its group."""
    check_groups(spec.train, trained)
    patterns = spec.train.optimizer.no_decay
    undecayed: set[str] = set()
    for place, pattern in enumerate(patterns or []):
        undecayed.update(matches(pattern, trained, f"train.optimizer.no_decay[{place}]", "trained parameter"))
    state = set(source.roles.state)
    biases = recurrent_biases(source.skeleton.graph)

    def group(name: str, shape: tuple[int, ...]) -> Group:
        if name not in trained:
            return "state" if name in state else "frozen"
        excluded = (len(shape) <= 1 or name in biases) if patterns is None else name in undecayed
        return "no_decay" if excluded else "decay"

    return FlatIndex.place(
        Tensor(name, array.shape, group(name, array.shape)) for name, array in source.tensors.items()
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and the number of others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
