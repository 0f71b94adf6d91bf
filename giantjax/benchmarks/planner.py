"""The cost model against published measurements of step time, each source predicted without having been fitted to."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from giantjax.benchmarks.fitting import Fit, errors_of, fit_in_words
from giantjax.benchmarks.published import Occupied, Row, read_occupied, read_rows
from giantjax.errors import InputError
from giantjax.planner.constants import CALIBRATION, FITTED, FITTED_SOURCES
from giantjax.planner.flops import flops_per_sample

SMALLEST_FAMILY = 5


@dataclass(frozen=True)
class Planner:
    """Compare predicted and published step times, source by source, beside a constant-MFU roofline."""

    data: str
    """CSV file with the columns of giantjax/benchmarks/published.py."""
    fit: bool = False
    """Fit the constants to all of the file, and print them with their priors."""
    rows: str | None = None
    """Print every row of the sources whose name contains this."""

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("--data is ''; it must be the path of a CSV file")


class Score(NamedTuple):
    """Errors as factors less one: 0.1 is 10 %, too long or too short."""

    median: float
    percentile: float
    """The 90th."""
    rows: int


def planner(arguments: Planner) -> int:
    """Print the tables; the last two lines are the figures to compare."""
    rows, unusable = read_rows(Path(arguments.data))
    if not rows:
        raise InputError(f"{arguments.data} has no row that can be priced" + _reasons(unusable))
    sources = list(dict.fromkeys(row.source for row in rows))
    known = [row for row in rows if row.source in FITTED_SOURCES]
    fit = Fit(known)
    errors = np.zeros(len(rows))
    for source in sources:
        places = [place for place, row in enumerate(rows) if row.source == source]
        constants = fit.without(source) if source in FITTED_SOURCES else FITTED
        errors[places] = errors_of([rows[place] for place in places], constants)
    roofline = _roofline(rows)
    console = Console(highlight=False, width=140)
    console.print(f"{arguments.data}: {len(rows)} rows of {len(sources)} sources{_reasons(unusable)}")
    for note, number in Counter(note for row in rows for note in row.notes).items():
        console.print(f"{number} rows do not state their {note}, which stands at its usual value")
    if arguments.rows is not None:
        _print_rows(console, rows, errors, arguments.rows)
    _print_sources(console, rows, errors, roofline)
    families = _families(rows, errors)
    _print_families(console, families)
    everything = errors_of(rows, FITTED)
    inside = f"in the sample, with the constants as they ship: {_in_words(score(everything))}"
    console.print(inside if len(known) == len(rows) else f"with the constants as they ship: {_in_words(score(everything))}")
    if arguments.fit:
        console.print(fit_in_words(Fit(rows)))
    _print_memory(console, read_occupied(Path(arguments.data)))
    tau = float(np.mean([family.tau for family in families])) if families else math.nan
    calibrated, any_row = _calibrated(rows, errors), _calibrated(rows, errors, every=True)
    one = _roofline_scores(rows, roofline)
    console.print(f"constant-MFU roofline: zero-shot {_in_words(one[0])}; after one row of each source {_in_words(one[1])}")
    console.print(f"calibrated by any one row of a source instead of its first: {_in_words(score(any_row))}")
    # Not through the console, which may wrap.
    print(f"zero-shot: {_in_words(score(errors))}, tau {tau:.2f}, {len(rows)} rows")
    print(f"calibrated: {_in_words(score(calibrated))}, tau {tau:.2f}, {len(calibrated)} rows")
    return 0


def score(errors: Float[np.ndarray, "rows"]) -> Score:
    """Of logarithms of predicted over measured."""
    if not len(errors):
        return Score(math.nan, math.nan, 0)
    ordered = np.sort(np.abs(errors))
    return Score(float(np.expm1(np.median(ordered))), float(np.expm1(ordered[int(0.9 * len(ordered))])), len(ordered))


def _in_words(of: Score) -> str:
    return f"median {100 * of.median:.1f} %, 90th percentile {100 * of.percentile:.1f} %"


def _reasons(unusable: Counter[str]) -> str:
    return f"; {unusable.total()} rows left out: " + ", ".join(f"{number} as {why}" for why, number in unusable.items()) if unusable else ""


def _calibrated(rows: Sequence[Row], errors: Float[np.ndarray, "rows"], *, every: bool = False) -> Float[np.ndarray, "others"]:
    """Errors of the other rows of each source once one has been measured: its first, or each in turn.

    The measured row's error is partly the source's and partly its own; CALIBRATION of it is taken off the others'.
    """
    left: list[float] = []
    for source in dict.fromkeys(row.source for row in rows):
        own = errors[[row.source == source for row in rows]]
        for measured in range(len(own) if every else 1):
            left += (np.delete(own, measured) - CALIBRATION * own[measured]).tolist()
    return np.array(left)


class Family(NamedTuple):
    """Plans of one source for one model on one cluster."""

    rows: list[Row]
    plans: int
    tau: float
    """Kendall's, of seconds a token; a plan that was measured several times counts with the median."""

    @property
    def one_window(self) -> bool:
        """Whether all plans have the same sequence length, so that only the layout tells them apart."""
        return len({row.model.sequence_length for row in self.rows}) == 1


