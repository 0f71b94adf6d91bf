"""What tokens come from once it is opened: a corpus, a part of one, several blended, or a random generator."""

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from giantjax.data.blend import Tree, blend_tree
from giantjax.data.indexed import PIECE, IndexedDataset
from giantjax.data.samples import PackedSamples, Samples, SyntheticSamples

# Places of a corpus whose tokens go into its fingerprint, and how many at each.
FINGERPRINT_PLACES, FINGERPRINT_TOKENS = 64, 256

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Synthetic:
    """Random tokens in place of a corpus."""

    seed: int
    name: str = "synthetic"


@dataclass(frozen=True, eq=False)
class Part:
    """Some documents in a row of an indexed corpus."""

    corpus: IndexedDataset
    first: int
    """The first of them."""
    stop: int
    """The one after the last."""

    @property
    def tokens(self) -> tuple[int, int]:
        """Token of the corpus at which the first begins, and the one after the last."""
        return self.corpus.document_start(self.first), self.corpus.document_start(self.stop)


@dataclass(frozen=True, eq=False)
class Blend:
    """Parts of one corpus or more, in fixed proportions."""

    parts: tuple[Part, ...]
    weights: tuple[Fraction, ...] | None
    """Of each, above 0; None is in proportion to their samples."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return " ".join(part.corpus.name for part in self.parts)


Source = IndexedDataset | Synthetic | Blend


class BlendedSamples(NamedTuple):
    """The samples of each part of a source, and which of them come when."""

    parts: list[Samples]
    tree: Tree


def samples_of(source: IndexedDataset | Synthetic | Part, sequence_length: int, vocabulary_size: int) -> Samples:
    """The samples of one corpus, or of a part of one.

    Raises:
        InputError: it is too short for one.
    """
    if isinstance(source, Synthetic):
        return SyntheticSamples(source.seed, sequence_length, vocabulary_size)
    if isinstance(source, Part):
        return PackedSamples(source.corpus, sequence_length, vocabulary_size, *source.tokens)
    return PackedSamples(source, sequence_length, vocabulary_size)


def blended_samples(source: Source, sequence_length: int, vocabulary_size: int) -> BlendedSamples:
    """The samples of all parts of a source, which is its only part where it is no blend.

    Raises:
        InputError: one of them is too short for one.
    """
    sources = source.parts if isinstance(source, Blend) else (source,)
    parts = [samples_of(part, sequence_length, vocabulary_size) for part in sources]
    weights = source.weights if isinstance(source, Blend) else None
    return BlendedSamples(parts, blend_tree(weights or [Fraction(samples.num_samples) for samples in parts]))


def corpora_of(source: Source) -> list[IndexedDataset]:
    """The indexed corpora of a source."""
    if isinstance(source, Blend):
        return [part.corpus for part in source.parts]
    return [source] if isinstance(source, IndexedDataset) else []


def fingerprint(source: Source) -> str:
    """16 hexadecimal digits that differ, in all likelihood, between corpora that would train differently.

    Made of the dtype, the length of every sequence and a spread of tokens, so it does not change when files move.
    """
    digest = hashlib.blake2b(source.name.encode() if isinstance(source, Synthetic) else b"", digest_size=8)
    if isinstance(source, Blend):
        for number, part in enumerate(source.parts):
            weight = source.weights and source.weights[number]
            digest.update(f"{fingerprint(part.corpus)} {part.first} {part.stop} {weight} ".encode())
    if isinstance(source, IndexedDataset):
        digest.update(f"{source.tokens.dtype.str} {source.num_tokens} {source.num_sequences} {source.num_documents}".encode())
        for array in (source.lengths, source.document_index):
            for first in range(0, len(array), PIECE):
                digest.update(array[first : first + PIECE].tobytes())
        for place in range(FINGERPRINT_PLACES):
            start = place * source.num_tokens // FINGERPRINT_PLACES
            digest.update(source.read(start, min(start + FINGERPRINT_TOKENS, source.num_tokens)).tobytes())
    return digest.hexdigest()
