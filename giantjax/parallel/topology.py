"""Which GPUs of a node are joined by which links: read from `nvidia-smi topo -m`, or known of a kind of node.

GPUs are numbered as nvidia-smi numbers them, by PCI address.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from giantjax.errors import InputError

PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS", "SOC")
"""Ways from GPU to GPU without NVLink in nvidia-smi's words, nearest first; SOC is what old drivers call SYS."""


@dataclass(frozen=True)
class NodeTopology:
    """What joins the GPUs of one node."""

    name: str
    links: tuple[tuple[int, ...], ...]
    """NVLinks between GPU i and GPU j; 0 where there is none, and from a GPU to itself."""
    paths: tuple[tuple[str, ...], ...] = ()
    """One of PATHS for pairs without NVLink, empty for others; no rows where it is not known."""
    numa: tuple[str, ...] = ()
    """NUMA nodes beside each GPU as nvidia-smi writes them (`0`, `0-3`), empty for a GPU where it does not say."""

    def __post_init__(self) -> None:
        for first, row in enumerate(self.links):
            if len(row) != self.num_gpus or row[first]:
                raise InputError(f"row {first} of topology {self.name} is {row}; it needs {self.num_gpus} numbers with 0 at {first}")
            for second, number in enumerate(row[:first]):
                if number != self.links[second][first]:
                    raise InputError(
                        f"topology {self.name} has {number} NVLinks from GPU {first} to GPU {second}, "
                        f"but {self.links[second][first]} back; a link has two ends"
                    )

    @property
    def num_gpus(self) -> int:
        """GPUs of the node."""
        return len(self.links)

    def closeness(self, first: int, second: int) -> int:
        """How near two GPUs are, to be compared only: more NVLinks are nearer, any is nearer than PCIe."""
        if self.links[first][second]:
            return len(PATHS) + self.links[first][second]
        path = self.paths[first][second] if self.paths else ""
        return len(PATHS) - PATHS.index(path) if path else 0

    @property
    def is_uniform(self) -> bool:
        """Whether all pairs of GPUs are equally near: through NVSwitch, or because nothing is known of them."""
        return len({self.closeness(first, second) for first in range(self.num_gpus) for second in range(first)}) <= 1

    def linked_groups(self) -> tuple[tuple[int, ...], ...]:
        """The maximal groups in which every GPU has NVLinks to every other, largest first.

        On a DGX-1V these are the two quads, then the four pairs that join one quad to the other.
        """
        neighbours = [frozenset(gpu for gpu, number in enumerate(row) if number) for row in self.links]
        found = (tuple(sorted(group)) for group in _maximal_cliques(neighbours, frozenset(), frozenset(range(self.num_gpus)), frozenset()))
        return tuple(sorted((group for group in found if len(group) > 1), key=lambda group: (-len(group), group)))

    def among(self, gpus: Sequence[int]) -> "NodeTopology":
        """The same links among `gpus` alone, numbered in the order given, as under CUDA_VISIBLE_DEVICES.

        Raises:
            InputError: the node has no such GPU.
        """
        beyond = [gpu for gpu in gpus if not 0 <= gpu < self.num_gpus]
        if beyond:
            raise InputError(f"there is no GPU {beyond[0]} in topology {self.name}; it has GPUs 0 to {self.num_gpus - 1}")
        return NodeTopology(
            self.name,
            tuple(tuple(self.links[first][second] for second in gpus) for first in gpus),
            tuple(tuple(self.paths[first][second] for second in gpus) for first in gpus) if self.paths else (),
            tuple(self.numa[gpu] for gpu in gpus) if self.numa else (),
        )

    def __str__(self) -> str:
        groups = self.linked_groups()
        largest = [",".join(map(str, group)) for group in groups if len(group) == len(groups[0])]
        if not groups:
            links = "no NVLink" if self.paths else "links unknown, taken as equal"
        else:
            links = f"NV{self.links[0][1]} between all" if self.is_uniform else f"fully NVLinked in {' and '.join(largest)}"
        return f"{self.name}: {self.num_gpus} GPUs, {links}"


