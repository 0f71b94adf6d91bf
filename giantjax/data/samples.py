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


@dataclass(frozen=True)
class PackedSamples:
    """Sample i is tokens [i x S, i x S + S] of all sequences one after the other, as Megatron packs them.

    Neighbouring samples share one token, the last target of one and the first input of the next. So every token
    but the first is a target once an epoch, up to S - 1 left over at the end.

    Raises:
        InputError: at construction where the corpus is too short for one sample; on access, where a token id
            is not in the vocabulary.
    """

    dataset: IndexedDataset
    sequence_length: int
    vocabulary_size: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(
                f"{self.dataset.name} holds {self.dataset.num_tokens} tokens, too few for one sample of model.sequence_length "
                f"{self.sequence_length} + 1; use a longer corpus, or a sequence length of {self.dataset.num_tokens - 1} or less"
            )

    @property
    def num_samples(self) -> int:
        """Whole samples in the corpus."""
        return (self.dataset.num_tokens - 1) // self.sequence_length

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` below num_samples, int32 [S+1]."""
        start = index * self.sequence_length
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
