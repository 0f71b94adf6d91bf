"""The one kind of error a user can mend, and the words that say how."""

import difflib
import math
import sys
import traceback
from collections.abc import Iterable


class InputError(ValueError):
    """Bad configuration or input: one sentence with the field, the numbers and the nearest valid values.

    The scripts print it without a traceback and exit with code 2.
    """


class TrainingFault(RuntimeError):  # noqa: N818 (a fault is what the exit code stands for)
    """A fault that training detected in itself (NaN, hang, lost peer): the scripts exit with code 3."""


def report(error: Exception) -> int:
    """Print an error to stderr, in one sentence where it is one that a user can mend or a detected fault; the exit code for it."""
    if isinstance(error, InputError):
        print("error:", *str(error).splitlines(), file=sys.stderr, flush=True)
        return 2
    if isinstance(error, TrainingFault):
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        return 3
    traceback.print_exception(error)
    return 1


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`; did you mean X?` for the closest candidate, or the empty string where nothing is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def nearest_multiples(value: int, multiple: int) -> str:
    """The multiples of `multiple` on both sides of `value`, as words: `96 or 128`."""
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below > 0 else f"{multiple}"


def nearest_divisors(value: int, number: int) -> str:
    """The divisors of `number` on both sides of `value`, as words: `4 or 6`."""
    # In pairs, so that numbers up to 10**12 take a tenth of a second; above that, some divisors are passed over.
    small = [d for d in range(1, min(math.isqrt(number), 10**6) + 1) if number % d == 0]
    divisors = sorted({*small, *(number // d for d in small)})
    below = [d for d in divisors if d < value][-1:]
    above = [d for d in divisors if d > value][:1]
    return " or ".join(str(d) for d in below + above)
