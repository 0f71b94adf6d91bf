"""The order is a function of (seed, global sample index) and of nothing else."""

import dataclasses
import itertools
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from giantjax.data.corpora import Blend, Part, Synthetic
from giantjax.data.indexed import TokenizerRecord, open_indexed
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.loader import DocumentRules, training_batches, validation_batches
from giantjax.data.order import sample_order
from giantjax.data.samples import PackedSamples
from giantjax.errors import InputError

SEEDS = st.integers(0, 2**32 - 1)
LENGTH, NUM_SAMPLES = 8, 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """20 samples of 8 tokens in three documents, with 5 tokens left over; each token is its own place."""
    prefix = str(tmp_path_factory.mktemp("data") / "corpus")
    with write_indexed(prefix, TokenizerRecord("bytes", 257, 256)) as writer:
        for part in np.split(np.arange(LENGTH * NUM_SAMPLES + 6), [30, 31]):
            writer.append(part)
            writer.end_document()
    return open_indexed(prefix)


def training(source, batch, start=0, seed=7, vocabulary=257, prefetch=2):
    return training_batches(
        source,
        seed=seed,
        sequence_length=LENGTH,
        global_batch_size=batch,
        start_sample=start,
        vocabulary_size=vocabulary,
        prefetch=prefetch,
    )


