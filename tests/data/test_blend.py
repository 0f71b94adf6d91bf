"""Blends: exact proportions at every point, and every sample of each corpus in turn."""

import collections
import time
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from giantjax.data.blend import blend_tree, counts, locate

WEIGHTS = st.lists(st.fractions(Fraction(1, 10**6), 1), min_size=1, max_size=12)


@given(WEIGHTS, st.integers(0, 10**15))
def test_every_corpus_has_its_part_of_any_beginning(weights, number):
    found = counts(blend_tree(weights), number)
    assert sum(found.values()) == number and set(found) == set(range(len(weights)))
    for corpus, weight in enumerate(weights):
        assert abs(found[corpus] - number * weight / sum(weights)) < 2


@given(WEIGHTS, st.integers(0, 10**15))
def test_samples_of_a_corpus_come_in_turn(weights, first):
    tree = blend_tree(weights)
    before = counts(tree, first)
    for index in range(first, first + 60):
        corpus, number = locate(tree, index)
        assert number == before[corpus]
        before[corpus] += 1


def test_proportions_are_exact_and_fine():
    tree = blend_tree([Fraction(7, 10), Fraction(3, 10)])
    found = collections.Counter(locate(tree, index)[0] for index in range(10_000))
    assert found == {0: 7000, 1: 3000}
    for first in range(0, 1000, 10):
        assert sum(locate(tree, index)[0] == 0 for index in range(first, first + 10)) == 7


def test_seeking_takes_the_same_time_anywhere():
    tree = blend_tree([Fraction(1, number) for number in range(1, 50)])
    begin = time.perf_counter()
    assert sum(locate(tree, 10**15 + index)[1] > 10**10 for index in range(100)) == 100
    assert time.perf_counter() - begin < 2


def test_the_order_stays_what_it_is():
    """Runs that resume depend on it: these numbers may never change."""
    tree = blend_tree([Fraction(1, 2), Fraction(3, 10), Fraction(1, 5)])
    assert [locate(tree, index)[0] for index in range(12)] == [0, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1]
    assert locate(tree, 10**12 + 7) == (2, 200000000001)
