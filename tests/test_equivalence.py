"""Any mesh and schedule equals one device: losses, every gradient, and parameters after three steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from giantjax.config import ModelConfig
from giantjax.model.gpt import GPT, gpt
from giantjax.parallel.communication import Communication
from giantjax.parallel.compact import laid_out
from giantjax.parallel.mesh import AXES
from giantjax.parallel.orders import interleaved_orders, megatron_orders, zero_bubble_orders
from giantjax.parallel.schedule import Schedule, interleaved, schedule_of_name
from giantjax.parallel.stages import Model
from giantjax.training.disk import disk_forms, to_disk
from giantjax.training.optimizer import Optimizer
from giantjax.training.state import Layout, TrainState, init_state, layout_of
from giantjax.training.step import build_eval_step, build_train_step
from tests.helpers import relative_error

FORWARD, GRADIENT = 1e-5, 1e-4
BATCH, LENGTH, VOCABULARY = 16, 16, 61
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way to run the same steps."""

    pipe: int = 1
    replica: int = 1
    data: int = 1
    tensor: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    recompute: str = "none"
    layers: int = 4
    dropout: float = 0.1
    head: str = "tied"
    clip: float | None = 0.5
    vocabulary: int = VOCABULARY
    dtype: str = "float32"
    compression: str = "none"
    chunks: int = 1
    skips_head: bool = False
    shares_head: bool = False
    partition: str = "uniform"

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != vars(Case())[name]}
        return "-".join(f"{name}{value}" for name, value in changed.items()) or "one"


INTERLEAVED = Case(pipe=2, data=2, tensor=2, microbatches=4, schedule="interleaved", chunks=2)

# Every factorisation of 8 into pipe x data x tensor, replicas, and each pair of the other choices at least once.
CASES = (
    Case(pipe=8, microbatches=16, layers=8, recompute="full:2", clip=None),
    Case(pipe=4, data=2, microbatches=4, schedule="gpipe", zero=1, head="untied", recompute="selective"),
    Case(pipe=4, tensor=2, microbatches=8, recompute="full", head="untied", dropout=0.0),
    Case(pipe=2, data=4, microbatches=2, zero=1, recompute="full:2", layers=5, head="untied"),
    Case(pipe=2, data=2, tensor=2, microbatches=4),
    Case(pipe=2, tensor=4, microbatches=4, schedule="gpipe", layers=3, dropout=0.0),
    Case(data=8, microbatches=2, zero=1, dropout=0.0, clip=None),
    Case(data=4, tensor=2, microbatches=2, zero=1, recompute="selective", head="untied"),
    Case(data=2, tensor=4, microbatches=8, recompute="full"),
    Case(tensor=8, microbatches=2, recompute="selective", layers=3, clip=None),
    Case(pipe=2, replica=2, data=2, microbatches=2, schedule="gpipe", zero=1, layers=5, recompute="full", clip=None),
    Case(pipe=4, replica=2, microbatches=1, layers=6, recompute="selective", dropout=0.0),
    Case(replica=4, tensor=2, microbatches=4, schedule="gpipe", recompute="full:2", dropout=0.0, clip=None),
    Case(pipe=4, data=2, microbatches=2, layers=7, zero=1, head="untied", clip=None),
    replace(INTERLEAVED, zero=1),
    Case(pipe=3, data=2, microbatches=8, schedule="interleaved", chunks=2, layers=7, recompute="full:2", skips_head=True, clip=None),
    Case(pipe=4, tensor=2, microbatches=2, schedule="interleaved", chunks=2, layers=8, head="untied", recompute="selective"),
    Case(pipe=4, tensor=2, microbatches=8, schedule="zero-bubble", recompute="selective"),
    Case(pipe=2, data=4, microbatches=2, schedule="zero-bubble", zero=1, layers=5, recompute="full:2", head="untied", clip=None),
    Case(pipe=2, data=2, tensor=2, microbatches=4, skips_head=True, dropout=0.0),
    Case(pipe=4, tensor=2, microbatches=8, schedule="separate-1f1b", head="untied"),
    Case(pipe=2, data=2, tensor=2, microbatches=4, schedule="separate-zero-bubble", zero=1, skips_head=True, recompute="selective"),
    Case(pipe=2, data=4, microbatches=4, schedule="separate-interleaved", chunks=2, shares_head=True, dropout=0.0, clip=None),
    Case(pipe=2, data=2, tensor=2, microbatches=4, shares_head=True, zero=1),
    Case(pipe=4, tensor=2, microbatches=4, schedule="gpipe", shares_head=True, head="untied", dropout=0.0, layers=5),
    Case(pipe=2, data=2, microbatches=4, schedule="interleaved", chunks=2, shares_head=True, recompute="full", clip=None, dropout=0.0),
    Case(pipe=2, replica=4, microbatches=4, schedule="zero-bubble", shares_head=True, head="untied"),
    Case(pipe=4, data=2, microbatches=4, layers=8, partition="manual:2,3,2,1", skips_head=True, zero=1, recompute="selective"),
    Case(pipe=2, tensor=4, microbatches=4, partition="manual:3,1", skips_head=True, dropout=0.0),
    Case(pipe=2, data=2, tensor=2, microbatches=4, partition="manual:1,3"),
    Case(
        pipe=2,
        data=4,
        microbatches=2,
        schedule="zero-bubble",
        partition="manual:3,1",
        skips_head=True,
        head="untied",
        zero=3,
        recompute="full",
        dropout=0.0,
    ),
    replace(INTERLEAVED, layers=7, partition="manual:1,3,2,1", skips_head=True, recompute="full:2", clip=None),
    Case(data=2, tensor=4, microbatches=2, zero=2, recompute="full:2", dropout=0.0, clip=None),
    Case(pipe=2, replica=2, data=2, microbatches=2, schedule="gpipe", zero=2, layers=3, recompute="full", head="untied"),
    Case(pipe=2, data=2, tensor=2, microbatches=4, schedule="zero-bubble", zero=2, head="untied", clip=None),
    Case(pipe=2, data=2, microbatches=4, schedule="interleaved", chunks=2, zero=2, layers=5, recompute="selective", skips_head=True),
    Case(data=4, tensor=2, microbatches=2, zero=3, recompute="full:2", dropout=0.0, clip=None),
    Case(pipe=2, replica=2, data=2, microbatches=4, zero=3, layers=3, shares_head=True),
    Case(pipe=4, data=2, microbatches=4, schedule="gpipe", zero=3, recompute="selective"),
    Case(pipe=2, data=2, tensor=2, microbatches=4, schedule="interleaved", chunks=2, zero=3, recompute="full", head="untied"),
    Case(pipe=2, data=4, microbatches=4, schedule="separate-1f1b", zero=3, head="untied"),
)


