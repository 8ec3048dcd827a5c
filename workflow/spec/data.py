"""The run file's `data` section: the sets, the micro-batch and the order of the samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Number, Positive, Section, Text, no_keys

SetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
"""Name of an evaluation set, in the names of results and in paths."""


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
    eval_sets: dict[SetName, DataSet] = Field(default_factory=no_keys)
    """Further evaluation sets, `{NAME: {path: …}}`, evaluated with the first; results are NAME/loss and so on."""
    micro_batch: Positive
    """Samples per rank and micro-batch."""
    shuffle: bool = True
    """Use a new order each epoch, computed only from seed and epoch."""
    by_length: ByLength | None = None
    """Group samples of similar length."""
    pad_value: dict[Text, Number] = Field(default_factory=no_keys)
    """Graph input -> padding value of variable-length samples; by default 0, and the loss's ignore index for labels."""
    last_batch: Literal["drop", "keep", "pad"] = "drop"
    """The rest of an epoch that is smaller than a global batch: skip it, train on the smaller batch, or pad it with
    samples of weight 0 (for graphs with a fixed batch size)."""
    eval_mode: Literal["partitioned", "replicated"] = "partitioned"
    """Divide the evaluation set over the ranks, or evaluate all of it on each rank."""
    eval_micro_batch: Positive | None = None
    """Samples of an evaluation micro-batch; by default `micro_batch`."""
    eval_samples: Positive | None = None
    """Number of samples to evaluate on, from the first; by default all."""
