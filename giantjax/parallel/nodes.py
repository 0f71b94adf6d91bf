"""Which process has which devices of which node, out of what each process tells of its machine. No jax.

A process on the CPU is a node of its own. GPUs are on the same node where the machine is the same one, and are numbered there
by PCI address.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from giantjax.cluster import InstalledGPU, Machine, machine_id, topology_text
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.launch import Job
from giantjax.parallel.placement import AXES, Device, infer_degrees, place_devices
from giantjax.parallel.topology import NodeTopology, equal_pairs, known_topology, parse_topology


@dataclass(frozen=True)
class Place:
    """The devices of one process."""

    node: str
    devices: tuple[int, ...]
    """In JAX's order, the number of each in its node."""
    visible: tuple[int, ...] | None
    """Which of the GPUs that the process sees it takes; None for all it sees."""


@dataclass(frozen=True)
class Nodes:
    """Where the devices of a job are."""

    places: tuple[Place, ...]
    """Of each process."""
    topologies: dict[str, NodeTopology]
    """What joins the devices of a node, by its name; for GPUs only."""

    @property
    def per_node(self) -> dict[str, int]:
        """Number of devices of each node."""
        return {name: sum(len(place.devices) for place in self.places if place.node == name) for name in self.names}

    @property
    def names(self) -> list[str]:
        """Of the nodes, in the order of their first processes."""
        return list(dict.fromkeys(place.node for place in self.places))

    def listed(self) -> list[Device]:
        """Every device, with a number of its own."""
        numbered = [(place.node, gpu) for place in self.places for gpu in place.devices]
        return [Device(node, gpu, number) for number, (node, gpu) in enumerate(numbered)]

    @property
    def in_words(self) -> str:
        """`2 nodes x 8 devices = 16`, or `8 devices`; of unequal nodes each."""
        counts = self.per_node
        if len(set(counts.values())) > 1:
            return ", ".join(f"{count} devices on {node}" for node, count in counts.items())
        each, number = next(iter(counts.values())), len(counts)
        return f"{each} devices" if number == 1 else f"{number} nodes x {each} devices = {number * each}"


