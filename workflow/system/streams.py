"""Safe standard output and error: control characters are escaped, and neither a full disk nor a closed terminal ends
the process.

Names in models, data, paths and messages of libraries are untrusted: an escape sequence would act on the reader's
terminal. Used by every program of ortflow that prints.
"""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ortflow.workflow.system.disk_space import is_full, is_too_large

HUNG_UP = (errno.EIO, errno.ENXIO)
"""Errors of a terminal whose other end was closed."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and those that change the direction of text."""


def plain(text: str) -> str:
    """The text with control characters escaped. Pure."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


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
        size = len(data)
        try:
            if self.lost:
                super().write(f"\n[{self.lost} bytes were lost here: the disk was full]\n".encode())
                self.lost = 0
            written_bytes = super().write(data)
        except OSError as error:
            if not is_full(error) and not is_too_large(error):
                raise
            written_bytes = 0
        self.lost += size - written_bytes
        return size


class Terminal(io.FileIO):
    """A terminal that drops what is written after it was closed.

    A process that has no handler of SIGHUP is ended by it, as the kernel ends it if it still has that terminal.
    """

    def write(self, data: Any) -> int:
        """Write or drop the data."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in HUNG_UP:
                raise
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, self.fileno())
        os.close(silence)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGHUP)
        return len(data)


def terminal_output() -> TextIO | None:
    """Standard output for code that draws on a terminal with control characters."""
    stream = sys.__stdout__
    if not isinstance(stream, io.TextIOWrapper) or not stream.isatty():
        return stream
    return io.TextIOWrapper(_buffer(stream), stream.encoding, stream.errors, line_buffering=True)


def open_closed() -> None:
    """Open the null device in place of standard streams that are closed, as `>&-` leaves them."""
    # Python has None for them, and the next file that is opened would get their number, and with it the output of
    # libraries.
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            try:
                os.fstat(number)
            except OSError:
                nothing = os.open(os.devnull, os.O_RDWR)
                if nothing != number:
                    os.dup2(nothing, number)
                    os.close(nothing)
            stream = open(number, mode, closefd=False)  # noqa: SIM115 - for the rest of the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


@contextmanager
def guarded() -> Iterator[None]:
    """Escape control characters in `print`; code that draws on a terminal writes to `terminal_output()`."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = replacements = _guarded(sys.stdout), _guarded(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for replacement, stream in zip(replacements, before, strict=True):
            if replacement is not stream:
                _flush(replacement)
                replacement.detach()


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
    # Python flushes the stream again at its end, and would fail once more.
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
    return PlainText(_buffer(stream), stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)


def _buffer(stream: io.TextIOWrapper) -> Any:
    """What is below a text stream; below a terminal's, one that outlives the terminal."""
    return io.BufferedWriter(Terminal(stream.fileno(), "wb", closefd=False)) if stream.isatty() else stream.buffer
