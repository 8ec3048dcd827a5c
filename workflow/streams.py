"""Safe standard output and error: control characters are escaped, and a full disk does not end the process.

Names in models, data, paths and messages of libraries are untrusted: an escape sequence would act on the reader's
terminal. Used by every program of ortflow that prints.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ortflow.workflow.disk_space import is_full, is_too_large

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""


def plain(text: str) -> str:
    """The text with control characters escaped. Pure."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class PlainText(io.TextIOWrapper):
    """A text stream that escapes control characters."""

    def write(self, text: str) -> int:
        """As TextIOWrapper; returns the number of characters of `text`."""
        super().write(plain(text))
        return len(text)


class Lossy(io.FileIO):
    """A file that drops what a full disk rejects, and reports how much when there is space again."""

    lost = 0

    def write(self, data: Any) -> int:
        """Write or drop the data; always returns its full length."""
        taken = len(data)
        try:
            if self.lost:
                super().write(f"\n[{self.lost} bytes were lost here: the disk was full]\n".encode())
                self.lost = 0
            written = super().write(data)
        except OSError as error:
            if not is_full(error) and not is_too_large(error):
                raise
            written = 0
        self.lost += taken - written
        return taken


@contextmanager
def guarded() -> Iterator[None]:
    """Escape control characters in `print`; code that draws on a terminal writes to `sys.__stdout__`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ours = _guarded(sys.stdout), _guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for one, stream in zip(ours, before, strict=True):
            if one is not stream:
                _flush(one)
                one.detach()


def print_line(text: str) -> None:
    """Print a line. If the reader has closed the stream, stop printing; on a full disk, keep the line for the next
    call.
    """
    try:
        print(text, flush=True)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            _silence(sys.stdout)
        elif not is_full(error):
            raise


def _flush(stream: TextIO) -> None:
    """Flush the stream; a failure is ignored."""
    try:
        stream.flush()
    except OSError:
        _silence(stream)
        stream.flush()


def _silence(stream: TextIO) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, stream.fileno())
    os.close(silence)


def guard_log() -> None:
    """The same for a process whose output goes to a file, which may be on a full disk."""
    sys.stdout, sys.stderr = (
        PlainText(
            io.BufferedWriter(Lossy(number, "ab", closefd=False)), "utf-8", "backslashreplace", line_buffering=True
        )
        for number in (1, 2)
    )


def _guarded(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper) or isinstance(stream, PlainText):
        return stream
    stream.flush()
    return PlainText(stream.buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
