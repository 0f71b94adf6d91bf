"""What every kind of tokenizer offers, and what several of them need."""

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from giantjax.data.indexed import TokenizerRecord
from giantjax.errors import InputError

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>", "[SEP]")  # noqa: RUF001
"""Tokens that end documents in the vocabularies people use, the first that a vocabulary has before the others."""
WORD_END = re.compile(rb"(?<=[0-9A-Za-z])(?=[ \n])")
"""Where GPT-2's pattern and its successors always divide a text: no piece of theirs has a space after a letter or digit."""


class Tokenizer(Protocol):
    """What every kind of tokenizer offers. No text encodes to a control token, also where the text spells its name."""

    @property
    def name(self) -> str:
        """The kind, as PREFIX.json records it."""

    @property
    def vocabulary_size(self) -> int:
        """Ids are below this number."""

    @property
    def end_of_document(self) -> int:
        """The id that ends a document; no text encodes to it."""

    @property
    def seam(self) -> re.Pattern[bytes] | None:
        """Where UTF-8 may be cut so that the ids of the parts are the parts of the ids; None is nowhere."""

    @property
    def ending(self) -> str:
        """Of the name of the file that holds the vocabulary, such as `.json`; empty where there is none."""

    @property
    def file(self) -> bytes:
        """That file."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, int32 [ids], without an end of document."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; those that stand for no text are left out."""


def record_of(tokenizer: Tokenizer) -> TokenizerRecord:
    """What PREFIX.json says of a tokenizer."""
    digest = hashlib.sha256(tokenizer.file).hexdigest() if tokenizer.ending else None
    return TokenizerRecord(tokenizer.name, tokenizer.vocabulary_size, tokenizer.end_of_document, digest)


def as_text(text: str | bytes) -> str:
    """Text that is Unicode: U+FFFD stands for bytes that are not UTF-8, and for halves of surrogate pairs."""
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def known_ids(ids: Sequence[int] | np.ndarray, known: np.ndarray) -> np.ndarray:
    """Those of ids [ids] for which `known`, bool [vocabulary], holds."""
    found = np.asarray(ids, np.int64)
    found = found[(found >= 0) & (found < len(known))]
    return found[known[found]]


def resolve_end(
    asked: str | int | None,
    size: int,
    id_of: Callable[[str], int | None],
    encode: Callable[[str], np.ndarray],
    decode: Callable[[Sequence[int]], str],
) -> int:
    """The id that ends documents, in a vocabulary of ids below `size`.

    Without a wish it is the first of END_TOKENS in the vocabulary, or else a new id, `size`.

    Args:
        asked: a token of the vocabulary or the digits of an id up to `size`; or, as an int, an id that is known to be right.
        size: ids of the vocabulary are below it.
        id_of: token -> its id.
        encode: text -> its ids.
        decode: ids -> their text.

    Raises:
        InputError: there is no such token, or texts encode to it.
    """
    if asked is None:
        found = (id_of(token) for token in END_TOKENS)
        return next((token for token in found if token is not None), size)
    if isinstance(asked, int):
        return asked
    end = int(asked) if asked.isdecimal() else id_of(asked)
    if end is None or not 0 <= end <= size:
        raise InputError(f"--end-of-document is {asked}, but the vocabulary has no such token; its ids are 0 to {size - 1}")
    if end < size and end in encode(decode([end])):
        raise InputError(f"--end-of-document is {asked}, but that token is ordinary text, which would end documents too")
    return end
