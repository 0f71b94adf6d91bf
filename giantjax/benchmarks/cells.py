"""The cells of a CSV file that has the columns it should."""

import csv
from collections.abc import Sequence
from pathlib import Path

from giantjax.errors import InputError


def read_cells(path: Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """The cells under `columns`, bare of spaces around them, of each line with its number.

    Raises:
        InputError: the file cannot be read, or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            missing = [name for name in columns if name not in (table.fieldnames or ())]
            if missing:
                raise InputError(f"{path} has no column {missing[0]}; its columns must be {', '.join(columns)}")
            return [(table.line_num, {name: (cells[name] or "").strip() for name in columns}) for cells in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a CSV file: {getattr(error, 'strerror', None) or error}") from error
