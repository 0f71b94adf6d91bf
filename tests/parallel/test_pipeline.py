"""The executor, compiled: what its loops hold, and how its memory grows."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.parallel import pipeline
from giantjax.parallel.schedule import KINDS, Action, Kind
from giantjax.training.state import abstract_state, init_state
from giantjax.training.step import build_train_step
from tests.test_equivalence import BATCH, LENGTH, Case, batch_of, program, schedule_of

SLOTS = 3
"""Of two stages under 1F1B: none of scalars makes a ring larger than this."""
COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def abstract_batch(num_samples: int) -> dict[str, jax.ShapeDtypeStruct]:
    shape = (num_samples, LENGTH)
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in ("tokens", "targets")}
    return batch | {"loss_mask": jax.ShapeDtypeStruct(shape, jnp.float32), "sample": jax.ShapeDtypeStruct(shape[:1], jnp.uint32)}


def traced(case: Case) -> jax.stages.Traced:
    """The step of `case`, with microbatches of two samples."""
    model, optimizer, layout, _ = program(case)
    batch = abstract_batch(2 * case.microbatches * case.data * case.replica)
    step = build_train_step(model, optimizer, layout, num_microbatches=case.microbatches, schedule=case.schedule, recompute=case.recompute)
    return step.trace(abstract_state(layout), batch)


@functools.cache
def compiled(schedule: str, num_microbatches: int, tensor: int = 1) -> jax.stages.Compiled:
    """The step of two stages with `num_microbatches` of two samples."""
    case = Case(pipe=2, tensor=tensor, dropout=0.0, schedule=schedule, microbatches=num_microbatches, vocabulary=90)
    return traced(case).lower().compile()


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
    few, many = temporary_bytes("1f1b", 8), temporary_bytes("1f1b", 64)
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


@pytest.mark.xdist_group("compiled pipeline")
def test_no_buffer_holds_logits_of_the_whole_vocabulary() -> None:
    """The vocabulary of 90 is padded to 92, half of it on each device; no other dim of the model is 92."""
    shapes = set(re.findall(r"\w+\[([\d,]+)\]", compiled("1f1b", 8, 2).as_text() or ""))
    assert any({"46", str(LENGTH)} <= set(dims.split(",")) for dims in shapes)
    assert not any({"92", str(LENGTH)} <= set(dims.split(",")) for dims in shapes)


def carried(loop: jax.extend.core.JaxprEqn) -> list[Any]:
    """Shapes of what a scan passes from turn to turn."""
    if "num_carry" in loop.params:
        first, number = loop.params["num_consts"], loop.params["num_carry"]
    else:  # JAX 0.12
        first, number = (len(list(part)) for part in loop.params["ft_in"].elts[:2])
    return [x.aval for x in loop.invars[first : first + number]]


def tick_loops(jaxpr: jax.extend.core.Jaxpr) -> Iterator[jax.extend.core.JaxprEqn]:
    """The loops over ticks with a backward action, which pass on the sums of all gradients; other loops pass on little."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and len(carried(equation)) > 16:
            yield equation
        elif equation.primitive.name != "scan":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from tick_loops(inner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "full:2", "full:3"])
