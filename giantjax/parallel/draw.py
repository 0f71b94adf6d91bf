"""A simulated step as a picture: for the terminal, and for a page."""

import textwrap
from typing import TYPE_CHECKING

from giantjax.errors import InputError
from giantjax.parallel.schedule_table import LETTERS, Action, Kind
from giantjax.parallel.timeline import Event, Timeline, Transfer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ARROWS: dict[Kind, str] = {"forward": ">", "backward": "<", "weight": "="}
COLOURS: dict[Kind, str] = {"forward": "#0072B2", "backward": "#E69F00", "weight": "#009E73"}
"""From Okabe and Ito's palette (2008), told apart with every kind of colour vision, and in grey by their lightness."""
NUMBERS: dict[Kind, str] = {"forward": "white", "backward": "black", "weight": "white"}
HIDDEN, EXPOSED = "#999999", "#CC0000"
"""Of a message while the receiver computes, and while a stage stands idle for it."""
BAR = 0.56
"""Height of a bar; the rest of a row is where messages travel."""
FONT = 7
WIDTH = 12
"""Of a figure, in inches."""


def timeline_text(timeline: Timeline, width: int = 100) -> str:
    """The timeline in lines of at most `width` characters: one a stage, characters in proportion to time.

    `F3>>>` is forward of microbatch 3, `B3<<<` backward, `W3===` a weight gradient, dots are idle. What is too short
    for its number shows arrows alone, and what is shorter than half a character may not show at all.

    Raises:
        InputError: `width` is too small for a line.
    """
    names = [f"stage {stage}" for stage in range(timeline.num_stages)]
    indent = max(map(len, names)) + 1
    if width < indent + 10:
        raise InputError(f"a timeline of {timeline.num_stages} stages needs at least {indent + 10} characters, not {width}")
    lines = [name.ljust(indent) + _row(timeline, stage, width - indent) for stage, name in enumerate(names)]
    return "\n".join([*textwrap.wrap(title(timeline), width), *lines])


def _row(timeline: Timeline, stage: int, width: int) -> str:
    """`width` characters, each for what the stage does in the middle of its part of the step."""
    row = ["."] * width
    per_character = timeline.step_time / width
    for event in timeline.events:
        if event.stage == stage and event.end > event.start:
            first, stop = (round(time / per_character) for time in (event.start, event.end))
            row[first:stop] = _label(event, stop - first)
    return "".join(row)


def _label(event: Event, width: int) -> str:
    """`F3>>>` in exactly `width` characters."""
    word, arrow = LETTERS[event.action.kind] + _number(event.action), ARROWS[event.action.kind]
    return (word if len(word) <= width else "").ljust(width, arrow)


def _number(action: Action) -> str:
    """The microbatch, and the chunk where it is not the first: `3`, `3.1`."""
    return f"{action.microbatch}" + (f".{action.chunk}" if action.chunk else "")