def _families(rows: Sequence[Row], errors: Float[np.ndarray, "rows"]) -> list[Family]:
    members: dict[object, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        members[row.family].append(place)
    found = []
    for places in members.values():
        plans: dict[object, list[int]] = defaultdict(list)
        for place in places:
            plans[rows[place].plan, rows[place].traits, rows[place].model].append(place)
        if len(plans) >= SMALLEST_FAMILY:
            pace = np.array([row.pace for row in rows])
            measured = [float(np.median(pace[plan])) for plan in plans.values()]
            predicted = [float(np.median((pace * np.exp(errors))[plan])) for plan in plans.values()]
            found.append(Family([rows[place] for place in places], len(plans), kendall(measured, predicted)))
    return found


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b: of all pairs, those ordered alike less those ordered otherwise, ties taken off."""
    signs = [(int(np.sign(a - b)), int(np.sign(c - d))) for (a, c), (b, d) in itertools.combinations(zip(first, second, strict=True), 2)]
    ties = math.sqrt(sum(a != 0 for a, _ in signs) * sum(b != 0 for _, b in signs))
    return sum(a * b for a, b in signs) / ties if ties else 0.0


def _roofline(rows: Sequence[Row]) -> Float[np.ndarray, "rows"]:
    """log(predicted / measured) at one share of the peak for all rows of a GPU family, the median's, fitted to these very rows."""
    ideal = []
    for row in rows:
        flops = flops_per_sample(row.model) * row.samples * (4 / 3 if row.plan.recompute_kind == "full" else 1)
        ideal.append(math.log(flops / (row.cluster.num_gpus * row.cluster.gpu.half_flops) / row.seconds))
    families = [row.cluster.gpu.family for row in rows]
    share = {gpu: np.median([one for one, family in zip(ideal, families, strict=True) if family == gpu]) for gpu in set(families)}
    return np.array([one - share[row.cluster.gpu.family] for one, row in zip(ideal, rows, strict=True)])


def _roofline_scores(rows: Sequence[Row], roofline: Float[np.ndarray, "rows"]) -> tuple[Score, Score]:
    left: list[float] = []
    for source in dict.fromkeys(row.source for row in rows):
        own = roofline[[row.source == source for row in rows]]
        left += (own[1:] - own[0]).tolist()
    return score(roofline), score(np.array(left))


def _print_sources(console: Console, rows: Sequence[Row], errors: Float[np.ndarray, "rows"], roofline: Float[np.ndarray, "rows"]) -> None:
    table = Table("source", "rows", "median", "90th percentile", "predicted / measured", "roofline: median", "90th percentile", box=None)
    for source in dict.fromkeys(row.source for row in rows):
        own = [row.source == source for row in rows]
        ours, theirs = score(errors[own]), score(roofline[own])
        table.add_row(
            *(source, str(ours.rows), f"{100 * ours.median:.1f} %", f"{100 * ours.percentile:.1f} %"),
            *(f"{math.exp(float(np.median(errors[own]))):.2f}", f"{100 * theirs.median:.1f} %", f"{100 * theirs.percentile:.1f} %"),
        )
    console.print(table)


def _print_families(console: Console, families: Sequence[Family]) -> None:
    for family in families:
        first = family.rows[0]
        console.print(
            f"tau {family.tau:.2f}: {family.plans} plans ({len(family.rows)} rows) of {first.source}, {first.name}, on "
            f"{first.cluster.num_gpus} {first.cluster.gpu.name}{'' if family.one_window else ', windows of several lengths'}"
        )
    alike = [family.tau for family in families if family.one_window]
    if alike:
        console.print(
            f"tau of the {len(alike)} families whose plans have one window: mean {np.mean(alike):.2f}, of all {len(families)} below"
        )


def _print_memory(console: Console, plans: Sequence[Occupied]) -> None:
    ran, failed = ([one for one in plans if one.ran == kind] for kind in (True, False))
    fitting = sum(one.fits for one in ran)
    right = fitting + sum(not one.fits for one in failed)
    console.print(
        f"memory: {fitting} of {len(ran)} plans that ran fit by the planner's model, {len(failed) - (right - fitting)} of {len(failed)} "
        f"that ran out of memory do; {100 * right / max(len(plans), 1):.0f} % classified right"
        + ("" if failed else "; no row states that it ran out of memory, so only one side is tested")
    )
    wrong = Counter(one.row.source for one in plans if one.fits != one.ran)
    for source, number in wrong.items():
        console.print(f"  {number} of {sum(one.row.source == source for one in plans)} of {source} wrong")
    errors = np.array([math.log(one.estimate / one.num_bytes) for one in plans if one.num_bytes])
    if len(errors):
        console.print(f"memory in use against the planner's model, {len(errors)} plans: {_in_words(score(errors))}")


def _print_rows(console: Console, rows: Sequence[Row], errors: Float[np.ndarray, "rows"], part: str) -> None:
    table = Table("line", "model", "GPUs", "t x p x d", "microbatches", "recompute", "ZeRO", "measured", "predicted", "ratio", box=None)
    for row, error in zip(rows, errors.tolist(), strict=True):
        if part in row.source:
            plan = row.plan
            table.add_row(
                *(str(row.line), row.name[:40], f"{row.cluster.num_gpus} {row.cluster.gpu.name}", f"{plan.tensor}x{plan.pipe}x{plan.ways}"),
                *(f"{plan.num_microbatches} of {plan.microbatch_size}", plan.recompute, str(plan.zero_stage)),
                *(f"{row.seconds:.3g} s", f"{row.seconds * math.exp(error):.3g} s", f"{math.exp(error):.2f}"),
            )
    console.print(table)
