"""What a schedule takes: a timeline from durations and link costs, in seconds, without a device.

Two executions are modelled. `lockstep` is how giantjax runs a table: all stages move from tick to tick together.
`asynchronous` is how Megatron-LM runs one: every stage works through a list of its own and waits for messages.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import ArrayLike

from giantjax.errors import InputError
from giantjax.parallel.schedule_table import KINDS, Action, Kind, Schedule, dependencies, validate

Execution = Literal["lockstep", "asynchronous"]
Sends = Literal["overlap", "block"]
Orders = Sequence[Sequence[Action]]
"""What each stage does, one action after the other."""


@dataclass(frozen=True)
class Link:
    """What carries messages between neighbours: full duplex, so that the two directions do not slow each other."""

    latency: float
    """Seconds a message takes beside its bytes."""
    bandwidth: float
    """Bytes/s in each direction."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency) and self.latency >= 0 and self.bandwidth > 0):
            raise InputError(f"a link of {self.latency} s and {self.bandwidth} bytes/s is none; latency is 0 or more, bandwidth above 0")

    def seconds(self, num_bytes: float) -> float:
        """Seconds from the start of a message of `num_bytes` to its arrival."""
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, eq=False)
class Costs:
    """What the pieces of a schedule take. Durations are in seconds: one number, one a stage, or [S, chunks]."""

    forward: ArrayLike
    backward: ArrayLike = 0.0
    """All of backward; the input gradient alone where the schedule splits weight gradients off."""
    weight: ArrayLike = 0.0
    """Only for schedules that split weight gradients off."""
    link: Link | None = None
    """None: messages arrive at once."""
    message_bytes: float = 0.0
    """Of one microbatch's activation at a stage boundary, which are also those of its gradient."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            durations = np.asarray(getattr(self, kind), float)
            if not (np.isfinite(durations).all() and (durations >= 0).all()):
                raise InputError(f"durations of {kind} are {durations.tolist()} s; each must be finite and 0 or more")
        if not (math.isfinite(self.message_bytes) and self.message_bytes >= 0):
            raise InputError(f"a message of {self.message_bytes} bytes is none; it must be finite and 0 or more")

    @property
    def hop(self) -> float:
        """Seconds a message takes from one stage to the next."""
        return 0.0 if self.link is None else self.link.seconds(self.message_bytes)

    def durations(self, schedule: Schedule) -> dict[Kind, Float[np.ndarray, "S chunks"]]:
        """Seconds of each kind of action on each stage and chunk.

        Raises:
            InputError: the durations are for other stages or chunks, or the schedule has no use for weight durations.
        """
        if np.any(self.weight) and not schedule.splits_weight:
            raise InputError(
                f"weight gradients have durations, but schedule {schedule.name} computes them in its backward actions; "
                "add their seconds to those of backward"
            )
        return {kind: _spread(kind, getattr(self, kind), schedule.num_stages, schedule.num_chunks) for kind in KINDS}


def _spread(kind: Kind, durations: ArrayLike, num_stages: int, num_chunks: int) -> Float[np.ndarray, "S chunks"]:
    given = np.asarray(durations, float)
    column = given[:, None] if given.ndim == 1 else given
    if column.ndim > 2 or any(size not in (1, whole) for size, whole in zip(column.shape, (num_stages, num_chunks), strict=False)):
        raise InputError(
            f"durations of {kind} have shape {given.shape}; for {num_stages} stages of {num_chunks} chunks they are one number, "
            f"({num_stages},) or ({num_stages}, {num_chunks})"
        )
    return np.broadcast_to(column, (num_stages, num_chunks))


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


def lockstep(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a table on giantjax's executor.

    All stages run the same kinds of action in a tick, so a kind that occurs anywhere in the tick takes all stages as
    long as it takes the slowest stage and chunk. What travels, travels in this order (one tick's loop body):

    1. The last tick's forward results leave, and travel while backward and weight gradients are computed.
    2. Forward waits for those of them that it needs.
    3. The input gradients leave when backward has ended and the forward results have arrived, and travel while weight
       gradients and forward are computed.
    4. The next tick waits for those of them that its backward needs.

    With message time h on every boundary, lockstep 1F1B of S > 1 equal stages takes (M + S - 1)(f + b) for the work and
    exposes 2(S - 1) h while it fills and drains, plus (M - 1)(max(0, h - b) + max(0, h - f)) between.

    Raises:
        InputError: the table is not valid, or the durations do not fit it.
    """
    validate(schedule)
    durations = costs.durations(schedule)
    mail = _Mail(costs.hop, _receivers(schedule))
    events: list[Event] = []
    leaving: list[Action] = []
    clock = exposed = 0.0
    for work in _ticks(schedule):
        clock, waited = mail.wait(clock, work["backward"])
        exposed += waited
        received = max([clock, *(mail.send(action, clock) for action in leaving)])
        for kind in KINDS:
            if kind == "forward":
                clock, waited = mail.wait(clock, work["forward"])
                exposed += waited
            events += [Event(action, clock, clock + durations[kind][action.stage, action.chunk]) for action in work[kind]]
            clock += durations[kind].max() if work[kind] else 0.0
            if kind == "backward":
                for action in work["backward"]:
                    mail.send(action, max(clock, received))
        leaving = work["forward"]
    return _timeline(schedule, "lockstep", events, mail, float(clock), float(exposed))


