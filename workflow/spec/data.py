"""The run file's `data` section: the sets, the micro-batch and the order of the samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ortflow.workflow.spec.base import Count, Fraction, Number, Positive, Section, Text, no_items, no_keys
from ortflow.workflow.spec.locations import without_secrets
from ortflow.workflow.spec.media import AudioSection, ImagesSection, TextSection, TokensSection
from ortflow.workflow.spec.split import HeldOut
from ortflow.workflow.spec.tables import Field as TableField
from ortflow.workflow.spec.transforms import Transform

SetName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]
"""Name of an evaluation set, in the names of results and in paths."""


class DataSet(Section):
    """A set of samples: an Arrow IPC file or a folder of shards, as `ortflow data convert` writes them, or a table."""

    path: Text | Annotated[list[Text], Field(min_length=1)]
    """File, folder or glob pattern, relative to the run file, or a list of these: one set, in this order."""
    columns: dict[Text, Text | list[Text]] = Field(default_factory=no_keys)
    """Graph input -> column, where the names differ: `tokens`, or a slice along the first axis, `tokens[:-1]`. A list
    of a table's columns or glob patterns becomes one vector."""
    fields: list[TableField] = Field(default_factory=no_items)
    """What becomes of columns of a table; the first entry that names a column applies. Only for the training set: the
    evaluation set is read in the same way."""
    bad_rows: Fraction = 0.0
    """Largest share of the samples that are skipped: rows of a table that do not fit, images and audio files that are
    damaged. By default the first one stops the run."""
    tokens: TokensSection | None = None
    """Windows of a file of tokens."""
    images: ImagesSection | None = None
    """Preparation of image files."""
    audio: AudioSection | None = None
    """Preparation of audio files."""
    text: TextSection | None = None
    """Tokens of text files."""
    transforms: list[Transform] = Field(default_factory=no_items)
    """Random changes of the samples, in this order. An evaluation set has its own, those of epoch 0 each time."""

    @property
    def paths(self) -> list[str]:
        """The paths as a list."""
        return [self.path] if isinstance(self.path, str) else self.path

    @property
    def title(self) -> str:
        """The paths, for messages and records."""
        first, *other_paths = map(without_secrets, self.paths)
        return f"{first} and {len(other_paths)} more" if other_paths else first

    @property
    def references(self) -> dict[str, str]:
        """Graph input -> column or slice of one, without the inputs that the set itself puts together."""
        return {name: column for name, column in self.columns.items() if isinstance(column, str)}


class EvalSet(DataSet, HeldOut):
    """The evaluation set: a separate set, or a share of the training set."""


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
    eval: EvalSet | None = None
    """Evaluation set."""
    eval_sets: dict[SetName, DataSet] = Field(default_factory=no_keys)
    """Further evaluation sets, `{NAME: {path: …}}`, evaluated with the first; results are NAME/loss and so on."""
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
    """Graph input -> padding value of variable-length samples; by default 0, and for labels the loss's ignore index, or
    -1 for `ctc`."""
    last_batch: Literal["drop", "keep", "pad"] = "drop"
    """The rest of an epoch that is smaller than a global batch: skip it, train on the smaller batch, or pad it with
    samples of weight 0 (for graphs with a fixed batch size)."""
    eval_mode: Literal["partitioned", "replicated"] = "partitioned"
    """Divide the evaluation set over the ranks, or evaluate all of it on each rank."""
    eval_micro_batch: Positive | None = None
    """Samples of an evaluation micro-batch; by default `micro_batch`."""
    eval_samples: Positive | None = None
    """Number of samples to evaluate on, from the first; by default all."""

    @model_validator(mode="before")
    @classmethod
    def _held_out(cls, values: Any) -> Any:
        """A share of the training set is read like it."""
        if not isinstance(values, dict):
            return values
        train, held_out = values.get("train"), values.get("eval")
        if not isinstance(train, dict) or not isinstance(held_out, dict) or held_out.get("fraction") is None:
            return values
        shared = {key: value for key, value in train.items() if key not in ("fields", "transforms")}
        return {**values, "eval": {**shared, **held_out}}