def rows(source, batch, count, start=0):
    """The first `count` samples, [count, LENGTH]."""
    batches = training(source, batch, start)
    found = np.concatenate([part["tokens"] for part in itertools.islice(batches, -(-count // batch))])[:count]
    batches.close()
    return found


def validation(source, batch, count):
    return list(validation_batches(source, sequence_length=LENGTH, batch_size=batch, num_samples=count, vocabulary_size=257))


@settings(deadline=None)
@example(seed=0, num_samples=1024, epoch=0)
@example(seed=0, num_samples=1025, epoch=2**33)
@given(seed=SEEDS, num_samples=st.integers(1, 200), epoch=st.integers(0, 10**12))
def test_every_epoch_is_a_permutation(seed, num_samples, epoch):
    order = [sample_order(seed, epoch * num_samples + i, num_samples) for i in range(num_samples)]
    assert {found for found, _ in order} == {epoch}
    assert sorted(sample for _, sample in order) == list(range(num_samples))


@settings(deadline=None)
@given(SEEDS, st.integers(0, 10**6), st.sampled_from([100, 10000]))
def test_epochs_and_seeds_differ(seed, epoch, num_samples):
    def order(seed, epoch):
        return [sample_order(seed, epoch * num_samples + i, num_samples)[1] for i in range(40)]

    here = order(seed, epoch)
    assert here != list(range(40))
    assert here not in (order(seed, epoch + 1), order((seed + 1) % 2**32, epoch), order((seed + 1) % 2**32, max(epoch - 1, 0)))


@pytest.mark.parametrize("num_samples", [64, 6400])
def test_the_order_is_even_over_the_corpus(num_samples):
    """Where the first samples of 6400 epochs lie, and how far apart: uniform by chi-square tests of 60 cells."""
    orders = np.array([[sample_order(3, epoch * num_samples + i, num_samples)[1] for i in (0, 1)] for epoch in range(6400)])
    # Two samples are never the same, so their distance starts at 1.
    for places, size in ((orders[:, 0], num_samples), ((orders[:, 1] - orders[:, 0]) % num_samples - 1, num_samples - 1)):
        expected = np.bincount(np.arange(size) * 60 // size) * len(orders) / size
        counts = np.bincount(places * 60 // size, minlength=60)
        assert ((counts - expected) ** 2 / expected).sum() < 110


def test_the_order_stays_what_it_is():
    """Runs that resume depend on it: these numbers may never change."""
    assert [sample_order(0, i, 10) for i in range(5)] == [(0, 8), (0, 1), (0, 0), (0, 5), (0, 6)]
    assert [sample_order(1234, 10**9 + i, 12345) for i in range(5)] == [
        (81004, 3512),
        (81004, 4602),
        (81004, 9913),
        (81004, 2912),
        (81004, 8868),
    ]


def test_samples_overlap_by_one_token(corpus):
    samples = PackedSamples(corpus, LENGTH, 257)
    assert samples.num_samples == NUM_SAMPLES
    for i in range(NUM_SAMPLES):
        assert samples[i].dtype == np.int32
        assert samples[i].tolist() == list(range(i * LENGTH, (i + 1) * LENGTH + 1))


def test_a_batch_is_what_it_says(corpus):
    batches = training(corpus, 4, start=2**32 - 2)
    batch = next(batches)
    batches.close()
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "tokens": ("int32", (4, LENGTH)),
        "targets": ("int32", (4, LENGTH)),
        "loss_mask": ("float32", (4, LENGTH)),
        "sample": ("uint32", (4,)),
    }
    assert (batch["targets"] == batch["tokens"] + 1).all() and (batch["loss_mask"] == 1).all()
    assert batch["sample"].tolist() == [2**32 - 2, 2**32 - 1, 0, 1]
    assert all(array.flags.c_contiguous for array in batch.values())
    firsts = [sample_order(7, 2**32 - 2 + i, NUM_SAMPLES)[1] * LENGTH for i in range(4)]
    assert batch["tokens"][:, 0].tolist() == firsts


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 30), start=st.integers(0, 70))
def test_batch_size_and_start_do_not_change_the_order(corpus, batch, start):
    np.testing.assert_array_equal(rows(corpus, batch, 50, start), rows(corpus, 10, 120)[start : start + 50])


def test_starting_far_in_takes_no_longer(corpus):
    begin = time.perf_counter()
    assert rows(corpus, 4, 4, start=10**15).shape == (4, LENGTH)
    assert time.perf_counter() - begin < 5


def test_a_foreign_id_is_found_while_reading(corpus):
    batches = training(corpus, 4, vocabulary=100)
    with pytest.raises(InputError, match=r"corpus.bin holds the token id 1\d\d in sample 1\d .*model.vocabulary_size is 100"):
        for _ in range(10):
            next(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_closing_ends_the_thread(corpus):
    before = set(threading.enumerate())
    batches = training(corpus, 4, prefetch=8)
    next(batches)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 1
    batches.close()
    for thread in mine:
        thread.join(10)
        assert not thread.is_alive()
    training(corpus, 4).close()


def test_a_process_ends_with_batches_still_ahead_and_needs_no_jax_to_start():
    program = (
        "import sys; from giantjax.data import corpus, loader, sources, tokenizer\n"
        "assert not {'jax', 'grain'} & set(sys.modules), 'slow to start'\n"
        "batches = loader.training_batches(sources.Synthetic(0), seed=0, sequence_length=64, global_batch_size=4, start_sample=0,"
        " vocabulary_size=9, prefetch=50)\n"
        "print(next(batches)['tokens'].shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "(4, 64)\n"), done.stderr


def test_synthetic_batches_repeat_with_the_seed():
    np.testing.assert_array_equal(rows(Synthetic(5), 4, 8), rows(Synthetic(5), 2, 8))


@given(batch=st.integers(1, 9), count=st.integers(0, 25))
def test_validation_is_spread_evenly_and_in_order(corpus, batch, count):
    taken = min(count or NUM_SAMPLES, NUM_SAMPLES)
    batches = validation(corpus, batch, count)
    assert {part["tokens"].shape for part in batches} == {(batch, LENGTH)} and len(batches) == -(-taken // batch)
    joined = {name: np.concatenate([part[name] for part in batches]) for name in batches[0]}
    numbers = [i * NUM_SAMPLES // taken for i in range(taken)]
    assert joined["sample"][:taken].tolist() == numbers
    assert joined["tokens"][:taken, 0].tolist() == [number * LENGTH for number in numbers]
    assert (joined["targets"][:taken] == joined["tokens"][:taken] + 1).all() and (joined["loss_mask"][:taken] == 1).all()
    assert all((array[taken:] == 0).all() for array in joined.values())
    dtypes = {name: array.dtype.name for name, array in joined.items()}
    assert dtypes == {"tokens": "int32", "targets": "int32", "loss_mask": "float32", "sample": "uint32"}


def test_a_corpus_too_short_is_refused_at_once(corpus):
    for make in (training_batches, validation_batches):
        ways: dict[str, Any] = (
            {"seed": 0, "global_batch_size": 1, "start_sample": 0, "prefetch": 1}
            if make is training_batches
            else {"batch_size": 1, "num_samples": 0}
        )
        with pytest.raises(InputError, match="166 tokens, too few"):
            make(corpus, sequence_length=166, vocabulary_size=257, **ways)


def documents(lengths, gap=0):
    """An opened corpus of documents of such lengths, each token its own place; with gaps in the file where asked."""
    folder = tempfile.mkdtemp()
    with write_indexed(f"{folder}/corpus", dtype=np.dtype("i4")) as writer:
        first = 0
        for length in lengths:
            writer.append(np.arange(first, first + length))
            writer.end_document()
            first += length
    read = open_indexed(f"{folder}/corpus")
    shutil.rmtree(folder)
    if gap:
        starts = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))
        offsets = (starts + gap * np.arange(len(lengths))) * 4
        tokens = np.zeros(sum(lengths) + gap * len(lengths), np.int32)
        for start, offset, length in zip(starts, offsets // 4, lengths, strict=True):
            tokens[offset : offset + length] = np.arange(start, start + length)
        read = dataclasses.replace(read, offsets=offsets, tokens=tokens, starts=starts)
    return read


LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > LENGTH)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 2), st.builds(DocumentRules, st.booleans(), st.booleans(), st.booleans()))
def test_documents_are_marked_where_they_begin(lengths, gap, rules):
    read = documents(lengths, gap)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    place_in = np.concatenate([np.arange(length) for length in lengths])
    for batch in validation_batches(read, sequence_length=LENGTH, batch_size=2, num_samples=0, vocabulary_size=10**6, rules=rules):
        # A row that fills up the last batch has nothing but zeros.
        for row in np.flatnonzero((batch["targets"] > 0).any(1)):
            tokens, targets = batch["tokens"][row], batch["targets"][row]
            crosses = document_of[tokens] != document_of[targets]
            np.testing.assert_array_equal(batch["loss_mask"][row] == 0, crosses & rules.mask_document_ends)
            if rules.reset_attention:
                same = document_of[tokens][:, None] == document_of[tokens]
                np.testing.assert_array_equal(batch["segment"][row][:, None] == batch["segment"][row], same)
            if rules.reset_positions:
                first = np.where(document_of[tokens] == document_of[tokens[0]], tokens[0], tokens - place_in[tokens])
                np.testing.assert_array_equal(batch["position"][row], tokens - first)
        assert ("segment" in batch, "position" in batch) == (rules.reset_attention, rules.reset_positions)
        assert all(batch[name].dtype == np.int32 for name in ("segment", "position") if name in batch)


def test_shorter_samples_begin_alike(corpus):
    rules = DocumentRules(True, True, True)
    ways: dict[str, Any] = dict(seed=7, sequence_length=LENGTH, global_batch_size=4, vocabulary_size=257, prefetch=2, rules=rules)
    whole = training_batches(corpus, start_sample=0, **ways)
    short = training_batches(corpus, start_sample=0, length_of=lambda number: [3, 5, LENGTH][min(number, 2)], **ways)
    resumed = training_batches(corpus, start_sample=4, length_of=lambda number: [5, LENGTH][min(number, 1)], **ways)
    next_resumed = {1: next(resumed), 2: next(resumed)}
    for number, length in enumerate((3, 5, LENGTH)):
        full, cut = next(whole), next(short)
        assert cut["tokens"].shape == (4, length)
        for name in full:
            expected = full[name][:, :length] if full[name].ndim > 1 else full[name]
            np.testing.assert_array_equal(cut[name], expected)
            if number:
                np.testing.assert_array_equal(next_resumed[number][name], expected)
    for batches in (whole, short, resumed):
        batches.close()


@pytest.fixture(scope="module")
def blend():
    """Three parts of 20, 7 and 3 samples; tokens say which."""
    parts = []
    for number, count in enumerate((20, 7, 3)):
        read = documents([LENGTH * count + 1 + 5])
        parts.append(Part(dataclasses.replace(read, tokens=read.tokens + 1000 * number), 0, 1))
    return Blend(tuple(parts), (Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)))


def numbers_of(source, batch, count, start=0, rows=None):
    """(part, sample) of the first `count` samples."""
    batches = training_batches(
        source,
        seed=7,
        sequence_length=LENGTH,
        global_batch_size=batch,
        start_sample=start,
        vocabulary_size=10**6,
        prefetch=2,
        rows=rows,
    )
    found = np.concatenate([next(batches)["tokens"][:, 0] for _ in range(-(-count // batch))])[:count]
    batches.close()
    return [(int(first) // 1000, int(first) % 1000 // LENGTH) for first in found]


def test_a_blend_has_its_proportions_and_every_sample_in_turn(blend):
    found = numbers_of(blend, 10, 200)
    for first in range(0, 200, 10):
        assert [sum(part == which for part, _ in found[first : first + 10]) for which in range(3)] in (
            [5, 3, 2],
            [6, 2, 2],
            [5, 2, 3],
            [4, 3, 3],
        )
    assert [sum(part == which for part, _ in found) for which in range(3)] == [100, 60, 40]
    for which, count in enumerate((20, 7, 3)):
        mine = [sample for part, sample in found if part == which]
        for epoch in range(len(mine) // count):
            assert sorted(mine[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_the_order_of_a_blend_depends_on_nothing_else(blend):
    whole = numbers_of(blend, 10, 100)
    assert numbers_of(blend, 7, 60, start=33) == whole[33:93]
    for rows in ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9]):
        assert numbers_of(blend, 10, 100, rows=rows) == [one for index, one in enumerate(whole) if index % 10 in rows]
    begin = time.perf_counter()
    assert len(numbers_of(blend, 4, 4, start=10**15)) == 4 and time.perf_counter() - begin < 5


def test_a_blend_without_weights_takes_each_sample_once_an_epoch(blend):
    found = numbers_of(Blend(blend.parts, None), 10, 30)
    assert sorted(found) == [(part, sample) for part, count in enumerate((20, 7, 3)) for sample in range(count)]


def test_one_part_is_taken_as_its_corpus_alone(corpus):
    alone = rows(corpus, 4, 40)
    np.testing.assert_array_equal(rows(Blend((Part(corpus, 0, corpus.num_documents),), None), 4, 40), alone)


@pytest.mark.parametrize(("count", "taken"), [(0, [20, 7, 3]), (10, [5, 3, 2]), (20, [10, 6, 3]), (1000, [20, 7, 3])])
def test_a_blend_is_validated_in_its_proportions(blend, count, taken):
    batches = list(validation_batches(blend, sequence_length=LENGTH, batch_size=8, num_samples=count, vocabulary_size=10**6))
    firsts = np.concatenate([batch["tokens"][batch["loss_mask"].any(1), 0] for batch in batches])
    assert [int((firsts // 1000 == part).sum()) for part in range(3)] == taken
    for part, of in enumerate((20, 7, 3)):
        samples = (firsts[firsts // 1000 == part] % 1000 // LENGTH).tolist()
        assert samples == [i * of // taken[part] for i in range(taken[part])]
