"""What a schedule takes: a timeline from durations and link costs, in seconds, without a device.

Two executions are modelled. `lockstep` is how giantjax runs a table: all stages move from tick to tick together.
`asynchronous` is how Megatron-LM runs one: every stage works through a list of its own and waits for messages.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from giantjax.errors import InputError
from giantjax.parallel.orders import Orders, table_orders
from giantjax.parallel.schedule_table import KINDS, Action, Kind, Schedule, dependencies, validate
from giantjax.parallel.timeline import Event, Execution, Timeline, Transfer

Sends = Literal["overlap", "block"]
Work = dict[Kind, list[Action]]
"""Of one tick."""
Durations = Mapping[Kind, Float[np.ndarray, "S chunks"]]


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


def lockstep(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline of a table on giantjax's executor.

    In a lockstep tick all stages run the same kinds of action, so a kind that occurs anywhere in it takes all stages as
    long as it takes the slowest stage and chunk. What travels, travels in this order (one tick's loop body):

    1. The last tick's forward results leave, and travel while backward and weight gradients are computed.
    2. Forward waits for those of them that it needs.
    3. The input gradients leave when backward has ended and the forward results have arrived, and travel while weight
       gradients and forward are computed.
    4. The next tick waits for those of them that its backward needs.

    In a switch tick each stage runs its own cells alone, and the tick takes as long as the busiest stage. Messages travel
    outside of the branches, beside no work: the last tick's forward results before, the input gradients after it.

    With message time h on every boundary, lockstep 1F1B of S > 1 equal stages takes (M + S - 1)(f + b) for the work and
    exposes 2(S - 1) h while it fills and drains, plus (M - 1)(max(0, h - b) + max(0, h - f)) between.

    Raises:
        InputError: the table is not valid, or the durations do not fit it.
    """
    validate(schedule)
    durations = costs.durations(schedule)
    mail, events = _Mail(costs.hop, _receivers(schedule)), list[Event]()
    ticks = _ticks(schedule)
    leaving: list[Action] = []
    clock = exposed = 0.0
    for segment in schedule.segments():
        run = _switch_tick if segment.mode == "switch" else _lockstep_tick
        for work in ticks[segment.first : segment.stop]:
            clock, waited = run(work, leaving, clock, durations, mail, events)
            exposed += waited
            leaving = work["forward"]
    return _timeline(schedule, "lockstep", events, mail, float(clock), float(exposed))


def _lockstep_tick(
    work: Work, leaving: Sequence[Action], clock: float, durations: Durations, mail: "_Mail", events: list[Event]
) -> tuple[float, float]:
    """(when the tick ends, seconds of it spent on waiting for messages) of one that starts at `clock`; its events are added."""
    clock, exposed = mail.wait(clock, work["backward"])
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
    return clock, exposed


def _switch_tick(
    work: Work, leaving: Sequence[Action], clock: float, durations: Durations, mail: "_Mail", events: list[Event]
) -> tuple[float, float]:
    """The same of a tick in which each stage runs its own cells alone."""
    for action in leaving:
        mail.send(action, clock)
    begin = mail.wait_for_all(clock)
    free: dict[int, float] = {}
    for kind in KINDS:
        for action in work[kind]:
            start = free.get(action.stage, begin)
            free[action.stage] = start + durations[kind][action.stage, action.chunk]
            events.append(Event(action, start, free[action.stage]))
    end = max(free.values())
    for action in work["backward"]:
        mail.send(action, end)
    done = mail.wait_for_all(end)
    return done, begin - clock + done - end


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


class _Mail:
    """Messages under way and delivered."""

    def __init__(self, hop: float, receivers: Mapping[Action, Action]) -> None:
        self.hop = hop
        self.receivers = receivers
        self.inbox: dict[Action, Transfer] = {}
        """By the action that needs it; no action needs two."""
        self.under_way: list[Action] = []
        """The receivers of messages that nothing has waited for as a whole."""
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
        self.under_way.append(receiver)
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

    def wait_for_all(self, clock: float) -> float:
        """When all messages handed over by `clock` have arrived, whether they are needed then or not."""
        late = [receiver for receiver in self.under_way if self.inbox[receiver].end > clock]
        for receiver in late:
            self.expose(receiver, self.inbox[receiver].end - max(clock, self.inbox[receiver].start))
        self.under_way = []
        return max((self.inbox[receiver].end for receiver in late), default=clock)

    def expose(self, receiver: Action, seconds: float) -> None:
        """The message to `receiver` keeps a stage idle for so long."""
        transfer = self.inbox[receiver]
        self.inbox[receiver] = transfer._replace(exposed=max(transfer.exposed, seconds))


def _run(schedule: Schedule, orders: Orders, durations: Durations, hop: float, sends: Sends) -> tuple[list[Event], _Mail]:
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
            raise deadlock(schedule, {stage: order[0] for stage, order in enumerate(ahead) if order}, done)
    return events, mail


def deadlock(schedule: Schedule, heads: Mapping[int, Action], done: set[Action]) -> InputError:
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


def _ticks(schedule: Schedule) -> list[Work]:
    """The actions of each tick by kind."""
    ticks: list[Work] = [{kind: [] for kind in KINDS} for _ in range(schedule.num_ticks)]
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
