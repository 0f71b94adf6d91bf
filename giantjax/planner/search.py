"""Every legal plan of a run on a cluster, priced, fastest first."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from giantjax.cluster import Cluster
from giantjax.config import ModelConfig, RunConfig
from giantjax.errors import InputError, nearest_multiples
from giantjax.planner.cost import StepCost, step_cost
from giantjax.planner.exchange import BYTES_A_VALUE
from giantjax.planner.memory import in_words
from giantjax.planner.plan import GIANTJAX, Compression, Head, Plan, Precision, Traits
from giantjax.planner.stage_memory import StageMemory, stage_memory, usable_bytes

LARGEST_MICROBATCH = 64
"""Samples; larger ones gain nothing and take memory."""

VARIED = 48
"""Fastest plans under 1F1B that are tried with other schedules."""

LARGEST_CHUNKS = 6
"""On a stage; more of them gain little and send as much more."""

WORTH_ROUNDING = 0.02
"""Share of the step that rounding gradients between nodes must save, and int8 again over bf16: it costs memory, and exactness."""


@dataclass(frozen=True)
class Priced:
    """A plan, what it costs and what it needs."""

    plan: Plan
    traits: Traits
    cost: StepCost
    memory: tuple[StageMemory, ...]
    """By stage."""
    usable: int
    """Bytes of a GPU."""

    @property
    def fullest(self) -> StageMemory:
        """Memory of the stage that needs most."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def fits(self) -> bool:
        """Whether every stage does."""
        return self.fullest.total <= self.usable


@dataclass(frozen=True)
class Search:
    """What was found."""

    fitting: list[Priced]
    """Fastest first."""
    too_large: list[Priced]
    """One of each mesh none of whose plans fits: the one that needs least."""
    not_worth: list[Priced] = field(default_factory=list)
    """The fastest plan of each compression that saves less than WORTH_ROUNDING, and is not proposed."""


def precision_of(config: RunConfig) -> Precision:
    """What a plan is priced in: fp32 where the run asks for it, otherwise the GPU's 16-bit type."""
    return "fp32" if config.training.precision == "fp32" else "half"


def search(config: RunConfig, cluster: Cluster, traits: Traits = GIANTJAX) -> Search:
    """Price every plan of `config` on all of `cluster`.

    Of each mesh and recompute policy all microbatch sizes that fit count. What cannot win is left out: GPipe, which takes as long
    as 1F1B or longer and never less memory; parallel groups that span nodes where they could lie inside; microbatches that need more
    memory than one that did not fit; and rounding of gradients that take less than WORTH_ROUNDING of the step. Other schedules, and
    other ways to compute the head, are tried on the VARIED plans that are fastest under 1F1B.
    """
    traits = replace(traits, precision=precision_of(config))
    usable = usable_bytes(cluster.gpu, config.runtime.memory_fraction)
    fitting: list[Priced] = []
    too_large: dict[tuple[int, int, int, int], Priced] = {}
    for mesh in meshes(config, cluster):
        degrees = (mesh.pipe, mesh.replica, mesh.data, mesh.tensor)
        found = [priced for priced in _plans(config, cluster, traits, mesh, usable) if priced.fits]
        if found:
            fitting += found
        else:
            too_large[degrees] = _smallest(config, cluster, traits, mesh, usable)
    ranked = _ranked(fitting)
    ranked = _ranked(ranked + [one for first in ranked[:VARIED] for one in variants(config, cluster, first) if one.fits])
    worth, not_worth = _worth_rounding(ranked)
    return Search(_distinct(worth), list(too_large.values()), not_worth)


def _ranked(plans: list[Priced]) -> list[Priced]:
    return sorted(plans, key=lambda priced: (priced.cost.seconds, priced.fullest.total))


def variants(config: RunConfig, cluster: Cluster, first: Priced) -> Iterator[Priced]:
    """`first` with each other schedule and each other way to compute the head, whether it fits or not."""
    plan, model = first.plan, config.model
    if plan.pipe == 1:
        return
    chunks = [number for number in range(2, LARGEST_CHUNKS + 1) if model.num_layers % (plan.pipe * number) == 0]
    schedules = [("1f1b", 1), ("zero-bubble", 1), *(("interleaved", number) for number in chunks)]
    divides = model.padded_vocabulary(plan.tensor) // plan.tensor % plan.pipe == 0
    heads: tuple[Head, ...] = ("everywhere", "last", "shared") if divides else ("everywhere", "last")
    for (schedule, number), where in itertools.product(schedules, heads):
        varied = replace(plan, schedule=schedule, num_chunks=number, head=where)
        if varied != plan:
            yield price(model, varied, cluster, first.traits, first.usable)


def compressions(config: RunConfig, mesh: Plan) -> tuple[Compression, ...]:
    """What may round the gradients between replicas: what the run asks for, or where it asks for nothing any."""
    if mesh.replica == 1:
        return ("none",)
    asked = config.training.compression
    return ("none", "bf16", "int8") if asked == "none" else (asked,)