def title(timeline: Timeline) -> str:
    """`1f1b, lockstep, 4 stages, 8 microbatches: step 330 ms, bubble 27.3 %, exposed transfer 0 ms`."""
    return (
        f"{timeline.name}, {timeline.execution}, {timeline.num_stages} stages, {timeline.num_microbatches} microbatches: "
        f"step {_time(timeline.step_time)}, bubble {100 * timeline.bubble:.1f} %, "
        f"exposed transfer {_time(timeline.exposed_transfer)}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{1e3 * seconds:.4g} ms"


def timeline_figure(timeline: Timeline) -> "Figure":
    """A Gantt chart, to be written with `savefig`: a row a stage, a bar an action, a line a message.

    Bars carry the number of their microbatch where it fits. A message runs from the bar of its sender to the row of its
    receiver, grey while it is hidden, red while a stage stands idle for it; messages that take no time are left out.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("drawing a timeline needs matplotlib, which is not installed; pip install matplotlib brings it") from error
    figure = Figure(figsize=(WIDTH, 1.5 + 0.55 * timeline.num_stages), layout="constrained")
    axes = figure.add_subplot()
    for kind in COLOURS:
        _draw_bars(axes, timeline, kind)
    _draw_transfers(axes, timeline)
    axes.set_xlim(0, 1e3 * timeline.step_time or 1)
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title(title(timeline), fontsize=10)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure


def _draw_bars(axes: "Axes", timeline: Timeline, kind: Kind) -> None:
    """A bar for each action of one kind, in one artist of that label."""
    from matplotlib.collections import PolyCollection

    events = [event for event in timeline.events if event.action.kind == kind]
    if not events:
        return
    edges = [(1e3 * event.start, 1e3 * event.end, event.stage - BAR / 2, event.stage + BAR / 2) for event in events]
    corners = [[(left, top), (right, top), (right, bottom), (left, bottom)] for left, right, top, bottom in edges]
    colours = [_shade(COLOURS[kind], event.action.chunk / (1 + max(event.action.chunk for event in events))) for event in events]
    axes.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.5, label=_legend(kind)))
    # The axes take about 0.9 of the figure's width; a digit is about 0.6 of the font's size wide. All bars of one
    # length have their number or none has, so that a row does not stop being numbered at microbatch 10.
    points_per_second = 0.9 * WIDTH * 72 / timeline.step_time if timeline.step_time else 0.0
    needed = 0.6 * FONT * max(len(_number(event.action)) for event in events) + 2
    for event in events:
        if needed < (event.end - event.start) * points_per_second:
            middle = 1e3 * (event.start + event.end) / 2
            axes.text(middle, event.stage, _number(event.action), ha="center", va="center", fontsize=FONT, color=NUMBERS[kind])


def _shade(colour: str, share: float) -> str:
    """The colour, brought so far towards white that dark and light numbers can still be read: later chunks are lighter."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return "#" + "".join(f"{round(part + 0.4 * share * (255 - part)):02X}" for part in parts)


def _legend(kind: Kind) -> str:
    return "weight gradient" if kind == "weight" else kind


def _draw_transfers(axes: "Axes", timeline: Timeline) -> None:
    """A line for each message that takes time, with a mark where it arrives."""
    from matplotlib.collections import LineCollection

    seen = [transfer for transfer in timeline.transfers if transfer.end > transfer.start]
    # What is exposed of a message is its end: the receiver has run out of other work.
    hidden = [_line(transfer, transfer.start, transfer.end - transfer.exposed) for transfer in seen if _exposed_share(transfer) < 1]
    exposed = [_line(transfer, transfer.end - transfer.exposed, transfer.end) for transfer in seen if _exposed_share(transfer) > 0]
    for label, colour, width, lines in (("hidden transfer", HIDDEN, 0.8, hidden), ("exposed transfer", EXPOSED, 1.4, exposed)):
        if lines:
            axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, label=label))
    for colour, waited in ((HIDDEN, False), (EXPOSED, True)):
        for mark, down in (("v", True), ("^", False)):
            chosen = [transfer for transfer in seen if (_exposed_share(transfer) > 0) == waited and _goes_down(transfer) == down]
            axes.plot(*_arrivals(chosen), mark, color=colour, markersize=3)


def _exposed_share(transfer: Transfer) -> float:
    # Rounded, because differences of clock times are not exactly 0 or the message time.
    return round(transfer.exposed / (transfer.end - transfer.start), 6)


def _goes_down(transfer: Transfer) -> bool:
    return transfer.receiver > transfer.sender


def _line(transfer: Transfer, first: float, last: float) -> list[tuple[float, float]]:
    """The part of a message's way that it covers between two times: from its sender's bar to its receiver's, in ms and rows."""
    side = BAR / 2 if _goes_down(transfer) else -BAR / 2
    top, bottom = transfer.sender + side, transfer.receiver - side
    slope = (bottom - top) / (transfer.end - transfer.start)
    return [(1e3 * time, top + slope * (time - transfer.start)) for time in (first, last)]


def _arrivals(transfers: list[Transfer]) -> tuple[list[float], list[float]]:
    ends = [_line(transfer, transfer.end, transfer.end)[0] for transfer in transfers]
    return [time for time, _ in ends], [row for _, row in ends]
