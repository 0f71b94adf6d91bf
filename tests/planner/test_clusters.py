"""Clusters by name and from files."""

import pytest

from giantjax.cluster import cluster_of_name
from giantjax.errors import InputError
from giantjax.network import Transport

GOOD = """
name = "lab"
gpu = "A100-40GB"
num_nodes = 4
gpus_per_node = 8

[network]
fabric = "tcp"
nic_gbits = 100
nics_per_node = 2
achieved = 0.5
latency_us = 40

[transport]
interface = "eth0"
socket_threads = 8
sockets_per_thread = 2
"""


def test_reference_clusters():
    slow, fast = cluster_of_name("v100x4-tcp100"), cluster_of_name("a100x128-rdma800")
    assert (slow.gpu.name, slow.num_gpus, slow.network.fabric) == ("V100-32GB", 32, "tcp")
    assert slow.network.node_bandwidth == pytest.approx(0.4 * 12.5e9)
    assert (fast.gpu.name, fast.num_gpus) == ("A100-40GB", 1024)
    assert fast.network.nic_bandwidth * fast.network.nics_per_node == pytest.approx(100e9)
    assert cluster_of_name("a100x4-tcp800").network.node_bandwidth < cluster_of_name("a100x4-rdma800").network.node_bandwidth
    with pytest.raises(InputError, match="has 129 nodes; plans go up to 128, such as v100x128-tcp100"):
        cluster_of_name("v100x129-tcp100")


def test_a_cluster_file(tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(GOOD)
    cluster = cluster_of_name(str(path))
    assert (cluster.name, cluster.num_gpus) == ("lab", 32)
    assert cluster.network.node_bandwidth == pytest.approx(0.5 * 2 * 12.5e9) and cluster.network.latency == pytest.approx(40e-6)
    assert cluster.network.transport.environment() == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "8",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }
    other = tmp_path / "one.json"
    other.write_text('{"gpu": "H100-80GB", "num_nodes": 1, "gpus_per_node": 8}')
    assert cluster_of_name(str(other)).name == "one"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[network]", "[link]", "there is no field link"),
        ("nic_gbits = 100", "nic_gbits = 0", "network.nic_gbits is 0; it must be above 0, such as 100"),
        ("nic_gbits = 100\n", "", "the field network.nic_gbits is missing"),
        ("achieved = 0.5", "achieved = 2", "network.achieved is 2; it is a share of the line rate"),
        ("latency_us = 40", "latency_us = -1", "network.latency_us is -1; it must be 0 or more"),
        ('"tcp"', '"tpc"', "network.fabric is 'tpc'; it must be tcp, infiniband, roce, omni-path; did you mean tcp?"),
        ("A100-40GB", "A100", "there is no GPU A100; there are V100-16GB"),
        ("num_nodes = 4", "num_nodes = 0", "num_nodes is 0; it must be from 1 to 128"),
        ("gpus_per_node = 8", "gpus_per_node = '8'", "gpus_per_node is '8'; it must be a whole number"),
        ("gpus_per_node = 8\n", "", "the field gpus_per_node is missing"),
        ("socket_threads = 8", "socket_threads = 64", "transport.socket_threads 64 x transport.sockets_per_thread 2 = 128"),
        ('name = "lab"', "name = lab", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_cluster_file_are_named(old, new, says, tmp_path):
    path = tmp_path / "lab.toml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(InputError) as caught:
        cluster_of_name(str(path))
    assert str(path) in str(caught.value) and says in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_of_several_nodes_needs_a_link(tmp_path):
    path = tmp_path / "lab.json"
    path.write_text('{"gpu": "A100-40GB", "num_nodes": 2, "gpus_per_node": 8}')
    with pytest.raises(InputError, match=r"num_nodes is 2, but the link between them is missing; add a table \[network\]"):
        cluster_of_name(str(path))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        cluster_of_name(str(tmp_path / "none.toml"))
    path.write_text("[1]")
    with pytest.raises(InputError, match=r"it holds \[1\], not a table"):
        cluster_of_name(str(path))


def test_transports_that_nccl_refuses():
    with pytest.raises(InputError, match=r"17 x transport\.sockets_per_thread 1 = 17; NCCL takes 1 to 16"):
        Transport(rdma=False, socket_threads=17)