def test_ticks_pass_on_nothing_as_large_as_a_weight(recompute: str, dtype: str) -> None:
    """But the sums of gradients: what the backward pass needs of weights is what the step was given."""
    case = Case(pipe=2, dropout=0.0, microbatches=4, layers=8, recompute=recompute, dtype=dtype)
    shapes = program(case).layout.shapes.params
    on_a_stage = sum(leaf.size // (2 if name == "blocks" else 1) for name, tree in shapes.items() for leaf in jax.tree.leaves(tree))
    ticks = list(tick_loops(traced(case).jaxpr.jaxpr))
    assert len(ticks) == 2  # the steady state and the drain
    for loop in ticks:
        # What is of a microbatch has a dim of two samples; no parameter has.
        others = [x for x in carried(loop) if not {2, LENGTH} <= set(x.shape) and x.size > SLOTS]
        assert sum(x.size for x in others) == on_a_stage
        assert {x.dtype for x in others} == {jnp.dtype(jnp.float32)}


def test_weights_are_cast_once_a_step() -> None:
    """Ticks read the compute copies: none of them casts a weight."""
    loops = list(tick_loops(traced(Case(pipe=2, dropout=0.0, microbatches=4, dtype="bfloat16")).jaxpr.jaxpr))
    weights = {(4, 4 * 32), (32, 3, 8, 4), (8, 4, 32), (32, 128), (128, 32), (62, 32)}

    def casts(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[int, ...]]:
        for equation in jaxpr.eqns:
            if equation.primitive.name == "convert_element_type":
                operand: Any = equation.invars[0].aval
                yield operand.shape
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from casts(inner)

    assert loops
    for loop in loops:
        body = loop.params["jaxpr"]
        found = set(casts(getattr(body, "jaxpr", body)))
        assert not {shape for shape in found if shape in weights or shape[1:] in weights}


@pytest.mark.parametrize("case", [Case(pipe=2, data=2, tensor=2, zero=1), Case(pipe=4, tensor=2), Case(pipe=2, data=4, zero=3)], ids=str)
def test_the_state_is_divided_as_the_table_says(case: Case) -> None:
    """Bytes of arguments on a device are full size over shards; kernels of blocks are shared by pipe x tensor devices."""
    case = dataclasses.replace(case, dropout=0.0, vocabulary=2000, microbatches=case.pipe)
    layout = program(case).layout
    # The step never reads the gradients that its optimizer recorded before.
    shapes, specs = (state._replace(optimizer=state.optimizer["inner"]) for state in (layout.shapes, layout.state))
    total = 0.0
    for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs, is_leaf=_is_spec), strict=True):
        axes = [axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
        total += leaf.size * leaf.dtype.itemsize / math.prod(layout.mesh.shape[axis] for axis in axes)
    kernel = layout.params["blocks"]["feedforward"]["up"]["kernel"]
    assert {axis for axis in kernel if axis} == {"pipe", "tensor"} | ({"data"} if case.zero == 3 else set())
    moment = specs.optimizer[0].mu["blocks"]["feedforward"]["up"]["kernel"]
    assert {axis for axis in moment if axis} == ({"pipe", "tensor", "data"} if case.zero else {"pipe", "tensor"})
    analysis = traced(case).lower().compile().memory_analysis()
    assert analysis is not None
    batch = 2 * case.microbatches * (LENGTH * 12 + 4)
    assert analysis.argument_size_in_bytes - batch == pytest.approx(total, rel=0.01)


def _is_spec(value: object) -> bool:
    return isinstance(value, jax.sharding.PartitionSpec)


def products(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[int, ...]]:
    """Shapes of the results of all matrix products."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            result: Any = equation.outvars[0].aval
            yield result.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from products(inner)


def test_zero_bubble_computes_gradients_of_weights_in_ticks_of_their_own() -> None:
    """Ticks without a weight action multiply nothing to the shape of a block's weight; those with one do, for all layers at once."""
    case = Case(pipe=2, dropout=0.0, microbatches=6, layers=4, schedule="zero-bubble", head="untied")
    weights = {(32, 3, 8, 4), (8, 4, 32), (32, 128), (128, 32)}
    runs = [run for run in pipeline.ticks_of(schedule_of(case), False).runs if "backward" in run.kinds]
    loops = list(tick_loops(traced(case).jaxpr.jaxpr))
    assert len(loops) == len(runs) and any("weight" not in run.kinds for run in runs)
    for run, loop in zip(runs, loops, strict=True):
        body = loop.params["jaxpr"]
        found = [
            shape
            for shape in products(getattr(body, "jaxpr", body))
            if shape[-4:] in weights or shape[-2:] in weights or shape[-3:] in weights
        ]
        # Results of layers together have a dim for them.
        assert {shape[1:] for shape in found} == (weights if "weight" in run.kinds else set())


EVERY_SCHEDULE = (
    Case(pipe=4, microbatches=6),
    Case(pipe=4, microbatches=3, schedule="gpipe"),
    Case(pipe=4, microbatches=5, schedule="interleaved", chunks=2, layers=8),
    Case(pipe=4, microbatches=5, schedule="zero-bubble"),
    Case(pipe=4, microbatches=5, schedule="separate-zero-bubble"),
)


@pytest.mark.parametrize("case", EVERY_SCHEDULE, ids=str)
def test_the_executor_does_what_the_table_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tick of each stage does the table's actions and no other, on that microbatch's samples."""
    case = dataclasses.replace(case, dropout=0.0)
    schedule, done = schedule_of(case), []
    planned, worked = pipeline.ticks_of, pipeline._Tick.work

    def with_ticks(schedule: Any, shares_head: bool) -> Any:
        found = planned(schedule, shares_head)
        return dataclasses.replace(found, columns=found.columns | {"tick": np.arange(found.schedule.num_ticks)[:, None]})

    def logged(at: Any, kind: Kind) -> Any:
        there, chunk, batch = worked(at, kind)

        def log(*values: Any) -> None:
            done.append((KINDS.index(kind), *map(int, values)))

        jax.debug.callback(log, at.cell["tick"], at.executor.stage.index, there, chunk.number, batch["sample"][0])
        return there, chunk, batch

    monkeypatch.setattr(pipeline, "ticks_of", with_ticks)
    monkeypatch.setattr(pipeline._Tick, "work", logged)
    model, optimizer, layout, _ = program(case)
    step = build_train_step(model, optimizer, layout, num_microbatches=case.microbatches, schedule=schedule)
    size = BATCH // case.microbatches
    batch = {name: array[: size * case.microbatches] for name, array in batch_of().items()}
    jax.block_until_ready(step(init_state(model, optimizer, layout, 0), batch))
    jax.effects_barrier()
    # Samples are numbered from 100.
    found = sorted(
        (tick, Action(KINDS[kind], stage, (sample - 100) // size, chunk)) for kind, tick, stage, there, chunk, sample in done if there
    )
    assert found == sorted(schedule.actions())
    if "zero-bubble" in case.schedule:
        when = {action: tick for tick, action in found}
        assert all(when[action._replace(kind="backward")] < tick for action, tick in when.items() if action.kind == "weight")
