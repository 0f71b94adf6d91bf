"""What the processes of a run tell each other while it trains, through JAX's key-value store; a process alone asks nobody."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from giantjax.errors import TrainingFault, report
from giantjax.training.stop import StopRequest

POLL_SECONDS = 0.5
"""Between looks for a fault of another process."""
GRACE_SECONDS = 6.0
"""For which process 0, which holds the store, waits at a fault until the others have seen it; without it JAX aborts them."""
LINGER_SECONDS = 3.0
"""For which a process whose collectives broke off waits to be told why."""


def is_first() -> bool:
    """Whether this process writes what is written once."""
    return jax.process_index() == 0


def from_first(name: str, value: Any) -> Any:
    """The value that process 0 has, on every process; what JSON can hold."""
    if jax.process_count() == 1:
        return value
    if is_first():
        _store().key_value_set(f"giantjax/{name}", json.dumps(value))
    return json.loads(_store().blocking_key_value_get(f"giantjax/{name}", 300_000))


class Stop:
    """The step after which all processes stop, once a signal has reached one of them.

    The first to see one, after step n, names n + 2, and before it begins n + 1. No process gets to the end of n + 2 without
    having read the metrics of n + 1, for which all have begun it; so each finds what was named in time, at one look a step
    and without waiting for a device.
    """

    def __init__(self) -> None:
        self._request = StopRequest()
        self._agreed: tuple[int, str] | None = None
        self._named = False

    def after(self, step: int) -> str | None:
        """The signal for which the run is to stop after `step`; None where it goes on."""
        name = self._request.name  # read once: a signal may arrive at any moment
        if jax.process_count() == 1:
            return name
        if name and not self._named and not self._agreed:
            self._named = True
            _set_once("stop", [step + 2, f"{name} to process {jax.process_index()}"])
        if not self._agreed and (found := _look("stop")):
            self._agreed = (found[0], found[1])
        return self._agreed[1] if self._agreed and step >= self._agreed[0] else None


@contextlib.contextmanager
def faults_shared() -> Iterator[None]:
    """Let no process wait for one that has stopped at an error: all of a job print its sentence and exit with its code.

    They exit at once, for an orderly end waits for the others too.
    """
    if jax.process_count() == 1:
        yield
        return
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(ended,), daemon=True)
    watch.start()
    try:
        yield
    except Exception as error:
        code = report(error)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _set_once("fault", [jax.process_index(), code, str(error)])
            _leave_seen()
        os._exit(code)
    finally:
        ended.set()
        watch.join()


@contextlib.contextmanager
def losses_named() -> Iterator[None]:
    """Say of an error inside a collective that another process is gone.

    Raises:
        TrainingFault: in its place.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or "RESOURCE_EXHAUSTED" in str(error):
            raise
        time.sleep(LINGER_SECONDS)  # where the other has said why, this process ends here
        first_line = str(error).partition("\n")[0]
        raise TrainingFault(f"the collectives broke off, as they do when another process is lost ({first_line:.200})") from error


def _watch(ended: threading.Event) -> None:
    while not ended.wait(POLL_SECONDS):
        try:
            found = _look("fault")
        except jax.errors.JaxRuntimeError:
            return
        if found and found[0] != jax.process_index():
            process, code, sentence = found
            print(f"stopped with process {process}: {sentence}", file=sys.stderr, flush=True)
            _leave_seen()
            # The main thread may be waiting for that process inside a collective.
            os._exit(code)


def _leave_seen() -> None:
    """Say that this process has seen the fault; process 0 waits for all to say so."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _set_once(f"seen/{jax.process_index()}", True)
        end = time.monotonic() + GRACE_SECONDS
        while is_first() and len(_store().key_value_dir_get("giantjax/seen/")) < jax.process_count() and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 5)


def _store() -> Any:
    """JAX's key-value store, which it has for its libraries."""
    return distributed.global_state.client


def _set_once(name: str, value: Any) -> None:
    try:
        _store().key_value_set(f"giantjax/{name}", json.dumps(value))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def _look(name: str) -> Any:
    try:
        return json.loads(_store().key_value_try_get(f"giantjax/{name}"))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" not in str(error):
            raise
        return None
