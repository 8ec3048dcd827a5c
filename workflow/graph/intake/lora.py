"""Adds low-rank adapters to a model, in place of training its parameters. Called by `assembly`.

Three nodes before its first reader compute each adapted weight, so that whatever reads the weight is adapted, in the
layout that it has. A session of the exported model folds them.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflow.workflow.errors import UserError
from ortflow.workflow.graph.intake.source import Source
from ortflow.workflow.graph.ir import walk
from ortflow.workflow.graph.ir.edit import rename_values
from ortflow.workflow.graph.patterns import matches
from ortflow.workflow.graph.roles.decide import Role, Roles
from ortflow.workflow.spec.model import Lora

A, B = ".lora_A", ".lora_B"
"""As `ortflow.workflow.weights.lora`."""
FACTOR = "ortflow.lora.scale"
"""Initializer with alpha / rank."""
WHERE = "model.lora"


def with_lora(source: Source, section: Lora | None, seed: int) -> Source:
    """The model with adapters on the matrices that `section` names; all other parameters are frozen but its `train`.

    Raises UserError if a pattern matches no parameter, or only such as are not matrices.
    """
    if section is None:
        return source
    trained = source.roles.trained
    names = _named(section.match, trained, "match")
    matrices = [name for name in names if source.tensors[name].ndim == 2]
    if not matrices:
        raise UserError(
            f"no parameter of {', '.join(section.match)} is a matrix", where=f"{WHERE}.match", fix="name linear layers"
        )
    unadapted = _named(section.train, trained, "train")
    overlap = [name for name in matrices if name in set(unadapted)]
    if overlap:
        raise UserError(
            f"{overlap[0]} is in both match and train", where=f"{WHERE}.train", fix="name it in one of them"
        )
    rank = section.rank
    large = [name for name in matrices if min(source.tensors[name].shape) < rank]
    if large:
        shape = " x ".join(map(str, source.tensors[large[0]].shape))
        raise UserError(f"is {rank}, and {large[0]} is {shape}", where=f"{WHERE}.rank", fix="lower it")
    adapters: dict[str, np.ndarray] = {}
    for name in matrices:
        rows, columns = source.tensors[name].shape
        bound = 1 / np.sqrt(columns)
        # Not hash(), which differs from process to process.
        random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        adapters[name + A] = random.uniform(-bound, bound, (rank, columns)).astype(np.float32)
        # Training begins with the model as it is (Hu et al. 2021).
        adapters[name + B] = np.zeros((rows, rank), np.float32)
    scale = section.alpha / rank
    skeleton = _adapted(source.skeleton, matrices, scale)
    forms = source.forms
    if forms.evaluation is not None:
        forms = replace(forms, evaluation=_adapted(forms.evaluation, matrices, scale))
    count = sum(array.size for array in adapters.values())
    trained_names = set(unadapted)
    roles = Roles(
        [*(_role(role, trained_names) for role in source.roles), *(_adapter(n, a) for n, a in adapters.items())]
    )
    other_values = sum(role.count for role in source.roles if role.name in trained_names)
    note = f"LoRA: {len(matrices)} weights adapted, {count:,} values" + (
        f", and {other_values:,} others" if other_values else ""
    )
    return replace(
        source,
        skeleton=skeleton,
        tensors={**source.tensors, **adapters},
        roles=roles,
        forms=forms,
        notes=(*source.notes, f"{note} of {source_size(source.tensors):,} trained"),
    )


def source_size(tensors: Mapping[str, np.ndarray]) -> int:
    """Elements of all tensors."""
    return sum(array.size for array in tensors.values())


def _named(patterns: Sequence[str], trained: Sequence[str], key: str) -> list[str]:
    names: dict[str, None] = {}
    for place, pattern in enumerate(patterns):
        names |= dict.fromkeys(matches(pattern, trained, f"{WHERE}.{key}[{place}]", "trained parameter"))
    return [*names]


def _role(role: Role, trained_names: set[str]) -> Role:
    if role.role != "trained" or role.name in trained_names:
        return role
    return replace(role, role="frozen", reason="model.lora")


def _adapter(name: str, array: np.ndarray) -> Role:
    return Role(name, array.shape, "trained", "model.lora", "FLOAT")


def _adapted(model: onnx.ModelProto, matrices: Sequence[str], scale: float) -> onnx.ModelProto:
    """The model in which every reader of a matrix reads its adapted value."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    names = {name: f"{name}/lora" for name in matrices}
    unread, nodes = dict.fromkeys(matrices), list[onnx.NodeProto]()
    for node in graph.node:
        # Beside its first reader: a stage of a pipeline then has the adapters of its own weights.
        for name in [name for name in unread if name in walk.inputs(node)]:
            del unread[name]
            nodes += _sum(name, names[name])
        rename_values(node, names)
        nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del graph.node[:]
    graph.node.extend(nodes)
    graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), FACTOR))
    return copy


def _sum(weight: str, output: str) -> list[onnx.NodeProto]:
    product, scaled = f"{output}/product", f"{output}/scaled"
    return [
        helper.make_node("MatMul", [weight + B, weight + A], [product], name=product),
        helper.make_node("Mul", [product, FACTOR], [scaled], name=scaled),
        helper.make_node("Add", [weight, scaled], [output], name=output),
    ]
