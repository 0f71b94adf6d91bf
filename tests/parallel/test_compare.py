"""The tables of the docs are what the simulator says."""

from pathlib import Path

import pytest

from giantjax.parallel.compare import compare, comparison_table


def test_the_docs_quote_the_table():
    assert comparison_table() in (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()


@pytest.mark.parametrize("hop", [0.0, 0.3])
def test_times_follow_the_formulas(hop):
    """(M + S - 1)(f + b) and so on, f = 1 and b = 2, and what each saves of 1F1B."""
    rows = {row.words: row for row in compare(4, 32, hop)}
    free = {words: row.lockstep[0].step_time for words, row in rows.items()}
    assert free == pytest.approx(
        {"gpipe": 105, "1f1b": 105, "interleaved, 2 chunks": 100.5, "interleaved, 4 chunks": 98.25, "zero-bubble": 102}
    )
    assert rows["zero-bubble"].asynchronous[0].step_time == pytest.approx(3 * 32 + 3)
    assert rows["interleaved, 2 chunks"].held == 4 + 3 / 2
    if hop == 0:
        assert all(row.lockstep[1].step_time == row.lockstep[0].step_time for row in rows.values())
    else:
        assert rows["1f1b"].lockstep[1].step_time == pytest.approx(105 + 6 * hop)