def asynchronous(schedule: Schedule, costs: Costs, orders: Orders | None = None, sends: Sends = "overlap") -> Timeline:
    """The timeline when each stage works through its own list.

    An action starts when its stage is free and its inputs have arrived. A message leaves when its action has ended and
    the wire in its direction is free, and arrives one message time later. Receivers are always ready to receive,
    which a rendezvous is not: the time of `block` is a lower bound.

    Args:
        schedule: what there is to do; its ticks count only where `orders` is None.
        costs: what it takes.
        orders: what each stage does, one after the other; None for the order of the table.
        sends: whether a stage goes on computing while its message travels (`overlap`), or stands still until it has
            arrived (`block`), as Megatron-LM's 1F1B does, which waits for its batched sends and receives.

    Raises:
        InputError: the orders are not those of the schedule's actions, or wait for each other.
    """
    validate(schedule)
    orders = table_orders(schedule) if orders is None else orders
    _check_orders(schedule, orders)
    durations = costs.durations(schedule)
    events, mail = _run(schedule, orders, durations, costs.hop, sends)
    step_time = max(event.end for event in events)
    free_time = max(event.end for event in _run(schedule, orders, durations, 0.0, sends)[0]) if costs.hop else step_time
    return _timeline(schedule, "asynchronous", events, mail, step_time, step_time - free_time)


def table_orders(schedule: Schedule) -> list[list[Action]]:
    """What each stage does in the order of the table."""
    orders: list[list[Action]] = [[] for _ in range(schedule.num_stages)]
    for _, action in schedule.actions():
        orders[action.stage].append(action)
    return orders


