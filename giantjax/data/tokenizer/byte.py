"""The tokenizer that needs no vocabulary."""

import re
from collections.abc import Sequence

import numpy as np


class ByteTokenizer:
    """Every byte of UTF-8 is an id of its own; 256 ends a document."""

    name = "bytes"
    vocabulary_size = 257
    end_of_document = 256
    # Pieces of a text encode to the pieces of its ids, wherever it is cut; here not inside of a character.
    seam = re.compile(rb"(?=[^\x80-\xbf])", re.DOTALL)
    ending = ""
    file = b""

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of a text, int32 [bytes]."""
        # Bytes that the command line could not read as UTF-8 come as lone surrogates, and go back to those bytes.
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; U+FFFD where they are not UTF-8. The end of document and padding leave nothing."""
        known = np.asarray(ids, np.int64)
        return known[(known >= 0) & (known < 256)].astype(np.uint8).tobytes().decode("utf-8", "replace")
