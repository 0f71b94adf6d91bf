"""Hugging Face's `tokenizer.json`, which GPT-2's pair of files, WordPiece vocabularies and trained ones are turned into."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers

from giantjax.data.tokenizer.protocol import WORD_END, as_text, known_ids, resolve_end
from giantjax.errors import InputError


class HuggingFaceTokenizer:
    """What the library `tokenizers` makes of a `tokenizer.json`, without its templates: nothing is added to a text.

    A token that the file marks as special is a control token, and a text that spells its name is text like any other.
    Tokens that the file adds without that mark are text.

    Args:
        file: the JSON.
        end_of_document: token or id that ends documents; None looks for a usual one.
        origin: what messages call the file.

    Raises:
        InputError: the file is none, or has no such token.
    """

    name = "huggingface"
    ending = ".json"

    def __init__(self, file: bytes, end_of_document: str | int | None = None, origin: str = "tokenizer.json"):
        self.file = file
        try:
            settings = json.loads(file)
            model = settings["model"]
            self._tokenizer = tokenizers.Tokenizer.from_buffer(file)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise InputError(f"{origin} is not a Hugging Face tokenizer.json ({reason})") from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(f"{origin} has an empty vocabulary")
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        if model.get("dropout"):
            # Of merges, which would make ids a matter of chance.
            self._tokenizer.model.dropout = None  # type: ignore[attr-defined]
        size = max(vocabulary.values()) + 1
        unknown = model.get("unk_id", vocabulary.get(model.get("unk_token") or ""))
        added = self._tokenizer.get_added_tokens_decoder()
        names = {number: token.content for number, token in added.items() if token.special and number != unknown}
        self._set_controls(names, size)
        self.end_of_document = resolve_end(end_of_document, size, vocabulary.get, self.encode, self.decode)
        self.vocabulary_size = max(size, self.end_of_document + 1)
        name = self._tokenizer.id_to_token(self.end_of_document) or ""
        self._set_controls(names | {self.end_of_document: name}, self.vocabulary_size)
        texts = [token.content for token in added.values() if not token.special]
        divides = _divides_words(settings) and not any(character.isalnum() for text in texts for character in text)
        self.seam = WORD_END if divides else None

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, int32 [ids], without an end of document."""
        # Of one text: what the library calls fast leaves out where in the text each id comes from.
        [found] = self._tokenizer.encode_batch_fast([as_text(text)], add_special_tokens=False)
        ids = np.array(found.ids, np.int32)
        wrong = np.flatnonzero(self._is_control[ids])
        if not len(wrong):
            return ids
        # A model whose vocabulary holds the names of control tokens finds them in the text itself.
        whole, *parts = np.split(ids, wrong)
        spelled = [np.concatenate([self._spelled(part[0]), part[1:]]) for part in parts]
        return np.concatenate([whole, *spelled]).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; control tokens and padding leave nothing."""
        known = known_ids(ids, ~self._is_control)
        return self._tokenizer.decode(known.tolist(), skip_special_tokens=False)

    def _set_controls(self, names: dict[int, str], size: int) -> None:
        self._names = names
        self._is_control = np.zeros(size, bool)
        self._is_control[list(names)] = True

    def _spelled(self, control: int) -> np.ndarray:
        """The ids of the name of a control token, as text that the model cannot read as one token."""
        name = self._names[control]
        return np.array([token.id for part in (name[:1], name[1:]) if part for token in self._tokenizer.model.tokenize(part)], np.int32)


def _divides_words(settings: dict[str, Any]) -> bool:
    """Whether GPT-2's pattern, and nothing else, divides texts."""
    words = settings.get("pre_tokenizer") or {}
    if settings.get("normalizer") or words.get("type") != "ByteLevel":
        return False
    return words.get("use_regex", True) and not words.get("add_prefix_space", True)