def _maximal_cliques(
    neighbours: Sequence[frozenset[int]], group: frozenset[int], candidates: frozenset[int], seen: frozenset[int]
) -> Iterator[frozenset[int]]:
    """Bron and Kerbosch (1973): grow `group` by `candidates`; what is already in a reported group is in `seen`."""
    if not candidates and not seen:
        yield group
        return
    # Every maximal clique holds the pivot or something the pivot is not joined to, so the pivot's neighbours can wait.
    pivot = max(candidates | seen, key=lambda gpu: (len(neighbours[gpu] & candidates), -gpu))
    for gpu in sorted(candidates - neighbours[pivot]):
        yield from _maximal_cliques(neighbours, group | {gpu}, candidates & neighbours[gpu], seen & neighbours[gpu])
        candidates, seen = candidates - {gpu}, seen | {gpu}


def equal_pairs(num_gpus: int, num_links: int = 0, name: str = "unknown") -> NodeTopology:
    """A node in which `num_links` NVLinks join every pair: NVSwitch, or with 0 a node of which nothing is known."""
    return NodeTopology(name, tuple(tuple(0 if i == j else num_links for j in range(num_gpus)) for i in range(num_gpus)))


DGX_1V = NodeTopology(
    "DGX-1V",
    (
        (0, 1, 1, 2, 2, 0, 0, 0),
        (1, 0, 2, 1, 0, 2, 0, 0),
        (1, 2, 0, 2, 0, 0, 1, 0),
        (2, 1, 2, 0, 0, 0, 0, 1),
        (2, 0, 0, 0, 0, 1, 1, 2),
        (0, 2, 0, 0, 1, 0, 2, 1),
        (0, 0, 1, 0, 1, 2, 0, 2),
        (0, 0, 0, 1, 2, 1, 2, 0),
    ),
)
"""The hybrid cube mesh of eight V100 with six NVLinks each, numbered as in the DGX-1 and AWS's p3.16xlarge.

Sources: the `nvidia-smi topo -m` of a DGX-1 in microsoft/msccl-tools, tests/test_topologies.py; the same counts by PCI
address in github.com/NVIDIA/nccl/issues/671. Other makers of eight-V100 nodes number their GPUs differently (four ways are
published), so where nvidia-smi can be asked, `parse_topology` of its answer is what holds.
"""

KNOWN = {
    ("V100", 8): DGX_1V,
    ("V100", 16): equal_pairs(16, 6, "DGX-2"),
    ("A100", 8): equal_pairs(8, 12, "HGX A100"),
    ("H100", 8): equal_pairs(8, 18, "HGX H100"),
    ("H200", 8): equal_pairs(8, 18, "HGX H200"),
}
"""Nodes of SXM modules by GPU family and count.

Sources, all `nvidia-smi topo -m`: NV6 github.com/NVIDIA/nccl-tests/issues/78, NV12 github.com/NVIDIA/nccl/issues/1505,
NV18 github.com/vllm-project/vllm/issues/13855; an H200 has the eighteen links of an H100.
"""


def known_topology(gpu: str, num_gpus: int) -> NodeTopology:
    """The usual node of `num_gpus` GPUs of this name (`V100-32GB`, `NVIDIA A100-SXM4-40GB`); all pairs equal for any other.

    For plans of nodes that are not here: a node that is here tells its own topology.
    """
    # PCIe cards and NVL boards of the same family are joined in pairs or fours, or not at all.
    if re.search("PCIE|NVL", gpu.upper()):
        return equal_pairs(num_gpus)
    return next((node for (family, size), node in KNOWN.items() if family in gpu.upper() and size == num_gpus), equal_pairs(num_gpus))


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CELL = re.compile(rf"X|NV([1-9][0-9]*)|{'|'.join(PATHS)}")


