"""SentencePiece models (Kudo and Richardson, 2018)."""

from collections.abc import Sequence

import numpy as np

from giantjax.data.tokenizer.protocol import as_text, known_ids, resolve_end
from giantjax.errors import InputError


class SentencePieceTokenizer:
    """The normaliser and the pieces of a `.model` file.

    What the model's normaliser changes does not come back: with the usual one compatible characters become one (NFKC), and
    spaces at the ends and next to each other go. Without byte pieces, characters outside the vocabulary come back as U+2047.

    Args:
        file: the model.
        end_of_document: piece or id that ends documents; None is the model's own end of a sentence, or a new id.
        origin: what messages call the file.

    Raises:
        InputError: the package is not installed, the file is no model, or has no such piece.
    """

    name = "sentencepiece"
    ending = ".model"
    seam = None

    def __init__(self, file: bytes, end_of_document: str | int | None = None, origin: str = "tokenizer.model"):
        try:
            import sentencepiece
        except ImportError as error:
            raise InputError(
                f"{origin} needs the package sentencepiece, which is not installed; pip install -e '.[sentencepiece]'"
            ) from error
        self.file = file
        try:
            if not file:
                raise RuntimeError
            self._model = sentencepiece.SentencePieceProcessor(model_proto=file)
        except RuntimeError as error:
            raise InputError(f"{origin} is not a SentencePiece model") from error
        size, own = self._model.vocab_size(), self._model.eos_id()
        self._is_text = np.array([not (self._model.is_control(number) or self._model.is_unused(number)) for number in range(size)])
        wish = own if end_of_document is None and own >= 0 else end_of_document
        self.end_of_document = resolve_end(wish, size, self._id_of, self.encode, self.decode)
        self.vocabulary_size = max(size, self.end_of_document + 1)
        self._is_text = np.append(self._is_text, np.zeros(self.vocabulary_size - size, bool))
        self._is_text[self.end_of_document] = False

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids of a text, int32 [ids], without an end of document."""
        return np.array(self._model.encode(as_text(text)), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids [ids]; control pieces and padding leave nothing."""
        return self._model.decode(known_ids(ids, self._is_text).tolist())

    def _id_of(self, piece: str) -> int | None:
        number = self._model.piece_to_id(piece)
        return None if number == self._model.unk_id() else number
