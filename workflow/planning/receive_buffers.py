"""Bytes of a GPU in which the sums of gradients arrive from other GPUs of its machine: see `trainer.overlap`.

Reads the training graph in its form for GPUs. Whether copies between the GPUs are fast is not known before a run: where
they are not, NCCL sums, and these buffers do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from ortflow.workflow.layout import FlatIndex
from ortflow.workflow.spec.run import TrainerRunSpec


@dataclass(frozen=True)
class Exchange:
    """Bytes of the buffers."""

    received: int = 0
    """Shares of buckets that other ranks send."""
    rows: int = 0
    """Indices and gradients of the rows that all ranks looked up."""
    tables: tuple[str, ...] = ()
    """The tables of these rows."""

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.received + self.rows

    @property
    def formula(self) -> str:
        """Description of these bytes in the plan; an empty string if there are none."""
        if not self.size:
            return ""
        rows = f", {self.rows:,} B of which for looked-up rows of {', '.join(self.tables)}" if self.rows else ""
        return f"gradients of other GPUs{rows}, if copies between them are fast; else NCCL sums"


def exchange_of(spec: TrainerRunSpec, form: Path | None, index: FlatIndex, elements: Mapping[str, int]) -> Exchange:
    """The buffers of a rank.

    Parameters
    ----------
    spec
        The run.
    form
        The training graph in its form for GPUs, if there is one.
    index
        The parameters.
    elements
        The most elements of a graph input in a micro-batch, where they are known.
    """
    from ortflow.workflow.comm.peers import MOST_RANKS

    of_one_machine = spec.on_gpus and spec.resources.nodes == 1 and 1 < spec.world_size <= MOST_RANKS
    beside_the_pass = spec.holds_whole and spec.accumulation == 1 and spec.resources.kernels == "auto"
    if form is None or not of_one_machine or not beside_the_pass:
        return Exchange()
    return buffers_of(onnx.load(form), index, elements, spec.world_size)


def buffers_of(form: onnx.ModelProto, index: FlatIndex, elements: Mapping[str, int], ranks: int) -> Exchange:
    """The buffers of so many ranks of one machine."""
    from ortflow.workflow.trainer.overlap import FEWEST, early_of, in_buckets
    from ortflow.workflow.trainer.peer_sums import received_size
    from ortflow.workflow.trainer.table_exchange import gathered_size

    _, buckets, rows = in_buckets(form, index, elements, ranks)
    received = received_size([bucket.stop - bucket.start for bucket in early_of(buckets, index.trained)], ranks)
    if not received or len(buckets) < FEWEST:
        return Exchange()
    gathered = sum(gathered_size(table_rows, index[table_rows.table].tensor.shape[1], ranks) for table_rows in rows)
    return Exchange(received, gathered, tuple(dict.fromkeys(table_rows.table for table_rows in rows)))
