"""Samples by their number: windows of an indexed corpus, or random tokens."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from giantjax.data.indexed import IndexedDataset
from giantjax.errors import InputError

# Enough that an epoch of random tokens outlasts a measurement, few enough to evaluate all of them.
NUM_SYNTHETIC = 1 << 16


class Samples(Protocol):
    """Random access to samples of S + 1 tokens: S inputs, and as many targets one place further on."""

    @property
    def num_samples(self) -> int:
        """How many there are; at least 1."""

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [S+1]."""

    def document_starts(self, index: int) -> np.ndarray:
        """Places in sample `index`, from 1 to S, at which another document begins, int64 in ascending order."""


@dataclass(frozen=True)
class PackedSamples:
    """Sample i is tokens [i x S, i x S + S] of all sequences one after the other, as Megatron packs them; or of those of
    some documents in a row.

    Neighbouring samples share one token, the last target of one and the first input of the next. So every token
    but the first is a target once an epoch, up to S - 1 left over at the end.

    Raises:
        InputError: at construction where the corpus is too short for one sample; on access, where a token id
            is not in the vocabulary.
    """

    dataset: IndexedDataset
    sequence_length: int
    vocabulary_size: int
    first: int = 0
    """Token of the corpus at which sample 0 begins."""
    stop: int | None = None
    """Token after the last sample; None is the end of the corpus."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            where = self.dataset.name if self.num_tokens == self.dataset.num_tokens else f"that part of {self.dataset.name}"
            raise InputError(
                f"{where} holds {self.num_tokens} tokens, too few for one sample of model.sequence_length "
                f"{self.sequence_length} + 1; use a longer corpus, or a sequence length of {max(self.num_tokens - 1, 1)} or less"
            )

    @property
    def num_tokens(self) -> int:
        """From the first to the last."""
        return (self.dataset.num_tokens if self.stop is None else self.stop) - self.first

    @property
    def num_samples(self) -> int:
        """Whole samples in the corpus."""
        return (self.num_tokens - 1) // self.sequence_length

    def document_starts(self, index: int) -> np.ndarray:
        """Places in sample `index`, from 1 to S, at which another document begins, int64 in ascending order."""
        start = self.first + index * self.sequence_length
        # A document without tokens begins where the next one does.
        return np.unique(self.dataset.documents_between(start + 1, start + self.sequence_length + 1)) - start

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` below num_samples, int32 [S+1]."""
        start = self.first + index * self.sequence_length
        ids = self.dataset.read(start, start + self.sequence_length + 1)
        refuse_foreign_ids(ids, self.dataset.name, start, f" in sample {index}", self.vocabulary_size)
        return ids.astype(np.int32)


@dataclass(frozen=True)
class SyntheticSamples:
    """Random tokens, each sample a pure function of (seed, index); cheap enough never to be what a step waits for."""

    seed: int
    sequence_length: int
    vocabulary_size: int
    num_samples: int = NUM_SYNTHETIC

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index`, int32 [S+1]."""
        # A counter-based generator needs no warm-up for each new key (Salmon et al., SC11).
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], np.uint64)))
        return generator.integers(0, self.vocabulary_size, self.sequence_length + 1, np.int32)

    def document_starts(self, index: int) -> np.ndarray:
        """None: a sample is one document."""
        return np.empty(0, np.int64)


def refuse_foreign_ids(ids: np.ndarray, name: str, start: int, where: str, vocabulary_size: int) -> None:
    """Raise InputError where one of ids [any number], which begin at token `start` of the corpus `name`, is not in the vocabulary."""
    limits = np.iinfo(ids.dtype)
    above = limits.max >= vocabulary_size and ids.max() >= vocabulary_size
    if above or (limits.min < 0 and ids.min() < 0):
        at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary_size))[0])
        raise InputError(
            f"{name}.bin holds the token id {ids[at]}{where} (token {start + at} of the corpus), but model.vocabulary_size is "
            f"{vocabulary_size}: ids must be from 0 to {vocabulary_size - 1}"
        )
