"""What the train step asks of XLA on GPUs: one list, for training and for compile checks alike."""

GPU_OPTIONS: dict[str, bool | int | str] = {
    # Without it a collective is waited for where it starts, and nothing overlaps.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # It moves hops to where a loop's next turn begins, away from the compute that they are to lie over.
    "xla_disable_hlo_passes": "collective-permute-motion",
    # The scheduler gives up overlap where a program takes more than this share of 80 % of the memory, by default 95 %: far less
    # than the 92 % of the memory that runtime.memory_fraction gives a program.
    "xla_gpu_memory_limit_slop_factor": 115,
}


def compiler_options(platform: str) -> dict[str, bool | int | str]:
    """Options of `jax.jit` for a program that runs on `platform` (`gpu`, `cpu`)."""
    return dict(GPU_OPTIONS) if platform == "gpu" else {}
