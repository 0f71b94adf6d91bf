"""A simulated step of a schedule: when each action ran, when each message travelled, and what that says. Seconds."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from giantjax.parallel.schedule_table import Action

Execution = Literal["lockstep", "asynchronous"]


class Event(NamedTuple):
    """One action and when it ran."""

    action: Action
    start: float
    end: float

    @property
    def stage(self) -> int:
        """The stage that ran it."""
        return self.action.stage


class Transfer(NamedTuple):
    """The message that carries the result of `action` to the stage that needs it."""

    action: Action
    receiver: int
    start: float
    end: float
    exposed: float
    """Seconds for which a stage stood idle that this message kept waiting."""

    @property
    def sender(self) -> int:
        """The stage it comes from."""
        return self.action.stage


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step of a schedule, from the first forward action to the last backward action. Times in seconds."""

    name: str
    """Of the schedule."""
    execution: Execution
    num_stages: int
    num_microbatches: int
    events: tuple[Event, ...]
    """Every action, stage by stage in the order in which the stage ran them."""
    transfers: tuple[Transfer, ...]
    """Every message between two stages, by its start."""
    step_time: float
    exposed_transfer: float
    """By how much the step is longer than it would be if messages arrived at once."""

    @property
    def busy(self) -> Float[np.ndarray, "S"]:
        """Seconds for which each stage does useful work."""
        seconds = [event.end - event.start for event in self.events]
        return np.bincount([event.stage for event in self.events], seconds, self.num_stages)

    @property
    def bubble_by_stage(self) -> Float[np.ndarray, "S"]:
        """1 - (useful work of the stage) / (step time).

        The rest is waiting, be it for a neighbour, for a message, or for a slower stage of the same tick; what a
        lockstep stage computes meanwhile to be thrown away is no use. Lockstep GPipe and 1F1B with equal stages and
        free links take (M + S - 1)(f + b), of which every stage uses M(f + b): each bubble is (S - 1)/(M + S - 1),
        whatever f and b are. This is a share of the whole step; papers that divide by the useful work alone write
        (S - 1)/M for the same schedule (Narayanan et al., 2021).
        """
        return 1 - self.busy / self.step_time if self.step_time else np.zeros(self.num_stages)

    @property
    def bubble(self) -> float:
        """Mean of `bubble_by_stage`."""
        return float(self.bubble_by_stage.mean())

    @property
    def in_flight(self) -> Int[np.ndarray, "S"]:
        """The most microbatches (of chunks, where there are several) in flight at once on each stage.

        One is in flight from the start of its first action on the stage to the end of its last, which is its weight
        gradient where that is an action of its own, and forward itself where there is no backward pass.
        """
        peaks = np.zeros(self.num_stages, int)
        last = {(action.stage, action.microbatch, action.chunk): action for action, _, _ in self.events}
        now = np.zeros(self.num_stages, int)
        for action, _, _ in self.events:
            now[action.stage] += action.kind == "forward"
            peaks[action.stage] = max(peaks[action.stage], now[action.stage])
            now[action.stage] -= last[action.stage, action.microbatch, action.chunk] == action
        return peaks

    def peak_activation_bytes(self, bytes_in_flight: ArrayLike) -> Float[np.ndarray, "S"]:
        """Bytes of activations each stage holds at most, if one microbatch in flight takes `bytes_in_flight` (one number, or [S])."""
        return self.in_flight * np.asarray(bytes_in_flight, float)
