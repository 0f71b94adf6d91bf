"""Which GPU stands where in the mesh: the axes that talk most live inside a node, on its best links.

The mesh is filled node by node. Axes inside a node are innermost, so that their neighbours share a node; what is left of the
mesh crosses nodes. Within a node the GPUs are ordered so that the group of the innermost axis has the best links: on a
DGX-1V a `tensor` group of 4 is one quad, and one of 2 a pair with two NVLinks.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from giantjax.errors import InputError, did_you_mean, nearest_divisors
from giantjax.parallel.topology import NodeTopology, equal_pairs

AXES = ("pipe", "replica", "data", "tensor")
"""The mesh's axes, outermost first."""
INSIDE = ("tensor", "data")
"""The axes that live inside a node unless told otherwise, innermost first."""
MENDED = ("data", "replica", "pipe", "tensor")
"""The axes in the order in which to change or infer a degree: what changes the run least comes first."""
SEARCHED = 8
"""GPUs of a node up to which all orders are compared: 8! are 40,320."""


class Device(NamedTuple):
    """One device of a job."""

    node: str
    """Name of its node."""
    gpu: int
    """Its number in the node, as the node's topology counts."""
    id: int
    """What the mesh holds in its place; no two of a job are the same."""


def place_devices(
    devices: Iterable[Device],
    degrees: Mapping[str, int],
    topologies: Mapping[str, NodeTopology] | None = None,
    inside: Sequence[str] = INSIDE,
) -> Int[np.ndarray, "pipe replica data tensor"]:
    """The `id` of the device at each place of the mesh.

    Depends on names of nodes and numbers of GPUs, not on the order of `devices`. A job on one node may use fewer devices
    than there are, and gets those with the best links; a job on several uses all.

    Args:
        devices: every device of the job, in any order.
        degrees: the degree of each of AXES.
        topologies: what joins the GPUs of each node, by its name; where one is missing all pairs are taken as equal.
        inside: the axes that may not cross nodes, innermost first.

    Raises:
        InputError: the degrees do not multiply to the devices, an axis of `inside` does not fit in a node, or the nodes
            differ in their numbers of GPUs.
    """
    nodes = _by_node(devices)
    per_node = len(next(iter(nodes.values())))
    order = _axes_outward(inside)
    _check_degrees(degrees, inside, len(nodes), per_node)
    used = math.prod(degrees.values()) // len(nodes)
    sizes = _sizes_inside([degrees[axis] for axis in order], used)
    placed = []
    for name, ids in nodes.items():
        topology = (topologies or {}).get(name) or equal_pairs(max(ids) + 1)
        placed += [ids[gpu] for gpu in _order_inside(topology, tuple(ids), sizes)]
    outermost_first = order[::-1]
    grid = np.array(placed).reshape([degrees[axis] for axis in outermost_first])
    return grid.transpose([outermost_first.index(axis) for axis in AXES])


def _by_node(devices: Iterable[Device]) -> dict[str, dict[int, int]]:
    """Ids by GPU by node, both in order; node 9 comes before node 10."""
    nodes: dict[str, dict[int, int]] = {}
    ids: dict[int, Device] = {}
    for device in sorted(devices, key=lambda device: (_number_aware(device.node), device.node, device.gpu)):
        gpus = nodes.setdefault(device.node, {})
        if device.gpu in gpus or device.id in ids:
            other = ids.get(device.id) or Device(device.node, device.gpu, gpus[device.gpu])
            raise InputError(
                f"GPU {device.gpu} of node {device.node} with id {device.id} and GPU {other.gpu} of node {other.node} with id "
                f"{other.id} are both listed; a GPU and an id belong to one device"
            )
        gpus[device.gpu], ids[device.id] = device.id, device
    if not nodes:
        raise InputError("there is no device to place; a mesh needs at least 1")
    fewest, most = (pick(nodes, key=lambda name: len(nodes[name])) for pick in (min, max))
    if len(nodes[fewest]) != len(nodes[most]):
        raise InputError(
            f"node {fewest} has {len(nodes[fewest])} GPUs, but node {most} has {len(nodes[most])}; the nodes of a job must have "
            f"equally many, such as {len(nodes[fewest])} each"
        )
    return nodes


