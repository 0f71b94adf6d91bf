"""What each schedule takes in both executions, side by side: the tables of docs/schedules.md."""

from collections.abc import Iterable
from typing import NamedTuple

from giantjax.parallel.orders import Orders, interleaved_orders, megatron_orders, zero_bubble_orders
from giantjax.parallel.schedule import Schedule, gpipe, interleaved, one_forward_one_backward, zero_bubble
from giantjax.parallel.simulate import Costs, Link, Timeline, asynchronous, lockstep
from giantjax.parallel.slots import residual_slots, weight_slots

SIZES = ((4, 8), (4, 32), (8, 8), (8, 32))
"""Stages and microbatches."""


class Comparison(NamedTuple):
    """One schedule on equal stages, in units of a stage's forward pass of a microbatch; backward takes two."""

    words: str
    """Name, with the number of chunks."""
    schedule: Schedule
    lockstep: tuple[Timeline, Timeline]
    """With free messages, and with messages that take time."""
    asynchronous: tuple[Timeline, Timeline]
    """The same, each stage going through the published order, and computing while it sends."""
    held: float
    """Microbatches a stage keeps the activations of, waiting for backward, in lockstep."""
    stashed: int
    """Microbatches it keeps waiting for their weight gradient."""
    held_alone: float
    """Microbatches in flight, weight gradients counted in, where each stage goes through the published order."""


def compare(num_stages: int, num_microbatches: int, hop: float) -> list[Comparison]:
    """The published schedules, on `num_stages` stages and with messages that take `hop`."""
    sizes = num_stages, num_microbatches
    rows: list[tuple[str, Schedule, Orders | None]] = [
        ("gpipe", gpipe(*sizes), None),
        ("1f1b", one_forward_one_backward(*sizes), megatron_orders(*sizes)),
    ]
    for num_chunks in (2, 4):
        schedule = interleaved(*sizes, num_chunks)
        rows.append((f"interleaved, {num_chunks} chunks", schedule, interleaved_orders(schedule)))
    rows.append(("zero-bubble", zero_bubble(*sizes), zero_bubble_orders(*sizes)))
    return [_compared(words, schedule, orders, hop) for words, schedule, orders in rows]


def _compared(words: str, schedule: Schedule, orders: Orders | None, hop: float) -> Comparison:
    parts = schedule.num_chunks
    backward, weight = (1, 1) if schedule.splits_weight else (2, 0)
    free, slow = (Costs(1 / parts, backward / parts, weight / parts, Link(seconds, 1)) for seconds in (0.0, hop))
    alone = asynchronous(schedule, free, orders), asynchronous(schedule, slow, orders)
    return Comparison(
        words=words,
        schedule=schedule,
        lockstep=(lockstep(schedule, free), lockstep(schedule, slow)),
        asynchronous=alone,
        held=residual_slots(schedule).number / parts,
        stashed=weight_slots(schedule).number,
        held_alone=int(alone[0].in_flight.max()) / parts,
    )


def comparison_table(sizes: Iterable[tuple[int, int]] = SIZES, hop: float = 0.3) -> str:
    """Step times and what is held, as a table in Markdown; messages that take time take `hop` forward passes."""
    lines = [
        f"| stages x microbatches | schedule | lockstep | messages {hop} | alone | messages {hop} | held in lockstep | held alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for num_stages, num_microbatches in sizes:
        for row in compare(num_stages, num_microbatches, hop):
            times = [timeline.step_time for timeline in (*row.lockstep, *row.asynchronous)]
            held = f"{row.held:g}" + (f" + {row.stashed}" if row.stashed else "")
            cells = [f"{num_stages} x {num_microbatches}", row.words, *(f"{time:.1f}" for time in times), held, f"{row.held_alone:g}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
