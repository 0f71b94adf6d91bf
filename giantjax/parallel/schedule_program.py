"""The fastest table of a small pipeline, by integer programming (HiGHS, through scipy): exact where messages are free."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from giantjax.parallel.schedule_beam import BACKWARD, FORWARD, WEIGHT, Problem
from giantjax.parallel.schedule_table import IDLE, KINDS, Schedule


class _Program:
    """Rows of a linear program, each a bound on a weighted sum of a few variables."""

    def __init__(self) -> None:
        self.rows, self.columns, self.values = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        self.most: list[np.ndarray] = []
        self.num_rows = 0

    def at_most(self, bound: float, *terms: tuple[np.ndarray, float]) -> None:
        """For each place of the arrays of variables: the sum of variable times value is at most `bound`."""
        number = max(np.size(variables) for variables, _ in terms)
        for variables, value in terms:
            self.rows.append(np.arange(self.num_rows, self.num_rows + number))
            self.columns.append(np.broadcast_to(np.ravel(variables), number))
            self.values.append(np.full(number, value))
        self.most.append(np.full(number, bound))
        self.num_rows += number

    def constraint(self, num_variables: int) -> LinearConstraint:
        """All rows."""
        place = (np.concatenate(self.rows), np.concatenate(self.columns))
        matrix = coo_array((np.concatenate(self.values), place), shape=(self.num_rows, num_variables))
        return LinearConstraint(matrix.tocsr(), -np.inf, np.concatenate(self.most))


def exact_table(name: str, problem: Problem, num_ticks: int, limit: float, activation: float, stash: float | None) -> Schedule | None:
    """The fastest table of at most `num_ticks` ticks whose slots fit, where messages take no time; None if there is none.

    The variables are N[kind, stage, tick], how many actions a stage has done by the end of a tick: microbatches are alike.
    A tick takes as long as the stage that does most in it, in lockstep and in switch ticks alike.

    Args:
        name: of the schedule.
        problem: of it, sizes and durations.
        num_ticks: K.
        limit: `activation` times the slots between forward and backward plus `stash` times those between backward and weight
            gradient must not exceed it.
        activation: what a microbatch takes between forward and backward.
        stash: what it takes between backward and its weight gradient; None if backward computes that.
    """
    num_stages, num_microbatches, seconds = problem.num_stages, problem.num_microbatches, problem.seconds
    kinds = [BACKWARD, FORWARD] if stash is None else [BACKWARD, WEIGHT, FORWARD]
    done = np.arange(len(KINDS) * num_stages * (num_ticks + 1)).reshape(len(KINDS), num_stages, num_ticks + 1)
    before, after = done[..., :-1], done[..., 1:]
    length = done.size + np.arange(num_ticks)
    residuals, weights = done.size + num_ticks, done.size + num_ticks + 1
    program = _Program()
    program.at_most(0, (before[kinds], 1), (after[kinds], -1))
    program.at_most(1, (after[kinds], 1), (before[kinds], -1))
    program.at_most(0, (after[FORWARD, 1:], 1), (before[FORWARD, :-1], -1))
    program.at_most(0, (after[BACKWARD, :-1], 1), (before[BACKWARD, 1:], -1))
    program.at_most(0, (after[BACKWARD, -1], 1), (before[FORWARD, -1], -1))
    program.at_most(0, (after[FORWARD], 1), (after[BACKWARD], -1), (np.array(residuals), -1))
    if stash is not None:
        program.at_most(0, (after[WEIGHT], 1), (before[BACKWARD], -1))
        program.at_most(0, (after[BACKWARD], 1), (after[WEIGHT], -1), (np.array(weights), -1))
    for stage in range(num_stages):
        work = [(part[kind, stage], sign * seconds[kind]) for kind in kinds for part, sign in ((after, 1), (before, -1))]
        program.at_most(0, *work, (length, -1))
    program.at_most(limit, (np.array([residuals]), activation), (np.array([weights]), stash or 0.0))

    size = done.size + num_ticks + 2
    least, most = np.zeros(size), np.full(size, num_microbatches, float)
    most[done[..., 0]] = 0
    least[done[kinds, :, -1]] = num_microbatches
    least[done[FORWARD, 0, 1]] = 1
    most[length] = np.inf
    cost, whole = np.zeros(size), np.ones(size)
    cost[length], whole[length] = 1, 0
    found = milp(cost, constraints=program.constraint(size), integrality=whole, bounds=Bounds(least, most))
    if found.x is None:
        return None
    counts = np.rint(found.x[done]).astype(int)
    tables = np.where(np.diff(counts, axis=2) > 0, counts[..., :-1], IDLE).astype(np.int32).swapaxes(1, 2)
    tables = tables[:, (tables != IDLE).any(axis=(0, 2))]
    if stash is None:
        tables[WEIGHT] = IDLE
    return Schedule(name, num_microbatches, 1, tables[FORWARD], tables[BACKWARD], tables[WEIGHT])
