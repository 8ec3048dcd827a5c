"""How the bytes of a part of a rank's memory follow from the run file, in words. Pure."""

from __future__ import annotations

from ortflow.workflow.device.prefetch import SLOTS, WORTHWHILE
from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.memory import ITEM, OFFLOADED
from ortflow.workflow.planning.holdings import staging_elements
from ortflow.workflow.planning.receive_buffers import Exchange
from ortflow.workflow.spec.run import TrainerRunSpec

BUS = (25, 50)
"""GB/s between a GPU and pinned memory over PCIe 4 and 5: estimates, beside which the log has a measured time."""
NOTHING = Exchange()
ON_THE_HOST = "the host's memory, which `in all` leaves out"


def formulas(
    index: FlatIndex, spec: TrainerRunSpec, messages: tuple[int, int] | None = None, exchange: Exchange = NOTHING
) -> dict[str, str]:
    """Formulas by part.

    Parameters
    ----------
    index
        Of the rank's parameters.
    spec
        The run.
    messages
        Elements of the memory in which parameters arrive, and of a message of gradients (ZeRO 3).
    exchange
        The buffers in which gradients of other GPUs arrive.
    """
    part_formulas = _formulas(index, spec, messages)
    if exchange.size:
        part_formulas["messages"] = exchange.formula
    if spec.on_gpus:
        part_formulas["batch"] = (
            f"a micro-batch and, from {WORTHWHILE // 1024} KiB on, {SLOTS} that are on their way to the GPU"
        )
        part_formulas["checkpoint"] = (
            f"a rank's share, copied to {ON_THE_HOST}; at most half of what its node has available"
        )
    return part_formulas


def _formulas(index: FlatIndex, spec: TrainerRunSpec, messages: tuple[int, int] | None) -> dict[str, str]:
    """Of the parts that all devices have. Elements include padding; a share is rounded up to a multiple of
    `layout.ALIGNMENT`.
    """
    zero, buffer_count = spec.parallel.zero, len(spec.train.buffers)
    trained, (start, end) = f"{index.trained:,}", index.span("state")
    ranks = f" / {spec.replicas} rank(s)"
    accumulated = "" if spec.accumulation == spec.parallel.chunks == 1 else f" + {trained}{ranks if zero >= 2 else ''}"
    statistics = f" + 2 x {end - start:,}" if end > start else ""
    if messages is not None:
        rest = index.size - index.trained
        behind = f" + {rest:,} + {index.size:,}{ranks}" if rest else ""
        layer, message = messages
        return {
            "parameters": f"{ITEM} B x ({trained}{ranks}{behind})",
            "gradients": f"{ITEM} B x ({trained}{ranks}{statistics})",
            "moments": f"{buffer_count} x {ITEM} B x {trained}{ranks}",
            "messages": f"{ITEM} B x {message:,} of a layer's gradients"
            if spec.on_gpus
            else f"{ITEM} B x ({layer:,} of the largest layer + {message:,} of gradients)",
        }
    all_moments = f"{buffer_count} x {ITEM} B x {trained}{ranks if zero else ''}"
    staging = staging_elements(index, spec)
    if staging is None:
        moment_formulas = {"moments": all_moments}
    else:
        moved = 2 * buffer_count * ITEM * index.trained / (spec.replicas if zero else 1)
        times = " or ".join(f"{1e3 * moved / 2 / rate / 1e9:.0f} ms at {rate} GB/s" for rate in BUS)
        moment_formulas = {
            "moments": f"{ITEM} B x {staging:,} in the pieces that pass through the GPU",
            OFFLOADED: f"{all_moments}, in {ON_THE_HOST}; copied both ways in each step, {times} each way, in part "
            "behind the passes",
        }
    return {"gradients": f"{ITEM} B x ({trained}{accumulated}{statistics})", **moment_formulas}