def _worth_rounding(ranked: list[Priced]) -> tuple[list[Priced], list[Priced]]:
    """Those of `ranked` that round nothing, or save WORTH_ROUNDING of the fastest that rounds less; and the fastest of each other kind."""
    dropped: list[Priced] = []
    for compression in ("bf16", "int8"):
        kind = [one for one in ranked if one.plan.compression == compression]
        others = [one.cost.seconds for one in ranked if BYTES_A_VALUE[one.plan.compression] > BYTES_A_VALUE[compression]]
        bar = (1 - WORTH_ROUNDING) * min(others, default=math.inf)
        slow = [one for one in kind if one.cost.seconds > bar]
        left_out = set(map(id, slow))
        ranked = [one for one in ranked if id(one) not in left_out]
        # Where another plan of the kind is proposed, the kind needs no reason.
        dropped += slow[:1] if len(slow) == len(kind) else []
    return ranked, dropped


def _distinct(ranked: list[Priced]) -> list[Priced]:
    """Of plans that differ only in what they recompute, share and round, the fastest."""
    found: dict[tuple[int, ...], Priced] = {}
    for one in ranked:
        plan = one.plan
        found.setdefault((plan.pipe, plan.replica, plan.data, plan.tensor, plan.microbatch_size), one)
    return list(found.values())


def meshes(config: RunConfig, cluster: Cluster) -> Iterator[Plan]:
    """Plans that differ in the mesh alone: tensor, then data inside a node, replica and pipe across.

    A mesh is legal if `tensor` divides heads, inner layer, sequence and a node's GPUs, every stage has a layer, and the
    data-parallel devices divide the batch.
    """
    model, batch = config.model, config.training.global_batch_size
    for tensor in divisors(cluster.gpus_per_node):
        if any(size % tensor for size in (model.num_heads, model.inner_size, model.sequence_length)):
            continue
        for pipe in divisors(cluster.num_gpus // tensor):
            ways = cluster.num_gpus // tensor // pipe
            if pipe <= model.num_layers and batch % ways == 0:
                data = math.gcd(ways, cluster.gpus_per_node // tensor)
                yield Plan(pipe=pipe, replica=ways // data, data=data, tensor=tensor)


def _plans(config: RunConfig, cluster: Cluster, traits: Traits, mesh: Plan, usable: int) -> Iterator[Priced]:
    model, each = config.model, config.training.global_batch_size // mesh.ways
    first, *others = compressions(config, mesh)
    for recompute in ("none", "selective", "full"):
        for zero in (0, 1, 2, 3) if mesh.data > 1 else (0,):
            kind = replace(mesh, recompute=recompute, zero_stage=zero, compression=first)
            for size in divisors(each):
                if size > LARGEST_MICROBATCH:
                    break
                plan = replace(kind, microbatch_size=size, num_microbatches=each // size)
                if stage_memory(model, plan, traits)[0].total > usable:
                    break
                exact = price(model, plan, cluster, traits, usable)
                yield exact
                gradients = exact.cost.parts["data-parallel collectives"] + exact.cost.parts["tied embedding"]
                if gradients > WORTH_ROUNDING * exact.cost.seconds:
                    yield from (price(model, replace(plan, compression=one), cluster, traits, usable) for one in others)


def _smallest(config: RunConfig, cluster: Cluster, traits: Traits, mesh: Plan, usable: int) -> Priced:
    each = config.training.global_batch_size // mesh.ways
    plan = replace(
        mesh, num_microbatches=each, recompute="full", zero_stage=3 if mesh.data > 1 else 0, compression=compressions(config, mesh)[0]
    )
    return price(config.model, plan, cluster, traits, usable)


def price(model: ModelConfig, plan: Plan, cluster: Cluster, traits: Traits, usable: int) -> Priced:
    """`plan` with its cost and memory."""
    return Priced(plan, traits, step_cost(model, plan, cluster, traits), tuple(stage_memory(model, plan, traits)), usable)


@lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """In order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def require_fitting(config: RunConfig, cluster: Cluster, found: Search) -> list[Priced]:
    """The plans that fit, at least one.

    Raises:
        InputError: there is none; the sentence says what the least demanding one would need.
    """
    if found.fitting:
        return found.fitting
    model, batch = config.model, config.training.global_batch_size
    if not found.too_large:
        raise InputError(
            f"no mesh of {cluster.num_nodes} nodes of {cluster.gpus_per_node} GPUs suits {config.name}: mesh.tensor must divide "
            f"model.num_heads {model.num_heads}, the feed-forward size {model.inner_size}, model.sequence_length "
            f"{model.sequence_length} and the {cluster.gpus_per_node} GPUs of a node, and mesh.data x mesh.replica must divide "
            f"training.global_batch_size {batch}; nearest batches: {nearest_multiples(batch, cluster.num_gpus)}"
        )
    least = min(found.too_large, key=lambda priced: priced.fullest.total)
    plan, (part, size) = least.plan, least.fullest.largest
    raise InputError(
        f"{config.name} does not fit {cluster.name}: even on pipe {plan.pipe} x tensor {plan.tensor} with recompute full and microbatches "
        f"of 1 a {cluster.gpu.name} would need {in_words(least.fullest.total)} ({part} {in_words(size)}) of {in_words(least.usable)}; "
        f"take {_nodes_needed(least, cluster)} or GPUs with more memory"
    )


def _nodes_needed(least: Priced, cluster: Cluster) -> str:
    """Roughly, for state that is divided over all GPUs."""
    factor = math.ceil(least.fullest.total / least.usable)
    return f"about {cluster.num_nodes * factor} nodes"
