"""Decodes image files to arrays by Pillow: resize, crop, and normalise, the same numbers on every machine.

Called by sets of images, in worker processes as well. Images are made upright by their EXIF orientation. Palettes, grey
and CMYK become the channels that are wanted, transparency is dropped, and 16 bits become the upper 8. Truncated files,
animations and other pixel types raise UserError with the file's name.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflow.workflow.data.schema import Array, Column
from ortflow.workflow.errors import UserError
from ortflow.workflow.spec.media import ImagesSection

if TYPE_CHECKING:
    from PIL import Image

ENDS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Ends of names of image files."""
Box = tuple[float, float, float, float]
"""Left, upper, right and lower edge in pixels."""
ChooseBox = Callable[[int, int], Box]
"""The part of an image of a width and a height."""

_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I;16N")


@dataclass(frozen=True)
class Preparation:
    """The steps from a file to a sample."""

    section: ImagesSection
    size: tuple[int, int]
    """Height and width of a sample."""

    @classmethod
    def of(cls, section: ImagesSection | None, first: bytes, name: str) -> Preparation:
        """The preparation of a set whose first image is given. Raises UserError if it leaves the size open."""
        require_pillow()
        section = section or ImagesSection.model_construct()
        for key, values in (("mean", section.mean), ("std", section.std)):
            if values and len(values) != section.channels:
                message = f"has {len(values)} numbers for {section.channels} channels"
                raise UserError(message, where=f"images.{key}", fix="give one for each channel")
        for key, size in (("resize", section.resize), ("crop", section.crop)):
            if isinstance(size, list) and len(size) != 2:
                raise UserError(f"has {len(size)} numbers", where=f"images.{key}", fix="give [height, width]")
        if section.crop is not None:
            return cls(section, _pair(section.crop))
        if isinstance(section.resize, int):
            fix = f"set images.crop, such as {section.resize}"
            raise UserError("fixes the shorter side alone", where="images.resize", fix=fix)
        if section.resize is not None:
            return cls(section, _pair(section.resize))
        width, height = _opened(first, name, section.channels).size
        return cls(section, (height, width))

    @property
    def column(self) -> Column:
        """Type, shape and range of a sample."""
        shape: tuple[int, ...] = (self.section.channels, *self.size)
        table = self.table
        if self.section.layout == "hwc":
            shape = (*self.size, self.section.channels)
        return Column(np.dtype(np.float32), shape, False, float(table.min()), float(table.max()))

    @property
    def table(self) -> Array:
        """The normalised number of each of the 256 values, [channels, 256]."""
        channels = self.section.channels
        mean = np.array(self.section.mean or [0.0] * channels, np.float32)
        std = np.array(self.section.std or [1.0] * channels, np.float32)
        values = np.arange(256, dtype=np.float32) / np.float32(255)
        table: Array = (values - mean[:, None]) / std[:, None]
        return table

    def sample(self, data: bytes, name: str, choose: ChooseBox | None = None) -> Array:
        """The image in a file as float32; the part that `choose` selects, resized, in place of `resize` and `crop`."""
        image = _opened(data, name, self.section.channels)
        # The array of an image with one channel has no axis for it.
        pixels = np.asarray(self._sized(image, name, choose)).reshape(*self.size, self.section.channels)
        table = self.table
        if self.section.layout == "hwc":
            return np.stack([table[channel][pixels[..., channel]] for channel in range(len(table))], axis=-1)
        return np.stack([table[channel][pixels[..., channel]] for channel in range(len(table))])

    def _sized(self, image: Image.Image, name: str, choose: ChooseBox | None) -> Image.Image:
        from PIL import Image

        height, width = self.size
        if choose is not None:
            return image.resize((width, height), Image.Resampling.BILINEAR, box=choose(*image.size))
        resize = self.section.resize
        if isinstance(resize, int):
            short, long = sorted(image.size)
            # Truncated, as in torchvision's Resize; the crop's place is rounded, as in its CenterCrop.
            longer = int(resize * long / short)
            target_size = (resize, longer) if image.width <= image.height else (longer, resize)
            image = image if image.size == target_size else image.resize(target_size, Image.Resampling.BILINEAR)
        elif resize is not None and image.size != (resize[1], resize[0]):
            image = image.resize((resize[1], resize[0]), Image.Resampling.BILINEAR)
        if self.section.crop is not None and width <= image.width and height <= image.height:
            left, top = round((image.width - width) / 2), round((image.height - height) / 2)
            image = image.crop((left, top, left + width, top + height))
        if image.size != (width, height):
            raise UserError(
                f"is {image.width} pixels wide and {image.height} high, but samples are {width} by {height}",
                where=name,
                fix="set images.resize and images.crop",
            )
        return image


def require_pillow() -> None:
    """Raise UserError if Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError("reading images needs Pillow", fix="install it with: pip install 'ortflow[images]'") from None


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _opened(data: bytes, name: str, channels: int) -> Image.Image:
    """The decoded image with 8 bits in each channel."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            # From 89 million pixels on Pillow warns, and only from twice as many does it raise an error.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Any = Image.open(io.BytesIO(data))
            # Telephones write MPO: the image, then views of it for other purposes.
            if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
                raise UserError(f"holds {frames} images", where=name, fix="save one of them in a separate file")
            # `open` reads the header: a file that ends too early fails here.
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode in _SIXTEEN_BITS:
                # Pillow's conversion cuts the values off at 255.
                image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    except (
        OSError,
        ValueError,
        # Pillow's error for a broken chunk of a PNG.
        SyntaxError,
        EOFError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        # Pillow names the Python object that it reads from.
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "no known format" if unknown else str(error).partition("\n")[0].replace(repr(data), "")
        raise UserError(f"cannot be decoded ({reason})", where=name, fix="replace or remove it") from None
    if image.mode in ("I", "F"):
        message = f"has pixels of type {image.mode}, whose range is unknown"
        raise UserError(message, where=name, fix="save it with 8 or 16 bits a channel")
    # Pillow warns if such a palette becomes RGB at once.
    if image.mode in ("P", "PA") and "transparency" in image.info:
        image = image.convert("RGBA")
    converted: Image.Image = image.convert("RGB" if channels == 3 else "L")
    return converted
