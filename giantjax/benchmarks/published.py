"""Published measurements of training speed, a CSV row each, as plans that the cost model can price.

A cell that is empty was not stated. What can be told from other cells is; what cannot is either replaced by the usual value,
which the row's notes then name, or makes the row unusable, which `read_rows` counts with the reason.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from giantjax.benchmarks.cells import read_cells
from giantjax.benchmarks.software import traits_of
from giantjax.cluster import GPU, GPUS, Cluster
from giantjax.config import ModelConfig
from giantjax.errors import InputError
from giantjax.network import Fabric, NetworkLink, network
from giantjax.planner.constants import Constants
from giantjax.planner.cost import step_cost
from giantjax.planner.plan import Plan, Traits
from giantjax.planner.stage_memory import RESERVED, stage_memory, usable_bytes

METRICS = ("iteration_time_s", "iteration_time_ms", "samples_per_s", "tokens_per_s")
"""Those that need no definition."""
MEMORY_UNITS = {"gpu_mem_GB": 1e9, "gpu_mem_MB": 1e6, "gpu_mem_MiB": 2**20, "peak_mem_GB": 1e9, "peak_mem_GiB": 2**30}
"""Bytes of a unit of the metrics that are memory in use on a GPU."""
OUT_OF_MEMORY, ALMOST = re.compile(r"\bOOM\b|out of memory", re.IGNORECASE), re.compile(r"close to OOM|near OOM", re.IGNORECASE)
COLUMNS = (
    *("source", "model", "params_B", "layers", "hidden", "heads", "seq", "vocab", "gpu", "gpus", "gpus_per_node", "inter_node_link"),
    *("tp", "pp", "dp", "zero_stage", "micro_batch", "global_batch", "schedule", "recompute", "precision", "metric", "value"),
)
GPT2_VOCABULARY = 50257
ALIASES = {"A800": "A100", "H800": "H100", "H20": "H100"}
USUAL_LINKS: dict[str, tuple[Fabric, float, int]] = {
    "V100": ("infiniband", 100, 4),
    "A100": ("infiniband", 200, 8),
    "H100": ("infiniband", 400, 8),
    "H200": ("infiniband", 400, 8),
}
"""Of DGX-1V (four cards of 100 Gb/s), DGX A100 (eight of 200) and DGX H100 (eight of 400)."""


class Unusable(Exception):  # noqa: N818 (the reason is the message)
    """A row that cannot be priced, and why."""


@dataclass(frozen=True)
class Row:
    """One measurement."""

    line: int
    """Of the file, from 1."""
    source: str
    """The first word of its cell; the rest is the address."""
    name: str
    model: ModelConfig
    plan: Plan
    cluster: Cluster
    traits: Traits
    seconds: float
    """Of one step."""
    samples: float
    """Of one step."""
    notes: tuple[str, ...]
    """What was not stated, and stands at its usual value."""

    @property
    def family(self) -> tuple[object, ...]:
        """What plans that may be ordered have in common: the source's own name for the model, and the cluster."""
        return (self.source, self.name, self.cluster.gpu.name, self.cluster.num_gpus)

    @property
    def pace(self) -> float:
        """Measured seconds a token, so that neither a larger batch nor a longer window is slower for that alone."""
        return self.seconds / self.samples / self.model.sequence_length

    def predicted(self, constants: Constants) -> float:
        """Seconds of one step by the cost model."""
        return step_cost(self.model, self.plan, self.cluster, self.traits, constants).seconds


@dataclass(frozen=True)
class Occupied:
    """A plan that was tried, and what became of its memory."""

    row: Row
    """Its time means nothing where `ran` is False."""
    ran: bool
    """Whether the GPUs held it."""
    num_bytes: float | None
    """Measured on the fullest GPU, where it was."""

    @property
    def estimate(self) -> int:
        """Bytes that the program takes, by the planner's model, with what else is in the GPU's memory."""
        return max(stage.program for stage in stage_memory(self.row.model, self.row.plan, self.row.traits)) + RESERVED

    @property
    def fits(self) -> bool:
        """Whether the planner thinks that the GPUs hold it; other programs may take all of their memory."""
        return self.estimate <= usable_bytes(self.row.cluster.gpu, 1.0)


