"""The order in which training takes samples: a pure function of (seed, samples taken before)."""

import functools

from giantjax.data.blend import locate
from giantjax.data.corpora import BlendedSamples
from giantjax.data.samples import Samples

MASK_32 = 2**32 - 1
# 2^32 / golden ratio, which spreads small numbers over 32 bits.
SPREAD = 0x9E3779B9
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


def pick(blend: BlendedSamples, seed: int, global_index: int) -> tuple[Samples, int]:
    """The samples of a part, and the number among them, that training takes as its `global_index`-th, from 0.

    Each part is taken in an order of its own, epoch by epoch, however often the others begin again.
    """
    part, number = locate(blend.tree, global_index)
    samples = blend.parts[part]
    return samples, sample_order((seed + part * SPREAD) & MASK_32, number, samples.num_samples)[1]


@functools.lru_cache(maxsize=256)
def _order_of_few(key: int, num_samples: int) -> list[int]:
    """A permutation of at most FEW_SAMPLES: their numbers in the order of one-to-one scrambled values."""
    return sorted(range(num_samples), key=lambda number: _mix(_mix(number) ^ key))


def _mix(value: int) -> int:
    """A one-to-one scrambling of 32 bits: MurmurHash3's finalizer (Appleby)."""
    # 0 is the fixed point of the finalizer, and the seed that most runs have.
    value = (value + SPREAD) & MASK_32
    value = ((value ^ value >> 16) * 0x85EBCA6B) & MASK_32
    value = ((value ^ value >> 13) * 0xC2B2AE35) & MASK_32
    return value ^ value >> 16
