"""The tensors of a model, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class FileTensors(Mapping[str, "npt.NDArray[np.float32]"]):
    """The tensors of a safetensors file by name, each read on access."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._file: Any = safe_open(path, "numpy")

    def __getitem__(self, name: str) -> npt.NDArray[np.float32]:
        array: npt.NDArray[np.float32] = self._file.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
