"""Good tables for equal stages under limits on what they hold, found tick by tick: a beam search.

Microbatches are alike, so all that matters of a table is how many actions of each kind each stage has done. A tick is
chosen from a handful, and in it every stage does all that the tick's kinds, its inputs and the limits let it: doing
something later helps nobody, for what a stage may do only grows with what all have done. So of two ways to the same
counts, or to more, the cheaper alone is followed, and of all others the few that promise most.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from giantjax.parallel.schedule_table import IDLE, KINDS, Kind, Schedule

WIDTH = 48
"""States followed from tick to tick."""
BACKWARD, WEIGHT, FORWARD = (KINDS.index(kind) for kind in ("backward", "weight", "forward"))
MARKS = np.random.default_rng(0).integers(2**62, size=4096)
"""Any numbers, the same in each run."""

Done = Int[np.ndarray, "n kinds S"]
"""Actions done by each stage, in n states."""


class Problem(NamedTuple):
    """What is to be done, and within what."""

    num_stages: int
    num_microbatches: int
    residuals: int
    """Microbatches that a stage holds between forward and backward at most; 1 or more."""
    weights: int
    """Microbatches that a stage holds between backward and weight gradient at most; 0 where backward computes it."""
    seconds: tuple[float, float, float]
    """Of a backward, a weight and a forward action, on every stage."""
    hop: float
    """Seconds of a message between stages."""
    per_segment: float
    """Seconds of a step for which a segment less is worth waiting."""


class _Tick(NamedTuple):
    """What stages do in a tick: all of `kinds` that they can, or the first of them that they can."""

    kinds: tuple[Kind, ...]
    one: bool


class _States(NamedTuple):
    """n states."""

    done: Done
    seconds: Float[np.ndarray, "n"]
    sent: Bool[np.ndarray, "n"]
    """Whether forward results leave when the next tick begins."""
    late: Float[np.ndarray, "n"]
    """Seconds from now to the arrival of input gradients."""
    before: Int[np.ndarray, "n"]
    """The state a tick ago, as a number."""
    tick: Int[np.ndarray, "n"]
    """The last tick, as a number; -1 at the start."""

    def at(self, chosen: np.ndarray) -> "_States":
        """Some of them."""
        return _States(*(field[chosen] for field in self))


def beam_table(name: str, problem: Problem, one: bool) -> Schedule:
    """The best table found.

    Args:
        name: of the schedule.
        problem: what it is for.
        one: whether each stage does one thing in a tick, the first it can in an order that differs from tick to tick, or
            all stages do all they can of the same kinds. The former makes switch ticks, the latter lockstep ticks.
    """
    kinds = KINDS if problem.weights else ("backward", "forward")
    chosen = itertools.permutations if one else itertools.combinations
    ticks = [_Tick(found, one) for size in range(1, len(kinds) + 1) for found in chosen(kinds, size)]
    way = _best_way(problem, ticks)
    done: Done = np.zeros((1, len(KINDS), problem.num_stages), int)
    tables = np.full((len(KINDS), len(way), problem.num_stages), IDLE, np.int32)
    for number, tick in enumerate(way):
        after = _advanced(problem, done, tick)
        tables[:, number] = np.where(after[0] > done[0], done[0], IDLE)
        done = after
    return Schedule(name, problem.num_microbatches, 1, tables[FORWARD], tables[BACKWARD], tables[WEIGHT])


def _best_way(problem: Problem, ticks: Sequence[_Tick]) -> list[_Tick]:
    """The ticks that lead to the end in the least time found."""
    none = np.zeros(1)
    states = _States(np.zeros((1, len(KINDS), problem.num_stages), int), none, none > 0, none, none.astype(int), none.astype(int) - 1)
    past, end, best = [states], (0, states), np.inf
    while len(states.seconds):
        reached = [_after(problem, states, number, tick) for number, tick in enumerate(ticks)]
        states = _States(*(np.concatenate(fields) for fields in zip(*reached, strict=True)))
        over = (states.done[:, _kinds(problem)] == problem.num_microbatches).all(axis=(1, 2))
        if over.any() and states.seconds[over].min() < best:
            last = np.flatnonzero(over)[[states.seconds[over].argmin()]]
            best, end = float(states.seconds[last[0]]), (len(past), states.at(last))
        states = _promising(problem, states.at(~over), best, ticks[0].one)
        past.append(states)
    length, state = end
    way = []
    for earlier in reversed(past[:length]):
        way.append(ticks[state.tick[0]])
        state = earlier.at(state.before)
    return way[::-1]


def _kinds(problem: Problem) -> list[int]:
    return [BACKWARD, WEIGHT, FORWARD] if problem.weights else [BACKWARD, FORWARD]


def _advanced(problem: Problem, done: Done, tick: _Tick) -> Done:
    """What is done after the tick."""
    backward, forward = done[:, BACKWARD], done[:, FORWARD]
    first = np.full((len(done), 1), problem.num_microbatches)
    ready = np.stack([np.column_stack([backward[:, 1:], forward[:, -1:]]), backward, np.column_stack([first, forward[:, :-1]])], axis=1)
    after = done.copy()
    free = np.ones_like(forward, bool)
    # What a tick reads makes room for what it writes: weight gradients for backward, and backward for forward.
    order = tick.kinds if tick.one else [kind for kind in ("weight", "backward", "forward") if kind in tick.kinds]
    for kind in map(KINDS.index, order):
        can = free & (done[:, kind] < ready[:, kind])
        if kind == FORWARD:
            can &= done[:, FORWARD] - after[:, BACKWARD] < problem.residuals
        if kind == BACKWARD and problem.weights:
            can &= done[:, BACKWARD] - after[:, WEIGHT] < problem.weights
        after[:, kind] += can
        if tick.one:
            free &= ~can
    return after


def _after(problem: Problem, states: _States, number: int, tick: _Tick) -> _States:
    """The states after a tick, of those in which each of its kinds occurs; priced much as `simulate.lockstep` does it."""
    done = _advanced(problem, states.done, tick)
    did = done > states.done
    occurs = np.asarray(did.any(axis=2))
    useful = np.flatnonzero(occurs.sum(axis=1) == len(tick.kinds))
    states, done, did, occurs = states.at(useful), done[useful], did[useful], occurs[useful]
    backward, weight, forward = (occurs * problem.seconds).T
    gives_back, gives_on = (np.asarray(part.any(axis=1)) for part in (did[:, BACKWARD, 1:], did[:, FORWARD, :-1]))
    hop = np.where(states.sent, problem.hop, 0.0)

    begin = np.where(occurs[:, BACKWARD], states.late, 0.0)
    left = np.maximum(begin + backward, begin + hop)
    end = begin + backward + weight
    end = np.where(occurs[:, FORWARD], np.maximum(end, begin + hop) + forward, end)
    late = np.where(gives_back, left + problem.hop - end, np.where(occurs[:, BACKWARD], 0.0, states.late - end))

    # Where no stage has all kinds each runs its own, and messages travel before and after.
    switches = ~(did == occurs[:, :, None]).all(axis=1).any(axis=1)
    own = (did * np.array(problem.seconds)[:, None]).sum(axis=1).max(axis=1)
    end = np.where(switches, np.maximum(states.late, hop) + own + np.where(gives_back, problem.hop, 0.0), end)
    late = np.where(switches, 0.0, np.maximum(late, 0.0))
    # Of tables as fast, the one of fewer segments is wanted in any case.
    changes = np.where(states.tick == number, 0.0, problem.per_segment + 1e-6 * sum(problem.seconds))
    return _States(done, states.seconds + end + changes, gives_on, late, useful, np.full(len(useful), number))


def _promising(problem: Problem, states: _States, best: float, one: bool) -> _States:
    """The states worth following: no two of them as far, none behind another that costs no more, none certain to be late."""
    backward, weight, forward = (problem.num_microbatches - states.done[:, kind] for kind in range(len(KINDS)))
    if one:
        # Each stage has its own work left.
        left = (problem.num_microbatches - states.done[:, _kinds(problem)]) * np.array(problem.seconds)[_kinds(problem), None]
        to_come = left.sum(axis=1).max(axis=1)
    else:
        # In lockstep a kind takes a tick for each action that some stage has left, and one for each stage on the way to it.
        far = np.arange(problem.num_stages)
        rounds = [np.where(left > 0, left + way, 0).max(axis=1) for left, way in ((backward, far), (weight, 0), (forward, far[::-1]))]
        to_come = sum(problem.seconds[kind] * rounds[kind] for kind in _kinds(problem))
    cost = states.seconds + states.late + np.where(states.sent, problem.hop, 0.0)
    chosen = np.lexsort((-states.done.sum(axis=(1, 2)), cost + to_come))
    chosen = chosen[(states.seconds + to_come)[chosen] < best]
    counts = states.done.reshape(-1, len(KINDS) * problem.num_stages)
    # One number for each row of counts, for to sort rows takes longer than all else.
    _, first = np.unique(counts[chosen] @ MARKS[: counts.shape[1]], return_index=True)
    chosen = chosen[np.sort(first)][: 4 * WIDTH]
    ahead = (counts[chosen][:, None] >= counts[chosen][None]).all(axis=2)
    beaten = ahead & (cost[chosen][:, None] <= states.seconds[chosen][None]) & ~np.eye(len(chosen), dtype=bool)
    return states.at(chosen[~beaten.any(axis=0)][:WIDTH])
