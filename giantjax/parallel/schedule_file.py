"""Schedules as files, in the CSV dialect of PyTorch's pipelining (torch.distributed.pipelining, `_load_csv` and `_dump_csv`).

A row is a rank, a cell is what it does in one step: `5F2` is forward of microbatch 2 on the model's part 5, `5B2` all of
backward, `5I2` the gradient of the input and `5W2` that of the weights; a blank cell is a wait. Part v is chunk v // S of
stage v % S, S being the number of rows. What runs in one tick is joined as PyTorch joins what it overlaps:
`(5I2;5W1;5F6)OVERLAP_F_B`, run from left to right. Messages, gathered parameters and gradient sums (`1SEND_F0`, `0UNSHARD`)
follow from the rest and are left out in reading, as PyTorch leaves them out of its own schedules until it runs them.

A file in which any cell is joined is a table, a column a tick, and read as it stands. PyTorch's own are not: their rows
are what each rank does next, and are brought into step (`giantjax.parallel.compact`).
"""

import csv
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from giantjax.errors import InputError
from giantjax.parallel.compact import compact, laid_out
from giantjax.parallel.schedule_table import IDLE, KINDS, Action, Kind, Schedule, validate

WORK = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
IMPLIED = re.compile(r"[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
JOINED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
FORMER = re.compile(r"[0-9]+BW[0-9]+")


class _Cell(NamedTuple):
    """One piece of work of a file, where it stands, counted from 1."""

    row: int
    column: int
    part: int
    letter: str
    microbatch: int
    joined: bool

    def __str__(self) -> str:
        return f"{self.part}{self.letter}{self.microbatch}"


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in a file: the table in it, or its rows brought into step.

    Rows are taken as orders where no cell is joined, or where a result is used in the column it is computed in. A whole
    backward among split ones is taken as its two parts.

    Raises:
        InputError: there is no such file, or it holds no schedule for looped placement; the sentence names row, column and
            cell where one is wrong.
    """
    path = Path(path)
    grid = _parsed(path)
    cells = [cell for row in grid for column in row for cell in column]
    if not cells:
        raise InputError(f"{path}: there is no action in it, such as 0F0")
    num_parts, num_microbatches = (max(numbers) + 1 for numbers in zip(*((cell.part, cell.microbatch) for cell in cells), strict=True))
    _check_placement(path, cells, len(grid), num_parts)
    _check_complete(path, cells, num_parts, num_microbatches)
    splits = any(cell.letter == "I" for cell in cells)
    orders = [[_actions(cells, len(grid), splits) for cells in row] for row in grid]
    num_chunks = num_parts // len(grid)
    table = _table(path.name, num_microbatches, num_chunks, orders)
    if table and any(cell.joined for cell in cells):
        return table
    return compact(laid_out(path.name, num_microbatches, num_chunks, [list(itertools.chain(*order)) for order in orders]))


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write the table, a column a tick, so that reading gives it back as it is.

    Raises:
        InputError: the table is not valid, or the file cannot be written.
    """
    validate(schedule)
    letters = {"backward": "I" if schedule.splits_weight else "B", "weight": "W", "forward": "F"}
    rows: list[list[list[str]]] = [[[] for _ in range(schedule.num_ticks)] for _ in range(schedule.num_stages)]
    for tick, action in schedule.actions():
        part = action.chunk * schedule.num_stages + action.stage
        rows[action.stage][tick].append(f"{part}{letters[action.kind]}{action.microbatch}")
    # Where a table has nothing to join, its first action is joined with nothing: that is what says that it is a table.
    joins = any(len(words) > 1 for row in rows for words in row)
    alone = None if joins else (0, min(tick for tick, words in enumerate(rows[0]) if words))
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [
                    f"({';'.join(words)})OVERLAP_F_B" if len(words) > 1 or (row, tick) == alone else "".join(words)
                    for tick, words in enumerate(cells)
                ]
                for row, cells in enumerate(rows)
            )
    except OSError as error:
        raise InputError(f"{path}: the schedule cannot be written there: {error.strerror}") from error