def _number_aware(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((text, int(number or 0)) for text, number in re.findall("([^0-9]*)([0-9]*)", name))


def _axes_outward(inside: Sequence[str]) -> list[str]:
    """All axes from innermost to outermost: those inside a node, then the others."""
    for place, axis in enumerate(inside):
        if axis not in AXES:
            raise InputError(f"mesh.inside names {axis}; the axes are {', '.join(AXES)}{did_you_mean(axis, AXES)}")
        if axis in inside[:place]:
            raise InputError(f"mesh.inside is {', '.join(inside)}; it names {axis} twice")
    return [*inside, *(axis for axis in reversed(AXES) if axis not in inside)]


def _check_degrees(degrees: Mapping[str, int], inside: Sequence[str], num_nodes: int, per_node: int) -> None:
    total, needed = num_nodes * per_node, math.prod(degrees.values())
    if needed > total or (needed < total and num_nodes > 1):
        mended = {axis: total * degrees[axis] // needed for axis in MENDED if total * degrees[axis] % needed == 0}
        fitting = [f"mesh.{axis} {degree}" for axis, degree in mended.items() if not _misfit({**degrees, axis: degree}, inside, per_node)]
        raise InputError(
            f"the mesh needs {_product(degrees, AXES)} = {needed} devices, but there are {_count(num_nodes, per_node)}; "
            + (f"set {' or '.join(fitting)}" if fitting else f"nearest {_product(_nearby(degrees, inside, num_nodes, per_node), AXES)}")
        )
    axis = _misfit(degrees, inside, needed // num_nodes)
    if axis:
        within = inside[: inside.index(axis) + 1]
        room = per_node // math.prod(degrees[other] for other in within[:-1])
        raise InputError(
            f"mesh.{axis} {degrees[axis]} does not fit in a node: {_product(degrees, within)} = "
            f"{math.prod(degrees[other] for other in within)} does not divide its {per_node} GPUs; nearest mesh.{axis}: "
            f"{nearest_divisors(degrees[axis], room)}"
            + (", with mesh.replica for what crosses nodes" if axis == "data" else f", or leave {axis} out of mesh.inside")
        )


def _nearby(degrees: Mapping[str, int], inside: Sequence[str], num_nodes: int, per_node: int) -> dict[str, int]:
    """Degrees that use every device, with `tensor` and `pipe` as asked for or the next that divide."""
    tensor = max(size for size in range(1, degrees["tensor"] + 1) if per_node % size == 0)
    pipe = max(size for size in range(1, degrees["pipe"] + 1) if (num_nodes * per_node // tensor) % size == 0)
    return infer_degrees({"pipe": pipe, "replica": None, "data": None, "tensor": tensor}, num_nodes, per_node, inside)


def _misfit(degrees: Mapping[str, int], inside: Sequence[str], per_node: int) -> str:
    """The first axis at which the axes inside a node no longer divide its GPUs; empty where they all do."""
    ways = itertools.accumulate((degrees[axis] for axis in inside), lambda product, degree: product * degree)
    return next((axis for axis, product in zip(inside, ways, strict=True) if per_node % product), "")


def _product(degrees: Mapping[str, int], axes: Iterable[str]) -> str:
    return " x ".join(f"mesh.{axis} {degrees[axis]}" for axis in axes)


def _count(num_nodes: int, per_node: int) -> str:
    return f"{per_node}" if num_nodes == 1 else f"{num_nodes} nodes x {per_node} GPUs = {num_nodes * per_node}"


def _sizes_inside(degrees: Sequence[int], used: int) -> tuple[int, ...]:
    """What of each axis, innermost first, lies within a node of which `used` GPUs are used."""
    sizes, left = [], used
    for degree in degrees:
        if left % degree:
            break  # this axis goes on in other nodes
        sizes.append(degree)
        left //= degree
    return (*sizes, left)


@lru_cache(maxsize=1024)
def _order_inside(topology: NodeTopology, gpus: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Which of `gpus` come first, second and so on in a node, so that consecutive groups of the first size link best."""
    num_used = math.prod(sizes)
    among = topology.among(gpus)
    if among.is_uniform:
        return gpus[:num_used]
    closeness = np.array([[among.closeness(i, j) for j in range(len(gpus))] for i in range(len(gpus))])
    if len(gpus) > SEARCHED:
        chosen = _grow_groups(closeness, next((size for size in sizes if size > 1), 1))[:num_used]
    else:
        chosen = _best_order(closeness, sizes)
    return tuple(gpus[place] for place in chosen)


def _best_order(closeness: Int[np.ndarray, "gpus gpus"], sizes: Sequence[int]) -> list[int]:
    """The best of all orders, and of equal ones that with the lowest numbers first.

    What counts, first things first: the links within groups of the innermost axis, then within groups of the inner two, and
    so on; then the links between ring neighbours along each axis. Of several links the worst counts before their sum.
    """
    orders = np.array(list(itertools.permutations(range(len(closeness)), math.prod(sizes))))
    for pairs in [*_pairs_in_groups(sizes), *_pairs_along_axes(sizes)]:
        for worth in (np.min, np.sum):
            links = closeness[orders[:, pairs[:, 0]], orders[:, pairs[:, 1]]]
            score = worth(links, axis=1)
            orders = orders[score == score.max()]
    return orders[0].tolist()


def _pairs_in_groups(sizes: Sequence[int]) -> list[Int[np.ndarray, "pairs 2"]]:
    """Places that share a group of the innermost axis; of the inner two axes; and so on."""
    widths = sorted({width for width in itertools.accumulate(sizes, lambda product, size: product * size) if width > 1})
    places = range(math.prod(sizes))
    return [np.array([pair for pair in itertools.combinations(places, 2) if pair[0] // width == pair[1] // width]) for width in widths]


def _pairs_along_axes(sizes: Sequence[int]) -> list[Int[np.ndarray, "pairs 2"]]:
    """Places that follow each other, in a ring, along the innermost axis; along the next; and so on."""
    grid = np.arange(math.prod(sizes)).reshape(tuple(sizes)[::-1])
    axes = [axis for axis in reversed(range(grid.ndim)) if grid.shape[axis] > 1]
    return [np.stack([grid, np.roll(grid, -1, axis)], axis=-1).reshape(-1, 2) for axis in axes]


def _grow_groups(closeness: Int[np.ndarray, "gpus gpus"], size: int) -> list[int]:
    """An order for nodes with too many GPUs to compare all: each group starts with the lowest free GPU and takes the closest."""
    free, order = list(range(len(closeness))), []
    while free:
        group = [free.pop(0)]
        while free and len(group) < size:
            links = closeness[np.ix_(free, group)]
            group.append(free.pop(int(np.lexsort((free, -links.sum(1), -links.min(1)))[0])))
        order += group
    return order


def crossings(mesh: Int[np.ndarray, "pipe replica data tensor"], devices: Iterable[Device]) -> dict[str, tuple[int, int]]:
    """Of the steps from neighbour to neighbour along each axis longer than 1: how many cross nodes, and how many there are."""
    nodes = {device.id: device.node for device in devices}
    names = np.vectorize(nodes.__getitem__, otypes=[object])(mesh)
    counts = {}
    for place, axis in enumerate(AXES):
        length = mesh.shape[place]
        if length > 1:
            cross = names.take(range(1, length), place) != names.take(range(length - 1), place)
            counts[axis] = (int(cross.sum()), cross.size)
    return counts


def where_axes_live(mesh: Int[np.ndarray, "pipe replica data tensor"], devices: Iterable[Device]) -> dict[str, str]:
    """Each axis longer than 1 in words: `inside a node`, `between nodes`, or how many of its steps cross nodes."""
    return {
        axis: "between nodes" if crossing == steps else f"{crossing} of {steps} steps between nodes" if crossing else "inside a node"
        for axis, (crossing, steps) in crossings(mesh, devices).items()
    }


def infer_degrees(degrees: Mapping[str, int | None], num_nodes: int, per_node: int, inside: Sequence[str] = INSIDE) -> dict[str, int]:
    """The degrees with every None filled in so that they multiply to num_nodes x per_node devices.

    `data` is inferred first, then `replica`, `pipe` and `tensor`; the first takes all that is left and the others become 1.
    Only where another axis is left to take what remains does `data` stop at what its node has room for.

    Raises:
        InputError: the given degrees do not divide the number of devices.
    """
    _axes_outward(inside)
    given = {axis: degree for axis in AXES if (degree := degrees[axis]) is not None}
    unknown = [axis for axis in MENDED if axis not in given]
    if not unknown:
        return given
    total, known = num_nodes * per_node, math.prod(given.values())
    if total % known:
        single = [axis for axis in MENDED if axis in given and total * given[axis] % known == 0]
        mended = [f"mesh.{axis}: {nearest_divisors(given[axis], total * given[axis] // known)}" for axis in single]
        raise InputError(
            f"{_product(given, given)} = {known} does not divide the devices that mesh.{unknown[0]} is to be inferred from, "
            f"{_count(num_nodes, per_node)}; nearest "
            + (mended[0] if mended else _product(_nearby({**dict.fromkeys(AXES, 1), **given}, inside, num_nodes, per_node), AXES))
        )
    left, filled = total // known, dict(given)
    for axis in unknown:
        room = per_node // math.gcd(per_node, math.prod(filled.get(other, 1) for other in inside))
        filled[axis] = math.gcd(left, room) if axis == "data" and axis in inside and len(unknown) > 1 else left
        left //= filled[axis]
    return {axis: filled[axis] for axis in AXES}
