"""The run file's `data` section: the sets, the micro-batch and the order of the samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import Number, Positive, Section, Text, no_keys


class DataSet(Section):
    """An Arrow IPC file, or a folder of such shards, as `ortflow data convert` writes them."""

    path: Text
    """File or folder, relative to the run file."""
    columns: dict[Text, Text] = Field(default_factory=no_keys)
    """Graph input -> column, where the names differ: `tokens`, or a slice along the first axis, `tokens[:-1]`."""


class ByLength(Section):
    """Load balancing: ranks get samples of similar length in the same step."""

    column: Text
    """Column whose length (variable columns) or value (integer columns) is a sample's cost."""
    bucket: Positive = 256
    """Number of samples of neighbouring length that are shuffled together."""


class DataSection(Section):
    """The samples and their order."""

    train: DataSet
    """Training set."""
    eval: DataSet | None = None
    """Evaluation set."""
    micro_batch: Positive
    """Samples a rank takes in one micro-step."""
    shuffle: bool = True
    """A new order each epoch, from seed and epoch alone."""
    by_length: ByLength | None = None
    """Group samples of similar length."""
    pad_value: dict[Text, Number] = Field(default_factory=no_keys)
    """Graph input -> what variable-length samples are padded with; 0, and the loss's ignore index for labels."""
    last_batch: Literal["drop", "keep", "pad"] = "drop"
    """The rest of an epoch that fills no global batch: leave it out, train on the smaller batch, or fill it up
    with samples of weight 0 (for graphs with a fixed batch size)."""
    eval_mode: Literal["partitioned", "replicated"] = "partitioned"
    """Evaluation set divided over the ranks, or read whole by each."""
    eval_micro_batch: Positive | None = None
    """Samples of an evaluation micro-batch; `micro_batch` if not given."""
    eval_samples: Positive | None = None
    """Number of samples to evaluate on, from the first; all if not given."""
