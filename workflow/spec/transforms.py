"""The run file's `transforms` of a set: random changes of samples, drawn from seed, epoch and the sample's number."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import (
    Count,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Text,
    no_items,
    no_keys,
)

OPTIONS = ("column", "columns", "random")
"""Keys of a transform that are not kinds."""
UpToOne = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class RandomCrop(Section):
    """A random part of an image. Give `scale`, or `padding`."""

    scale: list[UpToOne] = Field(default_factory=no_items)
    """Smallest and largest share of the area, such as [0.08, 1.0]: the part is resized to the sample's size, in place
    of the set's `resize` and `crop`."""
    ratio: list[PositiveFloat] = Field(default_factory=no_items)
    """Smallest and largest width over height of the part; by default [0.75, 1.3333333333333333]."""
    padding: Positive | None = None
    """Pixels of black added at each edge before a part of the sample's size is cut."""


class ColorJitter(Section):
    """Random factors from 1 - value to 1 + value."""

    brightness: NonNegativeFloat = 0.0
    """All values are multiplied by the factor."""
    contrast: NonNegativeFloat = 0.0
    """The distance of all values from the image's mean grey is multiplied by the factor."""
    saturation: NonNegativeFloat = 0.0
    """The distance of each pixel from its grey is multiplied by the factor."""


class MaskTokens(Section):
    """Dynamic masking for masked language models: of the chosen tokens, 80% become `mask_id`, 10% a random token, and
    10% stay. Adds a column of labels that are -100 except at the chosen tokens."""

    probability: Fraction = 0.15
    """Share of the tokens that are chosen."""
    mask_id: Count | None = None
    """Token of a mask; by default `[MASK]` or `<mask>` of the set's `text.tokenizer`."""
    vocabulary: Positive | None = None
    """Number of tokens from which random ones are drawn; by default all of the tokenizer's."""
    special: list[Count] | None = None
    """Tokens that are never chosen, such as those at the ends and of padding; by default the tokenizer's special ones,
    and none without a tokenizer."""
    labels: Text = "labels"
    """Name of the new column."""


class Transform(Section):
    """One change, of one kind."""

    column: Text | None = None
    """Column that is changed; by default `image`, and `tokens` for mask_tokens."""
    random_crop: RandomCrop | None = None
    """A random part of an image."""
    flip: Literal["horizontal", "vertical"] | None = None
    """Mirror every second image."""
    color_jitter: ColorJitter | None = None
    """Random brightness, contrast and saturation."""
    noise: PositiveFloat | None = None
    """Standard deviation of normal noise that is added."""
    mixup: UpToOne | None = None
    """Mix with another image and its label; the share is drawn from a beta distribution with this parameter. Labels
    become probabilities of the classes."""
    cutmix: UpToOne | None = None
    """Replace a rectangle by that of another image, and the label in the same proportion; as `mixup`."""
    mask_tokens: MaskTokens | None = None
    """Mask tokens."""
    function: Text | None = None
    """`file.py:function`, relative to the run file, or `module:function` on PYTHONPATH: called with the array of a
    sample and a numpy.random.Generator, it returns an array of the same type and shape."""
    onnx: Text | None = None
    """ONNX file, relative to the run file, that computes columns of one sample from others: its inputs and outputs are
    the columns of their names. An output replaces a column, or adds one."""
    columns: dict[Text, Text] = Field(default_factory=no_keys)
    """Of `onnx`: input or output -> column, where the names differ."""
    random: dict[Text, Literal["uniform", "normal"]] = Field(default_factory=no_keys)
    """Of `onnx`: inputs that are random numbers, `uniform` from 0 to 1 or `normal` with mean 0 and deviation 1."""

    @property
    def kinds(self) -> list[str]:
        """The kinds that are given."""
        return [name for name in type(self).model_fields if name not in OPTIONS and getattr(self, name) is not None]
