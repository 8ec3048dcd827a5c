"""Small image files for tests."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def pixels(seed: int, height: int = 8, width: int = 8) -> np.ndarray:
    """uint8 [height, width, 3]"""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, kind, **options)
    return buffer.getvalue()


def write_classes(root: Path, classes: dict[str, int], height: int = 8, width: int = 8) -> Path:
    """A folder for each class, with so many files in it."""
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for place in range(count):
            (root / name / f"{place:03}.png").write_bytes(encoded(pixels(1000 * number + place, height, width)))
    return root
