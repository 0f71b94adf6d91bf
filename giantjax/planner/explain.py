"""Why a plan loses, in one line, and plans as tables and as JSON."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from giantjax.cluster import Cluster
from giantjax.config import RunConfig
from giantjax.planner.memory import in_words
from giantjax.planner.plan import Plan
from giantjax.planner.search import WORTH_ROUNDING, Priced, Search

WORDS = {
    "computing": "computing",
    "tensor collectives": "tensor-parallel collectives",
    "bubble": "stages idle",
    "pipeline messages": "waiting for messages between stages",
    "data-parallel collectives": "exchanging gradients",
    "tied embedding": "adding up the embedding's gradients",
    "rounding": "rounding gradients",
    "optimizer": "the optimizer",
}


def mesh_in_words(plan: Plan) -> str:
    """`pipe 4 x data 2 x tensor 4`, degrees of 1 left out."""
    degrees = {"pipe": plan.pipe, "replica": plan.replica, "data": plan.data, "tensor": plan.tensor}
    return " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1) or "one device"


def schedule_in_words(plan: Plan) -> str:
    """`interleaved:2, head shared`; nothing of one stage."""
    if plan.pipe == 1:
        return ""
    chunks = f":{plan.num_chunks}" if plan.num_chunks > 1 else ""
    return f"{plan.schedule}{chunks}" + ("" if plan.head == "everywhere" else f", head {plan.head}")


def why(loser: Priced, best: Priced | None, cluster: Cluster) -> str:
    """What makes `loser` slower than `best`, or keeps it from fitting."""
    if not loser.fits:
        part, size = loser.fullest.largest
        return (
            f"needs {in_words(loser.fullest.total)} of {in_words(loser.usable)} on each GPU even with recompute {loser.plan.recompute} and "
            f"microbatches of {loser.plan.microbatch_size}; {part} alone {in_words(size)}"
        )
    if best is None or loser is best:
        return "the fastest"
    cost, network = loser.cost, cluster.network.fabric
    excess = {part: seconds - best.cost.parts[part] * loser.plan.samples / best.plan.samples for part, seconds in cost.parts.items()}
    part = max(excess, key=lambda name: excess[name])
    share = f"{cost.parts[part]:.2g} s of {cost.seconds:.3g} s"
    if part == "data-parallel collectives" and loser.plan.zero_stage >= 2 and loser.traits.execution == "lockstep":
        return f"ZeRO {loser.plan.zero_stage} in every microbatch: {_amount(cost.nvlink_bytes)} over NVLink a step, {share}"
    if part == "data-parallel collectives" and loser.plan.zero_stage == 3:
        return f"ZeRO-3 across nodes: {_amount(cost.network_bytes)} over {network} a step, {share}"
    if part in ("data-parallel collectives", "pipeline messages", "tied embedding") and cost.network_bytes:
        return f"{WORDS[part]}: {_amount(cost.network_bytes)} over {network} a step, {share}"
    if part == "tensor collectives":
        return f"tensor {loser.plan.tensor}: {_amount(cost.nvlink_bytes)} over NVLink a step, {share}"
    if part == "bubble":
        return f"{loser.plan.num_microbatches} microbatches on {loser.plan.pipe} stages: {WORDS[part]} for {share}"
    redone = {"full": "; layers are computed again", "selective": "; attention is computed again"}.get(loser.plan.recompute_kind, "")
    return f"{WORDS[part]} takes {share} in microbatches of {loser.plan.microbatch_size} on tensor {loser.plan.tensor}{redone}"


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def why_not_rounded(one: Priced, best: Priced) -> str:
    """Why a compression of gradients is not proposed, from its fastest plan."""
    saved = best.cost.seconds - one.cost.seconds * best.plan.samples / one.plan.samples
    amount = f"{_amount(one.cost.network_bytes)} between nodes a step"
    if saved <= 0:
        return f"{one.cost.seconds:.3g} s a step on {mesh_in_words(one.plan)}, {amount}: no faster than the best plan"
    return (
        f"{one.cost.seconds:.3g} s a step on {mesh_in_words(one.plan)}, {amount}: {100 * saved / best.cost.seconds:.1f} % faster than the "
        f"best plan, and rounding must save {100 * WORTH_ROUNDING:.0f} %"
    )


def plan_table(plans: Sequence[Priced], cluster: Cluster) -> Table:
    """The plans, fastest first, and why the others are slower."""
    table = Table(
        "mesh",
        "microbatches",
        "schedule",
        "recompute",
        "ZeRO",
        "compression",
        "step",
        "samples/s",
        "MFU",
        "memory",
        "network",
        "NVLink",
        "bubble",
        box=None,
    )
    table.add_column("exposed")
    table.add_column("why not")
    for one in plans:
        plan, cost = one.plan, one.cost
        table.add_row(
            *(mesh_in_words(plan), f"{plan.num_microbatches} of {plan.microbatch_size}", schedule_in_words(plan), plan.recompute),
            str(plan.zero_stage),
            plan.compression,
            *(f"{cost.seconds:.3g} s", f"{cost.samples_per_s:.3g}", f"{100 * cost.mfu:.0f} %", in_words(one.fullest.total)),
            *(_amount(cost.network_bytes), _amount(cost.nvlink_bytes), f"{100 * cost.bubble:.0f} %", f"{cost.exposed_network_s:.2g} s"),
            why(one, plans[0], cluster) if one is not plans[0] else "",
        )
    return table


def best_of_each_mesh(plans: Iterable[Priced]) -> list[Priced]:
    """The fastest plan of each mesh, in order."""
    found: dict[tuple[int, int, int, int], Priced] = {}
    for one in plans:
        found.setdefault(_degrees(one.plan), one)
    return list(found.values())


def _degrees(plan: Plan) -> tuple[int, int, int, int]:
    return (plan.pipe, plan.replica, plan.data, plan.tensor)


def losers(plans: Sequence[Priced], found: Search, baselines: Iterable[Priced], cluster: Cluster) -> list[tuple[Plan, str]]:
    """Each other mesh with the reason why it lost, baselines after them."""
    best = plans[0] if plans else None
    others = [one for one in [*best_of_each_mesh(plans)[1:], *found.too_large]]
    return [(one.plan, why(one, best, cluster)) for one in [*others, *baselines]]


def as_json(
    config: RunConfig, cluster: Cluster, plans: Sequence[Priced], rejected: Sequence[tuple[Plan, str]], verified: dict[str, Any] | None
) -> dict[str, Any]:
    """What `plan.py --json` writes."""
    return {
        "cluster": cluster.name,
        "model": config.name,
        "plans": [_plan_as_json(one) for one in plans],
        "rejected": [{"mesh": _mesh_as_json(plan), "why": reason} for plan, reason in rejected],
        "verified": verified,
    }


def _mesh_as_json(plan: Plan) -> dict[str, int]:
    return {"pipe": plan.pipe, "replica": plan.replica, "data": plan.data, "tensor": plan.tensor}


def _plan_as_json(one: Priced) -> dict[str, Any]:
    plan, cost = one.plan, one.cost
    return {
        "mesh": _mesh_as_json(plan),
        "schedule": plan.schedule,
        "num_chunks": plan.num_chunks,
        "head": plan.head,
        "microbatch_size": plan.microbatch_size,
        "num_microbatches": plan.num_microbatches,
        "zero_stage": plan.zero_stage,
        "recompute": plan.recompute,
        "compression": plan.compression,
        "step_time_s": cost.seconds,
        "samples_per_s": cost.samples_per_s,
        "mfu": cost.mfu,
        "memory_bytes_by_stage": [stage.total for stage in one.memory],
        "network_bytes_per_step": round(cost.network_bytes),
        "nvlink_bytes_per_step": round(cost.nvlink_bytes),
        "bubble": cost.bubble,
        "exposed_network_s": cost.exposed_network_s,
    }
