"""Spans cover every position once, each kind has room where any stage has it, and what is cut comes together again."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.parallel.partition import layer_table
from giantjax.parallel.spans import Span, cut, join, join_parts, kind_tables, part_sizes, spans_of

COUNTS = st.integers(1, 4).flatmap(
    lambda stages: st.integers(1, 3).flatmap(
        lambda chunks: st.tuples(st.just(stages), st.lists(st.integers(1, 4), min_size=stages * chunks, max_size=stages * chunks))
    )
)


@st.composite
def dealt(draw):
    """(order, table, number of chunks)."""
    num_stages, counts = draw(COUNTS)
    order = tuple(draw(st.lists(st.sampled_from("abc"), min_size=sum(counts), max_size=sum(counts))))
    return order, layer_table(counts, num_stages), len(counts) // num_stages


@settings(deadline=None)
@given(dealt(), st.sampled_from(["none", "full", "full:2", "full:3"]), st.booleans(), st.integers(1, 4))
def test_every_stage_runs_its_own_blocks_in_order(model, recompute, skips, num_parts):
    order, table, num_chunks = model
    cells = table.reshape(len(table), num_chunks, -1)
    num_parts = min(num_parts, cells.shape[-1])
    spans, tables = spans_of(order, table, num_chunks, recompute, skips, num_parts), kind_tables(order, table, num_chunks)
    sizes = part_sizes(order, table, num_chunks, num_parts)
    assert [place for span in spans for place in range(span.first, span.stop)] == list(range(cells.shape[-1]))
    for kind, own in tables.items():
        # Each block of a kind is held once.
        assert sorted(own[own >= 0]) == list(range(order.count(kind)))
    for stage, chunk in np.ndindex(cells.shape[:2]):
        room = {kind: own.reshape(len(table), num_chunks, -1)[stage, chunk] for kind, own in tables.items()}
        layers, blocks = cut(spans, jnp.asarray(cells[stage, chunk]), {kind: jnp.asarray(own) for kind, own in room.items()})
        for span, numbers, group in zip(spans, layers, blocks, strict=True):
            assert set(group) == set(span.kinds)
            assert all(numbers.shape == group[kind].shape for kind in span.kinds)
            assert numbers.ndim == (2 if span.every > 1 else 1)
            for place, layer in np.ndenumerate(numbers):
                held = {kind: int(group[kind][place]) for kind in span.kinds if group[kind][place] >= 0}
                assert held == ({} if layer < 0 else {order[layer]: order[: layer + 1].count(order[layer]) - 1})
                assert layer >= 0 or span.padded
        parts = join(spans, blocks)
        assert [{kind: len(own) for kind, own in part.items()} for part in parts] == sizes
        assert jax.tree.all(jax.tree.map(np.array_equal, join_parts(parts, 1), room))


def test_one_kind_dealt_evenly_is_one_loop():
    spans = spans_of(("block",) * 8, layer_table((4, 4), 2), 1, skips=True)
    assert spans == [Span(0, 4, 0, 1, ("block",), padded=False, skips=True)]
    assert not spans[0].chooses


def test_only_what_some_stages_lack_is_under_a_conditional():
    table = layer_table((3, 3, 2), 3)
    for skips, expected in ((False, [(0, 3, False)]), (True, [(0, 2, False), (2, 3, True)])):
        found = spans_of(("block",) * 8, table, 1, skips=skips)
        assert [(span.first, span.stop, span.chooses) for span in found] == expected


def test_blocks_made_again_together_are_of_one_span():
    table = layer_table((5, 3), 2)
    cuts = [(span.first, span.stop, span.every) for span in spans_of(("block",) * 8, table, 1, "full:2", skips=True)]
    assert cuts == [(0, 2, 2), (2, 3, 1), (3, 5, 2)]
