"""The run file's `parallel` section: how the ranks divide the model and the samples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ortflow.workflow.spec.base import Positive, Section, Text, no_items


class Parallel(Section):
    """Degrees of parallelism; their product is the world size."""

    data: Positive | None = None
    """Number of replicas; by default the world size divided by the other degrees."""
    pipeline: Positive = 1
    """Pipeline stages."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order in which stages work: gpipe runs all forward passes first; 1f1b runs backward passes as soon as it can,
    which needs less memory; interleaved is 1f1b with several stages per rank."""
    chunks: Positive = 1
    """Stages of each rank, with the schedule interleaved."""
    cuts: list[list[Text]] | None = None
    """Tensors at which the model is cut into stages, one list per cut; by default places are found that balance the
    stages."""
    horizontal: Positive = 1
    """Ranks that share one layer (tensor parallelism)."""
    whole: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that each of these ranks holds whole."""
    columns: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that are divided by columns, the outputs of their products. What no list names is found
    in the graph."""
    rows: list[Text] = Field(default_factory=no_items)
    """Glob patterns of weights that are divided by rows, the inputs of their products, which are then summed."""
    sequence_parallel: bool = False
    """Compute norms, dropout and additions between divided layers on a share of the tokens, which takes less memory."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: 1 shards the optimizer's moments over the replicas, 2 also accumulated gradients, 3 also parameters
    and all gradients."""
