"""The constants of the cost model, in one place.

Each has a prior, a published or measured figure, and a spread, how far a fit may move it. The defaults are the fit to published
measurements of whole steps, which `python scripts/benchmark.py planner --data FILE.csv --fit` states anew.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Constants:
    """Shares of line rates, and what is paid by the piece."""

    gemm_v100: float = 0.7099
    """Share of a V100's tensor-core peak that large fp16 matrix products reach."""
    gemm_a100: float = 0.7406
    """The same of an A100."""
    gemm_h100: float = 0.674
    """The same of an H100 or H200, which power limits."""
    small_tile: float = 0.8936
    """Speed of a matrix product in tiles half as large as 256 x 128, a tile's worth."""
    half_depth: float = 99.36
    """Contracted size at which a matrix product runs at half speed."""
    memory: float = 0.7789
    """Share of a GPU's memory bandwidth that elementwise work reaches."""
    flash: float = 0.453
    """Share of the tensor-core rate that blockwise attention reaches forward."""
    flash_backward: float = 0.6444
    """Its backward rate, as a share of the forward rate."""
    misaligned: float = 0.08581
    """Speed of attention whose head size is no multiple of 8: tensor cores need 16 bytes in a row."""
    eager: float = 1.418
    """Bytes moved by elementwise work, a kernel an operation, against kernels fused by hand."""
    compiled: float = 0.6385
    """The same of a compiler's fusions."""
    nvlink: float = 0.5989
    """Share of NVLink's line rate that collectives reach in training."""
    collective_latency: float = 31.5e-6
    """Seconds of one pass of a collective beside its bytes."""
    launch: float = 4.12e-6
    """Seconds between one kernel and the next."""
    contention: float = 0.6472
    """Share of a transfer's time that computing meanwhile is slowed by."""
    omni_path: float = 0.2037
    """Share of the line rate of Omni-Path staged through host memory (V100 nodes)."""
    omni_path_direct: float = 0.3164
    """The same where cards reach GPU memory (A100 nodes)."""
    infiniband: float = 0.6214
    """Share of InfiniBand's line rate, from V100 nodes behind PCIe 3."""
    infiniband_direct: float = 0.7958
    """The same from A100 and later nodes, a card beside each pair of GPUs."""
    roce: float = 0.75
    """Share of RDMA over Ethernet's line rate."""
    eighth: float = 0.7316
    """Speed of 8-bit matrix products against twice that of 16-bit ones: scaling factors and casts."""
    host: float = 0.5396
    """Share of PCIe's and host memory's line rates that offloading reaches."""


PRIORS: dict[str, tuple[float, float]] = {
    # Large cuBLAS products: 90 of 125, 255 of 312 and 620 of 989 TFLOP/s in the "achieved" tables of
    # github.com/stas00/ml-engineering compute/accelerator (mamf-finder); V100: Markidis et al. (2018), 83 TFLOP/s.
    "gemm_v100": (0.70, 0.10),
    "gemm_a100": (0.82, 0.10),
    "gemm_h100": (0.64, 0.10),
    # CUTLASS's profiler: 128 x 128 tiles run at 0.8 to 0.95 of 256 x 128.
    "small_tile": (0.80, 0.35),
    # Prologue and epilogue of a tile cost as much as two to four steps of 32.
    "half_depth": (100.0, 0.35),
    # Stream-like kernels: 0.75 to 0.9 of the datasheet.
    "memory": (0.80, 0.10),
    # The Triton kernel in Dao (2023), figures 4 to 6: 90 to 150 of 312 TFLOP/s with the causal half skipped, backward 0.6 to 0.8 of that.
    "flash": (0.45, 0.35),
    "flash_backward": (0.70, 0.35),
    # CUDA cores instead of tensor cores: 31 of 125 TFLOP/s at best.
    "misaligned": (0.12, 0.35),
    # Bytes counted by hand for Megatron-LM's operations with and without its fused kernels, and under XLA.
    "eager": (1.6, 0.35),
    "compiled": (0.8, 0.35),
    # nccl-tests on 8 A100: 171 to 194 of 300 GB/s for 64 to 256 MiB, 235 for 16 GiB (github.com/stas00/ml-engineering network); 124 of 150
    # on 4 V100 (BigScience).
    "nvlink": (0.65, 0.10),
    # The same table: 44 us for 32 KiB and 102 us for 1 MiB, in two passes.
    "collective_latency": (30e-6, 0.30),
    # Launches run ahead of the GPU; what is left is the tail of one kernel and the head of the next.
    "launch": (4e-6, 0.20),
    "contention": (0.40, 0.35),
    # BigScience experiments/bandwidth: 54 to 85 of 400 Gb/s.
    "omni_path": (0.16, 0.35),
    "omni_path_direct": (0.50, 0.35),
    # nccl-tests: 0.85 to 0.96 on A100 (issue 119), 0.5 on V100 with two NVLinks (issue 29); a step's collectives are smaller and colder.
    "infiniband": (0.70, 0.15),
    "infiniband_direct": (0.80, 0.10),
    "roce": (0.75, 0.10),
    "eighth": (0.75, 0.35),
    "host": (0.50, 0.35),
}
"""Where the fit starts, and the standard deviation of the logarithm that holds it there."""


def prior() -> Constants:
    """The constants before any fit."""
    return Constants(**{name: value for name, (value, _) in PRIORS.items()})


FITTED = Constants()
FITTED_SOURCES = frozenset(
    (
        *("Megatron-README@19301985", "DLPerf-Megatron", "DLPerf-OneFlow", "DLPerf-DeepSpeed", "bigscience/gpt2.md"),
        *("bigscience/gpt2-16gb-nodes.md", "bigscience/tr3m-1B3.md", "bigscience/tr8-104B.md", "bigscience/chronicles-prequel"),
        *("Alpa-OSDI22-intra-op-ablation", "llm-foundry-benchmarks"),
    )
)
"""Sources that the constants were fitted to, which a test of them must leave out."""
CALIBRATION = 0.75
"""Share of one measured row's error that other rows of its source have too: variance between sources over all variance."""

assert asdict(FITTED).keys() == PRIORS.keys()
