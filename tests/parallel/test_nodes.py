"""Which process has which devices, out of what machines tell of themselves, nvidia-smi by way of a fake one."""

import dataclasses
import json
import os
import stat
from pathlib import Path

import jax
import pytest

from giantjax.cluster import InstalledGPU, this_machine, visible_gpus
from giantjax.config import MeshConfig, ModelConfig, RunConfig, RuntimeConfig, TrainingConfig
from giantjax.errors import InputError
from giantjax.launch import Job
from giantjax.parallel.mesh import axes_in_words, build_mesh
from giantjax.parallel.nodes import Nodes, find_nodes, nodes_from, resolve, survey
from giantjax.parallel.topology import parse_topology
from tests.parallel.test_topology import NDV2_TEXT

GPUS = [InstalledGPU(i, f"GPU-{i:02}ab", f"00000000:{i:02}:00.0", "Tesla V100-SXM2-32GB", 32 * 2**30) for i in range(8)]
QUADS = [{0, 1, 2, 3}, {4, 5, 6, 7}]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi that tells of eight V100, the quads of which are joined 0-6, 1-7, 2-4 and 3-5."""
    (tmp_path / "topology").write_text(NDV2_TEXT)
    lines = "\n".join(f"{gpu.index}, {gpu.uuid}, {gpu.bus}, {gpu.memory_bytes // 2**20}, {gpu.name}" for gpu in GPUS)
    (tmp_path / "gpus").write_text(lines + "\n")
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {tmp_path}/topology; else cat {tmp_path}/gpus; fi\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def told(process, environment, *, of=1, local=None, host="node1", machine="a"):
    """The survey of one process, by way of JSON."""
    found = survey(this_machine(None, environment), Job("node1:1", of, process, local, ""), host)
    return json.loads(json.dumps(found | {"machine": machine}))


def config(**mesh) -> RunConfig:
    model = ModelConfig(num_layers=4, hidden_size=64, num_heads=8, sequence_length=8, vocabulary_size=9)
    return RunConfig(name="x", model=model, training=TrainingConfig(num_steps=1, global_batch_size=16), mesh=MeshConfig(**mesh))


def simulated(processes: int, devices: int) -> Nodes:
    machine = this_machine(devices)
    return find_nodes([survey(machine, Job("node1:1", processes, process, None, ""), "node1") for process in range(processes)])


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, [*range(8)]),
        ("3,1", [3, 1]),
        ("GPU-05ab, GPU-00", [5, 0]),
        ("2,9,1", [2]),
        ("-1", []),
        ("", []),
        ("1,1", [1]),
        ("0,x", [0]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable, numbers):
    assert [gpu.index for gpu in visible_gpus(GPUS, variable)] == numbers


def test_the_gpus_of_a_machine_are_those_one_may_use(nvidia_smi):
    machine = this_machine(None, {"CUDA_VISIBLE_DEVICES": "6,2"})
    assert (machine.kind, machine.num_devices, machine.memory_bytes) == ("Tesla V100-SXM2-32GB", 2, 32 * 2**30)
    assert (machine.installed, machine.visible) == (tuple(GPUS), (GPUS[6], GPUS[2]))
    assert this_machine(4, {}).num_devices == 4
    assert this_machine(None, {"CUDA_VISIBLE_DEVICES": ""}).simulated


def test_one_process_takes_all_and_its_tensor_groups_are_quads(nvidia_smi):
    nodes = find_nodes([told(0, {})])
    assert (nodes.in_words, nodes.places[0].devices, nodes.places[0].visible) == ("8 devices", tuple(range(8)), None)
    assert nodes_from(json.loads(json.dumps(dataclasses.asdict(nodes)))) == nodes
    resolved = resolve(config(tensor=4, data=None), nodes)
    assert (resolved.mesh.data, resolved.mesh.tensor) == (2, 4)
    mesh = build_mesh(resolved.mesh, nodes)
    number = {device: i for i, device in enumerate(jax.devices())}
    assert [{number[device] for device in group} for group in mesh.devices.reshape(2, 4)] == QUADS
    links = parse_topology(NDV2_TEXT).links
    assert all(links[number[first]][number[second]] for first, second in mesh.devices.reshape(2, 4).T)
    assert axes_in_words(mesh, nodes) == "data and tensor inside a node"


def test_gpus_are_numbered_as_the_process_sees_them(nvidia_smi):
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    nodes = find_nodes([told(0, {"CUDA_VISIBLE_DEVICES": ",".join(map(str, order))})])
    assert nodes.places[0].devices == tuple(order)
    mesh = build_mesh(config(tensor=4, data=2).mesh, nodes)
    assert [{order[jax.devices().index(device)] for device in group} for group in mesh.devices.reshape(2, 4)] == QUADS


@pytest.mark.parametrize("local", [lambda i: i, lambda i: None])
def test_processes_that_see_the_same_gpus_take_one_each(nvidia_smi, local):
    nodes = find_nodes([told(i, {}, of=16, local=local(i % 8), host=f"node{i // 8}", machine=str(i // 8)) for i in range(16)])
    assert [place.visible for place in nodes.places] == [(i % 8,) for i in range(16)]
    assert [(place.node, place.devices) for place in nodes.places] == [(f"node{i // 8}", (i % 8,)) for i in range(16)]
    assert nodes.in_words == "2 nodes x 8 devices = 16"
    assert {name: topology.links for name, topology in nodes.topologies.items()} == dict.fromkeys(
        ("node0", "node1"), parse_topology(NDV2_TEXT).links
    )
    assert resolve(config(tensor=8, replica=None), nodes).mesh.replica == 2


def test_the_launcher_says_which_process_takes_which(nvidia_smi):
    nodes = find_nodes([told(i, {}, of=2, local=1 - i) for i in range(2)])
    assert [place.visible for place in nodes.places] == [(1,), (0,)]
    assert [place.devices for place in nodes.places] == [(1,), (0,)]


def test_a_launcher_that_leaves_each_process_its_own_gpu_has_decided(nvidia_smi):
    nodes = find_nodes([told(i, {"CUDA_VISIBLE_DEVICES": str(7 - i)}, of=2, local=i) for i in range(2)])
    assert [(place.visible, place.devices) for place in nodes.places] == [(None, (1,)), (None, (0,))]
    assert nodes.topologies["node1"].links == ((0, 2), (2, 0))


def test_a_process_on_each_node_takes_all_there(nvidia_smi):
    nodes = find_nodes([told(i, {}, of=2, local=0, host=f"node{i}", machine=str(i)) for i in range(2)])
    assert [(place.node, place.devices, place.visible) for place in nodes.places] == [(f"node{i}", tuple(range(8)), None) for i in range(2)]
    # Two machines of one name are two nodes.
    assert find_nodes([told(i, {}, of=2, machine=str(i)) for i in range(2)]).names == ["node1", "node1 (2)"]


def test_containers_that_see_one_gpu_each_share_a_node(nvidia_smi):
    """As under Slurm's control groups: nvidia-smi numbers each GPU 0, and tells of no other."""
    surveys = [told(i, {}, of=4) | {"topology": ""} for i in range(4)]
    for i, one in enumerate(surveys):
        one["installed"] = one["visible"] = [dataclasses.asdict(dataclasses.replace(GPUS[i], index=0))]
    nodes = find_nodes(surveys)
    assert [(place.devices, place.visible) for place in nodes.places] == [((i,), None) for i in range(4)]
    assert nodes.topologies["node1"].is_uniform


