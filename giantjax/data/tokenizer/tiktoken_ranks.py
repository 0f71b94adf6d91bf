"""OpenAI's rank files, in which each line holds a token in base64 and its id; read from the disk alone."""

import base64
import binascii
from collections.abc import Sequence

import numpy as np

from giantjax.data.tokenizer.protocol import WORD_END, as_text, known_ids, resolve_end
from giantjax.errors import InputError

PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
"""How a text is divided before bytes are merged, which the file does not say (OpenAI's tiktoken, openai_public.py)."""
KNOWN = {
    50256: ("gpt2", 50256),
    50280: ("gpt2", 50256),
    100256: ("cl100k", 100257),
    128000: ("cl100k", 128001),
    199998: ("o200k", 199999),
}
"""Pattern and end of document of r50k, p50k, cl100k, Llama 3 and o200k, by the number of their ranks."""


class TiktokenTokenizer:
    """Ranks with the pattern they were made for.

    Args:
        file: the ranks.
        pattern: one of PATTERNS; None recognises the known files by their number of ranks.
        end_of_document: id that ends documents; None is that of the known files, else a new id.
        origin: what messages call the file.

    Raises:
        InputError: the package is not installed, the file holds no ranks, or nothing says which pattern goes with them.
    """

    ending = ".tiktoken"
    seam = WORD_END

    def __init__(self, file: bytes, pattern: str | None = None, end_of_document: str | int | None = None, origin: str = "ranks.tiktoken"):
        try:
            import tiktoken
        except ImportError as error:
            raise InputError(f"{origin} needs the package tiktoken, which is not installed; pip install -e '.[tiktoken]'") from error
        self.file, ranks = file, _read_ranks(file, origin)
        known_pattern, known_end = KNOWN.get(len(ranks), (None, None))
        pattern = pattern or known_pattern
        if pattern is None:
            kinds = ", ".join(f"tiktoken-{name}:{origin}" for name in PATTERNS)
            raise InputError(f"{origin} holds {len(ranks)} ranks, as no file that is known here; say which pattern they are for: {kinds}")
        self.name = f"tiktoken-{pattern}"
        self._encoding = tiktoken.Encoding(self.name, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={})
        size = max(ranks.values()) + 1
        self._is_text = np.zeros(size, bool)
        self._is_text[list(ranks.values())] = True
        wish = known_end if end_of_document is None else end_of_document
        self.end_of_document = resolve_end(wish, size, lambda _: None, self.encode, self.decode)
        self.vocabulary_size = max(size, self.end_of_document + 1)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, int32 [ids], without an end of document."""
        return self._encoding.encode_to_numpy(as_text(text), disallowed_special=()).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; the end of document and padding leave nothing."""
        return self._encoding.decode(known_ids(ids, self._is_text).tolist())


def _read_ranks(file: bytes, origin: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise InputError(f"{origin} is not a file of tiktoken ranks: line {number} is not a token in base64 and its rank") from error
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise InputError(f"{origin} is not a whole file of tiktoken ranks: it does not hold each of the 256 bytes")
    if len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise InputError(f"{origin} is not a file of tiktoken ranks: a rank is negative, or two tokens share one")
    return ranks
