"""The training graph of ONNX Runtime's operators, with the masks that ortflow's kernels draw.

The check of the gradient compares the two: with other masks the losses would differ.
"""

from __future__ import annotations

from pathlib import Path

import onnx

from ortflow.workflow.graph.domains import CPU_DOMAIN, CUDA_DOMAIN
from ortflow.workflow.graph.ir import shapes
from ortflow.workflow.graph.ir.edit import import_domain
from ortflow.workflow.graph.ir.rewriter import Rewriter
from ortflow.workflow.kernels import dropout
from ortflow.workflow.sessions.session import Sessions


def standard_graph(sessions: Sessions, graph: Path) -> bytes:
    """The form of a graph whose operators are all ONNX Runtime's, except for dropouts that the fastest form has.

    `sessions`: those that will open it.
    """
    content = sessions.standard_form_of(graph).read_bytes()
    form = sessions.form_of(graph)
    model = onnx.load_from_string(content)
    if form is None or _drawn_by_onnx_runtime(onnx.load(form)) == _drawn_by_onnx_runtime(model):
        return content
    on_gpu = sessions.device.kind == "cuda"
    shapes.infer(model, list(model.graph.value_info))
    rewriter = Rewriter(model.graph, CUDA_DOMAIN if on_gpu else CPU_DOMAIN)
    dropout.put(rewriter)
    rewriter.finish()
    import_domain(model, CUDA_DOMAIN if on_gpu else CPU_DOMAIN)
    if on_gpu:
        from ortflow.workflow.fusion.groups import fuse

        model, _ = fuse(model, dropouts_only=True)
    return bytes(model.SerializeToString())


def _drawn_by_onnx_runtime(model: onnx.ModelProto) -> int:
    """Number of dropouts whose masks come from its generator."""
    return sum(node.op_type == dropout.OPERATOR and not node.domain for node in model.graph.node)
