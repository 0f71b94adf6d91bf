"""Placement: the axes that talk most share a node and its best links, whatever the order in which anything is listed."""

import itertools
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.errors import InputError
from giantjax.parallel.placement import AXES, Device, crossings, infer_degrees, place_devices, where_axes_live
from giantjax.parallel.topology import DGX_1V, KNOWN, NodeTopology, equal_pairs, parse_topology
from tests.parallel.test_topology import DGX_1_TEXT, DGX_A100_TEXT, NDV2_TEXT, OTHER_V100_TEXT, SPACED_V100_TEXT

A100 = KNOWN["A100", 8]
QUADS = [{0, 1, 2, 3}, {4, 5, 6, 7}]
V100_TOPOLOGIES = [DGX_1V, *map(parse_topology, (DGX_1_TEXT, NDV2_TEXT, OTHER_V100_TEXT, SPACED_V100_TEXT))]


def job(num_nodes, per_node=8):
    """Devices of nodes v0, v1 and so on; GPU 3 of v2 has id 203."""
    return [Device(f"v{node}", gpu, 100 * node + gpu) for node in range(num_nodes) for gpu in range(per_node)]


def place(devices, topology=None, inside=("tensor", "data"), **degrees):
    """The mesh of ids, with the same topology in each node."""
    topologies = {device.node: topology for device in devices} if topology else None
    return place_devices(devices, dict.fromkeys(AXES, 1) | degrees, topologies, inside)


def groups_along(mesh, axis):
    """The ids of each group of one axis."""
    return np.moveaxis(mesh, AXES.index(axis), -1).reshape(-1, mesh.shape[AXES.index(axis)]).tolist()


