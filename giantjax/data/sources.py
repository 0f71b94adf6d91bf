"""From the words of data.train and data.validation to opened, checked corpora."""

import hashlib
import os
from dataclasses import dataclass
from typing import Literal

import numpy as np

from giantjax.config import RunConfig
from giantjax.data.corpus import SPLITS, stdlib
from giantjax.data.indexed import PIECE, IndexedDataset, open_indexed, without_ending
from giantjax.data.samples import PackedSamples, Samples, SyntheticSamples, refuse_foreign_ids
from giantjax.data.tokenizer import recorded_file
from giantjax.errors import InputError, did_you_mean

# Tokens looked at when nothing says how large a corpus' vocabulary is: under a second, and the rest are
# checked as they are used.
SCANNED_TOKENS = 1 << 26
# Places of a corpus whose tokens go into its fingerprint, and how many at each.
FINGERPRINT_PLACES, FINGERPRINT_TOKENS = 64, 256


@dataclass(frozen=True)
class Synthetic:
    """Random tokens in place of a corpus."""

    seed: int
    name: str = "synthetic"


Source = IndexedDataset | Synthetic


def open_sources(config: RunConfig) -> tuple[Source, Source | None]:
    """The training and the validation source of a run; None where the run has no validation data.

    Raises:
        InputError: a corpus is missing, damaged, too short, or does not go with the model's vocabulary; or the run
            is to evaluate and has nothing to evaluate on.
    """
    data, model = config.data, config.model
    if not data.train:
        raise InputError(
            "data.train is empty; `python scripts/prepare_data.py FILE... --output data/train` and `python scripts/prepare_data.py "
            "HELD_OUT_FILE... --output data/validation` make corpora for --data.train data/train --data.validation data/validation, "
            "or try --data.train stdlib or synthetic"
        )
    entry = data.train[0]
    held_out = data.validation or ("stdlib" if entry == "stdlib" else None)
    if held_out is None and config.training.eval_every:
        raise InputError(
            f"training.eval_every is {config.training.eval_every}, but data.validation names nothing to evaluate on; "
            "give a PREFIX of held-out data, or set training.eval_every to 0"
        )
    sizes = {"sequence_length": model.sequence_length, "vocabulary_size": model.vocabulary_size, "seed": config.seed}
    train = open_source(entry, split="train", **sizes)
    return train, None if held_out is None else open_source(held_out, split="validation", **sizes)


def open_source(entry: str, *, split: Literal["train", "validation"], sequence_length: int, vocabulary_size: int, seed: int = 0) -> Source:
    """What data.train or data.validation names: stdlib, synthetic, or the PREFIX of an indexed pair.

    Args:
        entry: the name; PREFIX.bin and PREFIX.idx are taken for PREFIX.
        split: which part of stdlib or synthetic is wanted, and which field messages speak of.
        sequence_length: of the model; the source must hold one such sample.
        vocabulary_size: of the model.
        seed: of synthetic tokens.

    Raises:
        InputError: the corpus is missing, damaged, too short, or does not go with the vocabulary.
    """
    if entry == "synthetic":
        # Seeds of runs are below 2**32, so no training seed makes the validation tokens.
        return Synthetic(seed + (split == "validation") * 2**32)
    field = f"data.{split}"
    prefix = stdlib()[SPLITS.index(split)] if entry == "stdlib" else without_ending(entry)
    if not (os.path.exists(f"{prefix}.idx") and os.path.exists(f"{prefix}.bin")):
        raise _no_pair(field, prefix)
    dataset = open_indexed(prefix)
    record = dataset.record
    if record is None:
        _scan(dataset, vocabulary_size)
    elif record.vocabulary_size > vocabulary_size:
        raise InputError(
            f"{field} {entry} was prepared with a vocabulary of {record.vocabulary_size} (tokenizer {record.tokenizer}), but "
            f"model.vocabulary_size is {vocabulary_size}; it must be at least {record.vocabulary_size}"
        )
    else:
        # What is generated needs it, and a run keeps a copy.
        recorded_file(record, f"{prefix}.tokenizer")
    samples_of(dataset, sequence_length, vocabulary_size)
    return dataset


def samples_of(source: Source, sequence_length: int, vocabulary_size: int) -> Samples:
    """The samples of a source.

    Raises:
        InputError: the corpus is too short for one.
    """
    if isinstance(source, Synthetic):
        return SyntheticSamples(source.seed, sequence_length, vocabulary_size)
    return PackedSamples(source, sequence_length, vocabulary_size)


def fingerprint(source: Source) -> str:
    """16 hexadecimal digits that differ, in all likelihood, between corpora that would train differently.

    Made of the dtype, the length of every sequence and a spread of tokens, so it does not change when files move.
    """
    digest = hashlib.blake2b(source.name.encode() if isinstance(source, Synthetic) else b"", digest_size=8)
    if isinstance(source, IndexedDataset):
        digest.update(f"{source.tokens.dtype.str} {source.num_tokens} {source.num_sequences} {source.num_documents}".encode())
        for array in (source.lengths, source.document_index):
            for first in range(0, len(array), PIECE):
                digest.update(array[first : first + PIECE].tobytes())
        for place in range(FINGERPRINT_PLACES):
            start = place * source.num_tokens // FINGERPRINT_PLACES
            digest.update(source.read(start, min(start + FINGERPRINT_TOKENS, source.num_tokens)).tobytes())
    return digest.hexdigest()


def _scan(dataset: IndexedDataset, vocabulary_size: int) -> None:
    """Raise InputError where one of up to SCANNED_TOKENS, evenly spread, is not in the vocabulary."""
    limits = np.iinfo(dataset.tokens.dtype)
    if limits.min == 0 and limits.max < vocabulary_size:
        return
    pieces = -(-dataset.num_tokens // PIECE)
    scanned = min(pieces, SCANNED_TOKENS // PIECE)
    for number in range(scanned):
        start = number * pieces // scanned * PIECE
        ids = dataset.read(start, min(start + PIECE, dataset.num_tokens))
        refuse_foreign_ids(ids, dataset.name, start, "", vocabulary_size)


def _no_pair(field: str, prefix: str) -> InputError:
    """What to say where PREFIX.bin and PREFIX.idx are not both there."""
    for there, missing in ((".bin", ".idx"), (".idx", ".bin")):
        if os.path.exists(prefix + there):
            return InputError(f"{field} is {prefix}, but beside {prefix}{there} there is no {prefix}{missing}; prepare the corpus again")
    if os.path.isfile(prefix):
        return InputError(
            f"{field} is {prefix}, a file that is no indexed pair; make one with python scripts/prepare_data.py {prefix} --output PREFIX"
        )
    folder = prefix if os.path.isdir(prefix) else os.path.dirname(prefix)
    if not os.path.isdir(folder or "."):
        return InputError(f"{field} is {prefix}, but there is no folder {folder}")
    pairs = sorted(os.path.join(folder, name[:-4]) for name in os.listdir(folder or ".") if name.endswith(".idx"))
    if folder == prefix:
        return InputError(
            f"{field} is {prefix}, a folder; {f'name a pair in it, such as {pairs[0]}' if pairs else 'it holds no indexed pair'}"
        )
    words = [] if folder else ["stdlib", "synthetic"]
    return InputError(f"{field} is {prefix}, but there is no {prefix}.idx{did_you_mean(prefix, words + pairs)}")
