"""Tables that tests share: the named schedules, and others that no name stands for."""

from collections.abc import Callable
from functools import partial

import numpy as np
from hypothesis import strategies as st

from giantjax.parallel.schedule import (
    IDLE,
    KINDS,
    Action,
    Schedule,
    dependencies,
    forward_only,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)

STAGES, MICROBATCHES = st.integers(1, 8), st.integers(1, 64)


def chunked(num_stages: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """GPipe over several chunks a stage: one chunk after the other, then the same backwards."""
    turn = max(num_stages, num_microbatches)
    chunk, microbatch, stage = np.indices((num_chunks, num_microbatches, num_stages))
    ticks = chunk * turn + microbatch + stage
    half = int(ticks.max()) + 1
    tables = np.full((3, 2 * half, num_stages), IDLE, np.int32)
    tables[0][ticks, stage] = chunk * num_microbatches + microbatch
    tables[1][2 * half - 1 - ticks, stage] = chunk * num_microbatches + microbatch
    return Schedule("chunked", num_microbatches, num_chunks, tables[0], tables[1], tables[2])


def split(num_stages: int, num_microbatches: int, late: int = 1) -> Schedule:
    """1F1B with each weight gradient an action of its own, `late` ticks after the input gradient."""
    whole = one_forward_one_backward(num_stages, num_microbatches)
    more = np.full((late, num_stages), IDLE, np.int32)
    forward, backward = np.concatenate([whole.forward, more]), np.concatenate([whole.backward, more])
    return Schedule("split", num_microbatches, 1, forward, backward, np.concatenate([more, whole.backward]))


MAKERS: list[Callable[[int, int], Schedule]] = [
    *(gpipe, one_forward_one_backward, zero_bubble, forward_only, chunked, split),
    *(partial(interleaved, num_chunks=number) for number in (1, 2, 3, 4)),
]
"""Schedules of (number of stages, number of microbatches)."""


def _alone() -> Schedule:
    forward, backward, weight = np.full((3, 6, 2), IDLE, np.int32)
    forward[[0, 1], 0] = forward[[1, 3], 1] = backward[[2, 4], 1] = backward[[3, 5], 0] = [0, 1]
    return Schedule("alone", 2, 1, forward, backward, weight)


ALONE = _alone()
"""Two stages with two microbatches, one action a tick."""


def random_table(num_stages: int, num_microbatches: int, num_chunks: int, splits: bool, seed: int) -> Schedule:
    """A valid table in which each stage does in each tick, of what it could do, whatever the dice say."""
    rng = np.random.default_rng(seed)
    kinds = KINDS if splits else ("backward", "forward")
    places = np.ndindex(num_stages, num_microbatches, num_chunks)
    empty = Schedule("random", num_microbatches, num_chunks, *np.full((3, 1, num_stages), IDLE, np.int32))
    needed = {action: dependencies(empty, action) for place in places for kind in kinds for action in [Action(kind, *map(int, place))]}
    keenness = rng.choice([0.3, 0.8, 1.0])
    done: set[Action] = set()
    rows = []
    while len(done) < len(needed):
        row = np.full((len(KINDS), num_stages), IDLE, np.int32)
        ready: dict[tuple[str, int], list[Action]] = {}
        for action in needed.keys() - done:
            if done.issuperset(needed[action]):
                ready.setdefault((action.kind, action.stage), []).append(action)
        ran = [sorted(actions)[rng.integers(len(actions))] for _, actions in sorted(ready.items()) if rng.random() < keenness]
        for kind, stage, microbatch, chunk in ran:
            row[KINDS.index(kind), stage] = chunk * num_microbatches + microbatch
        done.update(ran)
        rows.append(row)
    tables = dict(zip(KINDS, np.stack(rows, axis=1), strict=True))
    return Schedule("random", num_microbatches, num_chunks, tables["forward"], tables["backward"], tables["weight"])


random_tables = st.builds(random_table, st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.booleans(), st.integers(0, 2**32 - 1))

any_tables = random_tables | st.builds(lambda maker, *sizes: maker(*sizes), st.sampled_from(MAKERS), STAGES, st.integers(1, 12))
"""The above, and all named ones."""
