"""Pictures of simulated steps show every action where it is."""

import io
import sys

import numpy as np
import pytest

from giantjax.errors import InputError
from giantjax.parallel.draw import timeline_figure, timeline_text
from giantjax.parallel.orders import megatron_orders
from giantjax.parallel.schedule import KINDS, gpipe, interleaved, one_forward_one_backward
from giantjax.parallel.simulate import Costs, Link, asynchronous, lockstep
from tests.parallel.tables import ALONE, chunked, split

COSTS = Costs(0.010, 0.020, link=Link(0.002, 1e9), message_bytes=10e6)
TIMELINES = {
    "slow link": lockstep(one_forward_one_backward(4, 8), COSTS),
    "free link": lockstep(one_forward_one_backward(4, 8), Costs(0.010, 0.020)),
    "megatron": asynchronous(one_forward_one_backward(4, 8), COSTS, megatron_orders(4, 8), "block"),
    "many": lockstep(one_forward_one_backward(8, 64), COSTS),
    "one stage": lockstep(gpipe(1, 1), COSTS),
    "chunks": lockstep(chunked(2, 3), COSTS),
    "weight gradients": lockstep(split(2, 3), Costs(0.01, 0.01, 0.01)),
    "interleaved": lockstep(interleaved(2, 4, 3), Costs(0.01, 0.02, link=Link(0.005, 1e9))),
    "switches": lockstep(ALONE, COSTS),
    "no time": lockstep(gpipe(2, 2), Costs(0)),
}


def test_text_in_proportion_to_time():
    """Ticks F F BF BF B B with f = 1 and b = 2: four characters a second, then one, which no number of F fits in."""
    timeline = lockstep(one_forward_one_backward(2, 3), Costs(1, 2))
    assert timeline_text(timeline, width=8 + 48).splitlines() == [
        "1f1b, lockstep, 2 stages, 3 microbatches: step 12 s,",
        "bubble 25.0 %, exposed transfer 0 ms",
        "stage 0 F0>>F1>>........F2>>B0<<<<<<....B1<<<<<<B2<<<<<<",
        "stage 1 ....F0>>B0<<<<<<F1>>B1<<<<<<F2>>B2<<<<<<........",
    ]
    assert timeline_text(timeline, width=20).splitlines()[-2:] == ["stage 0 >>..>B0.B1B2", "stage 1 .>B0>B1>B2.."]


@pytest.mark.parametrize("width", [30, 100, 137])
@pytest.mark.parametrize("name", TIMELINES)
def test_text_has_a_line_a_stage_of_the_width_asked_for(name, width):
    timeline = TIMELINES[name]
    lines = timeline_text(timeline, width).splitlines()
    rows = lines[-timeline.num_stages :]
    assert all(row.startswith(f"stage {stage} ") and len(row) == width for stage, row in enumerate(rows))
    assert all(len(line) <= width for line in lines)


def test_text_shows_weight_gradients_and_chunks():
    assert "W2=" in timeline_text(TIMELINES["weight gradients"])
    assert "B2.1<" in timeline_text(TIMELINES["chunks"])


def test_text_too_narrow_is_refused():
    with pytest.raises(InputError, match="needs at least 18 characters, not 17"):
        timeline_text(TIMELINES["free link"], width=17)


def shapes(timeline) -> dict[str, list[np.ndarray]]:
    """The corners of the bars and the ends of the lines of a figure, by their label in the legend."""
    axes = timeline_figure(timeline).axes[0]
    return {str(collection.get_label()): [np.asarray(path.vertices) for path in collection.get_paths()] for collection in axes.collections}


@pytest.mark.parametrize("name", TIMELINES)
def test_figure_has_a_bar_for_every_action(name):
    pytest.importorskip("matplotlib")
    timeline = TIMELINES[name]
    found = shapes(timeline)
    for kind in KINDS:
        events = [event for event in timeline.events if event.action.kind == kind]
        bars = found.get("weight gradient" if kind == "weight" else kind, [])
        assert len(bars) == len(events)
        for event, corners in zip(events, bars, strict=True):
            low, high = corners.min(axis=0), corners.max(axis=0)
            assert (low[0], high[0]) == pytest.approx((1e3 * event.start, 1e3 * event.end))
            assert event.stage - 0.5 < low[1] < event.stage < high[1] < event.stage + 0.5
    picture = io.BytesIO()
    timeline_figure(timeline).savefig(picture, format="png")
    assert picture.getvalue().startswith(b"\x89PNG")


def test_figure_says_what_the_step_takes_and_numbers_what_fits():
    pytest.importorskip("matplotlib")
    axes = timeline_figure(TIMELINES["free link"]).axes[0]
    assert axes.get_title() == "1f1b, lockstep, 4 stages, 8 microbatches: step 330 ms, bubble 27.3 %, exposed transfer 0 ms"
    assert sorted(text.get_text() for text in axes.texts) == sorted(2 * 4 * "01234567")
    assert not timeline_figure(TIMELINES["many"]).axes[0].texts


def test_figure_tells_exposed_transfers_from_hidden_ones():
    pytest.importorskip("matplotlib")

    def lines(name: str) -> dict[str, float]:
        """Milliseconds of lines by label."""
        found = shapes(TIMELINES[name])
        return {label: sum(np.ptp(line[:, 0]) for line in ends) for label, ends in found.items() if "transfer" in label}

    assert lines("free link") == {}
    assert list(lines("megatron")) == ["exposed transfer"]
    transfers = TIMELINES["slow link"].transfers
    exposed = 1e3 * sum(transfer.exposed for transfer in transfers)
    assert lines("slow link") == pytest.approx({"hidden transfer": 12 * len(transfers) - exposed, "exposed transfer": exposed})


def test_figure_shows_later_chunks_lighter():
    pytest.importorskip("matplotlib")
    timeline = TIMELINES["interleaved"]
    (forward,) = (c for c in timeline_figure(timeline).axes[0].collections if c.get_label() == "forward")
    chunks = [event.action.chunk for event in timeline.events if event.action.kind == "forward"]
    light = {chunk: float(colour[:3].sum()) for chunk, colour in zip(chunks, np.asarray(forward.get_facecolor()), strict=True)}
    assert light[0] < light[1] < light[2]


def test_figure_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError, match="pip install matplotlib"):
        timeline_figure(TIMELINES["free link"])