class Result(NamedTuple):
    """What a run of a case comes to, in the layout of the disk."""

    losses: list[float]
    norms: list[float]
    evaluation: float
    gradients: Any
    params: Any


def batch_of() -> dict[str, np.ndarray]:
    """Tokens with masks of very unequal weight a shard, one sample masked altogether."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (BATCH, LENGTH + 1), np.int32)
    kept = rng.random((BATCH, LENGTH)) < np.linspace(0, 1, BATCH)[:, None]
    numbers = np.arange(100, 100 + BATCH, dtype=np.uint32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": kept.astype(np.float32), "sample": numbers}


def recording(transform: optax.GradientTransformation) -> optax.GradientTransformation:
    """`transform`, whose state also holds the last gradients it was given."""

    def init(params: Any) -> Any:
        return {"inner": transform.init(params), "last": jax.tree.map(jnp.zeros_like, params)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, inner = transform.update(grads, state["inner"], params)
        return updates, {"inner": inner, "last": grads}

    return optax.GradientTransformation(init, update)


class Program(NamedTuple):
    """A case's model and how it lies on its mesh."""

    model: Model
    optimizer: Optimizer
    layout: Layout
    forms: TrainState


def mesh_of(*degrees: int) -> Mesh:
    """The first devices, in the order of AXES."""
    return Mesh(np.array(jax.devices()[: np.prod(degrees)]).reshape(degrees), AXES)


def model_of(case: Case) -> GPT:
    config = ModelConfig(
        num_layers=case.layers,
        hidden_size=32,
        num_heads=8,
        sequence_length=LENGTH,
        vocabulary_size=case.vocabulary,
        vocabulary_multiple=2,
        attention_dropout=case.dropout,
        hidden_dropout=case.dropout,
        head=case.head,  # type: ignore[arg-type]
        init_std=0.2,
    )
    comm = Communication("tensor" if case.tensor > 1 else None)
    return gpt(config, jnp.dtype(case.dtype), seed=3, comm=comm, tensor=case.tensor, stages="pipe" if case.shares_head else None)


def program(case: Case) -> Program:
    model, mesh = model_of(case), mesh_of(case.pipe, case.replica, case.data, case.tensor)
    # An epsilon above rounding error: the gradient of a key's bias is zero but for rounding, which Adam would blow up.
    transform = optax.chain(optax.scale_by_adam(eps=1e-3), optax.add_decayed_weights(0.1, mask=model.decays), optax.scale(-1e-2))
    optimizer = Optimizer(recording(transform), optax.constant_schedule(1e-2), case.clip)
    layout = layout_of(model, optimizer, mesh, case.zero, case.compression, num_chunks=case.chunks, partition=case.partition)  # type: ignore[arg-type]
    return Program(model, optimizer, layout, disk_forms(model, optimizer, layout))


@lru_cache
def start(layers: int, head: str) -> Any:
    """Initial parameters in the layout of the disk: made once, for compiling that on each mesh takes long."""
    model, optimizer, layout, forms = program(Case(layers=layers, head=head))
    return jax.device_get(to_disk(init_state(model, optimizer, layout, 0).params, forms.params))


