"""The first samples of the training set, to time the nodes of a model with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ortflow.workflow.assembly.timing import Timing
from ortflow.workflow.data.check import check_inputs
from ortflow.workflow.data.feed import collate
from ortflow.workflow.data.inputs import BatchInput, Limits
from ortflow.workflow.data.samples import Samples
from ortflow.workflow.spec.run import TrainerRunSpec
from ortflow.workflow.system.cores import cores_per_rank


def timing_of(spec: TrainerRunSpec, dataset: Samples) -> Timing:
    """How to time the nodes of the model: on the first samples of the training set."""
    rows, data = spec.data.micro_batch, spec.data

    def batch(inputs: Sequence[BatchInput]) -> Mapping[str, npt.NDArray[np.generic]]:
        limits = Limits(pad_value=data.pad_value)
        columns = data.train.references
        feeds = check_inputs(
            dataset, inputs, columns, limits, micro_batch=rows, smaller_batch=False, key_path="data.train"
        )  # fmt: skip
        return collate(dataset, feeds, [np.arange(rows) % len(dataset)])[0]

    return Timing(batch, cores_per_rank(spec.resources.cpus_per_rank, spec.resources.ranks_per_node))
