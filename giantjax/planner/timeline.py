"""What a schedule takes, in closed form: the same as `giantjax.parallel.simulate`, without walking through it."""

from collections.abc import Sequence
from typing import NamedTuple


class Duration(NamedTuple):
    """Seconds of one step of a pipeline."""

    work: float
    """If messages arrived at once."""
    exposed: float
    """Waiting for messages."""

    @property
    def total(self) -> float:
        """Both."""
        return self.work + self.exposed


def num_ticks(schedule: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> int:
    """Ticks that have a forward action, and as many that have a backward one."""
    if schedule == "interleaved":
        return max(num_chunks * num_microbatches + num_stages, num_chunks * num_stages + num_microbatches) - 1
    return num_microbatches + num_stages - 1


def lockstep(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    forward: float,
    backward: float,
    hop: float,
    *,
    weight: float = 0.0,
    num_chunks: int = 1,
) -> Duration:
    """Equal stages that move from tick to tick together, as `simulate.lockstep` has them.

    Args:
        schedule: 1f1b, gpipe, interleaved or zero-bubble.
        num_stages: S.
        num_microbatches: M.
        forward: seconds of an action, which is of one chunk, on the slowest stage.
        backward: the same; of the input's gradient alone where weights' have actions of their own.
        hop: seconds of a message between neighbours.
        weight: seconds of an action that computes weights' gradients.
        num_chunks: on each stage.
    """
    ticks = num_ticks(schedule, num_stages, num_microbatches, num_chunks)
    work = ticks * (forward + backward) + num_microbatches * weight
    if num_stages == 1:
        return Duration(work, 0.0)
    if schedule == "gpipe":
        return Duration(work, 2 * (num_microbatches + num_stages - 2) * hop)
    alone = num_stages * num_chunks
    ramps = 2 * (alone - 1) * hop
    return Duration(work, ramps + max(0, ticks - alone) * (max(0.0, hop - backward) + max(0.0, hop - forward - weight)))


def asynchronous(stages: Sequence[float], num_microbatches: int, hop: float, num_chunks: int = 1, hidden: float = 0.0) -> Duration:
    """1F1B in which each stage waits for its messages only, and sends block, as `simulate.asynchronous` has it.

    Exact for free messages where the last stage, which has the head, is the slowest; an upper bound where another is.
    Messages that block cost two hops a microbatch. Interleaving `num_chunks` chunks divides the ramps and multiplies the
    messages by that (Narayanan et al., 2021).

    Args:
        stages: seconds of forward and backward of a microbatch on each stage.
        num_microbatches: M.
        hop: seconds of a message between neighbours.
        num_chunks: of the model on each stage.
        hidden: share of the messages' time between the ramps that lies over work.
    """
    slowest = max(stages)
    work = num_microbatches * slowest + (sum(stages) - slowest) / num_chunks
    if len(stages) == 1:
        return Duration(work, 0.0)
    steady = (num_microbatches - 1) * 2 * hop * num_chunks * (1 - hidden)
    return Duration(work, steady + 2 * hop * (len(stages) - 1))