def test_a_shuffled_list_of_dgx_1v_nodes_yields_the_same_mesh_with_tensor_groups_inside_quads():
    devices = job(4)
    expected = place(devices, DGX_1V, pipe=4, data=2, tensor=4)
    for seed in range(10):
        random.Random(seed).shuffle(devices)
        assert (place(devices, DGX_1V, pipe=4, data=2, tensor=4) == expected).all()
    for group in groups_along(expected, "tensor"):
        assert len({gpu // 100 for gpu in group}) == 1
        assert {gpu % 100 for gpu in group} in QUADS
    assert where_axes_live(expected, devices) == {"pipe": "between nodes", "data": "inside a node", "tensor": "inside a node"}


@pytest.mark.parametrize("topology", V100_TOPOLOGIES)
@pytest.mark.parametrize("seed", range(4))
def test_tensor_groups_follow_the_links_whatever_the_numbering(topology, seed):
    order = random.Random(seed).sample(range(8), 8)
    renumbered = topology.among(order)
    quads = [{order.index(gpu) for gpu in quad} for quad in QUADS]
    fours = place(job(1), renumbered, data=2, tensor=4)
    assert all(set(group) in quads for group in groups_along(fours, "tensor"))
    # Neighbours along data are the pairs that join the quads.
    assert all(renumbered.links[first][second] for first, second in groups_along(fours, "data"))
    for pairs in (place(job(1), renumbered, data=4, tensor=2), place(job(1), renumbered, pipe=2, data=2, tensor=2)):
        for first, second in groups_along(pairs, "tensor"):
            assert renumbered.links[first][second] == 2
            assert any({first, second} <= quad for quad in quads)
    eight = groups_along(place(job(1), renumbered, tensor=8), "tensor")[0]
    assert all(renumbered.links[first][second] == 2 for first, second in zip(eight, eight[1:] + eight[:1], strict=True))


def test_no_order_of_a_dgx_1v_has_better_pairs():
    pairs = groups_along(place(job(1), DGX_1V, data=4, tensor=2), "tensor")
    best = max(sum(DGX_1V.links[order[i]][order[i + 1]] for i in range(0, 8, 2)) for order in itertools.permutations(range(8)))
    assert sum(DGX_1V.links[first][second] for first, second in pairs) == best


def test_each_node_is_ordered_by_its_own_topology():
    reverse = DGX_1V.among([0, 4, 1, 5, 2, 6, 3, 7])
    mesh = place_devices(job(2), {"pipe": 2, "replica": 1, "data": 2, "tensor": 4}, {"v0": DGX_1V, "v1": reverse})
    assert groups_along(mesh, "tensor") == [[0, 1, 2, 3], [4, 5, 6, 7], [100, 102, 104, 106], [101, 103, 105, 107]]


@pytest.mark.parametrize("topology", [A100, parse_topology(DGX_A100_TEXT), None, equal_pairs(8)])
def test_equal_gpus_stay_in_their_order(topology):
    mesh = place(job(2), topology, pipe=2, data=4, tensor=2)
    assert mesh.shape == (2, 1, 4, 2)
    assert mesh.ravel().tolist() == [*range(8), *range(100, 108)]


def test_nodes_follow_their_numbers():
    devices = [Device(f"rack1-v{node}", gpu, 10 * node + gpu) for node in (10, 9, 2) for gpu in (1, 0)]
    assert place(devices, pipe=3, tensor=2).ravel().tolist() == [20, 21, 90, 91, 100, 101]


@given(st.sampled_from([(n, g) for n in (1, 2, 4) for g in (1, 2, 4, 8)]), st.data())
@settings(max_examples=80, deadline=None)
def test_every_device_has_one_place_and_inside_axes_stay_inside(cluster, data):
    num_nodes, per_node = cluster
    degrees: dict[str, int] = {}
    left = num_nodes * per_node
    for axis in ("tensor", "data", "replica"):
        room = math.gcd(left, per_node // math.prod(degrees.values())) if axis != "replica" else left
        degrees[axis] = data.draw(st.sampled_from([size for size in range(1, room + 1) if room % size == 0]), axis)
        left //= degrees[axis]
    degrees["pipe"] = left
    devices = data.draw(st.permutations(job(num_nodes, per_node)))
    mesh = place(devices, DGX_1V if per_node == 8 else None, **degrees)
    assert mesh.shape == tuple(degrees[axis] for axis in AXES)
    assert sorted(mesh.ravel().tolist()) == sorted(device.id for device in devices)
    assert all(where == "inside a node" for axis, where in where_axes_live(mesh, devices).items() if axis in ("tensor", "data"))


def test_other_axes_may_live_inside():
    mesh = place(job(2), DGX_1V, ("tensor", "pipe"), pipe=2, data=2, tensor=4)
    assert where_axes_live(mesh, job(2)) == {"pipe": "inside a node", "data": "between nodes", "tensor": "inside a node"}
    assert crossings(mesh, job(2)) == {"pipe": (0, 8), "data": (8, 8), "tensor": (0, 12)}
    mesh = place(job(2), DGX_1V, ("tensor",), data=4, tensor=4)
    assert where_axes_live(mesh, job(2)) == {"data": "4 of 12 steps between nodes", "tensor": "inside a node"}


def test_what_fills_no_node_shares_one():
    mesh = place(job(1), DGX_1V, pipe=2, replica=2, tensor=2)
    assert where_axes_live(mesh, job(1)) == {axis: "inside a node" for axis in ("pipe", "replica", "tensor")}
    mesh = place(job(2), DGX_1V, pipe=4, tensor=4)
    assert where_axes_live(mesh, job(2)) == {"pipe": "4 of 12 steps between nodes", "tensor": "inside a node"}
    assert place([Device("laptop", 0, 7)]).tolist() == [[[[7]]]]


def test_fewer_devices_of_one_node_are_those_that_link_best():
    shuffled = DGX_1V.among([0, 4, 1, 5, 2, 6, 3, 7])
    assert place(job(1), shuffled, tensor=4).ravel().tolist() == [0, 2, 4, 6]
    assert place(job(1), shuffled, tensor=2).ravel().tolist() == [0, 1]
    assert place(job(1), tensor=4).ravel().tolist() == [0, 1, 2, 3]
    # Only GPUs 4 to 7 of the node belong to the job.
    assert place(job(1)[4:], DGX_1V, data=2, tensor=2).ravel().tolist() == [4, 7, 5, 6]


def test_pairs_are_found_in_nodes_too_large_to_try_all_orders():
    bridged = NodeTopology("bridged", tuple(tuple(4 * (j == (i + 5) % 10) for j in range(10)) for i in range(10)))
    assert groups_along(place(job(1, 10), bridged, data=5, tensor=2), "tensor") == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    assert place(job(1, 16), KNOWN["V100", 16], tensor=16).ravel().tolist() == list(range(16))


def test_gpus_without_nvlink_are_paired_by_pcie():
    rows = ["GPU0 GPU1 GPU2 GPU3", "GPU0 X SYS PIX SYS", "GPU1 SYS X SYS PIX", "GPU2 PIX SYS X SYS", "GPU3 SYS PIX SYS X"]
    assert place(job(1, 4), parse_topology("\n".join(rows)), data=2, tensor=2).tolist() == [[[[0, 2], [1, 3]]]]


@pytest.mark.parametrize(
    ("num_nodes", "degrees", "words"),
    [
        (1, {"tensor": 16}, "mesh.data 1 x mesh.tensor 16 = 16 devices, but there are 8; set mesh.tensor 8"),
        (2, {"pipe": 2, "data": 2, "tensor": 2}, "there are 2 nodes x 8 GPUs = 16; set mesh.data 4 or mesh.replica 2 or mesh.pipe 4"),
        (4, {"tensor": 8}, "= 8 devices, but there are 4 nodes x 8 GPUs = 32; set mesh.replica 4 or mesh.pipe 4$"),
        (2, {"tensor": 3}, "nearest mesh.pipe 1 x mesh.replica 2 x mesh.data 4 x mesh.tensor 2$"),
        (1, {"tensor": 16, "data": 3}, "= 48 devices, but there are 8; nearest mesh.pipe 1 x mesh.replica 1 x mesh.data 1 x mesh.tensor 8"),
        (4, {"tensor": 8, "data": 4}, "mesh.data 4 = 32 does not divide its 8 GPUs; nearest mesh.data: 1, with mesh.replica for what"),
        (4, {"tensor": 4, "data": 4, "pipe": 2}, "mesh.data 4 does not fit in a node: .* nearest mesh.data: 2, with mesh.replica"),
        (3, {"tensor": 3, "pipe": 8}, "mesh.tensor 3 = 3 does not divide its 8 GPUs; nearest mesh.tensor: 2 or 4, or leave tensor out"),
    ],
)
def test_degrees_that_do_not_fit_show_the_arithmetic(num_nodes, degrees, words):
    with pytest.raises(InputError, match=words):
        place(job(num_nodes), DGX_1V, **degrees)


@pytest.mark.parametrize(
    ("devices", "inside", "words"),
    [
        (job(1), ("tensr",), "mesh.inside names tensr; the axes are pipe, replica, data, tensor; did you mean tensor"),
        (job(1), ("data", "data"), "mesh.inside is data, data; it names data twice"),
        (job(2)[:-1], ("tensor",), "node v1 has 7 GPUs, but node v0 has 8; .* such as 7 each"),
        ([*job(1), Device("v1", 0, 3)], ("tensor",), "GPU 0 of node v1 with id 3 and GPU 3 of node v0 with id 3 are both listed"),
        ([*job(1), Device("v0", 3, 9)], ("tensor",), "GPU 3 of node v0 with id 9 and GPU 3 of node v0 with id 3 are both listed"),
        ([], ("tensor",), "no device to place"),
    ],
)
def test_lists_that_make_no_sense_are_refused(devices, inside, words):
    with pytest.raises(InputError, match=words):
        place(devices, DGX_1V, inside, tensor=8)


def test_a_topology_must_know_the_gpus():
    with pytest.raises(InputError, match="no GPU 8 in topology DGX-1V"):
        place(job(1, 9), DGX_1V, tensor=9)


@pytest.mark.parametrize(
    ("num_nodes", "given", "inside", "expected"),
    [
        (1, {}, ("tensor", "data"), (1, 1, 8, 1)),
        (1, {"pipe": 2, "replica": 1, "tensor": 2}, ("tensor", "data"), (2, 1, 2, 2)),
        (4, {"tensor": 4}, ("tensor", "data"), (1, 4, 2, 4)),
        (4, {"pipe": 2, "tensor": 4}, ("tensor", "data"), (2, 2, 2, 4)),
        (4, {"replica": 1, "tensor": 4}, ("tensor", "data"), (4, 1, 2, 4)),
        (4, {"data": 2, "replica": 1, "pipe": 4}, ("tensor", "data"), (4, 1, 2, 4)),
        (4, {"tensor": 4, "pipe": 2}, ("tensor", "pipe"), (2, 1, 4, 4)),
        (2, {"pipe": 2, "replica": 1, "data": 4, "tensor": 2}, ("tensor", "data"), (2, 1, 4, 2)),
    ],
)
def test_degrees_left_out_are_inferred(num_nodes, given, inside, expected):
    degrees = infer_degrees(dict.fromkeys(AXES) | given, num_nodes, 8, inside)
    assert tuple(degrees[axis] for axis in AXES) == expected
    place(job(num_nodes), DGX_1V, inside, **degrees)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"pipe": 1, "replica": 1, "tensor": 3},
            "mesh.pipe 1 x mesh.replica 1 x mesh.tensor 3 = 3 does not divide the devices that mesh.data is to be inferred from, "
            "2 nodes x 8 GPUs = 16; nearest mesh.tensor: 2 or 4",
        ),
        ({"pipe": 3, "tensor": 3}, "= 9 does not divide .* nearest mesh.pipe 2 x mesh.replica 1 x mesh.data 4 x mesh.tensor 2"),
        ({"data": 5, "tensor": 2, "replica": 1}, "mesh.pipe is to be inferred from, .* nearest mesh.data: 4 or 8"),
    ],
)
def test_what_cannot_be_inferred_shows_the_arithmetic(given, words):
    with pytest.raises(InputError, match=words):
        infer_degrees(dict.fromkeys(AXES) | given, 2, 8)


def test_placement_needs_no_jax():
    code = "import sys, giantjax.launch, giantjax.parallel.placement; print([name for name in sys.modules if name.startswith('jax.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
