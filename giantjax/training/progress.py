"""What a person sees while a run trains: one live line on a terminal, plain lines elsewhere."""

import os
import sys
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from giantjax.training.metrics import Record


def summary(record: Record, num_steps: int, seconds_left: float) -> str:
    """One step as a line of text."""
    parts = [
        f"step {record['step']}/{num_steps}",
        f"loss {record['loss']:.4f}",
        f"{record['tokens_per_s']:,.0f} tokens/s",
        f"{record['samples_per_s']:.1f} samples/s",
        f"MFU {100 * record['mfu']:.1f} %",
        f"{timedelta(seconds=round(seconds_left))} left",
    ]
    if "validation_loss" in record:
        parts.insert(2, f"validation loss {record['validation_loss']:.4f}")
    return "  ".join(parts)


class ProgressLine:
    """Shows the latest step; a context manager. A quiet one shows nothing."""

    def __init__(self, num_steps: int, every: int, quiet: bool = False):
        self.num_steps, self.every = num_steps, every
        self._console = Console(soft_wrap=True, highlight=False, quiet=quiet)
        self._live = self._console.is_terminal and not quiet
        self._bar = Progress(
            BarColumn(bar_width=20), TextColumn("{task.description}", markup=False), console=self._console, transient=False
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._step_time: float | None = None

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line of its own."""
        try:
            self._console.print(text, markup=False)
            sys.stdout.flush()
        except BrokenPipeError:
            # The terminal is gone, the run is not: it goes on, and metrics.jsonl has all that was to be seen.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def show(self, record: Record) -> None:
        """Show one step."""
        # A running mean over about ten steps, so that the time left does not jump about.
        latest = record["step_time_s"]
        self._step_time = latest if self._step_time is None else 0.9 * self._step_time + 0.1 * latest
        text = summary(record, self.num_steps, self._step_time * (self.num_steps - record["step"]))
        if self._live:
            # Not before there is a step to show: the bar hides the cursor, and a compilation may be interrupted.
            self._bar.start()
            self._bar.update(self._task, completed=record["step"], description=text)
            if "validation_loss" in record:
                self.say(text)
        elif record["step"] % self.every == 0 or record["step"] in (1, self.num_steps) or "validation_loss" in record:
            self.say(text)
