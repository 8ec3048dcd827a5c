"""Decodes audio files to float32: WAV here, FLAC and Ogg by the package soundfile. Rates are never converted.

Integers are divided by their largest magnitude, as libsndfile does: 16 bits by 32768.
"""

from __future__ import annotations

import io
import os
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from ortflow.workflow.data.schema import Array
from ortflow.workflow.errors import UserError
from ortflow.workflow.system.files import open_regular

WAV = (".wav", ".wave")
COMPRESSED = (".flac", ".ogg", ".oga")
ENDS = (*WAV, *COMPRESSED)
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_FIX = "replace or remove it"


@dataclass(frozen=True)
class Header:
    """What a file says of itself."""

    rate: int
    """Samples a second."""
    channels: int
    length: int
    """Samples of a channel."""


@dataclass(frozen=True)
class _Wave(Header):
    """Also where the numbers are."""

    code: int
    bits: int
    start: int


def header_of(path: str) -> Header:
    """The header of a file. Raises UserError if it is damaged, or another kind of file."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return _header(file, path, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise UserError(error.strerror or str(error), where=path, fix="restore it") from None


def decode(data: bytes, name: str) -> tuple[Header, Array]:
    """The header of a file and its samples, [channels, samples]. Raises UserError."""
    header = _header(io.BytesIO(data), name, len(data))
    samples = _pcm(data, header) if isinstance(header, _Wave) else _by_soundfile(data, name)
    if not np.isfinite(samples).all():
        raise UserError("holds NaN or infinite samples", where=name, fix=_FIX)
    return header, samples


def _header(file: BinaryIO, name: str, size: int) -> Header:
    if not name.lower().endswith(WAV):
        return _header_by_soundfile(file, name)
    try:
        header = _wave(file, name, size)
    except (struct.error, ZeroDivisionError):
        raise UserError("cannot be decoded (its header is damaged)", where=name, fix=_FIX) from None
    if not header.length:
        raise UserError("has no samples", where=name, fix=_FIX)
    return header


def _wave(file: BinaryIO, name: str, size: int) -> _Wave:
    """Finds the chunks `fmt ` and `data` (Microsoft & IBM 1991)."""
    kind, _, form = struct.unpack("<4sI4s", file.read(12))
    if kind != b"RIFF" or form != b"WAVE":
        raise UserError("cannot be decoded (it is not a WAV file)", where=name, fix=_FIX)
    described: tuple[int, ...] | None = None
    while True:
        chunk, count = struct.unpack("<4sI", file.read(8))
        if chunk == b"data":
            break
        if chunk == b"fmt ":
            content = file.read(count)
            described = struct.unpack("<HHIIHH", content[:16])
            if described[0] == _EXTENSIBLE:
                # The code is at the beginning of the GUID in WAVE_FORMAT_EXTENSIBLE.
                described = (*struct.unpack("<H", content[24:26]), *described[1:])
            # Chunks are padded to even lengths, which their sizes do not count.
            file.seek(count % 2, os.SEEK_CUR)
        else:
            file.seek(count + count % 2, os.SEEK_CUR)
    if described is None:
        raise struct.error
    code, channels, rate, _, _, bits = described
    if (code, bits) not in {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}:
        message = f"holds samples of {bits} bits in the WAV format {code}"
        raise UserError(message, where=name, fix="save it as PCM of 8, 16, 24 or 32 bits, or as floats")
    start = file.tell()
    if start + count > size:
        raise UserError(f"is truncated: it has {size - start} of {count} bytes of sound", where=name, fix=_FIX)
    return _Wave(rate, channels, count // (channels * bits // 8), code, bits, start)


def _pcm(data: bytes, header: _Wave) -> Array:
    count = header.length * header.channels
    flat: Array
    if header.code == _FLOAT:
        flat = np.frombuffer(data, f"<f{header.bits // 8}", count, header.start).astype(np.float32)
    elif header.bits == 24:
        # numpy has no integers of 24 bits: these are the upper ones of 32.
        parts = np.frombuffer(data, np.uint8, 3 * count, header.start).reshape(count, 3)
        wide = np.zeros((count, 4), np.uint8)
        wide[:, 1:] = parts
        flat = (wide.view("<i4")[:, 0] / 2**31).astype(np.float32)
    elif header.bits == 8:
        # Only samples of 8 bits are unsigned.
        flat = (np.frombuffer(data, np.uint8, count, header.start).astype(np.float32) - 128) / np.float32(128)
    else:
        integers = np.frombuffer(data, f"<i{header.bits // 8}", count, header.start)
        flat = (integers / 2.0 ** (header.bits - 1)).astype(np.float32)
    return np.ascontiguousarray(flat.reshape(header.length, header.channels).T)


def _soundfile(name: str) -> Any:
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: its library is missing
        fix = "install it with: pip install 'ortflow[audio]'"
        raise UserError("needs the package soundfile", where=name, fix=fix) from None
    return soundfile


def _header_by_soundfile(file: BinaryIO, name: str) -> Header:
    soundfile = _soundfile(name)
    try:
        with soundfile.SoundFile(file) as sound:
            header = Header(sound.samplerate, sound.channels, sound.frames)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise UserError(f"cannot be decoded ({_reason(error)})", where=name, fix=_FIX) from None
    # libsndfile counts 0 frames in an Ogg file that was cut off.
    if header.length <= 0:
        raise UserError("has no samples", where=name, fix=_FIX)
    return header


def _by_soundfile(data: bytes, name: str) -> Array:
    soundfile = _soundfile(name)
    try:
        samples, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError) as error:
        raise UserError(f"cannot be decoded ({_reason(error)})", where=name, fix=_FIX) from None
    return np.ascontiguousarray(samples.T)


def _reason(error: Exception) -> str:
    # soundfile names the Python object that it reads from.
    return str(error).rpartition(": ")[2]
