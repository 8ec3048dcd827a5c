"""Documents as tokens by a `tokenizer.json`, made once.

The tokens are kept in the user's cache by the content of the tokenizer and of the documents, so that the ranks of a
machine map one file, and later runs begin at once.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ortflow.workflow.data.samples import Indices
from ortflow.workflow.data.schema import Array
from ortflow.workflow.errors import UserError
from ortflow.workflow.run.rundir import replacing
from ortflow.workflow.spec.media import TextSection
from ortflow.workflow.system.cache_folders import cache_folders
from ortflow.workflow.system.files import read_whole

_VERSION = 2
_DOCUMENTS = 256
"""Documents tokenised at a time, by all cores."""
_LARGEST_TOKENIZER = 256 << 20


def key_of(text: TextSection, identity: Sequence[str]) -> str:
    """The hash of everything that decides the tokens. Raises UserError if the tokenizer cannot be read."""
    hashing = xxhash.xxh3_128(json.dumps([_VERSION, text.end, text.max_length, *identity]).encode())
    hashing.update(_definition(text.tokenizer))
    return hashing.hexdigest()


def tokens_of(
    text: TextSection, identity: Sequence[str], documents: Callable[[], Iterable[str]], location: str
) -> tuple[Array, Indices]:
    """All tokens [n], mapped from the cache, and the end of each document, which may be empty.

    Parameters
    ----------
    text
        The section.
    identity
        What identifies the documents: hashes of their content.
    documents
        Called where they are not in the cache.
    location
        The set, for messages.

    Raises
    ------
    UserError
        If the section does not fit, or if the tokens cannot be made or kept.
    """
    if text.pack and text.length is None:
        raise UserError("packs windows, whose length is not given", where="text.pack", fix="set text.length")
    folder = next(cache_folders("tokens"), None)
    if folder is None:
        message = "the tokens cannot be kept: there is no folder for them"
        raise UserError(message, where=location, fix="set ORTFLOW_CACHE to a folder that only you may write to")
    key = key_of(text, identity)
    tokens, ends = folder / f"{key}.tokens.npy", folder / f"{key}.ends.npy"
    if not ends.exists() or not tokens.exists():
        _tokenise(documents(), text, tokens, ends, location)
    try:
        return np.load(tokens, "r", allow_pickle=False), np.load(ends, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read ({error})", where=str(tokens), fix="remove it") from None


def _tokenise(documents: Iterable[str], text: TextSection, tokens: Path, ends: Path, location: str) -> None:
    tokenizer = tokenizer_of(text.tokenizer)
    end = None
    if text.end is not None:
        end = tokenizer.token_to_id(text.end)
        if end is None:
            raise UserError(f"has no token {text.end!r}", where=text.tokenizer, fix="correct text.end")
    if text.max_length is not None:
        _truncate(tokenizer, text.max_length - (end is not None))
    kind: np.dtype[Any] = np.dtype(np.uint16 if (count := count_of(tokenizer)) <= 1 << 16 else np.uint32)
    lengths: list[int] = []
    cut, remaining = 0, iter(documents)
    try:
        with tempfile.TemporaryFile(dir=tokens.parent) as file:
            while batch := list(itertools.islice(remaining, _DOCUMENTS)):
                for encoding in tokenizer.encode_batch(batch):
                    ids = [*encoding.ids, *([] if end is None else [end])]
                    if ids and max(ids) >= count:  # of a post-processor
                        message = f"gives the id {max(ids)}, and its vocabulary's largest is {count - 1}"
                        raise UserError(message, where=text.tokenizer, fix="correct its post_processor")
                    cut += bool(encoding.overflowing)
                    lengths.append(len(ids))
                    file.write(np.array(ids, kind).tobytes())
            file.flush()
            total = sum(lengths)
            # mmap refuses a length of 0.
            values = np.memmap(file, kind, "r", 0, total) if total else np.empty(0, kind)
            with replacing(tokens) as target:
                np.save(target, values)
        with replacing(ends) as target:
            np.save(target, np.cumsum(lengths, dtype=np.int64))
    except OSError as error:
        message = f"the tokens cannot be kept ({error.strerror or error})"
        raise UserError(message, where=str(tokens.parent), fix="set ORTFLOW_CACHE to a folder with room") from None
    if cut:
        line = f"{location}: {cut} of {len(lengths)} documents have more than {text.max_length} tokens and are cut\n"
        sys.stderr.write(line)
        sys.stderr.flush()


def _definition(path: str) -> bytes:
    try:
        return read_whole(path, _LARGEST_TOKENIZER)
    except OSError as error:
        raise UserError(error.strerror or str(error), where=path, fix="correct text.tokenizer") from None


def tokenizer_of(path: str) -> Any:
    """The `tokenizers.Tokenizer` of a file, without truncation and padding. Raises UserError."""
    definition = _definition(path)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("text needs tokenizers", fix="install it with: pip install 'ortflow[text]'") from None
    try:
        tokenizer = Tokenizer.from_buffer(definition)
    except Exception as error:  # noqa: BLE001 - the package raises Exception itself
        raise UserError(f"is not a tokenizer.json ({error})", where=path, fix="save it with tokenizers") from None
    # Both would change documents without a word: max_length and pack do it here.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def count_of(tokenizer: Any) -> int:
    """The largest id of a token, and one. Ids may have gaps, which `get_vocab_size` leaves out."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _truncate(tokenizer: Any, length: int) -> None:
    """Cut documents to `length` tokens with those that the tokenizer adds."""
    added = tokenizer.num_special_tokens_to_add(False)
    if length <= added:
        message = f"leaves no token of a document: the tokenizer and text.end add {added} or more"
        raise UserError(message, where="text.max_length", fix="raise it")
    tokenizer.enable_truncation(length)