def read_occupied(path: Path) -> list[Occupied]:
    """Every plan of a file once: those with a time or a measured memory ran, those that a row calls out of memory did not.

    Raises:
        InputError: as `read_rows`.
    """
    found: dict[object, Occupied] = {}
    for line, cells in read_cells(path, COLUMNS):
        text = " ".join(cells[name] for name in ("model", "metric", "value"))
        failed = bool(OUT_OF_MEMORY.search(text)) and not ALMOST.search(text)
        unit = MEMORY_UNITS.get(cells["metric"])
        if not failed and unit is None and cells["metric"] not in METRICS:
            continue
        try:
            row = _row(line, cells | {"metric": METRICS[0], "value": "1"})
            num_bytes = float(cells["value"]) * unit if unit and not failed else None
        except (Unusable, ValueError):
            continue
        key = (row.source, row.name, row.model, row.plan, row.cluster.gpu, row.cluster.num_gpus, row.traits)
        before = found.get(key)
        found[key] = Occupied(row, not failed, num_bytes or (before.num_bytes if before else None))
    return list(found.values())


def read_rows(path: Path) -> tuple[list[Row], Counter[str]]:
    """The rows of a file that can be priced, and how many others there are, by reason.

    Rows of other metrics than METRICS are passed over.

    Raises:
        InputError: the file cannot be read or lacks a column.
    """
    rows, unusable = [], Counter[str]()
    for line, cells in read_cells(path, COLUMNS):
        if cells["metric"] in METRICS:
            try:
                rows.append(_row(line, cells))
            except Unusable as reason:
                unusable[str(reason)] += 1
            except InputError:
                unusable["its model is none"] += 1
    return rows, unusable


