"""Traits of published programs, told by the words of a row; none is a number, and none belongs to one row."""

from collections.abc import Mapping

from giantjax.cluster import GPU
from giantjax.planner.plan import Plan, Traits

BLOCKWISE = ("flash", "mpt", "llm-foundry", "torchtitan", "llama", "maxtext", "nemo", "megascale")
"""Programs whose attention is blockwise on any GPU; transformer engine's is too, and whatever runs on an H100."""
COMPILED = ("oneflow", "libai", "parax", "alpa", "jax", "maxtext", "xla", "compile")
"""A compiler joins their elementwise work."""
EAGER = ("fsdp", "hf ", "hugging", "transformers", "dlperf-deepspeed", "fairscale", "colossal")
"""A kernel an operation: plain PyTorch, and the Megatron-LM of 2019 in DeepSpeed's examples."""
MODERN = ("megatron", "nemo", "megascale", "torchtitan")
"""Since 2023, when they came to run on the H100, these overlap what they exchange, and share what tensor-parallel devices did alike."""
SHARDED = ("fsdp", "torchtitan", "pax", "maxtext", "fairscale")
"""Parameters are shared by layer, not each on its own."""


def traits_of(cells: Mapping[str, str], gpu: GPU, plan: Plan) -> Traits:
    """What the program of a row does, by its source, model, precision and schedule."""
    # The address after a source's name tells who published, which is not who programmed.
    name = cells["source"].partition(" ")[0]
    text = " ".join([name, *(cells[column] for column in ("model", "precision", "schedule", "recompute"))]).lower()
    precision = cells["precision"].lower()

    def has(words: tuple[str, ...]) -> bool:
        return any(word in text for word in words)

    compiled, eager = has(COMPILED), has(EAGER)
    blockwise = has(BLOCKWISE) or precision.startswith("te") or gpu.family in ("H100", "H200")
    modern = has(MODERN) and blockwise
    old = not blockwise and gpu.family in ("V100", "A100")
    return Traits(
        attention="native" if modern else "flash" if blockwise else "eager" if eager else "fused",
        elementwise="compiled" if compiled else "eager" if eager else "fused",
        precision="eighth" if "fp8" in precision or "float8" in precision else "fp32" if precision == "fp32" else "half",
        # Where tensor parallelism keeps the one stream of collectives busy, gradients wait for the end of it.
        overlap_data=(compiled and plan.tensor == 1) or has(SHARDED) or plan.zero_stage == 3 or modern,
        gathers="parameter" if plan.zero_stage == 3 and not compiled and not has(SHARDED) else "layer",
        overlap_pipe=compiled or modern,
        overlap_tensor=modern,
        sequence_parallel=modern or "sequence parallel" in text,
        sharded_boundary=plan.tensor > 1,
        gradient_bytes=4 if "default" in precision else 2,
        casts_weights="amp" in precision,
        dropout=old,
        offload="everything" if "full cpu offload" in text else "optimizer" if "optimizer offload" in text else "none",
        balanced="rebalancing" in text or "bloom" in text,
    )
