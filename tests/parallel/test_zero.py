"""ZeRO 2 and 3, traced and compiled: what ticks pass on, where gradients are scattered, what is gathered and how often."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from tests.parallel.test_pipeline import LENGTH, carried, tick_loops, traced
from tests.test_equivalence import Case, program

WAYS = 4
"""Devices that share; no share of the model's dims is 2 or LENGTH then, as those of microbatches are."""


def case_of(zero: int, **changes: object) -> Case:
    return Case(**({"pipe": 2, "data": WAYS, "dropout": 0.0, "microbatches": 4, "zero": zero} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute": "selective", "dtype": "bfloat16"},
        {"recompute": "full", "head": "untied"},
        {"recompute": "full:3", "layers": 8, "dtype": "bfloat16"},
        {"schedule": "zero-bubble", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_ticks_pass_on_shares_of_gradients_and_nothing_gathered(zero: int, changes: dict[str, object]) -> None:
    case = case_of(zero, **changes)
    shapes = program(case).layout.shapes.params
    on_a_stage = sum(leaf.size // (2 if name == "blocks" else 1) for name, tree in shapes.items() for leaf in jax.tree.leaves(tree))
    ticks = list(tick_loops(traced(case).jaxpr.jaxpr))[-2:]  # the first of zero bubble's three has no weight gradients
    assert len(ticks) == 2
    for loop in ticks:
        others = [x for x in carried(loop) if not {2, LENGTH} <= set(x.shape) and x.size > 3]
        assert sum(x.size for x in others) == pytest.approx(on_a_stage / WAYS, rel=0.01)
        assert {x.dtype for x in others} == {jnp.dtype(jnp.float32)}


@functools.cache
def compiled(zero: int) -> tuple[str, str]:
    """The text of the step, and of what of it stands in no loop."""
    text = traced(case_of(zero, recompute="selective", vocabulary=90)).lower().compile().as_text() or ""
    entry = re.search(r"^ENTRY .*?^\}", text, re.MULTILINE | re.DOTALL)
    assert entry
    return text, entry[0]


def sizes_of(text: str, kind: str) -> list[int]:
    """Values in each result of the collectives of a kind."""
    results = re.findall(rf"= (.*?) {kind}(?:-start)?\(", text)
    return [math.prod(int(n) for n in dims.split(",") if n) for found in results for dims in re.findall(r"\w+\[([\d,]*)\]", found)]


@pytest.mark.xdist_group("compiled pipeline")
@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_are_scattered_in_ticks_and_summed_whole_nowhere(zero: int) -> None:
    text, entry = compiled(zero)
    weights = {"up": 32 * 128, "qkv": 3 * 32 * 32, "output": 32 * 32, "table": 90 * 32}
    assert {size // WAYS for size in weights.values()} <= set(sizes_of(text, "reduce-scatter"))
    assert not sizes_of(entry, "reduce-scatter")
    # What is left after the loops are sums of shares: over stages of what all have, over replicas of a stage's two layers.
    assert max(sizes_of(text, "all-reduce")) == 2 * weights["up"] // WAYS < weights["table"]


@pytest.mark.xdist_group("compiled pipeline")
def test_weights_are_gathered_once_for_each_pass_and_never_beforehand() -> None:
    text, entry = compiled(3)
    gathered = sizes_of(text, "all-gather")
    # Forward in the fill and in the steady state, backward there and in the drain; up and down are alike.
    assert gathered.count(32 * 128) == 2 * 4
    assert gathered.count(3 * 32 * 32) == 4
    # The table is looked up with each forward pass, and is the head with each backward one; a tick gathers it anew, in fp32 once.
    assert gathered.count(90 * 32) in (3, 4)
    assert not sizes_of(entry, "all-gather")


@pytest.mark.parametrize(("zero", "shared"), [(1, {"moments"}), (2, {"moments"}), (3, {"moments", "parameters"})])
def test_the_state_is_shared_by_devices_along_data(zero: int, shared: set[str]) -> None:
    """Every parameter is: bytes of the state on a device are those of the whole over the devices that share it."""
    layout = program(case_of(zero, tensor=1)).layout
    trees = {"parameters": layout.state.params, "moments": layout.state.optimizer["inner"][0].mu}
    for name, specs in trees.items():
        for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda value: isinstance(value, jax.sharding.PartitionSpec)):
            axes = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
            assert ("data" in axes) == (name in shared), jax.tree_util.keystr(path)