def _row(line: int, cells: Mapping[str, str]) -> Row:
    notes: list[str] = []
    gpu = _gpu(cells["gpu"])
    gpus, length = _count(cells, "gpus"), _count(cells, "seq")
    model = _model(cells, notes)
    tensor, pipe, ways = _degrees(cells, gpus)
    microbatch, batch = _batch(cells, ways, pipe, notes)
    per_node = min(_optional(cells, "gpus_per_node") or 8, gpus)
    if gpus % per_node:
        raise Unusable("its nodes are not equally large")
    link = _link(cells["inter_node_link"], gpu, per_node)
    if gpus > per_node and not cells["inter_node_link"]:
        notes.append("network")
    cluster = Cluster(cells["gpu"], gpu, gpus // per_node, per_node, link, "DGX-2" if "DGX-2" in cells["gpu"] else "")
    zero = re.match("[0-3]", cells["zero_stage"])
    chunks = re.search(r"VP=(\d+)", cells["schedule"])
    data = math.gcd(ways, max(1, per_node // tensor))
    plan = Plan(
        pipe=pipe,
        replica=ways // data,
        data=data,
        tensor=tensor,
        microbatch_size=microbatch,
        num_microbatches=max(1, round(batch / ways / microbatch)),
        num_chunks=int(chunks[1]) if chunks else 2 if "interleaved" in cells["schedule"] else 1,
        recompute=_recompute(cells["recompute"], notes),
        zero_stage=int(zero[0]) if zero else 0,
    )
    value = _number(cells, "value")
    if not value or value < 0:
        raise Unusable("its value is not a number above 0")
    seconds = {"iteration_time_s": value, "iteration_time_ms": value / 1e3, "samples_per_s": batch / value}
    return Row(
        line=line,
        source=cells["source"].split(" ")[0],
        name=cells["model"],
        model=model,
        plan=plan,
        cluster=cluster,
        traits=traits_of(cells, gpu, plan),
        seconds=seconds.get(cells["metric"], batch * length / value),
        samples=batch,
        notes=tuple(notes),
    )


def _number(cells: Mapping[str, str], name: str) -> float | None:
    try:
        value = float(cells[name])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _optional(cells: Mapping[str, str], name: str) -> int | None:
    value = _number(cells, name)
    return int(value) if value and value >= 1 and value == int(value) else None


def _count(cells: Mapping[str, str], name: str) -> int:
    value = _optional(cells, name)
    if value is None:
        raise Unusable(f"its {name} is not stated")
    return value


def _gpu(text: str) -> GPU:
    family = next((name for name in (*ALIASES, *USUAL_LINKS) if name in text.upper()), None)
    if family is None:
        raise Unusable("its GPU is not one of V100, A100, H100 and H200")
    members = [gpu for gpu in GPUS if gpu.family == ALIASES.get(family, family)]
    size = re.search(r"(\d+) ?G", text)
    return min(members, key=lambda gpu: abs(gpu.memory_bytes / 2**30 - float(size[1] if size else "inf"))) if size else members[-1]


def _model(cells: Mapping[str, str], notes: list[str]) -> ModelConfig:
    layers, hidden, length = (_count(cells, name) for name in ("layers", "hidden", "seq"))
    heads, vocabulary = _optional(cells, "heads"), _optional(cells, "vocab")
    notes += [name for name, value in (("heads", heads), ("vocabulary", vocabulary)) if value is None]
    heads = heads or max(1, hidden // 128)
    while hidden % heads:
        heads -= 1
    vocabulary = vocabulary or GPT2_VOCABULARY
    stated, inner = _number(cells, "params_B"), None
    dense = 12 * layers * hidden * hidden + vocabulary * hidden
    if stated and abs(math.log(stated * 1e9 / dense)) > 0.15:
        # Not 12 h^2 a layer, as in a LLaMA: the feed-forward layer takes the difference.
        inner = round((stated * 1e9 - vocabulary * hidden) / layers / hidden / 2 - 2 * hidden)
        if not hidden / 2 <= inner <= 12 * hidden:
            raise Unusable("its parameters are far from what its layers and width have")
    return ModelConfig(layers, hidden, heads, length, vocabulary, inner)


def _degrees(cells: Mapping[str, str], gpus: int) -> tuple[int, int, int]:
    """tensor, pipe and data-parallel degrees; one that is not stated follows from the others."""
    given = {name: _optional(cells, name) for name in ("tp", "pp", "dp")}
    unknown = [name for name, degree in given.items() if degree is None]
    left = gpus / math.prod(degree for degree in given.values() if degree is not None)
    if len(unknown) > 1 and left != 1:
        raise Unusable("its plan is not stated")
    if left < 1 or left != int(left) or (not unknown and left != 1):
        raise Unusable("its degrees do not multiply to its GPUs")
    found = {name: degree or (int(left) if name == unknown[0] else 1) for name, degree in given.items()}
    return found["tp"], found["pp"], found["dp"]


def _batch(cells: Mapping[str, str], ways: int, pipe: int, notes: list[str]) -> tuple[int, int]:
    """Microbatch size and global batch; without a pipeline, what is not stated is one microbatch a step."""
    microbatch, batch = _optional(cells, "micro_batch"), _optional(cells, "global_batch")
    if (microbatch is None or batch is None) and (pipe > 1 or microbatch is batch):
        raise Unusable("its batch is not stated" if batch is None else "its microbatch is not stated")
    if microbatch is None:
        assert batch is not None
        notes.append("microbatch")
        return max(1, batch // ways), batch
    if batch is None:
        notes.append("global batch")
        return microbatch, microbatch * ways
    return microbatch, batch


def _recompute(text: str, notes: list[str]) -> str:
    for kind in ("none", "selective", "full"):
        if text.startswith(kind):
            return kind
    # Models of this size were trained with it until blockwise attention made it unnecessary.
    notes.append("recompute")
    return "selective" if "flash" in text else "full"


def _link(text: str, gpu: GPU, per_node: int) -> NetworkLink:
    if not text:
        fabric, gbits, cards = USUAL_LINKS[gpu.family]
        return network(fabric, gbits, cards)
    words = text.lower()
    kinds: dict[str, Fabric] = {"omni": "omni-path", "roce": "roce", "tcp": "tcp", "ethernet": "tcp"}
    kind: Fabric = next((fabric for word, fabric in kinds.items() if word in words), "infiniband")
    count, bits, octets = re.search(r"(\d+) ?x", words), re.search(r"([\d.]+) ?gb/s", text.lower()), re.search(r"([\d.]+) ?GB/s", text)
    gbits = 8 * float(octets[1]) if octets else float(bits[1]) if bits else 100.0
    if count:
        return network(kind, gbits, int(count[1]))
    if "per gpu" in words:
        return network(kind, gbits, per_node)
    return network(kind, gbits / 8, 8) if "per node" in words and gbits > 400 else network(kind, gbits, 1)
