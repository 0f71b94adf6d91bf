"""What nodes print of themselves is read as it stands: recorded outputs, renumbered ones, damaged ones."""

import itertools
import random

import pytest

from giantjax.errors import InputError
from giantjax.parallel.topology import DGX_1V, KNOWN, NodeTopology, equal_pairs, known_topology, parse_topology

LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""

# A DGX-1 with V100: microsoft/msccl-tools, tests/test_topologies.py.
DGX_1_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	mlx5_0	mlx5_2	mlx5_1	mlx5_3	CPU Affinity
GPU0	 X 	NV1	NV1	NV2	NV2	SYS	SYS	SYS	PIX	SYS	PHB	SYS	0-19,40-59
GPU1	NV1	 X 	NV2	NV1	SYS	NV2	SYS	SYS	PIX	SYS	PHB	SYS	0-19,40-59
GPU2	NV1	NV2	 X 	NV2	SYS	SYS	NV1	SYS	PHB	SYS	PIX	SYS	0-19,40-59
GPU3	NV2	NV1	NV2	 X 	SYS	SYS	SYS	NV1	PHB	SYS	PIX	SYS	0-19,40-59
GPU4	NV2	SYS	SYS	SYS	 X 	NV1	NV1	NV2	SYS	PIX	SYS	PHB	20-39,60-79
GPU5	SYS	NV2	SYS	SYS	NV1	 X 	NV2	NV1	SYS	PIX	SYS	PHB	20-39,60-79
GPU6	SYS	SYS	NV1	SYS	NV1	NV2	 X 	NV2	SYS	PHB	SYS	PIX	20-39,60-79
GPU7	SYS	SYS	SYS	NV1	NV2	NV1	NV2	 X 	SYS	PHB	SYS	PIX	20-39,60-79
mlx5_0	PIX	PIX	PHB	PHB	SYS	SYS	SYS	SYS	 X 	SYS	PHB	SYS	
mlx5_2	SYS	SYS	SYS	SYS	PIX	PIX	PHB	PHB	SYS	 X 	SYS	PHB	
mlx5_1	PHB	PHB	PIX	PIX	SYS	SYS	SYS	SYS	PHB	SYS	 X 	SYS	
mlx5_3	SYS	SYS	SYS	SYS	PHB	PHB	PIX	PIX	SYS	PHB	SYS	 X 	
"""

# Eight V100-SXM2-32GB under driver 580, rented and measured by their user.
V100_NUMA_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	NIC0	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV1	NV1	NV2	NV2	SYS	SYS	SYS	NODE	0-19,40-59	0		N/A
GPU1	NV1	 X 	NV2	NV1	SYS	NV2	SYS	SYS	NODE	0-19,40-59	0		N/A
GPU2	NV1	NV2	 X 	NV2	SYS	SYS	NV1	SYS	NODE	0-19,40-59	0		N/A
GPU3	NV2	NV1	NV2	 X 	SYS	SYS	SYS	NV1	NODE	0-19,40-59	0		N/A
GPU4	NV2	SYS	SYS	SYS	 X 	NV1	NV1	NV2	SYS	20-39,60-79	1		N/A
GPU5	SYS	NV2	SYS	SYS	NV1	 X 	NV2	NV1	SYS	20-39,60-79	1		N/A
GPU6	SYS	SYS	NV1	SYS	NV1	NV2	 X 	NV2	SYS	20-39,60-79	1		N/A
GPU7	SYS	SYS	SYS	NV1	NV2	NV1	NV2	 X 	SYS	20-39,60-79	1		N/A
NIC0	NODE	NODE	NODE	NODE	SYS	SYS	SYS	SYS	 X 				
"""

