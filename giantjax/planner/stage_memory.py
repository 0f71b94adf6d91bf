"""Memory of each pipeline stage under a plan, to the figures of the compiled program where it is ours."""

from dataclasses import dataclass, fields

from giantjax.cluster import GPU
from giantjax.config import ModelConfig
from giantjax.planner.exchange import Sizes, feedback_bytes, sizes_of, zero_ways
from giantjax.planner.layer import BLOCKWISE
from giantjax.planner.pipelining import stash_bytes
from giantjax.planner.plan import Plan, Traits

RESERVED = 2**30
"""Bytes kept free of what JAX may take: NCCL's buffers, workspaces of matrix products, and what fragments leave unused. What
`runtime.memory_fraction` leaves out holds the CUDA context."""
SLACK = 0.06
"""Share of the rest for what an allocator cannot hand out and for the estimate's own error."""
DRIVER = 0.986
"""Share of the datasheet's memory that a driver reports: 42,331,013,120 bytes of an A100-40GB, 33,871,364,096 of a V100-32GB."""

# Fitted to `memory_analysis()` of the compiled plans of tests/planner/compiled.csv that are not held out (docs/planner.md).
MICROBATCH_GRADIENTS = 4
"""Bytes a parameter of the gradients of one microbatch, before they are added to the sums: fp32, of all layers at once."""
KEPT = 1.13
"""Bytes kept for the backward pass against those counted by name: statistics of LayerNorms and inputs of blocks besides."""
SHARED_HEAD_GRADIENTS = 4
"""Bytes a parameter more where all stages share the head, whose gradients live beside those of the microbatch's blocks; with a slot more,
fitted to two compiled programs (13B on 32 V100s and on 32 A100s, 25 and 33 GiB without it)."""
SPARE = 1
"""Slots of a pipeline beside those in use: what a tick has just made or taken out."""
LOGITS = 3.2
"""fp32 arrays of logits that are there at once. Our executor makes them at the beginning of a microbatch's backward pass, so no slot keeps
any, and gradients and working set of the blocks take their place afterwards."""
WORKING = 2.0
"""Bytes of one block's backward pass against those counted."""
GROUPED_WORKING, GROUPED_WEIGHTS = 0.67, 8.5
"""Under `full:K`, of each of K layers: the same, and bytes a parameter of what is cut out of the stage for the group, and its gradients."""
OTHERS_WORKING = 1.5
"""WORKING of programs that are not compiled."""
ADAM = 8
"""Bytes a parameter of two fp32 moments."""


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage; the parts add up."""

    parameters: int
    """fp32."""
    optimizer: int
    """Two moments, or a device's share of them."""
    gradients: int
    """fp32 sums over microbatches, and with us those of one microbatch beside them."""
    copies: int
    """Of the weights, in the type of matrix products."""
    feedback: int
    """What rounding took off the gradients that cross between nodes."""
    activations: int
    """What microbatches in flight keep for their backward pass."""
    logits: int
    """fp32, of the last stage; with us of every one, as far as they need more than what takes their place."""
    working: int
    """What one block needs while its backward pass runs."""
    whole: int
    """Of what our ZeRO 2 and 3 share, what is there whole for a while: the fp32 gradients of one block, and weights gathered for it."""

    @property
    def program(self) -> int:
        """What the compiled program takes."""
        return sum(vars(self).values())

    @property
    def reserved(self) -> int:
        """What else must be free."""
        return RESERVED + int(SLACK * self.program)

    @property
    def total(self) -> int:
        """All of it."""
        return self.program + self.reserved

    @property
    def parts(self) -> list[tuple[str, int]]:
        """Each part's name and bytes, largest first."""
        return sorted(((part.name, int(getattr(self, part.name))) for part in fields(self)), key=lambda part: -part[1])

    @property
    def largest(self) -> tuple[str, int]:
        """The part that takes most."""
        return self.parts[0]


def usable_bytes(gpu: GPU, memory_fraction: float) -> int:
    """Bytes of a GPU that a program and RESERVED may take."""
    return int(gpu.memory_bytes * DRIVER * memory_fraction)


def kept_bytes(model: ModelConfig, plan: Plan, traits: Traits, width: int) -> float:
    """Bytes of one block and microbatch that a device keeps for the backward pass.

    Ours keeps the results of matrix products: 3 h for the heads, h each for context and residual, the inner layer, and where nothing
    is redone the attention weights, all divided over `tensor`. Others keep what Korthikanti et al. (2022) count: 34 h and 5 a s
    bytes a token, of which LayerNorms and residuals, 10 h, are not divided, and what only dropout needs, 2 h and 3 a s, goes without it.
    """
    tokens, hidden = plan.microbatch_size * model.sequence_length, model.hidden_size
    scores = 0 if traits.attention in BLOCKWISE or plan.recompute_kind != "none" else model.num_heads * model.sequence_length
    if traits.execution == "lockstep":
        if plan.recompute_kind == "full":
            return width * tokens * hidden / plan.tensor / plan.recompute_interval
        return width * tokens * (KEPT * (5 * hidden + model.inner_size) + scores) / plan.tensor
    if plan.recompute_kind == "full":
        return width * tokens * hidden
    dropped = int(traits.dropout)
    return tokens * ((8 + 2 * dropped) * hidden + (24 * hidden + (2 + 3 * dropped) * scores) / plan.tensor) * width / 2


