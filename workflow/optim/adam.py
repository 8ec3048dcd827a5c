"""Adam and AdamW, by ONNX Runtime's fused kernel.

Adam (Kingma & Ba 2015, algorithm 1): m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = w - lr (m / (1 - b1^t)) /
(sqrt(v / (1 - b2^t)) + epsilon). Its weight decay is L2 regularisation, g = g + decay w, as in torch.optim.Adam. AdamW
(Loshchilov & Hutter 2019, algorithm 2) decays the weight itself, w = w - lr decay w, as torch.optim.AdamW does. The
kernel uses this order of operations with `weight_decay_mode` 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import assert_never

from ortflow.workflow.graph.domains import MICROSOFT
from ortflow.workflow.optim.builder import Builder
from ortflow.workflow.optim.segments import Segment
from ortflow.workflow.spec.optimizers import Adam, Lamb, Muon, moments


def update(build: Builder, optimizer: Adam, segments: Sequence[Segment]) -> None:
    """Append the update of `segments`."""
    own_steps(build, len(segments))
    for i, segment in enumerate(segments):
        gradients, decay = f"gradients.{i}", segment.weight_decay
        if optimizer.name == "adam":
            if decay:
                decayed = build("Mul", f"parameters.{i}", build.constant([decay], "float32"))
                gradients, decay = build("Add", gradients, decayed), 0.0
        elif optimizer.name != "adamw":
            assert_never(optimizer.name)
        kernel(
            build,
            optimizer,
            i,
            rate=build.rate(segment.lr_scale),
            gradients=gradients,
            weight_decay=decay,
            parameters_out=f"parameters.{i}.out",
        )


def own_steps(build: Builder, count: int) -> None:
    """Append copies `step.i` of the step, one for each of `count` kernels."""
    # ONNX Runtime's kernel increments its step in place, in the memory of the graph's input. With a shared input, the
    # second kernel would use the bias correction of the next step.
    copies = build("Tile", "step", build.constant([count], "int64"))
    build.write("Split", [copies], [f"step.{i}" for i in range(count)], axis=0, num_outputs=count)


def kernel(
    build: Builder,
    optimizer: Adam | Lamb | Muon,
    i: int,
    *,
    rate: str,
    gradients: str,
    weight_decay: float,
    parameters_out: str = "",
    change_out: str = "",
) -> None:
    """Append the fused kernel for segment `i`, which reads `step.i`: new moments, and parameters or their change."""
    states = [f"{moment}.{i}" for moment in moments(optimizer)]
    # Without the optional norm of the gradients, which the CPU's kernel of 1.19.2 ignores: they are clipped before.
    build.write(
        "AdamOptimizer",
        [rate, f"step.{i}", f"parameters.{i}", gradients, *states],
        [f"next_step.{i}", *(f"{moment}.out" for moment in states), parameters_out, change_out],
        domain=MICROSOFT,
        alpha=optimizer.betas[0],
        beta=optimizer.betas[1],
        epsilon=optimizer.epsilon,
        do_bias_correction=1,
        weight_decay_mode=0,
        **{"lambda": weight_decay},
    )