# Eight V100 of a virtual machine with an InfiniBand function: the quads are joined 0-6, 1-7, 2-4 and 3-5.
NDV2_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	CPU Affinity	NUMA Affinity
GPU0	 X 	NV2	NV1	NV2	NODE	NODE	NV1	NODE	0-19	0
GPU1	NV2	 X 	NV2	NV1	NODE	NODE	NODE	NV1	0-19	0
GPU2	NV1	NV2	 X 	NV1	NV2	NODE	NODE	NODE	0-19	0
GPU3	NV2	NV1	NV1	 X 	NODE	NV2	NODE	NODE	0-19	0
GPU4	NODE	NODE	NV2	NODE	 X 	NV1	NV1	NV2	0-19	0
GPU5	NODE	NODE	NODE	NV2	NV1	 X 	NV2	NV1	0-19	0
GPU6	NV1	NODE	NODE	NODE	NV1	NV2	 X 	NV2	0-19	0
GPU7	NODE	NV1	NODE	NODE	NV2	NV1	NV2	 X 	0-19	0
"""

# Eight V100 as a device plugin of Kubernetes saw them: other pairs are doubled.
OTHER_V100_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	mlx5_0	mlx5_1	mlx5_2	mlx5_3	CPU Affinity
GPU0	 X 	NV2	NV2	NV1	NV1	NODE	NODE	NODE	PIX	PHB	NODE	NODE	18-35,54-71
GPU1	NV2	 X 	NV1	NV1	NODE	NV2	NODE	NODE	PIX	PHB	NODE	NODE	18-35,54-71
GPU2	NV2	NV1	 X 	NV2	NODE	NODE	NV1	NODE	PIX	PHB	NODE	NODE	18-35,54-71
GPU3	NV1	NV1	NV2	 X 	NODE	NODE	NODE	NV2	PIX	PHB	NODE	NODE	18-35,54-71
GPU4	NV1	NODE	NODE	NODE	 X 	NV2	NV2	NV1	NODE	NODE	PIX	PHB	18-35,54-71
GPU5	NODE	NV2	NODE	NODE	NV2	 X 	NV1	NV1	NODE	NODE	PIX	PHB	18-35,54-71
GPU6	NODE	NODE	NV1	NODE	NV2	NV1	 X 	NV2	NODE	NODE	PIX	PHB	18-35,54-71
GPU7	NODE	NODE	NODE	NV2	NV1	NV1	NV2	 X 	NODE	NODE	PIX	PHB	18-35,54-71
"""

# Eight V100 as pasted into a README, without tabs: the quads are joined 0-7, 1-6, 2-5 and 3-4.
SPACED_V100_TEXT = """\
GPU0  GPU1  GPU2  GPU3  GPU4  GPU5  GPU6  GPU7
  
GPU0   X   NV1  NV2  NV1  SYS  SYS  SYS  NV2

GPU1  NV1   X   NV1  NV2  SYS  SYS  NV2  SYS

GPU2  NV2  NV1   X   NV2  SYS  NV1  SYS  SYS

GPU3  NV1  NV2  NV2   X   NV1  SYS  SYS  SYS

GPU4  SYS  SYS  SYS  NV1   X   NV2  NV2  NV1

GPU5  SYS  SYS  NV1  SYS  NV2   X   NV1  NV2

GPU6  SYS  NV2  SYS  SYS  NV2  NV1   X   NV1

GPU7  NV2  SYS  SYS  SYS  NV1  NV2  NV1    X
"""

# A DGX A100; the same GPU columns in github.com/NVIDIA/nccl/issues/1505. Ten of the rows of network cards are left out.
DGX_A100_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	mlx5_0	mlx5_1	mlx5_2	mlx5_3	mlx5_4	mlx5_5	mlx5_6	mlx5_7	mlx5_8	mlx5_9	mlx5_10	mlx5_11	CPU Affinity	NUMA Affinity
GPU0	 X 	NV12	NV12	NV12	NV12	NV12	NV12	NV12	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	48-63,176-191	3
GPU1	NV12	 X 	NV12	NV12	NV12	NV12	NV12	NV12	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	48-63,176-191	3
GPU2	NV12	NV12	 X 	NV12	NV12	NV12	NV12	NV12	SYS	SYS	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	16-31,144-159	1
GPU3	NV12	NV12	NV12	 X 	NV12	NV12	NV12	NV12	SYS	SYS	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	16-31,144-159	1
GPU4	NV12	NV12	NV12	NV12	 X 	NV12	NV12	NV12	SYS	SYS	SYS	SYS	SYS	SYS	PXB	PXB	SYS	SYS	SYS	SYS	112-127,240-255	7
GPU5	NV12	NV12	NV12	NV12	NV12	 X 	NV12	NV12	SYS	SYS	SYS	SYS	SYS	SYS	PXB	PXB	SYS	SYS	SYS	SYS	112-127,240-255	7
GPU6	NV12	NV12	NV12	NV12	NV12	NV12	 X 	NV12	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	PXB	PXB	SYS	SYS	80-95,208-223	5
GPU7	NV12	NV12	NV12	NV12	NV12	NV12	NV12	 X 	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	PXB	PXB	SYS	SYS	80-95,208-223	5
mlx5_0	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	 X 	PXB	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS
mlx5_1	PXB	PXB	SYS	SYS	SYS	SYS	SYS	SYS	PXB	 X 	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS	SYS
"""  # noqa: E501

# Eight A100 of a virtual machine whose terminal lost part of a column.
A100_VM_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	NIC0	NIC1	NIC2	NIC3	NIC4	NIC5	NIC6	NIC7	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV12	NV12	NV12	NV12	NV12	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU1	NV12	 X 	NV12	NV12	NV12	NV12	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU2	NV12	NV12	 X 	NV12	NV12	NV12	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU3	NV12	NV12	NV12	 X 	NV12	NV12	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU4	NV12	NV12	NV12	NV12	 X 	NV12	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU5	NV12	NV12	NV12	NV12	NV12	 X 	NV12	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU6	NV12	NV12	NV12	NV12	NV12	NV12	 X 	NV12	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
GPU7	NV12	NV12	NV12	NV12	NV12	NV12	NV12	 X 	PHB	PHB	PHB	PHB	PHB	PHB	PHB	PH0-115	0-3		N/A
"""  # noqa: E501