def megatron_orders(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B as Megatron-LM runs it, each stage on its own (Narayanan et al., 2021, figure 4, above).

    Stage s runs S - 1 - s forward actions, then forward and backward in turn, then the backward actions left, so that
    at most S - s microbatches are in flight on it.
    """
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        order = [Action("forward", stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(num_microbatches):
            if microbatch + ahead < num_microbatches:
                order.append(Action("forward", stage, microbatch + ahead))
            order.append(Action("backward", stage, microbatch))
        orders.append(order)
    return orders


class _Mail:
    """Messages under way and delivered."""

    def __init__(self, hop: float, receivers: Mapping[Action, Action]) -> None:
        self.hop = hop
        self.receivers = receivers
        self.inbox: dict[Action, Transfer] = {}
        """By the action that needs it; no action needs two."""
        self.wire_free: dict[tuple[int, int], float] = {}

    def send(self, action: Action, ready: float) -> float:
        """Hand the result of `action`, if another stage needs it, to the wire at `ready`; when it has arrived."""
        if action not in self.receivers:
            return ready
        receiver = self.receivers[action]
        wire = (action.stage, receiver.stage)
        start = max(ready, self.wire_free.get(wire, 0.0))
        self.wire_free[wire] = start + self.hop
        self.inbox[receiver] = Transfer(action, receiver.stage, start, start + self.hop, 0.0)
        return start + self.hop

    def wait(self, clock: float, actions: Iterable[Action]) -> tuple[float, float]:
        """When all of `actions`, ready at `clock`, have their messages, and the seconds that takes."""
        ready = clock
        for action in actions:
            transfer = self.inbox.get(action)
            if transfer and transfer.end > clock:
                ready = max(ready, transfer.end)
                # Until the message left, it was the sender that the stage waited for.
                self.expose(action, transfer.end - max(clock, transfer.start))
        return ready, ready - clock

    def expose(self, receiver: Action, seconds: float) -> None:
        """The message to `receiver` keeps a stage idle for so long."""
        transfer = self.inbox[receiver]
        self.inbox[receiver] = transfer._replace(exposed=max(transfer.exposed, seconds))


def _run(
    schedule: Schedule, orders: Orders, durations: Mapping[Kind, Float[np.ndarray, "S chunks"]], hop: float, sends: Sends
) -> tuple[list[Event], _Mail]:
    """Let each stage go on as far as it can, again and again, until all lists are done."""
    mail = _Mail(hop, _receivers(schedule))
    events: list[Event] = []
    done: set[Action] = set()
    ahead, free = [deque(order) for order in orders], [0.0] * len(orders)
    while any(ahead):
        before = len(done)
        for stage, order in enumerate(ahead):
            while order and done.issuperset(dependencies(schedule, order[0])):
                action = order.popleft()
                start, _ = mail.wait(free[stage], [action])
                end = start + float(durations[action.kind][stage, action.chunk])
                arrival = mail.send(action, end)
                if sends == "block" and action in mail.receivers:
                    mail.expose(mail.receivers[action], hop)
                free[stage] = arrival if sends == "block" else end
                events.append(Event(action, start, end))
                done.add(action)
        if len(done) == before:
            raise _deadlock(schedule, {stage: order[0] for stage, order in enumerate(ahead) if order}, done)
    return events, mail


def _deadlock(schedule: Schedule, heads: Mapping[int, Action], done: set[Action]) -> InputError:
    """The ring of actions that wait for each other, found by asking each stage's next action what it waits for."""
    action = next(iter(heads.values()))
    seen: list[Action] = []
    words: list[str] = []
    while action not in seen:
        seen.append(action)
        needed = next(needed for needed in dependencies(schedule, action) if needed not in done)
        following = heads[needed.stage]
        words.append(f"the {action} waits for the {needed}" + ("" if following == needed else f", which comes after the {following}"))
        action = following
    return InputError("the orders of the stages wait for each other: " + "; ".join(words[seen.index(action) :]))


def _check_orders(schedule: Schedule, orders: Orders) -> None:
    """Make sure that the orders hold each action of the schedule once, on its own stage."""
    if len(orders) != schedule.num_stages:
        raise InputError(f"there are orders for {len(orders)} stages, but schedule {schedule.name} has {schedule.num_stages}")
    expected = {action for _, action in schedule.actions()}
    for stage, order in enumerate(orders):
        for action, times in Counter(order).items():
            if action not in expected or action.stage != stage:
                raise InputError(f"the order of stage {stage} holds the {action}, which is none of its actions in schedule {schedule.name}")
            if times > 1:
                raise InputError(f"the order of stage {stage} holds the {action} {times} times")
    missing = expected.difference(*orders)
    if missing:
        action = min(missing, key=lambda action: action[1:])
        raise InputError(f"the order of stage {action.stage} lacks the {action}")


def _receivers(schedule: Schedule) -> dict[Action, Action]:
    """The action on another stage that needs the result of each action, where there is one."""
    return {needed: action for _, action in schedule.actions() for needed in dependencies(schedule, action) if needed.stage != action.stage}


def _ticks(schedule: Schedule) -> list[dict[Kind, list[Action]]]:
    """The actions of each tick by kind."""
    ticks: list[dict[Kind, list[Action]]] = [{kind: [] for kind in KINDS} for _ in range(schedule.num_ticks)]
    for tick, action in schedule.actions():
        ticks[tick][action.kind].append(action)
    return ticks


def _timeline(schedule: Schedule, execution: Execution, events: list[Event], mail: _Mail, step_time: float, exposed: float) -> Timeline:
    # Sorting is stable: what a stage did stays in its order even where an action takes no time.
    by_stage = sorted(events, key=lambda event: event.stage)
    transfers = sorted(mail.inbox.values(), key=lambda transfer: transfer.start)
    return Timeline(
        schedule.name, execution, schedule.num_stages, schedule.num_microbatches, tuple(by_stage), tuple(transfers), step_time, exposed
    )
