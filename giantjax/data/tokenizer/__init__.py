"""Text to token ids and back: one class for each kind of vocabulary file."""

from giantjax.data.tokenizer.byte import ByteTokenizer
from giantjax.data.tokenizer.load import ending_of, from_file, load_recorded, load_tokenizer, recorded_file
from giantjax.data.tokenizer.protocol import Tokenizer, record_of
from giantjax.data.tokenizer.spelling import SPELLINGS, trained_size

__all__ = [
    "SPELLINGS",
    "ByteTokenizer",
    "Tokenizer",
    "ending_of",
    "from_file",
    "load_recorded",
    "load_tokenizer",
    "record_of",
    "recorded_file",
    "trained_size",
]
