"""Signals that ask a run to save and end."""

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Set by the first SIGTERM, SIGINT or SIGUSR1; a second signal acts as it does in any other program."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.restore()

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
