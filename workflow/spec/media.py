"""The run file's sections for sets that are not columns yet: token files, images and text."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortflow.workflow.spec.base import Count, Positive, PositiveFloat, Section, Text, no_items

Channel = Annotated[float, Field(allow_inf_nan=False)]


class TokensSection(Section):
    """Windows of `length` + 1 tokens of `.bin` and one-dimensional `.npy` files, read in place: column `tokens`."""

    length: Positive
    """Tokens of a sample's input: inputs are `tokens[:-1]`, targets `tokens[1:]`."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """Element type of `.bin` files, little-endian. A `.npy` file states its own."""
    stride: Positive | None = None
    """Tokens from the beginning of a window to that of the next; by default `length`: each token is a target once."""
    offset: Count = 0
    """Bytes before the first token of a `.bin` file, such as a header."""


class ImagesSection(Section):
    """How an image file becomes the float32 column `image`."""

    resize: Positive | list[Positive] | None = None
    """Length of the shorter side in pixels, or [height, width]."""
    crop: Positive | list[Positive] | None = None
    """Side of the square cut from the centre, or [height, width]."""
    mean: list[Channel] = Field(default_factory=no_items)
    """Subtracted from each channel, whose values are 0 to 1; by default 0."""
    std: list[PositiveFloat] = Field(default_factory=no_items)
    """Each channel is divided by it, after `mean`; by default 1."""
    layout: Literal["chw", "hwc"] = "chw"
    """Axes of a sample: channels, height, width, or height, width, channels."""
    channels: Literal[1, 3] = 3
    """Channels of a sample: 3 for RGB, 1 for grey."""


class AudioSection(Section):
    """How audio files (WAV; FLAC and Ogg with the extra `audio`) become the float32 column `audio`, from -1 to 1."""

    rate: Positive
    """Samples a second. Files of another rate are refused: they are not converted."""
    mono: bool = False
    """Use the mean of the channels: a list of any length. Otherwise, files of several channels are arrays [channels,
    samples], and must have one length."""


class TextSection(Section):
    """How `.txt` files, or a column of a table, become tokens. They are kept in the cache by the content of texts and
    tokenizer."""

    tokenizer: Text
    """A `tokenizer.json` of the package tokenizers, relative to the run file."""
    column: Text | None = None
    """Column of a table that has the text; by default `text`. Each row is a document."""
    max_length: Positive | None = None
    """Most tokens of a document: longer ones are cut, and their number is printed. By default none is cut."""
    length: Positive | None = None
    """Tokens of a window; without it, each document is a sample of variable length."""
    pack: bool = False
    """Pack whole documents into windows, with columns for mask, positions and labels. Otherwise windows of `length` + 1
    tokens run over the documents' ends."""
    documents: Literal["lines", "files"] = "lines"
    """What a document is: a line that is not empty, or a file."""
    end: Text | None = None
    """Token that is added to the end of each document, such as <|endoftext|>."""
