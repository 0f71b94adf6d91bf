"""What is exported to NCCL, and what its log is read to say; the logs are in the format of NCCL's own lines."""

import pytest

from giantjax.errors import InputError
from giantjax.nccl import export_transport, listen, parse_log, read_log
from giantjax.network import Transport

SOCKET = """\
node1:2716:2716 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node1:2716:2716 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
node1:2716:2716 [0] NCCL INFO NCCL version 2.21.5+cuda12.4
node1:2716:2760 [0] NCCL INFO NET/Plugin: No plugin found (libnccl-net.so), using internal implementation
node1:2716:2760 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.
node1:2716:2760 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:fe80::84f5:3ff:fe44:ab9b%eth1<0>
node1:2716:2760 [0] NCCL INFO Using non-device net plugin version 0
node1:2716:2760 [0] NCCL INFO Using network Socket
node1:2716:2760 [0] NCCL INFO ncclCommInitRankConfig comm 0x55f0 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 30 commId 0x438c - Init START
node1:2716:2790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node1:2716:2790 [0] NCCL INFO NET/Socket: Using 4 threads and 4 sockets per thread
node1:2716:2790 [0] NCCL INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/Socket/0
node1:2716:2790 [0] NCCL INFO Channel 01/0 : 0[0] -> 8[0] [send] via NET/Socket/0
"""
INFINIBAND = """\
[2025-08-19 12:00:01] gpu02:99:120 [3] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_3:1/RoCE [RO]; OOB eth0:172.21.17.82<0>
[2025-08-19 12:00:01] gpu02:99:120 [3] NCCL INFO Initialized NET plugin IB
[2025-08-19 12:00:01] gpu02:99:120 [3] NCCL INFO Assigned NET plugin IB to comm
[2025-08-19 12:00:01] gpu02:99:120 [3] NCCL INFO Using network IB
[2025-08-19 12:00:02] gpu02:99:121 [3] NCCL INFO Channel 00/0 : 3[3] -> 11[3] [send] via NET/IB/1/GDRDMA(PCI)/Shared
[2025-08-19 12:00:02] gpu02:99:121 [3] NCCL INFO Channel 01/0 : 3[3] -> 11[3] [send] via NET/IB/0/GDRDMA
"""
OLD = """\
sh-01:98911:98911 [0] NCCL INFO NET/Socket : Using [0]enp1s0f0:10.30.0.127<0> [1]enp1s0f1:10.30.0.227<0>
NCCL version 2.5.6+cuda10.1
sh-01:98911:98911 [0] NCCL INFO Using network Socket
sh-01:98911:98923 [3] NCCL INFO Ring 00 : 3[b01000] -> 4[201000] [send] via NET/Socket/1
"""
ONE_NODE = """\
host:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.140.0.7<0>
host:1:2 [0] NCCL INFO Using network Socket
host:1:2 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[1] via SHM/direct/direct
"""
PLUGIN = """\
host:1:2 [0] NCCL INFO NET/OFI Initializing aws-ofi-nccl 1.16.2
host:1:2 [0] NCCL INFO Using network Libfabric
host:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Libfabric/0/GDRDMA
"""


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (SOCKET, "NCCL: Socket over eth0, 4 threads x 4 sockets; P2P/CUMEM inside a node"),
        (INFINIBAND, "NCCL: IB over mlx5_0:1/RoCE, mlx5_3:1/RoCE, straight from GPU memory"),
        (OLD, "NCCL: Socket over enp1s0f1"),
        (ONE_NODE, "NCCL: SHM/direct/direct inside a node"),
        (PLUGIN, "NCCL: Libfabric, straight from GPU memory"),
    ],
)
def test_what_nccl_chose_is_one_line(log, says, tmp_path):
    assert str(parse_log(log)) == says
    (tmp_path / "log").write_text(log)
    assert read_log(tmp_path / "log") == says


def test_a_log_that_says_nothing_is_no_choice(tmp_path):
    assert parse_log("") is None and parse_log("node1:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>\n") is None
    assert read_log(tmp_path / "none") is None
    assert parse_log(SOCKET).version == "2.21.5" and parse_log(OLD).version == "2.5.6"  # type: ignore[union-attr]


def test_what_the_user_has_set_stays():
    environment = {"NCCL_IB_DISABLE": "0", "NCCL_SOCKET_NTHREADS": "4"}
    said = export_transport(Transport(rdma=False, interface="eth0", socket_threads=4, sockets_per_thread=2), environment)
    assert said == "NCCL_SOCKET_IFNAME=eth0 NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=2; NCCL_IB_DISABLE=0 stays as it was set"
    assert environment == {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_IB_DISABLE": "0",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "2",
    }


def test_a_log_that_the_user_asked_for_is_left_to_him(tmp_path):
    environment = {"NCCL_DEBUG": "WARN"}
    assert listen(tmp_path, environment) is None and environment == {"NCCL_DEBUG": "WARN"}
    environment = {}
    assert listen(tmp_path, environment) == tmp_path / "nccl.log"
    assert environment == {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.log")}


def test_transports_beyond_the_limit_of_nccl_are_refused():
    with pytest.raises(InputError, match="at most 64 sockets in all"):
        Transport(rdma=False, socket_threads=8, sockets_per_thread=16)
