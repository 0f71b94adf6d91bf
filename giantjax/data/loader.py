"""Batches in an order that depends on nothing but the seed and how many samples came before.

The position in the data is therefore one whole number, the same for any batch size and any number of processes.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import numpy as np

from giantjax.config import DataConfig
from giantjax.data.blend import counts
from giantjax.data.corpora import Source, blended_samples
from giantjax.data.indexed import IndexedDataset
from giantjax.data.order import MASK_32, pick
from giantjax.data.samples import PackedSamples, Samples

# tokens int32 [B, S]; targets int32 [B, S], the token after each; loss_mask float32 [B, S], 0 on padding;
# sample uint32 [B], the number of each sample, from which dropout is drawn. Where the rules ask for them
# segment int32 [B, S], the number of each token's document in its sample, and position int32 [B, S], its place in it.
Batch = dict[str, np.ndarray]

# Past the end of any training.
NUM_BATCHES = 2**62


@dataclass(frozen=True)
class DocumentRules:
    """What happens where a document ends inside a sample; what the fields of `DataConfig` of these names say."""

    reset_positions: bool = False
    reset_attention: bool = False
    mask_document_ends: bool = False


PACKED = DocumentRules()
"""Nothing: documents follow each other as one text."""


def rules_of(data: DataConfig) -> DocumentRules:
    """The rules of a run."""
    return DocumentRules(data.reset_positions, data.reset_attention, data.mask_document_ends)


def training_batches(
    source: Source,
    *,
    seed: int,
    sequence_length: int,
    global_batch_size: int,
    start_sample: int,
    vocabulary_size: int,
    prefetch: int,
    rows: Sequence[int] | None = None,
    rules: DocumentRules = PACKED,
    length_of: Callable[[int], int] | None = None,
) -> Generator[Batch, None, None]:
    """Endless batches of B = global_batch_size samples of S = sequence_length tokens, made ahead in a thread.

    Row r of batch k, from 0, is sample `start_sample + k x B + r` of the run, so starting anywhere takes the same
    time. `close()` ends the reading ahead.

    Args:
        source: from `open_source`.
        seed: of the order.
        sequence_length: S.
        global_batch_size: B.
        start_sample: samples that were trained on before.
        vocabulary_size: token ids must be below this.
        prefetch: batches made ahead, at least 1.
        rows: which rows of each batch to read and return, in ascending order; None is all.
        rules: for the ends of documents.
        length_of: number of a batch, from 0 -> how many of the S first tokens of its samples it holds; None is all.

    Raises:
        InputError: at once where a corpus is too short; while reading, where a token id is not in the vocabulary.
    """
    import grain

    blend = blended_samples(source, sequence_length, vocabulary_size)

    def batch(number: int) -> Batch:
        first = start_sample + number * global_batch_size
        numbers = [first + row for row in (range(global_batch_size) if rows is None else rows)]
        length = length_of(number) if length_of else sequence_length
        return _collate([pick(blend, seed, index) for index in numbers], numbers, length, rules)

    # One thread: numpy's small operations hold the interpreter lock, so a second would only compete with the loop.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    batches = iter(grain.MapDataset.range(NUM_BATCHES).map(batch).to_iter_dataset(options))

    def read() -> Generator[Batch, None, None]:
        try:
            yield from batches
        finally:
            batches.close()

    return read()


def validation_batches(
    source: Source,
    *,
    sequence_length: int,
    batch_size: int,
    num_samples: int,
    vocabulary_size: int,
    rows: Sequence[int] | None = None,
    rules: DocumentRules = PACKED,
) -> Generator[Batch, None, None]:
    """Batches of `num_samples` samples spread evenly over the source, in order; 0, or more than there are, takes all.

    Of n samples, k are numbers floor(i x n / k). A blend gives as many of each part as of the first `num_samples` samples of
    training would be of it. The last batch is filled up with rows whose loss_mask is 0. Of each batch only `rows`, in ascending
    order, are read and returned; None is all.

    Raises:
        InputError: at once where a corpus is too short; while reading, where a token id is not in the vocabulary.
    """
    blend = blended_samples(source, sequence_length, vocabulary_size)
    wanted = counts(blend.tree, num_samples)
    taken = [min(wanted[part] if num_samples else samples.num_samples, samples.num_samples) for part, samples in enumerate(blend.parts)]
    return _spread_batches(blend.parts, taken, sequence_length, batch_size, range(batch_size) if rows is None else rows, rules)


def every_token(
    corpus: IndexedDataset, *, sequence_length: int, batch_size: int, vocabulary_size: int, rules: DocumentRules = PACKED
) -> Generator[Batch, None, None]:
    """Batches in order in which every token of a corpus but its first is a target once; the last sample is filled up where it is short.

    What fills up, rows of the last batch too, has a loss_mask of 0.

    Raises:
        InputError: while reading, where a token id is not in the vocabulary.
    """
    num_whole, left = divmod(corpus.num_tokens - 1, sequence_length)
    if num_whole:
        whole = PackedSamples(corpus, sequence_length, vocabulary_size)
        yield from _spread_batches([whole], [num_whole], sequence_length, batch_size, range(batch_size), rules)
    if left:
        rest = PackedSamples(corpus, left, vocabulary_size, num_whole * sequence_length)
        batch = _collate([(rest, 0)], [num_whole], left, rules)
        filled = {name: np.pad(array, [(0, 0), (0, sequence_length - left)][: array.ndim]) for name, array in batch.items()}
        yield {name: np.pad(array, [(0, batch_size - 1), (0, 0)][: array.ndim]) for name, array in filled.items()}


def _spread_batches(
    parts: Sequence[Samples], taken: Sequence[int], length: int, batch_size: int, rows: Sequence[int], rules: DocumentRules
) -> Generator[Batch, None, None]:
    """`taken` samples of each part, one part after the other."""
    ends = np.cumsum(taken)

    def at(number: int) -> tuple[Samples, int]:
        part = int(np.searchsorted(ends, number, side="right"))
        within = number - int(ends[part]) + taken[part]
        return parts[part], within * parts[part].num_samples // taken[part]

    count = int(ends[-1])
    for first in range(0, count, batch_size):
        chosen = [at(first + row) for row in rows if first + row < count]
        batch = _collate(chosen, [number for _, number in chosen], length, rules)
        missing = len(rows) - len(chosen)
        yield {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}


def _collate(chosen: Sequence[tuple[Samples, int]], numbers: Sequence[int], length: int, rules: DocumentRules) -> Batch:
    """The first `length` tokens of samples as a batch, in which they have `numbers`."""
    shape = (len(chosen), length)
    tokens, targets, mask = np.empty(shape, np.int32), np.empty(shape, np.int32), np.ones(shape, np.float32)
    batch = {"tokens": tokens, "targets": targets, "loss_mask": mask}
    for name, asked in (("segment", rules.reset_attention), ("position", rules.reset_positions)):
        if asked:
            batch[name] = np.empty(shape, np.int32)
    for place, (samples, number) in enumerate(chosen):
        row = samples[number]
        tokens[place], targets[place] = row[:length], row[1 : length + 1]
        if rules != PACKED:
            _mark_documents(batch, place, samples.document_starts(number), rules)
    return batch | {"sample": np.array([number & MASK_32 for number in numbers], np.uint32)}


def _mark_documents(batch: Batch, place: int, starts: np.ndarray, rules: DocumentRules) -> None:
    """Apply the rules to one row, in which documents begin at `starts`, from 1 on."""
    places = np.arange(batch["tokens"].shape[1])
    if rules.mask_document_ends:
        batch["loss_mask"][place, starts[starts <= len(places)] - 1] = 0
    number = np.searchsorted(starts, places, side="right")
    if rules.reset_attention:
        batch["segment"][place] = number
    if rules.reset_positions:
        batch["position"][place] = places - np.concatenate(([0], starts))[number]
