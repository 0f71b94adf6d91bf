"""The training loop, read from top to bottom."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from giantjax.checkpoint import CheckpointStore, Position, check_resume, newest_whole
from giantjax.config import RunConfig
from giantjax.data.corpora import Source, corpora_of, fingerprint
from giantjax.data.loader import Batch, rules_of, training_batches, validation_batches
from giantjax.errors import TrainingFault
from giantjax.fields import from_dict
from giantjax.nccl import read_log
from giantjax.parallel.mesh import axes_in_words
from giantjax.parallel.nodes import Nodes
from giantjax.parallel.partition import held, said
from giantjax.planner.flops import num_parameters
from giantjax.training.bookkeeper import Bookkeeper
from giantjax.training.disk import abstract_disk_state, to_device, to_disk
from giantjax.training.feed import rows_here, spread
from giantjax.training.metrics import peak_flops
from giantjax.training.parts import Parts, assemble, train_step_of_run
from giantjax.training.processes import Stop, faults_shared, from_first, is_first, losses_named
from giantjax.training.programs import Programs
from giantjax.training.progress import ProgressLine
from giantjax.training.run_directory import RunDirectory, held_alone, keep_tokenizer, write_record
from giantjax.training.state import TrainState, abstract_state, check_finite, first_scale, init_state, without_errors
from giantjax.training.step import build_eval_step

SAVED_ON_SIGNAL = 143


def train(
    config: RunConfig,
    run: RunDirectory,
    train_data: Source,
    validation_data: Source | None,
    nodes: Nodes | None = None,
    nccl_log: Path | None = None,
) -> int:
    """Train from the latest checkpoint, or from the start, to the last step; returns the exit code.

    Every process of a job does this, and process 0 alone prints and writes what is written once.

    Args:
        config: of the run, all degrees of its mesh numbers.
        run: its directory.
        train_data: what to train on.
        validation_data: what to evaluate on, where there is any.
        nodes: where the devices are.
        nccl_log: where NCCL logs what it chooses, which is said after the first step.

    Raises:
        InputError: the mesh does not fit the devices, or the run in the directory had another configuration.
        TrainingFault: the loss, the gradients or the state are no longer finite, or a file cannot be written.
    """
    corpus, total = fingerprint(train_data), config.training.num_steps

    with (
        faults_shared(),
        faults_of(run),
        losses_named(),
        ProgressLine(total, config.logging.every, quiet=not is_first()) as progress,
        contextlib.ExitStack() as opened,
    ):
        parts = assemble(config, nodes, run.partition)
        config, layout, forms = parts.config, parts.layout, parts.forms
        run.path.mkdir(parents=True, exist_ok=True)
        if is_first():
            opened.enter_context(held_alone(run))
        store = opened.enter_context(CheckpointStore(run.checkpoints, config.checkpoint))
        first = from_first("first", store.latest_step()) or 0
        if first:
            position = store.read_position(first)
            for sentence in check_resume(config, corpus, position):
                progress.say(sentence)
            if first >= total:
                progress.say(f"nothing to do: step {first} of {total} is done")
                return 0
            state = restored_state(store, parts, position)
        else:
            state = init_state(parts.model, parts.optimizer, layout, config.seed)
        if is_first():
            write_record(run.config, config)
            if parts.profile:
                write_record(run.partition, parts.profile)
            if recorded := next((corpus for corpus in corpora_of(train_data) if corpus.record), None):
                keep_tokenizer(run, recorded)
        start_samples, start_tokens = consumed(position) if first else (0, 0)
        peak = peak_flops(jax.local_devices()[0], config.training.precision) if is_first() else (math.nan, "told by process 0")
        book = Bookkeeper(config, run, first, start_samples, start_tokens, progress, peak)
        for sentence in start_summary(config, parts, book, nodes):
            progress.say(sentence)
        if first:
            progress.say(f"resuming after step {first}")

        batches = batches_on_mesh(parts, train_data, start_samples, first)
        batch = next(batches)
        train_step = train_step_of_run(config, parts.optimizer, layout)
        programs = Programs(train_step, config.model.sequence_length, progress.say)
        programs.compile(state, batch)
        eval_step = build_eval_step(parts.model, layout, num_microbatches=config.num_microbatches)
        evaluate = Evaluation(config, validation_data, eval_step, parts.placement)

        # Not before: until there is something new to save, a signal may end the run as it ends any program.
        stop = Stop()
        book.start_clock()
        for step in range(first + 1, total + 1):
            if programs.lack(batch):
                book.write()
                programs.compile(state, batch)
                book.start_clock()
            state, metrics = programs.of(batch)(state, batch)
            book.push(step, metrics)
            if nccl_log and step == first + 1:
                jax.block_until_ready(metrics)
                progress.say(read_log(nccl_log) or "NCCL has not said what it chose")
            # The next batch is fetched and sent while the device works on this one.
            if step < total:
                batch = next(batches)
            if evaluate.is_due(step):
                book.read()
                book.write(validation_loss=evaluate(state))
                book.start_clock()
            stopped_by = stop.after(step)
            if stopped_by or step == total or (config.checkpoint.every and step % config.checkpoint.every == 0):
                book.write()
                book.sync()
                check_finite(state, step)
                taken = book.consumed_samples(step)
                position = Position(step, taken, config.seed, corpus, dataclasses.asdict(config), book.consumed_tokens(step))
                store.save(to_disk(state, forms), position)
                book.start_clock()
            if stopped_by and step < total:
                store.wait()
                book.close()
                progress.say(f"stopped by {stopped_by} after step {step}, which is saved; the same command goes on from there")
                return SAVED_ON_SIGNAL
        book.close()
    return 0


def restored_state(store: CheckpointStore, parts: Parts, position: Position) -> TrainState:
    """The state saved at `position`.

    What rounding took off on another mesh is left out, which costs a part of one step; so is a loss scale of another precision.
    """
    layout, forms, like = parts.layout, parts.forms, abstract_state(parts.layout)
    before, now = from_dict(RunConfig, position.config), parts.config
    rounds = lambda config: (config.mesh, config.training.zero_stage, config.training.compression)  # noqa: E731
    kept = {"feedback": rounds(before) == rounds(now), "scaling": before.training.precision == now.training.precision}
    left_out = {name: () for name, same in kept.items() if not (same and getattr(like, name))}
    wanted = {name: tree for name, tree in abstract_disk_state(layout, forms)._asdict().items() if name not in left_out}
    read = TrainState(**(store.read_state(position.step, wanted) | left_out))
    state = to_device(read, forms._replace(**left_out), like._replace(**left_out))
    fresh = {"feedback": without_errors, "scaling": first_scale}
    return state._replace(**{name: fresh[name](layout) for name in left_out})


def consumed(position: Position) -> tuple[int, int]:
    """Samples, and tokens of them, trained on up to a checkpoint."""
    samples, tokens = position.consumed_samples, position.consumed_tokens
    return samples, samples * position.config["model"]["sequence_length"] if tokens is None else tokens


def batches_on_mesh(parts: Parts, data: Source, start_sample: int, first: int = 0) -> Iterator[dict[str, jax.Array]]:
    """Global batches from `start_sample` on, which is after step `first`, laid over the mesh.

    Each process reads the rows that its devices hold.
    """
    config, size = parts.config, parts.config.training.global_batch_size
    rows = rows_here(parts.placement, size)
    batches = training_batches(
        data,
        seed=config.seed,
        sequence_length=config.model.sequence_length,
        global_batch_size=size,
        start_sample=start_sample,
        vocabulary_size=config.model.vocabulary_size,
        prefetch=config.data.prefetch,
        rows=rows,
        rules=rules_of(config.data),
        length_of=lambda number: config.length_of_step(first + 1 + number),
    )
    for batch in batches:
        yield spread(batch, parts.placement, size, rows)


@contextlib.contextmanager
def faults_of(run: RunDirectory) -> Iterator[None]:
    """Say of a fault, a file that cannot be written among them, what is left to go on from.

    Raises:
        TrainingFault: in the place of each TrainingFault and each OSError.
    """
    try:
        yield
    except (TrainingFault, OSError) as error:
        step = newest_whole(run.checkpoints)
        left = f"holds checkpoint {step} whole, and the same command goes on from there" if step else "holds no checkpoint yet"
        raise TrainingFault(f"{error}; {run.path} {left}") from error


def start_summary(config: RunConfig, parts: Parts, book: Bookkeeper, nodes: Nodes | None) -> list[str]:
    """What the run is, in two lines, and in more where its mesh has axes and its stages a partition."""
    device, batch, mesh = jax.devices()[0], config.training.global_batch_size, config.mesh
    ways = f"data {mesh.data}" + (f" x replica {mesh.replica}" if mesh.replica > 1 else "")
    lines = [
        f"{config.name}: {num_parameters(config.model):,} parameters, {config.training.precision} ({parts.reason}), {mesh.num_devices} of "
        f"{jax.device_count()} {device.device_kind} devices, global batch {batch} = microbatch {config.microbatch_size} x "
        f"{config.num_microbatches} microbatches x {ways}",
        f"run directory {book.run.path}; MFU counts against {book.peak[0] / 1e12:.3g} TFLOP/s a device ({book.peak[1]})",
    ]
    if mesh.num_devices > 1:
        degrees = " x ".join(f"{axis} {size}" for axis, size in parts.layout.mesh.shape.items() if size > 1)
        kinds = sorted({str(topology).partition(": ")[2] for topology in nodes.topologies.values()}) if nodes else []
        lines.append(f"mesh {degrees}: {axes_in_words(parts.layout.mesh, nodes)}" + "".join(f"; a node has {kind}" for kind in kinds))
    if config.pipeline.partition != "uniform":
        counts = held(parts.layout.layers, parts.layout.num_chunks)
        lines.append(said(config.pipeline.partition, counts) + (f"; measured: {parts.profile}" if parts.profile else ""))
    return lines


@dataclass
class Evaluation:
    """The loss on held-out data, every so often and at the end."""

    config: RunConfig
    data: Source | None
    eval_step: Callable[[Any, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
    placement: NamedSharding

    def is_due(self, step: int) -> bool:
        """Whether `step` is followed by an evaluation."""
        every = self.config.training.eval_every
        return self.data is not None and every > 0 and (step % every == 0 or step == self.config.training.num_steps)

    def __call__(self, state: TrainState) -> float:
        """Mean loss a position over the samples of one evaluation, in nats."""
        assert self.data is not None
        size = self.config.training.global_batch_size
        rows = rows_here(self.placement, size)
        batches = (spread(batch, self.placement, size, rows) for batch in self._batches(self.data, rows))
        running, sums = None, np.zeros(2)
        for batch in batches:
            # Read one step late, as in training: the device never waits, and no more than two steps hold memory, or threads
            # of simulated devices, which wait for each other.
            done, running = running, self.eval_step(state.params, batch)
            sums += 0 if done is None else np.array(jax.device_get(done), np.float64)
        losses, counts = sums + np.array(jax.device_get(running), np.float64)
        return float(losses / counts)

    def _batches(self, data: Source, rows: list[int]) -> Iterator[Batch]:
        return validation_batches(
            data,
            sequence_length=self.config.model.sequence_length,
            batch_size=self.config.training.global_batch_size,
            num_samples=self.config.training.eval_samples,
            vocabulary_size=self.config.model.vocabulary_size,
            rows=rows,
            rules=rules_of(self.config.data),
        )