def test_more_processes_than_gpus_are_refused(nvidia_smi):
    with pytest.raises(InputError, match="process 2 is number 2, from 0, of 3 on node1 that see 2 GPUs; start at most 2 there"):
        find_nodes([told(i, {"CUDA_VISIBLE_DEVICES": "0,1"}, of=3, local=i) for i in range(3)])


def test_a_garbled_table_is_no_reason_not_to_train(nvidia_smi):
    nodes = find_nodes([told(0, {}) | {"topology": NDV2_TEXT.replace("NV2", "??")}])
    assert nodes.topologies["node1"].is_uniform


@pytest.mark.parametrize(
    ("processes", "devices", "given", "expected"),
    [
        (1, 8, {"data": None}, (1, 1, 8, 1)),
        (1, 8, {"data": None, "tensor": 2, "pipe": 2}, (2, 1, 2, 2)),
        (4, 2, {"pipe": None, "tensor": 2}, (4, 1, 1, 2)),
        (2, 4, {"data": None, "replica": None}, (1, 2, 4, 1)),
        (2, 4, {"data": None, "replica": None, "pipe": None, "tensor": None}, (1, 2, 4, 1)),
        (2, 4, {"data": 4, "replica": 2}, (1, 2, 4, 1)),
    ],
)
def test_degrees_are_inferred_from_processes_and_devices(processes, devices, given, expected):
    wanted = dataclasses.replace(config(**given), runtime=RuntimeConfig(num_cpu_devices=devices))
    mesh = resolve(wanted, simulated(processes, devices)).mesh
    assert (mesh.pipe, mesh.replica, mesh.data, mesh.tensor) == expected
    assert mesh.num_devices == processes * devices


@pytest.mark.parametrize(
    ("processes", "devices", "given", "words"),
    [
        (2, 2, {"data": 2}, "num_cpu_devices is 2 in each of 2 processes, 4 in all, but .* = 2; set mesh.data to 4 or .*devices to 1$"),
        (4, 1, {"replica": 8}, "devices is 1 in each of 4 processes, 4 in all, but .* = 8; set runtime.num_cpu_devices to 2$"),
        (3, 1, {"replica": 8}, "devices is 1 in each of 3 processes, 3 in all, but .* = 8; set degrees whose product is 3$"),
        (2, 2, {"data": 4}, "mesh.data 4 does not fit in a node: .* does not divide its 2 GPUs"),
        (2, 3, {"data": None, "replica": 4}, "= 4 does not divide the devices that mesh.data is to be inferred from, 2 nodes x 3 GPUs = 6"),
        (2, 3, {"replica": None, "data": 3}, r"global_batch_size is 16, .* = 6 does not .* \(mesh.replica 2 inferred from 2 nodes x 3 dev"),
    ],
)
def test_degrees_that_do_not_fit_show_the_arithmetic(processes, devices, given, words):
    with pytest.raises(InputError, match=words):
        resolve(dataclasses.replace(config(**given), runtime=RuntimeConfig(num_cpu_devices=devices)), simulated(processes, devices))
