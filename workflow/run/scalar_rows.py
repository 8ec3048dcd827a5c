"""TensorBoard's records of many steps with the same scalars, made together. Pure; see `tensorboard_scalars`.

A checksum is linear: that of a record is the exclusive or of one value for each of its bytes, by position and byte.
So records of one length take a few calls of numpy, where one by one they take 18 us each.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
"""CRC-32C, reflected (RFC 3720, appendix B.4)."""
_WALL, _STEP, _SUMMARY, _VALUE = b"\x09", b"\x10", b"\x2a", b"\x0a"
"""Tags of the fields of tensorflow.Event and Summary: wall_time 1, step 2, summary 5; value 1."""

Row = tuple[float, int, tuple[float, ...]]
"""Unix time, step, and the values of the scalars."""


def records(names: tuple[str, ...], rows: Sequence[Row]) -> list[bytes]:
    """One framed record for each row, in order; values beyond fp32 become infinite."""
    frames = []
    for length, group in groupby(rows, key=lambda row: len(_varint(row[1]))):
        frames += _of_one_length(names, length, list(group))
    return frames


def _of_one_length(names: tuple[str, ...], step_length: int, rows: Sequence[Row]) -> list[bytes]:
    start, parts = _layout(names, step_length)
    event = np.zeros(len(rows), parts)
    for name in parts.names or ():
        if name.startswith("text"):
            event[name] = np.void(start[name])
    event["wall"] = [row[0] for row in rows]
    event["step"] = np.frombuffer(b"".join(_varint(row[1]) for row in rows), f"V{step_length}")
    with np.errstate(over="ignore"):
        values = np.array([row[2] for row in rows], np.float64).astype(np.float32)
    for place in range(len(names)):
        event[f"value{place}"] = values[:, place]
    size = parts.itemsize
    content = event.view(np.uint8).reshape(len(rows), size)
    framed = np.empty((len(rows), size + 16), np.uint8)
    header = np.frombuffer(struct.pack("<Q", size), np.uint8)
    framed[:, :8] = header
    framed[:, 8:12] = _checksums(header[None]).view(np.uint8)
    framed[:, 12:-4] = content
    framed[:, -4:] = _checksums(content)[:, None].view(np.uint8)
    return [row.tobytes() for row in framed]


@functools.lru_cache(64)
def _layout(names: tuple[str, ...], step_length: int) -> tuple[dict[str, bytes], np.dtype[np.void]]:
    """The bytes that are the same in all records, and the form of a record."""
    heads = []
    for name in names:
        text = name.encode()
        value = _VALUE + _varint(len(text)) + text + b"\x15"
        heads.append(_VALUE + _varint(len(value) + 4) + value)
    summary = sum(len(head) + 4 for head in heads)
    texts = {"text_wall": _WALL, "text_step": _STEP, "text_summary": _SUMMARY + _varint(summary)}
    fields = [("text_wall", "V1"), ("wall", "<f8"), ("text_step", "V1"), ("step", f"V{step_length}")]
    fields.append(("text_summary", f"V{len(texts['text_summary'])}"))
    for place, head in enumerate(heads):
        texts[f"text{place}"] = head
        fields += [(f"text{place}", f"V{len(head)}"), (f"value{place}", "<f4")]
    return texts, np.dtype(fields)


def _varint(number: int) -> bytes:
    """The encoding of a number of at least 0."""
    encoding = bytearray()
    while number > 0x7F:
        encoding.append(number & 0x7F | 0x80)
        number >>= 7
    encoding.append(number)
    return bytes(encoding)


def _checksums(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """The masked checksums of the rows, little-endian [rows]."""
    size = content.shape[1]
    tables, empty = _tables(size)
    crc = np.bitwise_xor.reduce(tables[np.arange(size), content], axis=1) ^ empty
    rotated = (crc >> np.uint32(15)) | (crc << np.uint32(17))
    checksums: npt.NDArray[np.uint32] = (rotated + np.uint32(0xA282EAD8)).astype("<u4")
    return checksums


@functools.lru_cache(64)
def _tables(size: int) -> tuple[npt.NDArray[np.uint32], np.uint32]:
    """What each byte adds to the checksum of `size` bytes, by position [size, 256], and that of zeros."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_POLYNOMIAL), byte >> 1).astype(np.uint32)
    tables = np.empty((size, 256), np.uint32)
    tables[-1] = byte
    for position in range(size - 2, -1, -1):
        tables[position] = byte[tables[position + 1] & 0xFF] ^ (tables[position + 1] >> 8)
    crc = np.uint32(0xFFFFFFFF)
    for _ in range(size):
        crc = byte[int(crc) & 0xFF] ^ (crc >> np.uint32(8))
    return tables, np.uint32(crc ^ np.uint32(0xFFFFFFFF))