def _parsed(path: Path) -> list[list[list[_Cell]]]:
    """What the file's cells hold, by row and column, columns of nothing but implied actions left out."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: no schedule can be read from it: {getattr(error, 'strerror', None) or error}") from error
    while rows and not rows[-1]:
        rows.pop()
    grid = []
    for number, row in enumerate(rows, 1):
        words = [(column, word.strip()) for column, word in enumerate(row, 1) if not IMPLIED.fullmatch(word.strip())]
        grid.append([_cells(f"{path}: row {number}, column {column}", number, column, word) for column, word in words])
    return grid


def _cells(place: str, row: int, column: int, word: str) -> list[_Cell]:
    joined = JOINED.fullmatch(word)
    words = [part.strip() for part in joined[1].split(";")] if joined else [word] if word else []
    cells = []
    for part in words:
        match = WORK.fullmatch(part)
        if FORMER.fullmatch(part):
            raise InputError(
                f"{place} holds {word}, in PyTorch's former dialect, where BW was all of backward and B the gradient of the input; "
                "write B for BW and I for B, in the whole file"
            )
        if not match:
            raise InputError(
                f"{place} holds {word!r}, which is no action; actions are like 0F3 (forward), 0B3 (backward), 0I3 and 0W3 (its gradients "
                "of input and weights), (0B3;0F5)OVERLAP_F_B for several in one tick, or blank"
            )
        cells.append(_Cell(row, column, int(match[1]), match[2], int(match[3]), joined is not None))
    return cells


def _check_placement(path: Path, cells: Iterable[_Cell], num_rows: int, num_parts: int) -> None:
    """Make sure that the parts of the model go round the rows."""
    for cell in cells:
        if cell.part % num_rows != cell.row - 1:
            raise InputError(
                f"{path}: row {cell.row}, column {cell.column} holds {cell}, but of {num_rows} rows part {cell.part} belongs to row "
                f"{cell.part % num_rows + 1}: parts go round the rows, 0 to {num_rows - 1} and then {num_rows} on row 1 again; "
                "placements that turn back, as V-shaped schedules have, cannot be run"
            )
    if num_parts % num_rows:
        raise InputError(f"{path}: {num_rows} rows hold {num_parts} parts of the model; each needs as many, so {num_rows} or a multiple")


def _check_complete(path: Path, cells: Iterable[_Cell], num_parts: int, num_microbatches: int) -> None:
    """Make sure that every part does everything once with every microbatch."""
    seen: dict[tuple[int, int, str], _Cell] = {}
    for cell in cells:
        first = seen.setdefault((cell.part, cell.microbatch, cell.letter), cell)
        if first is not cell:
            raise InputError(f"{path}: row {cell.row} holds {cell} in column {first.column} and again in column {cell.column}")
    trains = any(letter != "F" for _, _, letter in seen)
    # One after the other, not as a whole: a mistyped number is far beyond what there is, and what it lacks comes early.
    for part, microbatch in ((part, microbatch) for part in range(num_parts) for microbatch in range(num_microbatches)):
        found = "".join(letter for letter in "FBIW" if (part, microbatch, letter) in seen)
        if found == "FBW":
            raise InputError(
                f"{path}: {part}B{microbatch} and {part}W{microbatch} compute one gradient twice; in PyTorch's former dialect B was the "
                "gradient of the input alone, for which now stands I"
            )
        if found not in (("FB", "FIW") if trains else ("F",)):
            whole = "F, and B or both I and W" if trains else "F"
            raise InputError(f"{path}: part {part} has {' and '.join(found) or 'nothing'} of microbatch {microbatch}; it needs {whole}")


def _actions(cells: Iterable[_Cell], num_stages: int, splits: bool) -> list[Action]:
    """The actions of one cell of the file."""
    kinds: dict[str, list[Kind]] = {
        "F": ["forward"],
        "B": ["backward", "weight"] if splits else ["backward"],
        "I": ["backward"],
        "W": ["weight"],
    }
    return [Action(kind, cell.part % num_stages, cell.microbatch, cell.part // num_stages) for cell in cells for kind in kinds[cell.letter]]


def _table(name: str, num_microbatches: int, num_chunks: int, orders: list[list[list[Action]]]) -> Schedule | None:
    """The table whose ticks are the file's columns, if that is one."""
    tables = {kind: np.full((max(map(len, orders)), len(orders)), IDLE, np.int32) for kind in KINDS}
    for order in orders:
        for tick, actions in enumerate(order):
            for action in actions:
                if tables[action.kind][tick, action.stage] != IDLE:
                    return None
                tables[action.kind][tick, action.stage] = action.chunk * num_microbatches + action.microbatch
    schedule = Schedule(name, num_microbatches, num_chunks, tables["forward"], tables["backward"], tables["weight"])
    try:
        validate(schedule)
    except InputError:
        return None
    return schedule