# Eight H100 whose terminal lost tabs between network cards: github.com/vllm-project/vllm/issues/13855.
H100_TEXT = """\
	GPU0	GPU1	GPU2	GPU3	GPU4	GPU5	GPU6	GPU7	NIC0	NIC1	NIC2	NIC3	NIC4	NIC5	NIC6	NIC7	NIC8NIC9	NIC10	NIC11	CPU Affinity	NUMA Affinity	GPU NUMA ID
GPU0	 X 	NV18	NV18	NV18	NV18	NV18	NV18	NV18	PXB	NODE	NODE	NODE	NODE	NODE	SYS	SYS	SYS	SYS	SYS	SYS	0-55,112-167	0		N/A
GPU1	NV18	 X 	NV18	NV18	NV18	NV18	NV18	NV18	NODE	NODE	NODE	PXB	NODE	NODE	SYS	SYS	SYS	SYS	SYS	SYS	0-55,112-167	0		N/A
GPU2	NV18	NV18	 X 	NV18	NV18	NV18	NV18	NV18	NODE	NODE	NODE	NODE	PXB	NODE	SYS	SYS	SYS	SYS	SYS	SYS	0-55,112-167	0		N/A
GPU3	NV18	NV18	NV18	 X 	NV18	NV18	NV18	NV18	NODE	NODE	NODE	NODE	NODE	PXB	SYS	SYS	SYS	SYS	SYS	SYS	0-55,112-167	0		N/A
GPU4	NV18	NV18	NV18	NV18	 X 	NV18	NV18	NV18	SYS	SYS	SYS	SYS	SYS	SYS	PXB	NODE	NODENODE	NODE	NODE	56-111,168-223	1		N/A
GPU5	NV18	NV18	NV18	NV18	NV18	 X 	NV18	NV18	SYS	SYS	SYS	SYS	SYS	SYS	NODE	NODE	NODEPXB	NODE	NODE	56-111,168-223	1		N/A
GPU6	NV18	NV18	NV18	NV18	NV18	NV18	 X 	NV18	SYS	SYS	SYS	SYS	SYS	SYS	NODE	NODE	NODENODE	PXB	NODE	56-111,168-223	1		N/A
GPU7	NV18	NV18	NV18	NV18	NV18	NV18	NV18	 X 	SYS	SYS	SYS	SYS	SYS	SYS	NODE	NODE	NODENODE	NODE	PXB	56-111,168-223	1		N/A
"""  # noqa: E501

# Two GPUs on a terminal, where the head is underlined.
UNDERLINED_TEXT = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV4\tPXB\t0-63\t0\t\tN/A\nGPU1\tNV4\t X \tSYS\t64-127\t1\t\tN/A\nNIC0\tPXB\tSYS\t X \t\t\t\t\n"
)

QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
V100_TEXTS = {"dgx-1": DGX_1_TEXT, "numa": V100_NUMA_TEXT, "ndv2": NDV2_TEXT, "other": OTHER_V100_TEXT, "spaced": SPACED_V100_TEXT}


