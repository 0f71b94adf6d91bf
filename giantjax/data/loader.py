"""Batches in an order that depends on nothing but the seed and how many samples came before.

The position in the data is therefore one whole number, the same for any batch size and any number of processes.
"""

import functools
from collections.abc import Generator, Sequence

import numpy as np

from giantjax.data.samples import Samples
from giantjax.data.sources import Source, samples_of

# tokens int32 [B, S]; targets int32 [B, S], the token after each; loss_mask float32 [B, S], 0 on padding;
# sample uint32 [B], the number of each sample, from which dropout is drawn.
Batch = dict[str, np.ndarray]

# Past the end of any training.
NUM_BATCHES = 2**62
MASK_32 = 2**32 - 1
# grain's cipher permutes 2**16 positions or more; the walk down to ten samples takes a millisecond for each.
FEW_SAMPLES = 1024


def sample_order(seed: int, global_index: int, num_samples: int) -> tuple[int, int]:
    """(epoch, sample) that training takes as its `global_index`-th, from 0, in constant time and memory.

    Each epoch visits every sample once, and each epoch in another order: a block cipher on the positions, walked until
    it lands below num_samples (grain's index_shuffle; Black and Rogaway, CT-RSA 2002).

    Args:
        seed: of the run, from 0 to 2**32 - 1.
        global_index: samples taken before this one, at least 0.
        num_samples: samples in the corpus, at least 1.
    """
    epoch, position = divmod(global_index, num_samples)
    # One-to-one in the epoch, so that 2**32 epochs have keys of their own, and scrambled, so that the epochs
    # of one seed are not those of the next.
    key = _mix(_mix(seed) + epoch)
    if num_samples <= FEW_SAMPLES:
        return epoch, _order_of_few(key, num_samples)[position]
    # grain takes a second to import, which the command line's help and its refusals need not wait for.
    from grain.experimental import index_shuffle

    return epoch, index_shuffle(index=position, max_index=num_samples - 1, seed=key, rounds=4)


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

    Raises:
        InputError: at once where the corpus is too short; while reading, where a token id is not in the vocabulary.
    """
    import grain

    samples = samples_of(source, sequence_length, vocabulary_size)

    def batch(number: int) -> Batch:
        first = start_sample + number * global_batch_size
        numbers = [first + row for row in (range(global_batch_size) if rows is None else rows)]
        return _collate([samples[sample_order(seed, index, samples.num_samples)[1]] for index in numbers], numbers, sequence_length)

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
) -> Generator[Batch, None, None]:
    """Batches of `num_samples` samples spread evenly over the source, in order; 0, or more than there are, takes all.

    Of n samples, k are numbers floor(i x n / k). The last batch is filled up with rows whose loss_mask is 0. Of each batch
    only `rows`, in ascending order, are read and returned; None is all.

    Raises:
        InputError: at once where the corpus is too short; while reading, where a token id is not in the vocabulary.
    """
    samples = samples_of(source, sequence_length, vocabulary_size)
    return _spread_batches(samples, sequence_length, batch_size, num_samples, range(batch_size) if rows is None else rows)


def _spread_batches(
    samples: Samples, sequence_length: int, batch_size: int, num_samples: int, rows: Sequence[int]
) -> Generator[Batch, None, None]:
    there = samples.num_samples
    count = min(num_samples or there, there)
    for first in range(0, count, batch_size):
        numbers = [(first + row) * there // count for row in rows if first + row < count]
        batch = _collate([samples[number] for number in numbers], numbers, sequence_length)
        missing = len(rows) - len(numbers)
        yield {name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in batch.items()}


def _collate(rows: list[np.ndarray], numbers: Sequence[int], sequence_length: int) -> Batch:
    """Rows [S+1] as a batch."""
    shape = (len(rows), sequence_length)
    tokens, targets = np.empty(shape, np.int32), np.empty(shape, np.int32)
    for place, row in enumerate(rows):
        tokens[place], targets[place] = row[:-1], row[1:]
    return {
        "tokens": tokens,
        "targets": targets,
        "loss_mask": np.ones(shape, np.float32),
        "sample": np.array([number & MASK_32 for number in numbers], np.uint32),
    }


@functools.lru_cache(maxsize=16)
def _order_of_few(key: int, num_samples: int) -> list[int]:
    """A permutation of at most FEW_SAMPLES: their numbers in the order of one-to-one scrambled values."""
    return sorted(range(num_samples), key=lambda number: _mix(_mix(number) ^ key))


def _mix(value: int) -> int:
    """A one-to-one scrambling of 32 bits: MurmurHash3's finalizer (Appleby)."""
    # 0 is the fixed point of the finalizer, and the seed that most runs have.
    value = (value + 0x9E3779B9) & MASK_32
    value = ((value ^ value >> 16) * 0x85EBCA6B) & MASK_32
    value = ((value ^ value >> 13) * 0xC2B2AE35) & MASK_32
    return value ^ value >> 16
