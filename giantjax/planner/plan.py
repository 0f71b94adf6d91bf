"""What is priced: a layout of the work, and the traits of the software that does it."""

from dataclasses import dataclass
from typing import Literal

from giantjax.config import recompute_interval

Compression = Literal["none", "bf16", "int8"]
Head = Literal["everywhere", "last", "shared"]
"""Which stages compute a microbatch's loss, as `pipeline.head` says."""
Precision = Literal["fp32", "half", "eighth"]
"""Of matrix products: fp32, fp16 or bf16, 8-bit."""


@dataclass(frozen=True)
class Plan:
    """How one step is laid out over a cluster."""

    pipe: int = 1
    replica: int = 1
    """Data-parallel groups across nodes."""
    data: int = 1
    """Data-parallel devices inside a node."""
    tensor: int = 1
    microbatch_size: int = 1
    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    head: Head = "everywhere"
    recompute: str = "none"
    zero_stage: int = 0
    compression: Compression = "none"
    """Of gradients that cross between nodes on `replica`."""

    @property
    def ways(self) -> int:
        """Data-parallel degree, inside nodes and across."""
        return self.replica * self.data

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.pipe * self.replica * self.data * self.tensor

    @property
    def samples(self) -> int:
        """Samples of one step."""
        return self.microbatch_size * self.num_microbatches * self.ways

    @property
    def recompute_kind(self) -> str:
        """`none`, `selective` or `full`."""
        return self.recompute.partition(":")[0]

    @property
    def recompute_interval(self) -> int:
        """K of `full:K`, else 1."""
        return recompute_interval(self.recompute)


@dataclass(frozen=True)
class Traits:
    """What a program does, as far as it shows in its speed. No trait is a number that was fitted to one program."""

    attention: Literal["eager", "fused", "flash", "native"] = "fused"
    """A kernel an operation; mask and softmax in one kernel; blockwise, scores never written, masked blocks skipped; or the same in
    the newest instructions of the GPU, as cuDNN and FlashAttention-3 have it on an H100."""
    elementwise: Literal["eager", "fused", "compiled"] = "fused"
    """A kernel an operation; bias, GELU, dropout and residual joined by hand; or joined wherever possible by a compiler."""
    precision: Precision = "half"
    overlap_data: bool = False
    """Gradients and shared parameters travel while layers compute, instead of before and after."""
    gathers: Literal["layer", "parameter"] = "layer"
    """Whether shared parameters are gathered a layer at a time, or each on its own."""
    overlap_pipe: bool = False
    """Boundary activations travel while layers compute."""
    overlap_tensor: bool = False
    """Tensor-parallel collectives travel in pieces while the products beside them run."""
    sequence_parallel: bool = False
    """What tensor-parallel devices would all do, LayerNorms and residuals, is divided among them too."""
    shares_across: bool = True
    """ZeRO shares over every data-parallel device, not only over those of a node."""
    sharded_boundary: bool = False
    """Each tensor-parallel device sends its part of a boundary, instead of all of it."""
    execution: Literal["lockstep", "asynchronous"] = "asynchronous"
    gradient_bytes: int = 2
    """Of an element of the gradients that data-parallel devices exchange."""
    casts_weights: bool = False
    """fp32 parameters are cast to the compute type anew in every microbatch."""
    dropout: bool = True
    offload: Literal["none", "optimizer", "everything"] = "none"
    """What lives in host memory: nothing, the optimizer and its work, or parameters too."""
    balanced: bool = False
    """Stages with the embedding or the head hold a layer less each."""


GIANTJAX = Traits(
    attention="fused",
    elementwise="compiled",
    overlap_pipe=True,
    sequence_parallel=True,
    shares_across=False,
    sharded_boundary=True,
    execution="lockstep",
    gradient_bytes=4,
    dropout=False,
)
"""What this program does: gradients are reduced in fp32 after the last tick, boundaries travel as 1/tensor while layers compute."""

MEGATRON = Traits(attention="fused", elementwise="fused", sharded_boundary=True, gradient_bytes=4, dropout=False)
"""Megatron-LM of 2021 (Narayanan et al.): fused kernels, gradients reduced in fp32 after the last microbatch, sends that block."""

ZERO3 = Traits(attention="fused", elementwise="fused", overlap_data=True, gathers="parameter", gradient_bytes=2, dropout=False)
"""DeepSpeed ZeRO stage 3 (Rajbhandari et al., 2020): parameters gathered a layer ahead, gradients scattered behind."""