def stage_memory(model: ModelConfig, plan: Plan, traits: Traits) -> list[StageMemory]:
    """Memory of a device of each stage.

    In lockstep every stage is padded to the fullest and holds up to 2S - 1 microbatches; otherwise stage s holds S - s.
    """
    width = 4 if traits.precision == "fp32" else 2
    lockstep = traits.execution == "lockstep"
    chunks = plan.num_chunks if lockstep else 1
    layers = -(-model.num_layers // (plan.pipe * chunks)) * chunks
    sizes = sizes_of(model, plan, layers, traits)
    tokens = plan.microbatch_size * model.sequence_length
    rows = model.padded_vocabulary(plan.tensor) / plan.tensor
    scores = 0 if traits.attention in BLOCKWISE else 2 * model.num_heads * model.sequence_length
    block = width * tokens * (16 * model.hidden_size + scores) / plan.tensor
    working = (WORKING if lockstep else OTHERS_WORKING) * block
    if lockstep and plan.recompute_interval > 1:
        working += min(plan.recompute_interval, layers) * (
            GROUPED_WORKING * block + GROUPED_WEIGHTS * sizes.layer / (plan.data if plan.zero_stage >= 2 else 1)
        )
    on_device = {"none": (1, 1), "optimizer": (1, 0), "everything": (0, 0)}[traits.offload]
    spare = SPARE if lockstep and plan.pipe > 1 else 0
    stages = []
    for stage in range(1 if lockstep else plan.pipe):
        at_end = lockstep or stage in (0, plan.pipe - 1)
        held = sizes.stage if at_end else sizes.stage - sizes.table
        shared = zero_ways(plan, traits)
        states, grads, params = (shared if plan.zero_stage >= level else 1 for level in (1, 2, 3))
        whole = 0.0
        gradients, copies = traits.gradient_bytes * held / grads, held * 2 / params
        logits = max(0.0, 8 * tokens * rows - working) if stage == plan.pipe - 1 else 0.0
        if lockstep:
            # Of one microbatch, which give way to the logits of the next.
            fresh = MICROBATCH_GRADIENTS * ((held - sizes.table) / chunks + sizes.table) / grads
            gradients += fresh + (SHARED_HEAD_GRADIENTS * held / grads if plan.head == "shared" and plan.pipe > 1 else 0)
            copies = width * sizes.cast / params if width < 4 else 0
            if chunks > 1:
                # Those of the chunks of the two actions of a tick are cut out of the stage's.
                copies += 2 * width * sizes.matrices / params / chunks
            whole, with_head = _whole_bytes(sizes, plan, width)
            head = LOGITS * 4 * tokens * rows / (plan.pipe if plan.head == "shared" else 1)
            logits = max(0.0, head + with_head - fresh - working - whole)
        stages.append(
            StageMemory(
                parameters=int(on_device[0] * 4 * held / params),
                optimizer=int(on_device[1] * ADAM * held / states),
                gradients=int(gradients),
                copies=int(copies),
                feedback=int(feedback_bytes(sizes, plan)),
                activations=int(
                    kept_bytes(model, plan, traits, width) * layers * (in_flight(plan, traits, stage) + spare / chunks)
                    + _stashed(model, plan, width) * layers
                ),
                logits=int(logits),
                working=int(working),
                whole=int(whole),
            )
        )
    return stages * plan.pipe if lockstep else stages


def _whole_bytes(sizes: Sizes, plan: Plan, width: int) -> tuple[float, float]:
    """Bytes that our ZeRO has whole while a block's backward pass runs, and while the head's does.

    Gradients of the embedding by the head wait for those of its look-up, to be scattered with them; and what is looked up may
    have been gathered for the next microbatch already.
    """
    if plan.zero_stage < 2:
        return 0.0, 0.0
    gathered = plan.zero_stage == 3
    return (4 + width * gathered) * sizes.layer + 4 * sizes.token, (4 + (width + 4) * gathered) * sizes.token


def in_flight(plan: Plan, traits: Traits, stage: int) -> float:
    """Microbatches whose backward pass has yet to run; what is of one of several chunks is a part of one."""
    if plan.pipe == 1:
        return 1
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    if traits.execution == "asynchronous":
        return min(plan.pipe - stage, plan.num_microbatches)
    # A tick later, and beside what the tick of the head takes out and puts.
    later = 2 * int(plan.head == "shared")
    most = (plan.num_chunks * plan.pipe + plan.pipe - 1 + later) / plan.num_chunks
    return min(most, plan.num_microbatches)


def _stashed(model: ModelConfig, plan: Plan, width: int) -> float:
    """Bytes of a layer that wait for the gradients of weights, where these have ticks of their own: of S microbatches, and one's spare."""
    if plan.schedule != "zero-bubble" or plan.pipe == 1:
        return 0.0
    return stash_bytes(model, plan, width) * (min(plan.pipe, plan.num_microbatches) + SPARE)
