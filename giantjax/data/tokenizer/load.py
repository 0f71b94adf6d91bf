"""From the words of `--tokenizer`, or a record beside a corpus, to a tokenizer."""

import hashlib

from giantjax.data.indexed import TokenizerRecord
from giantjax.data.tokenizer.byte import ByteTokenizer
from giantjax.data.tokenizer.protocol import Tokenizer
from giantjax.data.tokenizer.spelling import KINDS, find_files, read_file
from giantjax.errors import InputError


def load_tokenizer(spelling: str, end_of_document: str | None = None) -> Tokenizer:
    """The tokenizer that `--tokenizer` names: `bytes`, `KIND:PATH`, or a path whose kind its name or content tells.

    Args:
        spelling: those words.
        end_of_document: a token of the vocabulary, or an id; None takes the usual one.

    Raises:
        InputError: there is no such kind or file, the file is of another kind, a package for it is not installed, or it has no
            such token.
    """
    if spelling == ByteTokenizer.name:
        if end_of_document is not None:
            raise InputError(f"--end-of-document is {end_of_document}, but the tokenizer bytes ends documents with 256")
        return ByteTokenizer()
    kind, paths = find_files(spelling)
    files = [read_file(path) for path in paths]
    if kind == "gpt2":
        from giantjax.data.tokenizer.convert import from_gpt2

        return from_file("huggingface", from_gpt2(files[0], files[1], paths), end_of_document, paths[0])
    if kind == "wordpiece":
        from giantjax.data.tokenizer.convert import from_wordpiece

        return from_file("huggingface", from_wordpiece(files[0], paths[0]), end_of_document, paths[0])
    return from_file(kind, files[0], end_of_document, paths[0])


def load_recorded(record: TokenizerRecord, stem: str) -> Tokenizer:
    """The tokenizer that a record tells of, whose file is called `stem` and the ending of its kind.

    Raises:
        InputError: as `recorded_file` does, or a package for it is not installed.
    """
    return from_file(record.tokenizer, recorded_file(record, stem), record.end_of_document, stem + ending_of(record))


def recorded_file(record: TokenizerRecord, stem: str) -> bytes:
    """The file of the vocabulary of a recorded tokenizer; empty where its kind needs none.

    Raises:
        InputError: the file is missing or another one, or this version does not know the kind.
    """
    if record.tokenizer not in (*KINDS, ByteTokenizer.name):
        raise InputError(f"{stem} is of the tokenizer {record.tokenizer!r}, which this version does not have")
    if not ending_of(record):
        return b""
    path = stem + ending_of(record)
    file = read_file(path)
    if record.digest is not None and hashlib.sha256(file).hexdigest() != record.digest:
        raise InputError(f"{path} is not the tokenizer that was recorded; put back the file that was written with its corpus")
    return file


def ending_of(record: TokenizerRecord) -> str:
    """Of the name of the file that a recorded tokenizer is in; empty where it needs none."""
    return {"bytes": "", "huggingface": ".json", "sentencepiece": ".model"}.get(record.tokenizer, ".tiktoken")


def from_file(kind: str, file: bytes, end_of_document: str | int | None, origin: str) -> Tokenizer:
    """The tokenizer of the content of a file; messages call that `origin`."""
    if kind == ByteTokenizer.name:
        return ByteTokenizer()
    # Each library is imported only where it is needed: a run on bytes starts without any.
    if kind == "huggingface":
        from giantjax.data.tokenizer.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(file, end_of_document, origin)
    if kind == "sentencepiece":
        from giantjax.data.tokenizer.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(file, end_of_document, origin)
    from giantjax.data.tokenizer.tiktoken_ranks import TiktokenTokenizer

    return TiktokenTokenizer(file, kind.partition("-")[2] or None, end_of_document, origin)
