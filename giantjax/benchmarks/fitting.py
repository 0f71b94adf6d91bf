"""Fits the cost model's constants to measurements of whole steps."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from jaxtyping import Bool, Float

from giantjax.benchmarks.published import Row
from giantjax.planner.constants import PRIORS, Constants

NOISE = 0.10
"""Logarithm by which a step time is off however good the model; what is off by much more weighs less and less (Cauchy)."""
WIDTH = 2.0
"""Multiples of NOISE from which on it does."""
STEP = 1e-3
WEIGHT = 3.0
"""Independent measurements that a source of one row counts as; one of n rows counts as sqrt(n) times that."""

NAMES = tuple(PRIORS)
PRIOR = np.log([value for value, _ in PRIORS.values()])
SPREAD = np.array([spread for _, spread in PRIORS.values()])


def errors_of(rows: Sequence[Row], constants: Constants) -> Float[np.ndarray, "rows"]:
    """log(predicted / measured) of each row."""
    return np.array([math.log(row.predicted(constants) / row.seconds) for row in rows])


class Fit:
    """Constants that maximise the posterior: a normal prior for each logarithm, and heavy-tailed errors of step times."""

    def __init__(self, rows: Sequence[Row], iterations: int = 6) -> None:
        self.rows = list(rows)
        counts = Counter(row.source for row in rows)
        self.sources = np.array([row.source for row in rows])
        self.weights = np.array([WEIGHT / math.sqrt(counts[row.source]) for row in rows])
        self.point, self.slopes = PRIOR.copy(), np.zeros((len(rows), len(NAMES)))
        every = np.ones(len(rows), bool)
        for _ in range(iterations if rows else 0):
            errors = self._errors(self.point)
            self.slopes = np.stack([self._errors(self.point + STEP * axis) - errors for axis in np.eye(len(NAMES))], axis=1) / STEP
            self.point = self._improve(self.point, errors, every)

    @property
    def constants(self) -> Constants:
        """The fit to all rows."""
        return _constants(self.point)

    def without(self, source: str) -> Constants:
        """The fit to the rows of all other sources; slopes are those of the whole fit."""
        kept, point = self.sources != source, self.point
        for _ in range(4):
            point = self._improve(point, self._errors(point), kept)
        return _constants(point)

    def _errors(self, point: Float[np.ndarray, "constants"]) -> Float[np.ndarray, "rows"]:
        return errors_of(self.rows, _constants(point))

    def _improve(
        self, point: Float[np.ndarray, "constants"], errors: Float[np.ndarray, "rows"], kept: Bool[np.ndarray, "rows"]
    ) -> Float[np.ndarray, "constants"]:
        """One step of Gauss and Newton."""
        weights = self.weights * kept / (NOISE**2 * (1 + (errors / (WIDTH * NOISE)) ** 2))
        curvature = self.slopes.T @ (weights[:, None] * self.slopes) + np.diag(SPREAD**-2.0)
        gradient = self.slopes.T @ (weights * errors) + (point - PRIOR) / SPREAD**2
        return point - np.clip(np.linalg.solve(curvature, gradient), -0.5, 0.5)


def _constants(point: Float[np.ndarray, "constants"]) -> Constants:
    return Constants(**dict(zip(NAMES, np.exp(point).tolist(), strict=True)))


def fit_in_words(fit: Fit) -> str:
    """The constants as `giantjax/planner/constants.py` declares them, each with its prior."""
    lines = [
        f"{name:20} {value:10.4g}   prior {prior:10.4g}, spread {spread:.2f}"
        for (name, value), (prior, spread) in zip(asdict(fit.constants).items(), PRIORS.values(), strict=True)
    ]
    return "\n".join([f"fitted to {len(fit.rows)} rows of {len(set(fit.sources))} sources:", *lines])