def nodes_from(told: Mapping[str, Any]) -> Nodes:
    """The nodes out of what JSON keeps of `dataclasses.asdict`."""
    places = tuple(Place(**{name: _tuples(value) for name, value in place.items()}) for place in told["places"])
    return Nodes(
        places, {name: NodeTopology(**{key: _tuples(value) for key, value in links.items()}) for name, links in told["topologies"].items()}
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def survey(machine: Machine, job: Job, host: str) -> dict[str, Any]:
    """What this process tells the others of its machine, as JSON can hold it."""
    gpus = {"installed": machine.installed, "visible": machine.visible}
    return {
        "host": host,
        "local": job.local_process_id,
        "num_devices": machine.num_devices,
        "machine": machine_id(),
        "topology": topology_text() if len(machine.visible) > 1 or (machine.visible and job.num_processes > 1) else "",
        **{name: [dataclasses.asdict(gpu) for gpu in found] for name, found in gpus.items()},
    }


def find_nodes(surveys: Sequence[Mapping[str, Any]]) -> Nodes:
    """The nodes of a job, out of the surveys of its processes.

    A process alone with the GPUs it sees takes all of them; of processes that see the same, each takes its own.

    Raises:
        InputError: more processes share GPUs than there are.
    """
    if not all(told["visible"] for told in surveys):
        return Nodes(tuple(Place(f"process {i}", tuple(range(told["num_devices"])), None) for i, told in enumerate(surveys)), {})
    visible = [[InstalledGPU(**gpu) for gpu in told["visible"]] for told in surveys]
    taken = [_own(process, surveys, visible) for process in range(len(surveys))]
    names = _names(surveys)
    places, topologies = [], {}
    used = {
        name: sorted({visible[i][k] for i, own in enumerate(taken) if names[i] == name for k in own}, key=lambda gpu: (gpu.bus, gpu.uuid))
        for name in names
    }
    for process, own in enumerate(taken):
        whole = len(own) == len(visible[process])
        numbers = tuple(used[names[process]].index(visible[process][k]) for k in own)
        places.append(Place(names[process], numbers, None if whole else own))
    for name in dict.fromkeys(names):
        told = [each for each, other in zip(surveys, names, strict=True) if other == name]
        topologies[name] = _topology(name, used[name], told)
    return Nodes(tuple(places), topologies)


def _own(process: int, surveys: Sequence[Mapping[str, Any]], visible: Sequence[Sequence[InstalledGPU]]) -> tuple[int, ...]:
    """Which of the GPUs that it sees a process takes."""
    seen = {gpu.uuid for gpu in visible[process]}
    here = surveys[process]["machine"]
    sharing = [i for i, other in enumerate(visible) if surveys[i]["machine"] == here and seen & {gpu.uuid for gpu in other}]
    if len(sharing) == 1:
        return tuple(range(len(seen)))
    local = [surveys[i]["local"] for i in sharing]
    distinct = None not in local and len(set(local)) == len(local)
    rank = surveys[process]["local"] if distinct else sharing.index(process)
    if rank >= len(seen):
        raise InputError(
            f"process {process} is number {rank}, from 0, of {len(sharing)} on {surveys[process]['host']} that see {len(seen)} GPUs; "
            f"start at most {len(seen)} there, one a GPU, or one for all of them"
        )
    return (rank,)


def _names(surveys: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of the node of each process: its host's, or where two machines share that, or one has two, with a number."""
    machines: dict[str, str] = {}
    for told in surveys:
        if told["machine"] not in machines:
            same = sum(name.partition(" ")[0] == told["host"] for name in machines.values())
            machines[told["machine"]] = f"{told['host']} ({same + 1})" if same else told["host"]
    return [machines[told["machine"]] for told in surveys]


def _topology(name: str, used: Sequence[InstalledGPU], surveys: Sequence[Mapping[str, Any]]) -> NodeTopology:
    """What joins the GPUs `used`, in that order: as nvidia-smi says, else as is usual where the whole node is used."""
    for told in surveys:
        index = {gpu["uuid"]: gpu["index"] for gpu in told["installed"]}
        if told["topology"] and all(gpu.uuid in index for gpu in used):
            try:
                return parse_topology(told["topology"], name).among([index[gpu.uuid] for gpu in used])
            except InputError:
                continue  # a garbled table is no reason not to train
    usual = known_topology(used[0].name, len(used))
    return dataclasses.replace(usual, name=name) if usual.is_uniform else equal_pairs(len(used), name=name)


def resolve(config: RunConfig, nodes: Nodes) -> RunConfig:
    """The configuration with every degree of the mesh a number.

    Raises:
        InputError: the degrees do not divide the devices, or what follows from them does not fit.
    """
    count = nodes.per_node
    num_nodes, per_node, total = len(count), min(count.values()), sum(count.values())
    given: dict[str, int | None] = {axis: getattr(config.mesh, axis) for axis in AXES}
    degrees: dict[str, Any] = infer_degrees(given, num_nodes, per_node, config.mesh.inside)
    try:
        config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **degrees))
    except InputError as error:
        inferred = " and ".join(f"mesh.{axis} {degrees[axis]}" for axis in AXES if given[axis] is None)
        raise InputError(f"{error} ({inferred} inferred from {nodes.in_words})") from error
    num_processes, needed = len(nodes.places), config.mesh.num_devices
    # One process without GPUs may have devices of another kind, which JAX knows.
    if config.runtime.num_cpu_devices or (num_processes > 1 and not nodes.topologies):
        _check_simulated(config, num_processes)
    if num_processes > 1:
        place_devices(nodes.listed(), degrees, nodes.topologies, config.mesh.inside)
        if needed < total:
            raise InputError(
                f"the mesh needs {_product(config)} = {needed} devices, but the {num_processes} processes have {nodes.in_words}, and none "
                "may be idle; set mesh.data to None to use them all, or start fewer processes"
            )
    return config


def _check_simulated(config: RunConfig, num_processes: int) -> None:
    mesh = config.mesh
    each = config.runtime.num_cpu_devices or 1
    total, needed = each * num_processes, mesh.num_devices
    if total == needed:
        return
    said = f"runtime.num_cpu_devices is {each}" + (f" in each of {num_processes} processes, {total} in all" if num_processes > 1 else "")
    others = needed // mesh.data
    advice = [f"mesh.data to {total // others}"] if total % others == 0 else []
    advice += [f"runtime.num_cpu_devices to {needed // num_processes}"] if needed % num_processes == 0 else []
    raise InputError(f"{said}, but {_product(config)} = {needed}; set {' or '.join(advice) or f'degrees whose product is {total}'}")


def _product(config: RunConfig) -> str:
    return " x ".join(f"mesh.{axis} {getattr(config.mesh, axis)}" for axis in AXES)
