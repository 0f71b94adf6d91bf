"""Lines through times, transports worth trying, and the cluster file made of them."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from giantjax.cluster import cluster_of_name
from giantjax.cluster_file import read_cluster
from giantjax.command_line import preset
from giantjax.errors import InputError
from giantjax.launch import Job
from giantjax.measure import cluster as measuring
from giantjax.measure.cluster import Measurement, interface_to
from giantjax.measure.fit import COLLECTIVES, fit_link, measurable, sent_bytes
from giantjax.measure.outcome import Surroundings, check_nodes, check_path, cluster_values, fits, write_cluster
from giantjax.measure.transports import line_rate, rdma_cards, transports
from giantjax.network import Transport
from giantjax.parallel.collectives import __doc__ as collectives_table
from giantjax.planner.constants import FITTED
from giantjax.planner.links import Span, Wires
from giantjax.planner.search import search

SIZES = tuple(2**exponent for exponent in (14, 17, 20, 23, 26))
LINKS = {
    # Seconds and bytes/s of a GPU.
    "hop_inside": (11e-6, 200e9),
    "all_reduce_inside": (40e-6, 170e9),
    "hop_across_one": (52e-6, 4.9e9),
    "hop_across": (60e-6, 0.65e9),
    "all_reduce_across": (90e-6, 0.6e9),
    "all_reduce": (140e-6, 0.6e9),
}


def timed(where: Surroundings, links=LINKS, noise: float = 0.0):
    """Times that the links would take."""
    random = np.random.default_rng(0)
    return {
        name: [
            (size, (latency + sent_bytes(name, size, where.per_node, where.num_nodes) / bandwidth) * float(np.exp(noise * random.normal())))
            for size in SIZES
        ]
        for name, (latency, bandwidth) in links.items()
        if name in measurable(where.per_node, where.num_nodes)
    }


NODES = Surroundings(4, 8, simulated=False, interface_gbits=100.0)
RESULT = {"kind": "Tesla V100-SXM2-32GB", "versions": {"jax": "0.10.2"}}


# ---- fits ----


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_a_fit_recovers_latency_and_bandwidth(name, noise):
    latency, bandwidth = LINKS[name]
    found = fits(timed(NODES, noise=noise), NODES)[name]
    assert found.bandwidth == pytest.approx(bandwidth, rel=max(1e-9, 4 * noise))
    assert found.latency == pytest.approx(latency, rel=max(1e-9, 4 * noise))
    assert found.deviation <= max(1e-9, 4 * noise)


def test_latency_is_never_below_zero():
    found = fit_link([(1e3, 0.5e-6), (1e6, 1e-3), (2e6, 2.2e-3)])
    assert found.latency == 0 and found.bandwidth == pytest.approx(1e9, rel=0.5)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ([(1e6, 1e-3)], "a line needs the times of two sizes or more"),
        ([(1e6, 1e-3), (2e6, 0.0)], "each above 0"),
        (
            [(1e6, 1e-3), (2e6, 1e-3), (4e6, 0.9e-3)],
            r"messages of 4000000 bytes take no longer than those of 1000000 \(0.0009 and 0.001 s\)",
        ),
    ],
)
def test_times_that_make_no_line_are_refused(points, says):
    with pytest.raises(InputError, match=says):
        fit_link(points)
    with pytest.raises(InputError, match=r"^hop to the next GPU of the node: "):
        fits({"hop_inside": points}, NODES)


def test_bytes_are_those_of_the_collectives():
    assert collectives_table and "| all_reduce | 2 n (I-1)/I | 2 n/I (A-1)/A |" in collectives_table
    assert sent_bytes("all_reduce_inside", 800, 8, 4) == 2 * 800 * 7 / 8
    assert sent_bytes("all_reduce_across", 800, 8, 4) == 2 * 800 * 3 / 4
    assert sent_bytes("all_reduce", 800, 8, 4) == 2 * 800 / 8 * 3 / 4
    assert sent_bytes("hop_across", 800, 8, 4) == 800
    assert measurable(1, 2) == ("hop_across_one", "hop_across", "all_reduce_across")
    assert measurable(2, 1) == ("hop_inside", "all_reduce_inside")


# ---- the file ----


def written(tmp_path: Path, where: Surroundings, transport: Transport | None, links=LINKS) -> Path:
    """The file of a cluster with `links`."""
    path = tmp_path / "lab.toml"
    values = cluster_values(
        "lab", RESULT, fits(timed(where, links), where), transport, where, [{"settings": "NCCL_IB_DISABLE=1", "gbytes": 4.8}]
    )
    write_cluster(path, values)
    assert [file.name for file in tmp_path.iterdir()] == ["lab.toml"]
    return path


def test_the_file_is_the_cluster_that_was_measured(tmp_path):
    transport = Transport(rdma=False, interface="eth0", socket_threads=8, sockets_per_thread=8)
    path = written(tmp_path, NODES, transport)
    cluster = cluster_of_name(str(path))
    assert (cluster.name, cluster.gpu.name, cluster.num_nodes, cluster.gpus_per_node) == ("lab", "V100-32GB", 4, 8)
    link = cluster.network
    assert (link.fabric, link.nics_per_node, link.nic_bandwidth, link.transport) == ("tcp", 1, 12.5e9, transport)
    assert link.node_bandwidth == pytest.approx(8 * 0.6e9, rel=1e-3) and link.latency == pytest.approx(52e-6, rel=1e-3)
    assert cluster.inside_bandwidth == pytest.approx(170e9, rel=1e-3)
    # The planner takes both as they are, not a share of them.
    wires = Wires(cluster, FITTED)
    assert wires.node_bandwidth == pytest.approx(8 * 0.6e9, rel=1e-3) and wires.nvlink(8) == pytest.approx(170e9, rel=1e-3)
    told = tomllib.loads(path.read_text())["measured"]
    assert told["versions"] == {"jax": "0.10.2"} and told["trials"] == [{"settings": "NCCL_IB_DISABLE=1", "gbytes": 4.8}]
    assert told["links"]["between_nodes"] == {"gbytes": 0.6, "latency_us": 90.0} and told["date"].startswith("20")


def test_plans_follow_what_was_measured(tmp_path):
    config = preset("gpt13b")
    path = written(tmp_path, NODES, None)
    fast = search(config, read_cluster(path)).fitting[0].cost.seconds
    slow_links = LINKS | {name: (seconds, bandwidth / 20) for name, (seconds, bandwidth) in LINKS.items() if "across" in name}
    slow = search(config, read_cluster(written(tmp_path, NODES, None, slow_links))).fitting[0].cost.seconds
    assert slow > 1.05 * fast
    # Of a link said to be RDMA the cost model would take its own share, were it not measured.
    rdma = dataclasses.replace(NODES, cards=(("infiniband", 100.0),) * 4)
    quick = LINKS | {"all_reduce_across": (20e-6, 6e9)}
    cluster = read_cluster(written(tmp_path, rdma, Transport(rdma=True), quick))
    assert cluster.network.fabric == "infiniband" and cluster.network.nics_per_node == 4
    assert cluster.network.achieved == pytest.approx(0.96) == Wires(cluster, FITTED).achieved
    edited = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, measured=False))
    assert Wires(edited, FITTED).achieved < 0.9
    assert Wires(cluster, FITTED).one_pass(1e9, Span(1, 4), 8) < Wires(edited, FITTED).one_pass(1e9, Span(1, 4), 8)


def test_an_unknown_line_rate_is_what_was_reached(tmp_path):
    where = dataclasses.replace(NODES, interface_gbits=None)
    link = read_cluster(written(tmp_path, where, None)).network
    assert link.achieved == 1 and link.node_bandwidth == pytest.approx(4.8e9, rel=1e-3) and link.nics_per_node == 1
    # GPUs that do not slow each other down have a card each.
    apart = LINKS | {"hop_across": LINKS["hop_across_one"], "all_reduce_across": (90e-6, 4.5e9)}
    link = read_cluster(written(tmp_path, where, None, apart)).network
    assert link.nics_per_node == 8 and link.node_bandwidth == pytest.approx(8 * 4.5e9, rel=1e-3)


def test_one_node_has_no_link_and_several_need_one(tmp_path):
    path = written(tmp_path, dataclasses.replace(NODES, num_nodes=1), None)
    cluster = read_cluster(path)
    assert cluster.num_nodes == 1 and not cluster.has_link and not cluster.network.measured and cluster.inside_bandwidth
    path.write_text(path.read_text().replace("num_nodes = 1", "num_nodes = 4"))
    with pytest.raises(InputError, match=r"num_nodes is 4, but the link between them is missing; add a table \[network\]"):
        read_cluster(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("bandwidth_gbytes = 170.0", "bandwidth_gbytes = 0", "inside.bandwidth_gbytes is 0; it must be above 0, such as 170"),
        ("bandwidth_gbytes", "bandwidth", "there is no field inside.bandwidth; did you mean bandwidth_gbytes"),
        ("nic_gbits = 100.0", "nic_gbits = 0", "network.nic_gbits is 0; it must be above 0"),
        ("date =", "day =", "there is no field measured.day"),
    ],
)
def test_mistakes_in_an_edited_file_are_named(old, new, says, tmp_path):
    path = written(tmp_path, NODES, None)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=f"lab.toml: {says}"):
        read_cluster(path)


def test_paths_and_nodes_that_cannot_be_are_refused_before_anything_is_timed(tmp_path):
    with pytest.raises(InputError, match=r"must end in \.toml, such as .*lab\.toml"):
        check_path(tmp_path / "lab.json")
    with pytest.raises(InputError, match=r"none/lab\.toml cannot be written: No such file or directory"):
        check_path(tmp_path / "none" / "lab.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        check_path(tmp_path / "folder.toml")
    with pytest.raises(InputError, match="one device has no link to measure; start a process on every machine"):
        check_nodes({"a": 1})
    with pytest.raises(InputError, match="equal nodes, but there are 8 on a, 4 on b GPUs; start every machine with 4"):
        check_nodes({"a": 8, "b": 4})
    with pytest.raises(InputError, match="129 nodes of 8 devices are more than the 128 nodes of 16"):
        check_nodes({f"node{i}": 8 for i in range(129)})


# ---- transports ----


def test_every_transport_is_one_that_nccl_takes():
    found = transports("eth0", rdma=True, environment={})
    assert found[0] == Transport(True, "eth0") and Transport(False, "eth0", 4, 4) in found and Transport(False, "eth0") in found
    assert all((one.socket_threads or 1) * (one.sockets_per_thread or 1) <= 64 for one in found) and len(found) == len(set(found)) > 5
    assert not any(one.rdma for one in transports(None, rdma=False, environment={}))


def test_what_is_set_in_the_environment_is_not_tried_otherwise():
    found = transports("eth0", rdma=True, environment={"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "8", "NCCL_SOCKET_IFNAME": "ib0"})
    assert {(one.rdma, one.interface, one.socket_threads) for one in found} == {(False, "ib0", 8)}
    assert {one.sockets_per_thread for one in found} == {None, 2, 4, 8}
    with pytest.raises(InputError, match="NCCL_SOCKET_NTHREADS is 'many'; it must be a whole number"):
        transports("eth0", rdma=False, environment={"NCCL_SOCKET_NTHREADS": "many"})
    with pytest.raises(InputError, match="NCCL_SOCKET_NTHREADS 32 is nothing NCCL takes"):
        transports("eth0", rdma=False, environment={"NCCL_SOCKET_NTHREADS": "32"})


def test_cards_are_read_from_their_drivers(tmp_path):
    for name, rate, layer, state in (
        ("mlx5_0", "100 Gb/sec (4X EDR)", "InfiniBand", "4: ACTIVE"),
        ("mlx5_1", "200 Gb/sec (4X HDR)", "Ethernet", "4: ACTIVE"),
        ("mlx5_2", "10 Gb/sec (4X SDR)", "InfiniBand", "1: DOWN"),
        ("hfi1_0", "100 Gb/sec (4X EDR)", "InfiniBand", "4: ACTIVE"),
    ):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        for file, text in (("rate", rate), ("link_layer", layer), ("state", state)):
            (port / file).write_text(text + "\n")
    assert rdma_cards(tmp_path) == [("omni-path", 100.0), ("infiniband", 100.0), ("roce", 200.0)]
    assert rdma_cards(tmp_path / "none") == []
    for name, speed in (("eth0", "100000"), ("veth0", "-1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(speed + "\n")
    assert line_rate("eth0", tmp_path) == 100 and line_rate("veth0", tmp_path) is None and line_rate("eth9", tmp_path) is None
    assert line_rate(None, tmp_path) is None and interface_to("127.0.0.1") is None and interface_to("no.such.host.invalid") is None


def process(machine: str, interface: str | None, names: tuple[str, ...] = ("lo", "eth0"), gbits: float | None = 100.0):
    """What a process with one GPU tells."""
    gpu = {"index": 0, "uuid": f"GPU-{machine}", "bus": "0", "name": "Tesla V100-SXM2-32GB", "memory_bytes": 2**35}
    one = {"host": machine, "local": None, "num_devices": 1, "machine": machine, "topology": "", "installed": [gpu], "visible": [gpu]}
    return {"same": {}, "survey": one, "interface": interface, "interfaces": list(names), "gbits": interface and gbits, "cards": []}


@pytest.mark.parametrize(
    ("told", "interface", "gbits"),
    [
        ([process("a", None), process("b", "eth0"), process("c", "eth0")], "eth0", 100.0),
        ([process("a", None), process("b", "eth0"), process("c", "eth0", gbits=None)], "eth0", None),
        ([process("a", None), process("b", "eth0"), process("c", "ens3")], None, None),
        ([process("a", None, ("lo", "ens3")), process("b", "eth0")], None, None),
        ([process("a", None), process("b", None)], None, None),
    ],
)
def test_the_interface_is_one_that_all_machines_have(told, interface, gbits):
    found = measuring._survey(told)
    assert (found["interface"], found["gbits"]) == (interface, gbits)


# ---- what comes next ----


def decided(monkeypatch, tmp_path, outcomes, *, seconds=4.0, where=NODES, queue=None):
    """The orders of a measurement whose trials end as `outcomes` has them by their environment, each after `seconds`; and the lines."""
    clock = [0.0]
    lines: list[str] = []
    orders: list[dict[str, Any]] = []
    monkeypatch.setattr(measuring.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(measuring, "say", lines.append)
    measurement = Measurement(tmp_path / "lab.toml", Job("node0:1234", 4, 0, None, ""), where, list(queue), begin=0.0)
    told: list[Any] = [None] * 4
    while (order := measurement.decide(told))["stage"] != "done":
        orders.append(order)
        clock[0] += seconds
        if order["stage"] == "whole":
            told = [RESULT | {"times": timed(where), "choice": None, "network": "Socket"}] * 4
        else:
            told = outcomes(order["environment"])
    return orders, order, lines


def rate_of(gbytes: float, network: str = "Socket"):
    """The outcome of a trial on every process at which a node sends `gbytes` GB/s."""
    return [{"times": {"all_reduce": [(2**24, 2 * 2**24 / 8 * 3 / 4 * 8 / gbytes / 1e9)]}, "network": network}] * 4


def test_the_fastest_transport_is_kept(monkeypatch, tmp_path):
    def outcomes(environment):
        threads = int(environment.get("NCCL_SOCKET_NTHREADS", 1))
        return rate_of(9.0) if environment["NCCL_IB_DISABLE"] == "0" else rate_of(threads / 2)  # falls back to sockets

    queue = transports("eth0", rdma=True, environment={})
    orders, last, lines = decided(monkeypatch, tmp_path, outcomes, queue=queue)
    assert last == {"stage": "done", "fault": None}
    assert [order["stage"] for order in orders] == ["trial"] * 8 + ["whole"]
    assert orders[-1]["environment"]["NCCL_SOCKET_NTHREADS"] == "16" and orders[-1]["request"]["collectives"] == measurable(8, 4)
    assert len({order["coordinator"] for order in orders}) > 1 and orders[0]["coordinator"].startswith("node0:")
    assert "NCCL took sockets instead of RDMA" in lines[0]
    cluster = read_cluster(tmp_path / "lab.toml")
    assert cluster.network.transport == Transport(False, "eth0", 16, 4)
    assert len(tomllib.loads((tmp_path / "lab.toml").read_text())["measured"]["trials"]) == 8


def test_a_minute_bounds_the_trials(monkeypatch, tmp_path):
    queue = transports("eth0", rdma=False, environment={})
    orders, _, lines = decided(monkeypatch, tmp_path, lambda _: rate_of(1.0), queue=queue, seconds=12.0)
    assert [order["stage"] for order in orders] == ["trial"] * 3 + ["whole"]
    assert any("no time for 4 more" in line for line in lines)


def test_transports_that_fail_are_said_and_passed_over(monkeypatch, tmp_path):
    broken = [{"error": "not done after 45 s"}, *rate_of(1.0)[1:]]

    def outcomes(environment):
        return rate_of(1.0) if environment.get("NCCL_SOCKET_NTHREADS") == "2" else broken

    queue = transports(None, rdma=False, environment={})
    orders, last, lines = decided(monkeypatch, tmp_path, outcomes, queue=queue)
    assert last["fault"] is None and orders[-1]["environment"]["NCCL_SOCKET_NTHREADS"] == "2"
    assert "process 0: not done after 45 s" in lines[0]
    orders, last, _ = decided(monkeypatch, tmp_path, lambda _: broken, queue=queue)
    assert last["fault"] == "no transport works; the last failed with process 0: not done after 45 s"
