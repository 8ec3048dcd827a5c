"""The run file's `data` section: the sets, the micro-batch and the order of the samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Number, Positive, Section, Text, no_items, no_keys
from ortflow.workflow.spec.media import ImagesSection, TextSection, TokensSection
from ortflow.workflow.spec.transforms import Transform


class DataSet(Section):
    """An Arrow IPC file, or a folder of such shards, as `ortflow data convert` writes them."""

    path: Text
    """File or folder, relative to the run file."""
    columns: dict[Text, Text] = Field(default_factory=no_keys)
    """Graph input -> column, where the names differ: `tokens`, or a slice along the first axis, `tokens[:-1]`."""
    tokens: TokensSection | None = None
    """Windows of a file of tokens."""
    images: ImagesSection | None = None
    """Preparation of image files."""
    text: TextSection | None = None
    """Tokens of text files."""
    transforms: list[Transform] = Field(default_factory=no_items)
    """Random changes of the samples, in this order. An evaluation set has its own, those of epoch 0 each time."""


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
    """Samples per rank and micro-batch."""
    workers: Count | None = None
    """Processes of a rank that decode images and call functions of `transforms`; by default one for each of its cores.
    With 0 the rank does it."""
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
