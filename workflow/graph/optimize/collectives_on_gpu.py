"""Lets the collectives of a finished graph be computed by the operator of GPUs, `ortflow.workflow.cuda.collective`."""

from __future__ import annotations

import onnx
from onnx import helper

from ortflow.workflow.graph.domains import CUDA_DOMAIN
from ortflow.workflow.graph.ir.collective import is_collective
from ortflow.workflow.graph.ir.edit import described, import_domain
from ortflow.workflow.graph.memory.element_types import element_types


def on_gpu(model: onnx.ModelProto) -> None:
    """Change the domain of the collectives, in place, and describe what they make."""
    types, names = element_types(model), set(described(model.graph))
    for node in filter(is_collective, model.graph.node):
        node.domain = CUDA_DOMAIN
        for name in node.output:
            if name and name not in names:
                model.graph.value_info.append(helper.make_tensor_value_info(name, types[name], None))
    import_domain(model, CUDA_DOMAIN)
