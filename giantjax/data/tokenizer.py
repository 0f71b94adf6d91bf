"""Text to token ids and back."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from giantjax.errors import InputError, did_you_mean


class Tokenizer(Protocol):
    """What every kind of tokenizer offers."""

    @property
    def name(self) -> str:
        """What `load_tokenizer` makes it from."""

    @property
    def vocabulary_size(self) -> int:
        """Ids are below this number."""

    @property
    def end_of_document(self) -> int:
        """The id that ends a document; no text encodes to it."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, int32 [ids], without an end of document."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; those that stand for no text are left out."""


class ByteTokenizer:
    """Every byte of UTF-8 is an id of its own; 256 ends a document."""

    name = "bytes"
    vocabulary_size = 257
    end_of_document = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of a text, int32 [bytes]. Pieces of a text encode to the pieces of its ids, wherever it is cut."""
        # Bytes that the command line could not read as UTF-8 come as lone surrogates, and go back to those bytes.
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; U+FFFD where they are not UTF-8. The end of document and padding leave nothing."""
        known = np.asarray(ids, np.int64)
        return known[(known >= 0) & (known < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name, as `--tokenizer` and PREFIX.json spell it.

    Raises:
        InputError: there is none.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    raise InputError(f"there is no tokenizer {name!r}; this version has {ByteTokenizer.name}{did_you_mean(name, [ByteTokenizer.name])}")