@pytest.mark.parametrize("text", V100_TEXTS.values(), ids=V100_TEXTS.keys())
@pytest.mark.parametrize("ending", ["", LEGEND])
def test_a_recorded_v100_node_has_two_quads_and_six_links_a_gpu(text, ending):
    topology = parse_topology(text + ending)
    assert topology.num_gpus == 8
    assert all(sum(row) == 6 for row in topology.links)
    assert tuple(group for group in topology.linked_groups() if len(group) == 4) == QUADS
    across = [group for group in topology.linked_groups() if len(group) == 2]
    assert len(across) == 4 and all(first < 4 <= second for first, second in across)
    assert not topology.is_uniform


def test_the_dgx_1v_is_what_a_dgx_1_prints():
    assert parse_topology(DGX_1_TEXT).links == DGX_1V.links == parse_topology(V100_NUMA_TEXT).links
    assert known_topology("Tesla V100-SXM2-32GB", 8) is DGX_1V is known_topology("V100-32GB", 8)
    assert str(DGX_1V) == "DGX-1V: 8 GPUs, fully NVLinked in 0,1,2,3 and 4,5,6,7"


def test_links_of_other_v100_nodes_are_their_own():
    joined = [[pair for pair in parse_topology(text).linked_groups() if len(pair) == 2] for text in (NDV2_TEXT, SPACED_V100_TEXT)]
    assert joined == [[(0, 6), (1, 7), (2, 4), (3, 5)], [(0, 7), (1, 6), (2, 5), (3, 4)]]


@pytest.mark.parametrize("ending", ["", LEGEND])
@pytest.mark.parametrize(
    ("text", "num_links", "numa"),
    [
        (DGX_A100_TEXT, 12, ("3", "3", "1", "1", "7", "7", "5", "5")),
        (A100_VM_TEXT, 12, ("",) * 8),
        (H100_TEXT, 18, ("",) * 8),
    ],
)
def test_a_recorded_nvswitch_node_is_uniform(text, num_links, numa, ending):
    topology = parse_topology(text + ending)
    assert topology.links == equal_pairs(8, num_links).links
    assert topology.is_uniform and topology.linked_groups() == (tuple(range(8)),)
    assert str(topology) == f"this node: 8 GPUs, NV{num_links} between all"
    # Where a terminal has moved the columns, no NUMA node is better than a wrong one.
    assert all(read in (told, "") for read, told in zip(topology.numa, numa, strict=True))


def test_numa_and_pcie_are_read_where_they_are_told():
    topology = parse_topology(V100_NUMA_TEXT + LEGEND)
    assert topology.numa == ("0",) * 4 + ("1",) * 4
    assert topology.paths[0] == ("", "", "", "", "", "SYS", "SYS", "SYS")
    assert parse_topology(DGX_A100_TEXT).numa == ("3", "3", "1", "1", "7", "7", "5", "5")
    assert parse_topology(DGX_1_TEXT).numa == ("",) * 8


def test_escapes_of_a_terminal_and_spaces_for_tabs_change_nothing():
    underlined = parse_topology(UNDERLINED_TEXT)
    assert underlined.links == ((0, 4), (4, 0)) and underlined.numa == ("0", "1")
    for text in (DGX_1_TEXT, DGX_A100_TEXT):
        for other in (text.replace("\t", "    "), text.replace("\n", "\r\n")):
            assert parse_topology(other).links == parse_topology(text).links


def test_a_matrix_that_follows_is_not_mixed_in():
    peer_access = " \t" + "\t".join(f"GPU{gpu}" for gpu in range(8)) + "\n" + "".join(f" GPU{gpu}" + "\tOK" * 8 + "\n" for gpu in range(8))
    assert parse_topology(DGX_1_TEXT + LEGEND + peer_access) == parse_topology(DGX_1_TEXT)


def test_a_single_gpu_has_no_neighbour():
    topology = parse_topology("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-59\t0\t\tN/A\n")
    assert topology.num_gpus == 1 and topology.is_uniform and topology.linked_groups() == ()


