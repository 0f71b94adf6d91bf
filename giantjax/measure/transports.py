"""What joins this machine to others, and the ways to have NCCL use it that are worth trying. No jax."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from giantjax.errors import InputError
from giantjax.network import Transport

SOCKETS = ((4, 4), (None, None), (8, 8), (2, 8), (16, 4), (8, 2), (1, 16))
"""Threads and sockets a thread, best first on published clusters (github.com/NVIDIA/nccl/issues/450); None is NCCL's choice."""
SETTINGS = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")


def interface_to(host: str) -> str | None:
    """The network interface through which packets to `host` leave; None for this machine itself, or where nobody knows."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return None if name == "lo" or own.startswith("127.") else name
    return None


def interfaces() -> list[str]:
    """Names of the network interfaces of this machine."""
    return sorted(psutil.net_if_addrs())


def line_rate(interface: str | None, root: Path = Path("/sys/class/net")) -> float | None:
    """Gb/s of an interface as its driver tells; None where it does not, as of virtual ones."""
    try:
        megabits = int((root / str(interface) / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None


def rdma_cards(root: Path = Path("/sys/class/infiniband")) -> list[tuple[str, float]]:
    """Fabric and Gb/s of each active port that does RDMA."""
    found = []
    for port in sorted(root.glob("*/ports/*")):
        try:
            active = "ACTIVE" in (port / "state").read_text()
            gbits = re.match(r"[0-9.]+", (port / "rate").read_text())
            ethernet = (port / "link_layer").read_text().strip() == "Ethernet"
        except OSError:
            continue
        if active and gbits:
            omni_path = port.parents[1].name.startswith("hfi1")
            found.append(("omni-path" if omni_path else "roce" if ethernet else "infiniband", float(gbits[0])))
    return found


def transports(interface: str | None, *, rdma: bool, environment: Mapping[str, str]) -> list[Transport]:
    """Those to try, the most promising first; what the user has set stays.

    Raises:
        InputError: what the user has set is nothing NCCL takes.
    """
    wanted = [Transport(True, interface)] if rdma else []
    wanted += [Transport(False, interface, threads, sockets) for threads, sockets in SOCKETS]
    found: list[Transport] = []
    for transport in wanted:
        changes: dict[str, Any] = {
            "interface": environment.get("NCCL_SOCKET_IFNAME") or transport.interface,
            "rdma": environment["NCCL_IB_DISABLE"] == "0" if environment.get("NCCL_IB_DISABLE") else transport.rdma,
        }
        for name, variable in (("socket_threads", "NCCL_SOCKET_NTHREADS"), ("sockets_per_thread", "NCCL_NSOCKS_PERTHREAD")):
            if text := environment.get(variable):
                if not text.isdecimal():
                    raise InputError(f"{variable} is {text!r}; it must be a whole number, such as 4")
                changes[name] = int(text)
        try:
            one = replace(transport, **changes)
        except InputError:
            continue  # what is set leaves no room for these
        if one not in found:
            found.append(one)
    if not found:
        said = " and ".join(f"{name} {environment[name]}" for name in SETTINGS[2:] if environment.get(name))
        raise InputError(f"{said} is nothing NCCL takes: 1 to 16 threads and at most 64 sockets in all, such as 4 x 4")
    return found


def common(values: Sequence[Any]) -> Any:
    """What all machines have alike; None where they differ, or there are none."""
    return values[0] if values and all(value == values[0] for value in values) else None