def schedule_of(case: Case) -> Schedule:
    """The case's schedule; `separate-...` has one action a tick on each stage, as stages that run on their own do."""
    sizes = (case.pipe, case.microbatches)
    kind = case.schedule.removeprefix("separate-")
    if kind == case.schedule:
        return schedule_of_name(kind, *sizes, case.chunks)
    orders = {
        "1f1b": lambda: megatron_orders(*sizes),
        "zero-bubble": lambda: zero_bubble_orders(*sizes),
        "interleaved": lambda: interleaved_orders(interleaved(*sizes, case.chunks)),
    }
    return laid_out(case.schedule, case.microbatches, case.chunks, orders[kind]())


def step_of(case: Case) -> jax.stages.Wrapped:
    """The train step of a case."""
    model, optimizer, layout, _ = program(case)
    return build_train_step(
        model,
        optimizer,
        layout,
        num_microbatches=case.microbatches,
        schedule=schedule_of(case),
        recompute=case.recompute,
        skips_head=case.skips_head,
    )


def run(case: Case) -> Result:
    """Three steps and an evaluation."""
    model, _, layout, forms = program(case)
    shapes = layout.shapes
    params = jax.tree.map(lambda form, x, leaf: form.to_device(x, leaf.shape), forms.params, start(case.layers, case.head), shapes.params)
    moments = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes.optimizer)
    state = jax.device_put(TrainState(np.int32(0), jax.device_get(params), moments), layout.shardings)
    step = step_of(case)
    evaluate = build_eval_step(model, layout, num_microbatches=case.microbatches)
    batch = batch_of()
    total, weight = evaluate(state.params, batch)
    losses, norms, gradients = [], [], None
    for number in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
        if number == 0:
            gradients = jax.device_get(to_disk(state, forms).optimizer["last"])
    params = jax.device_get(to_disk(state, forms).params)
    return Result(losses, norms, float(total) / float(weight), gradients, params)


@lru_cache
def one_device(case: Case) -> Result:
    """The same steps on one device in one piece."""
    return run(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_device(case: Case) -> None:
    found = run(case)
    expected = one_device(Case(layers=case.layers, dropout=case.dropout, head=case.head, clip=case.clip))
    assert relative_error(found.losses, expected.losses) <= FORWARD
    assert relative_error(found.evaluation, expected.evaluation) <= FORWARD
    assert relative_error(found.norms, expected.norms) <= FORWARD
    errors = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / np.abs(b).max()), found.gradients, expected.gradients)
    for path, error in jax.tree_util.tree_leaves_with_path(errors):
        # Softmax ignores what is added to all scores of a query, so the key's bias has no gradient but rounding.
        if "qkv" not in str(path) or "bias" not in str(path):
            assert error <= GRADIENT, jax.tree_util.keystr(path)
    biases = [tree.gradients["blocks"]["attention"]["qkv"]["bias"][:, ::2] for tree in (found, expected)]
    assert relative_error(*biases) <= GRADIENT
    assert relative_error(found.params, expected.params) <= GRADIENT
    if case.clip:
        assert max(expected.norms) > case.clip


@pytest.mark.parametrize("case", [Case(pipe=4, data=2, layers=6, zero=1), Case(pipe=2, tensor=4)], ids=str)
def test_a_run_starts_the_same_on_any_mesh(case: Case) -> None:
    model, optimizer, layout, forms = program(case)
    found = jax.device_get(to_disk(init_state(model, optimizer, layout, 0).params, forms.params))
    assert relative_error(found, start(case.layers, case.head)) <= 1e-6


def test_cases_cover_every_factorisation_and_pair_of_choices() -> None:
    shapes = {(case.pipe, case.data * case.replica, case.tensor) for case in CASES}
    assert shapes >= {(p, d, 8 // p // d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8) if 8 % (p * d) == 0}
    choices: dict[str, Callable[[Case], Any]] = {
        "pipe": lambda case: case.pipe > 1,
        "tensor": lambda case: case.tensor > 1,
        "schedule": lambda case: case.schedule,
        "zero": lambda case: case.zero,
        "recompute": lambda case: case.recompute,
        "dropout": lambda case: case.dropout > 0,
        "head": lambda case: case.head,
        "clip": lambda case: case.clip is not None,
    }
    for (first, one), (second, other) in combinations(choices.items(), 2):
        met = {(one(case), other(case)) for case in CASES}
        named = [case for case in CASES if not case.schedule.startswith("separate")]
        missing = {(a, b) for a in map(one, named) for b in map(other, named)} - met
        # A single stage has one schedule, whatever its name.
        missing -= {(False, schedule) for schedule in ("interleaved", "zero-bubble")}
        assert not missing, f"no case has {first} and {second} at {missing}"
    uneven = {case.pipe for case in CASES if case.layers % case.pipe}
    assert uneven >= {2, 4}
