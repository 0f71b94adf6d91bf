"""From the words of data.train and data.validation to opened, checked corpora."""

import os
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from giantjax.config import RunConfig
from giantjax.data.corpora import Blend, Part, Source, Split, Synthetic, blended_samples, corpora_of, samples_of
from giantjax.data.corpus import SPLITS, stdlib
from giantjax.data.indexed import PIECE, IndexedDataset, open_indexed, without_ending
from giantjax.data.samples import refuse_foreign_ids
from giantjax.data.tokenizer import recorded_file
from giantjax.errors import InputError, did_you_mean

# Tokens looked at when nothing says how large a corpus' vocabulary is: under a second, and the rest are
# checked as they are used.
SCANNED_TOKENS = 1 << 26
SHARES: tuple[Split, ...] = ("train", "validation", "test")
"""Parts of a corpus, in the order of data.split."""


def open_sources(config: RunConfig) -> tuple[Source, Source | None]:
    """The training and the validation source of a run; None where the run has no validation data.

    Raises:
        InputError: a corpus is missing, damaged, too short, or does not go with the model's vocabulary; corpora are of different
            tokenizers; or the run is to evaluate and has nothing to evaluate on.
    """
    data = config.data
    corpora = open_corpora(config)
    train, validation = part_of(config, corpora, "train"), part_of(config, corpora, "validation")
    assert train is not None
    if data.shares is None and (held_out := data.validation or ("stdlib" if data.train == ("stdlib",) else None)):
        validation = open_source(held_out, split="validation", **_sizes(config))
    if validation is None and config.training.eval_every:
        raise InputError(
            f"training.eval_every is {config.training.eval_every}, but data.validation names nothing to evaluate on; "
            "give a PREFIX of held-out data, or a share of the corpora with data.split, or set training.eval_every to 0"
        )
    _refuse_other_tokenizers([*corpora_of(train), *(corpora_of(validation) if validation else ())])
    return train, validation


def open_corpora(config: RunConfig) -> list[IndexedDataset | Synthetic]:
    """The whole corpora of data.train.

    Raises:
        InputError: as `open_sources` does.
    """
    if not config.data.train:
        raise InputError(
            "data.train is empty; `python scripts/prepare_data.py FILE... --output data/train` and `python scripts/prepare_data.py "
            "HELD_OUT_FILE... --output data/validation` make corpora for --data.train data/train --data.validation data/validation, "
            "or try --data.train stdlib or synthetic"
        )
    return [open_source(prefix, split="train", **_sizes(config)) for prefix, _ in config.data.corpora]


def part_of(config: RunConfig, corpora: Sequence[IndexedDataset | Synthetic], split: Split) -> Source | None:
    """What data.split sets apart of the corpora for training, validation or test; None where that is nothing.

    Raises:
        InputError: a corpus has too few documents or tokens for its part.
    """
    shares = config.data.shares
    if (shares is None and split != "train") or (shares is not None and shares[SHARES.index(split)] == 0):
        return None
    if shares is None and len(corpora) == 1:
        return corpora[0]
    parts = []
    for corpus in corpora:
        if isinstance(corpus, Synthetic):
            raise InputError(f"data.split is {config.data.split}, but synthetic tokens are of no documents that could be divided")
        first, stop = _documents_of(corpus, shares, split) if shares else (0, corpus.num_documents)
        if first == stop:
            raise InputError(
                f"data.split is {config.data.split}, which leaves none of the {corpus.num_documents} documents of {corpus.name} for "
                f"{split}; give it a larger share"
            )
        parts.append(Part(corpus, first, stop))
    weights = tuple(weight for _, weight in config.data.corpora if weight is not None)
    blend = Blend(tuple(parts), weights or None)
    blended_samples(blend, config.model.sequence_length, config.model.vocabulary_size)
    return blend


def _documents_of(corpus: IndexedDataset, shares: Sequence[Fraction], split: Split) -> tuple[int, int]:
    """(first document, the one after the last) of a part; bounds are rounded as Megatron-core rounds them."""
    number = SHARES.index(split)
    before, after = sum(shares[:number]), sum(shares[: number + 1])
    return round(before * corpus.num_documents), round(after * corpus.num_documents)


def _sizes(config: RunConfig) -> dict[str, Any]:
    return {"sequence_length": config.model.sequence_length, "vocabulary_size": config.model.vocabulary_size, "seed": config.seed}


def _refuse_other_tokenizers(corpora: Sequence[IndexedDataset]) -> None:
    """Raise InputError where two corpora are recorded with different tokenizers."""
    recorded = [(corpus.name, corpus.record) for corpus in corpora if corpus.record]
    for name, record in recorded[1:]:
        first, other = recorded[0]
        if record != other:
            sizes = f"{record.tokenizer} of {record.vocabulary_size} ids and {other.tokenizer} of {other.vocabulary_size}"
            raise InputError(f"{name} and {first} were prepared with different tokenizers ({sizes}); prepare both with the same one")


def open_source(
    entry: str,
    *,
    split: Literal["train", "validation"],
    sequence_length: int,
    vocabulary_size: int,
    seed: int = 0,
    field: str | None = None,
) -> IndexedDataset | Synthetic:
    """What data.train or data.validation names: stdlib, synthetic, or the PREFIX of an indexed pair.

    Args:
        entry: the name; PREFIX.bin and PREFIX.idx are taken for PREFIX.
        split: which part of stdlib or synthetic is wanted.
        sequence_length: of the model; the source must hold one such sample.
        vocabulary_size: of the model.
        seed: of synthetic tokens.
        field: which messages speak of; None is data.train or data.validation.

    Raises:
        InputError: the corpus is missing, damaged, too short, or does not go with the vocabulary.
    """
    if entry == "synthetic":
        # Seeds of runs are below 2**32, so no training seed makes the validation tokens.
        return Synthetic(seed + (split == "validation") * 2**32)
    field = field or f"data.{split}"
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