def test_quads_are_found_whatever_the_numbering():
    order = list(range(8))
    for seed in range(20):
        random.Random(seed).shuffle(order)
        shuffled = parse_topology(DGX_1_TEXT).among(order)
        groups = [{order[gpu] for gpu in group} for group in shuffled.linked_groups()[:2]]
        assert sorted(map(sorted, groups)) == [list(quad) for quad in QUADS]


def test_linked_groups_are_the_maximal_cliques():
    for seed in range(30):
        draw = random.Random(seed)
        linked = {pair: draw.random() < 0.6 for pair in itertools.combinations(range(6), 2)}
        topology = NodeTopology("drawn", tuple(tuple(int(linked.get((min(i, j), max(i, j)), False)) for j in range(6)) for i in range(6)))
        cliques = {
            group
            for size in range(2, 7)
            for group in itertools.combinations(range(6), size)
            if all(linked[pair] for pair in itertools.combinations(group, 2))
        }
        maximal = {group for group in cliques if not any(set(group) < set(other) for other in cliques)}
        assert set(topology.linked_groups()) == maximal


def test_more_links_are_nearer_and_pcie_is_farther():
    rows = ("     GPU0 GPU1 GPU2 GPU3", "GPU0 X NV2 NV1 PIX", "GPU1 NV2 X SYS NODE", "GPU2 NV1 SYS X PHB", "GPU3 PIX NODE PHB X")
    topology = parse_topology("\n".join(rows))
    pairs = [(0, 1), (0, 2), (0, 3), (2, 3), (1, 3), (1, 2)]
    nearness = [topology.closeness(*pair) for pair in pairs]
    assert nearness == sorted(nearness, reverse=True) and len(set(nearness)) == 6


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "num_links"),
    [
        ("Tesla V100-SXM3-32GB", 16, 6),
        ("NVIDIA A100-SXM4-80GB", 8, 12),
        ("A100-40GB", 8, 12),
        ("NVIDIA H100 80GB HBM3", 8, 18),
        ("NVIDIA H200", 8, 18),
        ("NVIDIA A100-PCIE-40GB", 8, 0),
        ("NVIDIA H100 NVL", 8, 0),
        ("NVIDIA A100-SXM4-80GB", 4, 0),
        ("NVIDIA L4", 8, 0),
        ("cpu", 6, 0),
    ],
)
def test_known_nodes_and_equal_pairs_for_all_others(gpu, num_gpus, num_links):
    topology = known_topology(gpu, num_gpus)
    assert topology.links == equal_pairs(num_gpus, num_links).links and topology.is_uniform
    assert (topology in KNOWN.values()) == (num_links > 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line heads the columns GPU0 GPU1"),
        ("Failed to initialize NVML: Driver/library version mismatch", "no line heads the columns"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV1\t0-3\n", "GPU0 to GPU1, but there is no row GPU1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tOK\nGPU1\tOK\t X \n", "says OK from GPU0 to GPU1; cells are X, NV1 and up, PIX"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV2\nGPU1\tNV1\t X \n", "says NV2 from GPU0 to GPU1, but NV1 back"),
        ("\tGPU0\tGPU1\nGPU0\tNV1\tNV2\nGPU1\tNV2\t X \n", "X stands from a GPU to itself and nowhere else"),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tNV2\t X \n", "row GPU0 of nvidia-smi topo -m has 1 cells, but there are 2 GPUs"),
        ("\tGPU0\tGPU2\nGPU0\t X \tNV2\nGPU2\tNV2\t X \n", "heads its columns GPU0 GPU2; the GPUs of a node are GPU0 and up"),
        ("GPU0 is fine\n" + DGX_1_TEXT, "has a row GPU1, but heads columns GPU0 to GPU0 only"),
    ],
)
def test_what_is_no_matrix_is_refused_in_one_sentence(text, words):
    with pytest.raises(InputError, match=words) as error:
        parse_topology(text)
    assert "\n" not in str(error.value)


def test_a_topology_is_checked():
    with pytest.raises(InputError, match="1 NVLinks from GPU 1 to GPU 0, but 2 back"):
        NodeTopology("odd", ((0, 2), (1, 0)))
    with pytest.raises(InputError, match="needs 2 numbers with 0 at 0"):
        NodeTopology("odd", ((1, 1), (1, 0)))
    with pytest.raises(InputError, match="no GPU 8 in topology DGX-1V; it has GPUs 0 to 7"):
        DGX_1V.among([0, 8])
