"""What a run writes: checkpoints and logs."""

from dataclasses import dataclass

from giantjax.fields import at_least, check_types


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, and what may change on resume."""

    every: int = 0
    """Steps between saves; the last step is always saved. 0 saves only that one."""
    keep: int = 3
    """Latest checkpoints kept."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are kept for good; None keeps only the latest."""
    accept_change: tuple[str, ...] = ()
    """Fields that may differ from the run that is resumed, such as optimizer.learning_rate; each is logged."""

    def __post_init__(self) -> None:
        check_types(self, "checkpoint")
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)
        if self.keep_every is not None:
            at_least("checkpoint.keep_every", self.keep_every, 1)


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown while training."""

    every: int = 10
    """Steps between printed lines when stdout is not a terminal."""
    tensorboard: bool = True
    """Write RUN_DIR/tensorboard."""

    def __post_init__(self) -> None:
        check_types(self, "logging")
        at_least("logging.every", self.every, 1)
