"""Older vocabulary files, and texts, turned into a Hugging Face `tokenizer.json`."""

import json
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from giantjax.errors import InputError

END = "<|endoftext|>"
"""Ends documents in GPT-2's vocabulary and in trained ones."""


def from_gpt2(vocabulary: bytes, merges: bytes, names: tuple[str, ...]) -> bytes:
    """The `tokenizer.json` of a byte-level BPE (Radford et al., 2019).

    Args:
        vocabulary: encoder.json or vocab.json, an object from tokens to ids.
        merges: vocab.bpe or merges.txt, a pair of tokens in each line.
        names: of both, for messages.

    Raises:
        InputError: one of them is something else, or they do not belong together.
    """
    try:
        ids = json.loads(vocabulary)
        if not (isinstance(ids, dict) and ids and all(isinstance(number, int) for number in ids.values())):
            raise ValueError("it is not an object from tokens to whole numbers")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{names[0]} is not the vocabulary of a byte-level BPE ({error})") from error
    lines = [line.split(" ") for line in merges.decode("utf-8", "replace").splitlines() if line and not line.startswith("#version")]
    pairs = [(line[0], line[1]) for line in lines if len(line) == 2]
    if not pairs or len(pairs) != len(lines):
        raise InputError(f"{names[1]} is not a list of merges: its lines must hold two tokens each")
    if missing := next((token for token in sorted(pre_tokenizers.ByteLevel.alphabet()) if token not in ids), None):
        raise InputError(f"{names[0]} is not the vocabulary of a byte-level BPE: the symbol {missing} of a byte is not in it")
    if missing := next((token for a, b in pairs for token in (a, b, a + b) if token not in ids), None):
        raise InputError(f"{names[1]} merges to {missing}, which {names[0]} does not hold; the two do not belong together")
    tokenizer = _byte_level(models.BPE(vocab=ids, merges=pairs))
    if END in ids:
        tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str().encode()


def from_wordpiece(vocabulary: bytes, name: str) -> bytes:
    """The `tokenizer.json` of BERT's vocab.txt, a token in each line (Devlin et al., 2019).

    Text is lower-cased and stripped of accents, as for BERT's uncased vocabularies, where no token but the bracketed ones
    has a capital letter.

    Raises:
        InputError: it is something else.
    """
    tokens = vocabulary.decode("utf-8", "replace").splitlines()
    ids = {token: number for number, token in enumerate(tokens)}
    if "[UNK]" not in ids:
        raise InputError(f"{name} is not a WordPiece vocabulary: it has no line [UNK]")
    lowers = all(token == token.lower() for token in tokens if not token.startswith("["))
    tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    controls = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if token in ids]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    return tokenizer.to_str().encode()


def train_bpe(texts: Iterable[str], size: int) -> bytes:
    """The `tokenizer.json` of a byte-level BPE of up to `size` ids trained on texts, its end of document among them.

    The same texts in the same order give the same bytes.
    """
    tokenizer = _byte_level(models.BPE())
    # In a fixed order, for a set of strings has another one in each process.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
