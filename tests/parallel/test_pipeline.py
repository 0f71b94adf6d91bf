"""The executor, compiled: what its loops hold, and how its memory grows."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.training.state import abstract_state
from giantjax.training.step import build_train_step
from tests.test_equivalence import LENGTH, Case, program

COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


@functools.cache
def compiled(schedule: str, num_microbatches: int, tensor: int = 1) -> jax.stages.Compiled:
    """The step of two stages with `num_microbatches` of two samples."""
    model, optimizer, layout, _ = program(Case(pipe=2, tensor=tensor, dropout=0.0))
    shape = (2 * num_microbatches, LENGTH)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "targets")}
    batch |= {"loss_mask": jax.ShapeDtypeStruct(shape, jnp.float32), "sample": jax.ShapeDtypeStruct(shape[:1], jnp.uint32)}
    step = build_train_step(model, optimizer, layout, num_microbatches=num_microbatches, schedule=schedule)
    return step.lower(abstract_state(layout), batch).compile()


def _memory(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def temporary_bytes(schedule: str, num_microbatches: int) -> int:
    """Temporary memory of the step, less the copy of the batch that the microbatches are cut from."""
    batch_bytes = 2 * num_microbatches * LENGTH * 12
    return _memory(compiled(schedule, num_microbatches)) - batch_bytes


@pytest.mark.xdist_group("compiled pipeline")
def test_memory_of_1f1b_does_not_grow_with_microbatches() -> None:
    few, many = temporary_bytes("1f1b", 8), temporary_bytes("1f1b", 32)
    assert many <= 1.05 * few
    # GPipe keeps every microbatch at once.
    assert temporary_bytes("gpipe", 32) > 2 * temporary_bytes("gpipe", 8)


def loops_of(program: jax.stages.Compiled) -> list[str]:
    """The text of each loop's body, with all that it calls."""
    text = program.as_text() or ""
    found = re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    bodies = {match[1]: match[2] for match in found}

    def whole(name: str, seen: set[str]) -> str:
        seen.add(name)
        called = [other for other in re.findall(r"%([\w.\-]+)", bodies[name]) if other in bodies and other not in seen]
        return bodies[name] + "".join(whole(other, seen) for other in called if other not in seen)

    return [whole(name, set()) for name in re.findall(r"body=%([\w.\-]+)", text)]


@pytest.mark.xdist_group("compiled pipeline")
def test_ticks_hold_hops_and_no_sum_of_gradients() -> None:
    loops = loops_of(compiled("1f1b", 8))
    kinds = {kind for loop in loops for kind in COLLECTIVE.findall(loop)}
    assert kinds == {"collective-permute"}


@pytest.mark.xdist_group("compiled pipeline")
def test_tensor_parallel_ticks_sum_activations_only() -> None:
    """No sum in a loop is as large as a weight's gradient, and none gathers logits."""
    loops = "".join(loops_of(compiled("1f1b", 8, 2)))
    sums = re.findall(r"= (.*?) all-reduce(?:-start)?\(", loops)
    sizes = [int(np.prod([int(n) for n in dims.split(",") if n])) for shapes in sums for dims in re.findall(r"\w+\[([\d,]*)\]", shapes)]
    # Three numbers a position of a microbatch: the largest logit, the sum of exponentials, the target's logit.
    assert sizes and max(sizes) <= 2 * LENGTH
    kinds = set(COLLECTIVE.findall(loops))
    assert {"collective-permute", "all-gather", "reduce-scatter"} <= kinds
