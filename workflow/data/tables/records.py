"""Where the records of CSV and JSON lines begin. Pure: works on a piece of a file in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]

_LF, _CR, _QUOTE = 10, 13, 34


class UnclosedError(Exception):
    """A quoted field does not end in this piece; `place` is its opening quote."""

    def __init__(self, place: int) -> None:
        self.place = place
        super().__init__(f"the quote at {place} is not closed")


def line_ends(piece: bytes, delimiter: str | None, last: bool) -> Places:
    """The ends of the records of a piece that begins with a record: each behind its line end.

    A line feed, a carriage return or both end a record outside quotes (RFC 4180). JSON lines have no `delimiter`: their
    strings contain no line end. With `last`, the piece ends the file, and its last record may have no line end.

    Raises UnclosedError if the piece ends the file inside quotes.
    """
    text = np.frombuffer(piece, np.uint8)
    ends = np.flatnonzero(text == _LF)
    if b"\r" in piece:
        returns = np.flatnonzero(text == _CR)
        # A return at the end of a piece may have its line feed in the next one.
        following = np.append(text, _CR if last else _LF)[returns + 1]
        ends = np.union1d(ends, returns[following != _LF])
    if delimiter is not None and b'"' in piece:
        ends = _outside_quotes(text, ends, ord(delimiter), last)
    ends = ends + 1
    if last and len(text) and (not len(ends) or ends[-1] < len(text)):
        ends = np.append(ends, len(text))
    return ends


def _outside_quotes(text: npt.NDArray[np.uint8], ends: Places, delimiter: int, last: bool) -> Places:
    quotes = np.flatnonzero(text == _QUOTE)
    # A quote opens a field only at its beginning. If each second quote does, or follows the quote that it doubles,
    # quotes open and close in turn; else some are characters of fields without quotes.
    before = np.where(quotes > 0, text[quotes - 1], _LF)
    opening = (before == delimiter) | (before == _LF) | (before == _CR)
    if (opening | (before == _QUOTE))[::2].all():
        unclosed = len(quotes) % 2 == 1
        if unclosed and last:
            raise UnclosedError(int(quotes[-1]))
        outside: Places = ends[np.searchsorted(quotes, ends) % 2 == 0]
        return outside
    return _by_single_quotes(quotes, opening, text, ends, last)


def _by_single_quotes(
    quotes: Places, opening: npt.NDArray[np.bool_], text: npt.NDArray[np.uint8], ends: Places, last: bool
) -> Places:
    """The same, quote by quote: for pieces with quotes inside fields that have none around them."""
    inside, opened, skipped = False, 0, -1
    spans: list[tuple[int, int]] = []
    places = quotes.tolist()
    for number, place in enumerate(places):
        if place == skipped:
            continue
        if not inside:
            if opening[number]:
                inside, opened = True, place
        elif number + 1 < len(places) and places[number + 1] == place + 1:
            skipped = place + 1
        else:
            inside = False
            spans.append((opened, place))
    if inside:
        if last:
            raise UnclosedError(opened)
        spans.append((opened, len(text)))
    if not spans:
        return ends
    firsts, lasts = np.array(spans).T
    span = np.searchsorted(firsts, ends, side="right") - 1
    outside: Places = ends[(span < 0) | (ends > lasts[span])]
    return outside


def blank(piece: bytes, starts: Places, ends: Places, json: bool) -> npt.NDArray[np.bool_]:
    """Which records are empty lines, and so none; in JSON lines also those of blanks."""
    first = np.frombuffer(piece, np.uint8)[starts]
    if not json:
        return np.isin(first, (_LF, _CR))
    result: npt.NDArray[np.bool_] = first != ord("{")
    for number in np.flatnonzero(result).tolist():
        result[number] = not piece[starts[number] : ends[number]].strip()
    return result
