"""Partitions: every block once and in order, none without a block, and the largest part as small as can be."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.partition import (
    BLOCK,
    MEGATRON_BLOCKS,
    Weights,
    balanced,
    counts_of,
    held,
    layer_table,
    said,
)

STAGES, CHUNKS, WEIGHT = st.integers(1, 8), st.integers(1, 4), st.integers(0, 50)


def gpt_of(number: int) -> tuple[str, ...]:
    return (BLOCK,) * number


def largest(weights: Weights, counts: tuple[int, ...]) -> int:
    ends = np.cumsum([0, *counts])
    parts = [sum(weights.blocks[first:stop]) for first, stop in pairwise(ends)]
    parts[0] += weights.first
    parts[-1] += weights.last
    return max(parts)


@settings(deadline=None)
@given(st.lists(WEIGHT, min_size=1, max_size=9), st.integers(1, 5), WEIGHT, WEIGHT)
def test_no_partition_has_a_smaller_largest_part(blocks, num_parts, first, last):
    assume(num_parts <= len(blocks))
    weights = Weights(tuple(blocks), first, last)
    cuts = combinations(range(1, len(blocks)), num_parts - 1)
    all_counts = [tuple(np.diff([0, *inner, len(blocks)]).tolist()) for inner in cuts]
    assert largest(weights, balanced(weights, num_parts)) == min(largest(weights, counts) for counts in all_counts)


@settings(deadline=None)
@given(STAGES, CHUNKS, st.integers(0, 30), st.sampled_from(["uniform", "parameters", "profile", "type:transformer"]), st.data())
def test_every_layer_is_held_once_and_in_order(num_stages, num_chunks, more, text, data):
    num_parts = num_stages * num_chunks
    number = num_parts + more
    weights = Weights(tuple(data.draw(st.lists(WEIGHT, min_size=number, max_size=number))), data.draw(WEIGHT), data.draw(WEIGHT))
    counts = counts_of(text, gpt_of(number), num_parts, weights)
    assert min(counts) >= 1
    table = layer_table(counts, num_stages)
    assert table.shape == (num_stages, num_chunks * max(counts))
    parts = table.reshape(num_stages, num_chunks, -1).transpose(1, 0, 2).reshape(num_parts, -1)
    # The model runs through the first chunk of every stage, then the second; padding is at the end of each.
    assert [layer for part in parts for layer in part if layer >= 0] == list(range(number))
    assert all((np.diff((part >= 0).astype(int)) <= 0).all() for part in parts)
    assert held(table, num_chunks) == counts
    assert counts_of("manual:" + ",".join(map(str, counts)), gpt_of(number), num_parts) == counts


@given(st.integers(1, 8), st.integers(0, 30))
def test_blocks_alike_are_dealt_uniformly(num_parts, more):
    kinds = gpt_of(num_parts + more)
    uniform = counts_of("uniform", kinds, num_parts)
    assert max(uniform) - min(uniform) <= 1
    assert list(uniform) == sorted(uniform, reverse=True)
    assert balanced(Weights((7,) * len(kinds)), num_parts) == uniform
    assert counts_of("type:block", kinds, num_parts) == uniform


def test_what_the_ends_have_besides_counts():
    """12 blocks of 7.1 million parameters, and an embedding of 39 million on both ends."""
    weights = Weights((7_087_872,) * 12, first=39_383_808, last=38_598_912)
    assert counts_of("parameters", gpt_of(12), 4, weights) == (1, 5, 5, 1)


@settings(deadline=None)
@given(STAGES, st.integers(0, 12), st.sampled_from([0, 6, 7]), st.data())
def test_boundaries_as_vegiantmodel_has_them(num_parts, more, others, data):
    """Of blocks, or of all its pipeline entries: 3 before the blocks, and 3 or in half precision 4 after."""
    number = num_parts + more
    inner = sorted(data.draw(st.sets(st.integers(1, number - 1), min_size=num_parts - 1, max_size=num_parts - 1)) if num_parts > 1 else [])
    lead = 3 if others else 0
    text = f"manual:{number + others}:" + ",".join(map(str, [0, *(lead + bound for bound in inner), number + others]))
    counts = counts_of(text, gpt_of(number), num_parts)
    assert counts == tuple(np.diff([0, *inner, number]))
    assert ("counting pipeline entries" if others else "counting blocks") in said(text, counts)


@pytest.mark.parametrize("name", [BLOCK, *MEGATRON_BLOCKS])
def test_blocks_of_a_gpt_have_megatrons_names(name):
    for regex in (name, name.lower(), f"^{name.upper()}$"):
        assert counts_of(f"type:{regex}", gpt_of(6), 3) == (2, 2, 2)


def test_only_blocks_that_match_are_balanced():
    kinds = ("encoder",) * 4 + ("decoder",) * 2
    assert counts_of("type:dec", kinds, 2) == (5, 1)
    assert counts_of("type:coder", kinds, 2) == (3, 3)
    assert counts_of("type:encoder", kinds, 4)[:1] == (1,)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("unifrom", ["pipeline.partition is 'unifrom'; it must be uniform, parameters, profile, type:REGEX", "did you mean uniform?"]),
        ("10,10,10,10", ["did you mean manual:10,10,10,10?"]),
        ("manual:", ["it must be uniform"]),
        ("manual:10,-1", ["it must be uniform"]),
        ("type:(", ["'(' is no regular expression", "such as type:transformer"]),
        ("type:convolution", ["matches no block", "block or TransformerLayer or ParallelTransformerLayer"]),
        ("manual:20,20", ["2 counts, but mesh.pipe x pipeline.num_chunks is 4; such as manual:10,10,10,10"]),
        ("manual:10,10,10,9", ["39 layers in all, but the model has 40; such as manual:10,10,10,10"]),
        ("manual:20,0,10,10", ["leaves part 1 without a block", "such as manual:10,10,10,10"]),
        ("manual:41:0,10,20,30,41", ["the model has 40 blocks", "46 pipeline entries", "47", "such as manual:40:0,10,20,30,40"]),
        ("manual:40:0,20,40", ["3 boundaries", "is 4", "such as manual:40:0,10,20,30,40"]),
        ("manual:40:0,10,20,30,39", ["boundaries rise from 0 to 40, such as manual:40:0,10,20,30,40"]),
        ("manual:46:0,13,23,33,40", ["boundaries rise from 0 to 46, such as manual:46:0,13,23,33,46"]),
        ("manual:46:0,3,23,33,46", ["leaves part 0 without a block", "such as manual:46:0,13,23,33,46"]),
        ("manual:46:0,13,23,43,46", ["leaves part 3 without a block"]),
    ],
)
def test_what_cannot_be_dealt_says_what_could(text, words):
    with pytest.raises(InputError) as error:
        counts_of(text, gpt_of(40), 4)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_more_parts_than_blocks():
    with pytest.raises(InputError, match=r"mesh.pipe x pipeline.num_chunks is 6, but the model has 5 blocks"):
        counts_of("uniform", gpt_of(5), 6)
