"""Checkpoints: the state, the data position and the configuration, written by orbax.

Parameters lie on disk stacked by layer in layer order. A checkpoint becomes visible by the rename of its folder,
so a killed save leaves either the whole of it or nothing that a restore would look at.
"""

import contextlib
import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from giantjax.config import CheckpointConfig, RunConfig
from giantjax.errors import InputError
from giantjax.fields import from_dict, leaves

STATE, POSITION = "state", "position"

FREE_TO_CHANGE = (
    "name",
    "run_dir",
    "training.num_steps",
    "training.eval_every",
    "training.eval_samples",
    "training.zero_stage",
    "training.recompute",
    "data.prefetch",
    "mesh.",
    "pipeline.",
    "checkpoint.",
    "logging.",
    "runtime.",
    "model.vocabulary_multiple",
)
"""Fields, or groups ending in a dot, that do not change what is computed, or only how long."""

FIXED = (
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.sequence_length",
    "model.vocabulary_size",
    "model.feedforward_size",
    "model.head",
)
"""Fields that give parameters their shapes, and so may never change."""


@dataclass(frozen=True)
class Position:
    """Where a run stands, besides its state."""

    step: int
    consumed_samples: int
    """Samples taken from the training data; with the seed, the whole data position."""
    seed: int
    """Seed of dropout and sample order: with `step` and `consumed_samples`, all the randomness there is."""
    corpus: str
    """Fingerprint of the training data."""
    config: dict[str, Any]
    """The resolved configuration."""
    consumed_tokens: int | None = None
    """Tokens of those samples that were trained on; None, as in older checkpoints, is all of them."""


class CheckpointStore:
    """The checkpoints of one run directory; a context manager, which waits for the last save at its end.

    Every process of a job opens it and saves and reads at the same steps, each its part of the arrays.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            keep_period=config.keep_every,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        )
        self._folder = folder
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=(STATE, POSITION))

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind and jax.process_count() > 1:
            return  # the others would be waited for, and they are somewhere else
        with _as_os_error():
            self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, state: Any, position: Position) -> None:
        """Copy the state to the host and start writing it; returns before it is on disk.

        Raises:
            OSError: this save cannot be started, or the one before it failed.
        """
        items = {STATE: ocp.args.PyTreeSave(state), POSITION: ocp.args.JsonSave(dataclasses.asdict(position))}
        with _as_os_error():
            self._manager.save(position.step, args=ocp.args.Composite(**items), force=True)

    def read_position(self, step: int) -> Position:
        """The position saved at `step`.

        Raises:
            InputError: it cannot be read.
        """
        with _reading(self._manager, self._folder, step):
            restored = self._manager.restore(step, args=ocp.args.Composite(**{POSITION: ocp.args.JsonRestore()}))
            return Position(**restored[POSITION])

    def read_state(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """Those parts of the state saved at `step` that `abstract` names, placed as it says (shapes, types, shardings).

        Raises:
            InputError: it cannot be read.
        """
        with _reading(self._manager, self._folder, step):
            restored = self._manager.restore(step, args=ocp.args.Composite(**{STATE: _parts_of(abstract)}))[STATE]
        return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), restored, abstract)

    def wait(self) -> None:
        """Block until every started save is on disk.

        Raises:
            OSError: one of them failed.
        """
        with _as_os_error():
            self._manager.wait_until_finished()


@contextlib.contextmanager
def _reading(manager: ocp.CheckpointManager, folder: Path, step: int) -> Iterator[None]:
    """Say which checkpoint cannot be read: none that a kill left, but a copy that was cut short, or a bad disk."""
    try:
        yield
    except Exception as error:
        # For an array that is cut short, orbax raises an Exception of no kind.
        if not isinstance(error, (KeyError, OSError, TypeError, ValueError)) and type(error) is not Exception:
            raise
        _say_it_once()
        others = [saved for saved in manager.all_steps() if saved < step]
        instead = f"go on from step {max(others)}" if others else "start anew"
        cause = error.__cause__ or error
        reason = re.split(r"\n|\.( |$)", str(cause.args[0] if isinstance(cause, KeyError) else cause))[0]
        raise InputError(f"checkpoint {folder / str(step)} cannot be read ({reason}); move it away to {instead}") from error


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """A write that failed is a ValueError of tensorstore's: name it what it is."""
    try:
        yield
    except ValueError as error:
        _say_it_once()
        raise OSError(str(error).partition("\n")[0]) from error


def _say_it_once() -> None:
    """Of many arrays that fail alike orbax raises one; the others would be logged or printed, each with pages of traceback."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)):
            before(unraisable)

    sys.unraisablehook = hook


def newest_whole(folder: Path) -> int | None:
    """The step of the newest whole checkpoint in `folder`, which need not exist."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=None)


def check_resume(config: RunConfig, corpus: str, position: Position) -> list[str]:
    """What of the configuration changed since the checkpoint, as sentences to log.

    Raises:
        InputError: a field differs that is neither free to change nor listed in checkpoint.accept_change, or gives the
            parameters other shapes.
    """
    now, before = leaves(config), leaves(from_dict(RunConfig, position.config))
    # The same path may hold another corpus by now, so the data is compared by content as well as by name.
    for fields, fingerprint in ((before, position.corpus), (now, corpus)):
        fields["data.train"] = f"{' '.join(fields['data.train'])} ({fingerprint})"
    changed = [path for path in now if now[path] != before[path] and not path.startswith(FREE_TO_CHANGE)]
    accepted = {field.replace("-", "_") for field in config.checkpoint.accept_change}
    refused = [path for path in changed if path not in accepted]
    if refused:
        differences = ", ".join(f"{path} was {before[path]} and is {now[path]}" for path in refused)
        raise InputError(
            f"the run in this directory was started with another configuration: {differences}; use the old values, add "
            f"`--checkpoint.accept-change {' '.join(refused)}` to change them now, or name another --run-dir"
        )
    reshaped = [path for path in changed if path in FIXED]
    if reshaped:
        differences = ", ".join(f"{path} was {before[path]} and is {now[path]}" for path in reshaped)
        raise InputError(
            f"the parameters saved in this directory do not fit the model any more: {differences}; use the old values, "
            "or name another --run-dir"
        )
    return [f"accepted change: {path} was {before[path]} and is {now[path]}" for path in changed]


def load_params(folder: Path, config: RunConfig, abstract: PyTree) -> tuple[int, PyTree]:
    """The step and the parameters of the newest checkpoint in `folder`, placed as `abstract` says.

    Raises:
        InputError: there is no whole checkpoint, it cannot be read, or it is of another model.
    """
    options = ocp.CheckpointManagerOptions(read_only=True)
    manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=(STATE, POSITION))
    step = manager.latest_step() if folder.exists() else None
    if step is None:
        raise InputError(f"{folder} holds no whole checkpoint; train first, or wait for the first save")
    with _reading(manager, folder, step):
        saved = manager.restore(step, args=ocp.args.Composite(**{POSITION: ocp.args.JsonRestore()}))[POSITION]["config"]
        same = from_dict(RunConfig, saved).model == config.model
    if not same:
        raise InputError(f"{folder / str(step)} is of another model than {folder.with_name('config.json')} says; put the old file back")
    with _reading(manager, folder, step):
        return step, manager.restore(step, args=ocp.args.Composite(**{STATE: _parts_of({"params": abstract})}))[STATE]["params"]


def _parts_of(abstract: dict[str, Any]) -> ocp.args.PyTreeRestore:
    return ocp.args.PyTreeRestore(abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract), partial_restore=True)
