"""The books of a run: one record a step, read one step late."""

import dataclasses
import math
import time

import jax

from giantjax.config import RunConfig
from giantjax.errors import TrainingFault
from giantjax.planner.flops import flops_per_sample
from giantjax.training.events import EventFile
from giantjax.training.metrics import MetricsFile, Record
from giantjax.training.processes import is_first
from giantjax.training.progress import ProgressLine
from giantjax.training.run_directory import RunDirectory
from giantjax.training.step import StepMetrics


class Bookkeeper:
    """Reads the metrics of each step once the next one runs, and writes them everywhere they go; on process 0 alone."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        first: int,
        start_samples: int,
        start_tokens: int,
        progress: ProgressLine,
        peak: tuple[float, str],
    ):
        self.config, self.run, self.first, self.start_samples, self.start_tokens = config, run, first, start_samples, start_tokens
        self.progress, self.peak = progress, peak
        self._files: list[MetricsFile | EventFile] = [MetricsFile(run.metrics, first)] if is_first() else []
        if is_first() and config.logging.tensorboard:
            self._files.append(EventFile(run.tensorboard, first))
        self._pending: tuple[int, StepMetrics] | None = None
        self._record: Record | None = None
        self._clock = time.perf_counter()
        self._skipped_in_a_row = 0

    def start_clock(self) -> None:
        """Count the time of the next step from now: a save or an evaluation is not part of a step."""
        self._clock = time.perf_counter()

    def consumed_samples(self, step: int) -> int:
        """Samples of the training data taken up to and including `step`."""
        return self.start_samples + (step - self.first) * self.config.training.global_batch_size

    def consumed_tokens(self, step: int) -> int:
        """Tokens of them that a step was taken on."""
        positions = self.config.positions_until(step) - self.config.positions_until(self.first)
        return self.start_tokens + positions * self.config.training.global_batch_size

    def push(self, step: int, metrics: StepMetrics) -> None:
        """Take the metrics of a step just dispatched, and write those of the step before, which has ended by now."""
        self.write()
        self._pending = (step, metrics)

    def read(self) -> None:
        """Wait for the last step pushed."""
        if self._pending:
            self._record = self._make_record(*self._pending)
            self._pending = None

    def write(self, **extra: float) -> None:
        """Write the last step pushed, once, with `extra` in its record.

        Raises:
            TrainingFault: its loss or gradient norm is not finite.
        """
        self.read()
        if self._record is None:
            return
        record, self._record = self._record | extra, None
        for file in self._files:
            file.append(record)
        self.progress.show(record)
        limit = self.config.loss_scale.skip_limit
        if self._skipped_in_a_row >= limit:
            self.close()
            raise TrainingFault(
                f"at step {record['step']} gradients overflowed for the {limit}th time in a row, at a loss scale of "
                f"{record['loss_scale']:g}; a lower optimizer.learning_rate or a longer optimizer.warmup is the usual remedy"
            )
        if not self._skipped_in_a_row and not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            self.close()
            raise TrainingFault(
                f"at step {record['step']} the loss is {record['loss']} and the gradient norm {record['grad_norm']}; "
                "a lower optimizer.learning_rate or a longer optimizer.warmup is the usual remedy"
            )

    def sync(self) -> None:
        """Make what is written survive a power failure, before a checkpoint counts on it."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close every file."""
        for file in self._files:
            file.close()

    def _make_record(self, step: int, metrics: StepMetrics) -> Record:
        loss, grad_norm, learning_rate, reported, loss_scale, skipped, in_a_row = jax.tree.map(float, jax.device_get(metrics))
        self._skipped_in_a_row = int(in_a_row)
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        samples, length = self.config.training.global_batch_size, self.config.length_of_step(step)
        model = dataclasses.replace(self.config.model, sequence_length=length)
        return {
            "step": step,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "step_time_s": seconds,
            "tokens_per_s": samples * length / seconds,
            "samples_per_s": samples / seconds,
            "mfu": samples * flops_per_sample(model) / seconds / (self.peak[0] * self.config.mesh.num_devices),
            "consumed_samples": self.consumed_samples(step),
            "consumed_tokens": self.consumed_tokens(step),
            "loss_scale": loss_scale,
            "skipped": int(skipped),
        } | reported
