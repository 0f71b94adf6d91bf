"""What the words of `--tokenizer` name."""

import json
import os
from typing import NamedTuple

from giantjax.errors import InputError, did_you_mean

SPELLINGS = ("bytes", "bpe:SIZE", "gpt2:FOLDER", "huggingface:FILE", "sentencepiece:FILE", "tiktoken:FILE", "wordpiece:FILE")
"""What `--tokenizer` takes besides a path that speaks for itself."""
KINDS = ("gpt2", "huggingface", "sentencepiece", "tiktoken", "tiktoken-gpt2", "tiktoken-cl100k", "tiktoken-o200k", "wordpiece")
"""Kinds that lie in files."""
FILES = (
    ("huggingface", ("tokenizer.json",)),
    ("gpt2", ("encoder.json", "vocab.bpe")),
    ("gpt2", ("vocab.json", "merges.txt")),
    ("sentencepiece", ("tokenizer.model",)),
    ("wordpiece", ("vocab.txt",)),
)
"""What a folder may hold, the first before the others."""
SMALLEST_BPE = 257
# Of any vocabulary file; those in use have at most some tens of megabytes.
LARGEST_FILE = 1 << 30


class Named(NamedTuple):
    """A kind and its files: a vocabulary, and for `gpt2` its merges."""

    kind: str
    paths: tuple[str, ...]


def trained_size(spelling: str) -> int | None:
    """SIZE of `bpe:SIZE`, or None where `spelling` is something else.

    Raises:
        InputError: SIZE is no number, or too small.
    """
    kind, colon, size = spelling.partition(":")
    if kind != "bpe" or not colon:
        return None
    if not size.isdecimal() or int(size) < SMALLEST_BPE:
        raise InputError(
            f"--tokenizer is {spelling}; SIZE must be a whole number of at least {SMALLEST_BPE}, for every byte and the end of a document"
        )
    return int(size)


def find_files(spelling: str) -> Named:
    """What `KIND:PATH`, or a path whose kind its name and content tell, names; PATH may be the folder of the files.

    Raises:
        InputError: there is no such kind or path, or nothing tells the kind.
    """
    kind, colon, path = spelling.partition(":")
    if not (colon and kind in KINDS):
        kind, path = "", spelling
    if not os.path.exists(path):
        if kind:
            raise InputError(f"--tokenizer is {spelling}, but there is no file {path}")
        hint = did_you_mean(path, [*KINDS, "bytes", "bpe"])
        raise InputError(f"there is no tokenizer {path!r}, nor a file of that name{hint} (kinds: {', '.join(SPELLINGS)})")
    folder, name = (path, "") if os.path.isdir(path) else os.path.split(path)
    for of, names in FILES:
        # A pair is found by either of its files; what is called tokenizer.model may be of another kind.
        wanted = kind in ("", of) and (not name or (name in names and of != "sentencepiece"))
        paths = tuple(os.path.join(folder, each) for each in names)
        if wanted and all(map(os.path.isfile, paths)):
            return Named(of, paths)
    if not name:
        known = ", ".join(" with ".join(names) for of, names in FILES if kind in ("", of))
        raise InputError(f"--tokenizer is {spelling}, a folder without {known or 'a file of that kind; name the file itself'}")
    kind = kind or _kind_of(path)
    if kind == "gpt2":
        pairs = " or ".join(" with ".join(names) for of, names in FILES if of == kind)
        raise InputError(f"--tokenizer is {spelling}, but a GPT-2 BPE is a pair in one folder: {pairs}")
    return Named(kind, (path,))


def read_file(path: str) -> bytes:
    """The content of a vocabulary file.

    Raises:
        InputError: it cannot be read, or is too large to be one.
    """
    try:
        if (size := os.path.getsize(path)) > LARGEST_FILE:
            raise InputError(f"{path} has {size} bytes, too many for the file of a tokenizer")
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _kind_of(path: str) -> str:
    """By the name of a file, or by its content where names are alike."""
    name = os.path.basename(path)
    if name.endswith(".json"):
        return "huggingface" if _has_model(read_file(path)) else "gpt2"
    if name.endswith(".model"):
        # Llama 3 brings ranks under SentencePiece's name; a model begins with the tag of its first field.
        return "sentencepiece" if read_file(path)[:1] == b"\n" else "tiktoken"
    for ending, kind in ((".tiktoken", "tiktoken"), (".bpe", "gpt2"), ("merges.txt", "gpt2"), ("vocab.txt", "wordpiece")):
        if name.endswith(ending):
            return kind
    raise InputError(f"--tokenizer is {path}, whose name does not tell its kind; write KIND:{path} with a KIND of {', '.join(KINDS)}")


def _has_model(file: bytes) -> bool:
    """Whether JSON is a whole tokenizer's; a vocabulary may hold a token of that name."""
    try:
        values = json.loads(file)
    except (ValueError, RecursionError):
        return True
    return not isinstance(values, dict) or isinstance(values.get("model"), dict)
