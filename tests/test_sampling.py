"""Choosing among logits: every function against its definition, written with numpy token by token."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from giantjax.sampling import Sampling, choose, only_top_k, only_top_p, penalised

SHAPE = (2, 7)
# Few values, so that ties are common.
LOGITS = arrays.arrays(np.float32, SHAPE, elements=st.integers(-8, 8).map(lambda number: np.float32(number / 2)))
CHOOSE = jax.jit(choose, static_argnames="sampling")
KEYS = jax.random.split(jax.random.key(0), 60)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(LOGITS, arrays.arrays(np.bool_, SHAPE), st.sampled_from([0.5, 1.0, 1.2, 2.0]))
def test_penalised(logits, seen, penalty):
    wanted = logits.copy()
    for row, token in np.argwhere(seen):
        wanted[row, token] = logits[row, token] / penalty if logits[row, token] > 0 else logits[row, token] * penalty
    np.testing.assert_allclose(penalised(logits, seen, penalty), wanted, rtol=1e-6)


@FEW
@given(LOGITS, st.integers(1, 9))
def test_top_k_keeps_tokens_of_which_fewer_than_k_are_likelier(logits, k):
    kept = np.array([[sum(other > own for other in row) < k for own in row] for row in logits])
    np.testing.assert_array_equal(only_top_k(logits, k), np.where(kept, logits, -np.inf))


@FEW
@given(LOGITS, st.sampled_from([0.01, 0.3, 0.5, 0.77, 0.9, 0.999]))
def test_top_p_keeps_tokens_while_likelier_ones_sum_to_less_than_p(logits, p):
    weights = np.exp(logits.astype(np.float64))
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    kept = np.zeros(SHAPE, bool)
    for row in range(SHAPE[0]):
        total = 0.0
        for token in sorted(range(SHAPE[1]), key=lambda token: -logits[row, token]):
            assume(abs(total - p) > 1e-5)  # rounding decides
            kept[row] |= (total < p) & (logits[row] == logits[row, token])
            total += probabilities[row, token]
    np.testing.assert_array_equal(only_top_p(logits, p), np.where(kept, logits, -np.inf))


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2), {3, 4}),
        (Sampling(top_p=0.6), {3, 4}),
        (Sampling(top_k=1), {4}),
        (Sampling(repetition_penalty=100.0, top_k=1), {3}),
        (Sampling(temperature=1e-3), {4}),
        (Sampling(temperature=0), {4}),
        (Sampling(temperature=0, repetition_penalty=100.0), {3}),
        (Sampling(temperature=100.0), {0, 1, 2, 3, 4}),
    ],
)
def test_options_together(sampling, allowed):
    """Token 4 is the likeliest, a little likelier than 3, and has been seen."""
    logits = np.tile(np.array([0.0, 1.0, 2.0, 4.9, 5.0], np.float32), (2, 1))
    seen = np.tile(np.arange(5) == 4, (2, 1))
    found = [np.asarray(CHOOSE(logits, seen, KEYS[np.array([seed, seed])], np.int32(0), sampling=sampling)) for seed in range(60)]
    assert {int(token) for pair in found for token in pair} == allowed
    # Rows alike are chosen alike.
    assert all(pair[0] == pair[1] for pair in found)


def test_rows_of_other_keys_are_drawn_by_other_numbers():
    logits, seen = np.zeros((40, 50), np.float32), np.zeros((40, 50), bool)
    found = np.asarray(CHOOSE(logits, seen, KEYS[:40], np.int32(0), sampling=Sampling()))
    assert len(set(found.tolist())) > 15
    assert CHOOSE(logits[:1], seen[:1], KEYS[7:8], np.int32(0), sampling=Sampling()) == found[7]


def test_frequencies_are_probabilities():
    logits = np.log(np.array([[0.6, 0.3, 0.1]], np.float32))
    seen = np.zeros((1, 3), bool)
    found = np.array([int(CHOOSE(logits, seen, KEYS[9:10], np.int32(index), sampling=Sampling())[0]) for index in range(600)])
    np.testing.assert_allclose(np.bincount(found, minlength=3) / 600, [0.6, 0.3, 0.1], atol=0.06)