def parse_topology(text: str, name: str = "this node") -> NodeTopology:
    """The topology that `nvidia-smi topo -m` prints, with tabs or spaces, underlined or not.

    Only the columns of GPUs are needed: those of network cards and affinity, which drivers and terminals garble, are not
    relied on, and the NUMA node is told where a row has its column in place.

    Raises:
        InputError: the GPU rows and columns are not all there, or contradict each other.
    """
    lines = [ESCAPES.sub("", line) for line in text.splitlines()]
    start, labels = _find_header(lines)
    rows = _find_rows(lines[start + 1 :], labels)
    cells = {label: _cells(line, label, labels) for label, line in rows.items()}
    for first in labels:
        for second, cell in zip(labels, cells[first], strict=True):
            if (cell == "X") != (first == second) or cell != cells[second][labels.index(first)]:
                raise InputError(
                    f"nvidia-smi topo -m says {cell} from {first} to {second}, but {cells[second][labels.index(first)]} back; "
                    "X stands from a GPU to itself and nowhere else, and the matrix is symmetric"
                )
    return NodeTopology(
        name,
        tuple(tuple(int(cell[2:]) if cell.startswith("NV") else 0 for cell in cells[label]) for label in labels),
        tuple(tuple(cell if cell in PATHS else "" for cell in cells[label]) for label in labels),
        tuple(_numa(lines[start], rows[label]) for label in labels),
    )


def _find_header(lines: Sequence[str]) -> tuple[int, list[str]]:
    """Number of the line that heads the columns, and the labels of GPUs that it begins with."""
    for number, line in enumerate(lines):
        words = line.split()
        labels = [word for word in words if re.fullmatch("GPU[0-9]+", word)]
        # A row, too, begins with a label, but goes on with a cell.
        if labels and words[: len(labels)] == labels and not any(map(CELL.fullmatch, words[len(labels) : len(labels) + 1])):
            if labels != [f"GPU{gpu}" for gpu in range(len(labels))]:
                raise InputError(f"nvidia-smi topo -m heads its columns {' '.join(labels)}; the GPUs of a node are GPU0 and up, in order")
            return number, labels
    raise InputError("this is not what nvidia-smi topo -m prints: no line heads the columns GPU0 GPU1 and so on")


def _find_rows(lines: Iterable[str], labels: Sequence[str]) -> dict[str, str]:
    """The first line that begins with each label; other matrices may follow."""
    rows: dict[str, str] = {}
    for line in lines:
        label = (line.split() or [""])[0]
        if label in labels:
            rows.setdefault(label, line)
        elif re.fullmatch("GPU[0-9]+", label):
            raise InputError(f"nvidia-smi topo -m has a row {label}, but heads columns {labels[0]} to {labels[-1]} only")
    missing = [label for label in labels if label not in rows]
    if missing:
        raise InputError(f"nvidia-smi topo -m heads columns {labels[0]} to {labels[-1]}, but there is no row {missing[0]}")
    return rows


def _cells(line: str, label: str, labels: Sequence[str]) -> list[str]:
    """What the row says of each GPU."""
    cells = line.split()[1 : len(labels) + 1]
    for column, cell in zip(labels, cells, strict=False):
        if not CELL.fullmatch(cell):
            raise InputError(f"nvidia-smi topo -m says {cell} from {label} to {column}; cells are X, NV1 and up, {', '.join(PATHS)}")
    if len(cells) < len(labels):
        raise InputError(f"row {label} of nvidia-smi topo -m has {len(cells)} cells, but there are {len(labels)} GPUs")
    return cells


def _numa(header: str, row: str) -> str:
    """The cell under `NUMA Affinity`; empty where there is none, or tabs do not show which it is."""
    heads, cells = ([cell.strip() for cell in line.split("\t")] for line in (header, row))
    if "CPU Affinity" not in heads or "NUMA Affinity" not in heads or len(cells) < len(heads):
        return ""
    # A lost tab would put a list of CPUs here, which looks the same.
    links, (cpus, told) = cells[1 : heads.index("CPU Affinity")], (cells[heads.index(head)] for head in ("CPU Affinity", "NUMA Affinity"))
    in_place = all(map(CELL.fullmatch, links)) and not CELL.fullmatch(cpus)
    return told if in_place and re.fullmatch("[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*", told) else ""
