"""A user's own cluster from a TOML or JSON file.

name = "lab"
gpu = "A100-40GB"        # a name of giantjax.cluster.GPUS
num_nodes = 4
gpus_per_node = 8

[inside]                 # optional
bandwidth_gbytes = 170   # GB/s of each GPU in an all-reduce over its node

[network]
fabric = "tcp"           # tcp, infiniband, roce or omni-path
nic_gbits = 100          # line rate of one card
nics_per_node = 1
achieved = 0.4           # optional: share of the line rate that a large collective reaches
latency_us = 50          # optional

[transport]              # optional, how NCCL reaches other nodes
interface = "eth0"
rdma = false
socket_threads = 4
sockets_per_thread = 4

[measured]               # written by plan.py --measure; with a link between_nodes, achieved and latency_us hold as they are
date = "2026-12-01"
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from giantjax.cluster import MOST_GPUS_PER_NODE, MOST_NODES, Cluster, gpu_of_name
from giantjax.errors import InputError, did_you_mean
from giantjax.network import Fabric, NetworkLink, Transport, network

FIELDS = {"name": str, "gpu": str, "num_nodes": int, "gpus_per_node": int} | dict.fromkeys(
    ("inside", "network", "transport", "measured"), dict
)
INSIDE = {"bandwidth_gbytes": float}
NETWORK = {"fabric": str, "nic_gbits": float, "nics_per_node": int, "achieved": float, "latency_us": float}
TRANSPORT = {"interface": str, "rdma": bool, "socket_threads": int, "sockets_per_thread": int}
MEASURED = {"date": str, "devices": str, "versions": dict, "links": dict, "trials": list}
"""Kept for the reader, but for whether links holds BETWEEN."""
BETWEEN = "between_nodes"
WORDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "a table", list: "a list"}


def read_cluster(path: Path) -> Cluster:
    """The cluster that a file describes.

    Raises:
        InputError: the file cannot be read, or a field is missing, unknown or wrong; the sentence names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise InputError(f"cluster file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"cluster file {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    try:
        return _cluster(values, path)
    except InputError as error:
        raise InputError(f"cluster file {path}: {error}") from error


def _cluster(values: Any, path: Path) -> Cluster:
    if not isinstance(values, dict):
        raise InputError(f"it holds {values!r:.40}, not a table with the fields {', '.join(FIELDS)}")
    _check(values, FIELDS, "", required=("gpu", "num_nodes", "gpus_per_node"))
    nodes, per_node = values["num_nodes"], values["gpus_per_node"]
    for name, value, most in (("num_nodes", nodes, MOST_NODES), ("gpus_per_node", per_node, MOST_GPUS_PER_NODE)):
        if not 1 <= value <= most:
            raise InputError(f"{name} is {value}; it must be from 1 to {most}")
    if nodes > 1 and "network" not in values:
        raise InputError(
            f"num_nodes is {nodes}, but the link between them is missing; add a table [network] with fabric, nic_gbits and nics_per_node"
        )
    link = _network(values.get("network"), values.get("transport", {}))
    _check(values.get("measured", {}), MEASURED, "measured.", required=())
    link = replace(link, measured=BETWEEN in values.get("measured", {}).get("links", {}))
    name, gpu = values.get("name", path.stem), gpu_of_name(values["gpu"])
    return Cluster(name, gpu, nodes, per_node, link, inside_bandwidth=_inside(values.get("inside")), has_link="network" in values)


def _inside(values: dict[str, Any] | None) -> float | None:
    if values is None:
        return None
    _check(values, INSIDE, "inside.", required=("bandwidth_gbytes",))
    bandwidth = values["bandwidth_gbytes"]
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise InputError(f"inside.bandwidth_gbytes is {bandwidth:g}; it must be above 0, such as 170")
    return bandwidth * 1e9


def _network(values: dict[str, Any] | None, transport: dict[str, Any]) -> NetworkLink:
    if values is None:
        return network("infiniband", 100)
    _check(values, NETWORK, "network.", required=("fabric", "nic_gbits", "nics_per_node"))
    _check(transport, TRANSPORT, "transport.", required=())
    kinds = get_args(Fabric)
    if values["fabric"] not in kinds:
        raise InputError(f"network.fabric is {values['fabric']!r}; it must be {', '.join(kinds)}{did_you_mean(values['fabric'], kinds)}")
    link = network(values["fabric"], values["nic_gbits"], values["nics_per_node"], values.get("achieved"))
    if "latency_us" in values:
        link = replace(link, latency=values["latency_us"] / 1e6)
    settings = {"rdma": link.transport.rdma, "socket_threads": link.transport.socket_threads} | {
        "sockets_per_thread": link.transport.sockets_per_thread
    }
    return replace(link, transport=Transport(**(settings | transport)))


def _check(values: Mapping[str, Any], known: Mapping[str, type], prefix: str, required: tuple[str, ...]) -> None:
    for name, value in values.items():
        if name not in known:
            raise InputError(f"there is no field {prefix}{name}{did_you_mean(name, known)}")
        kind = known[name]
        fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
        if not fits:
            raise InputError(f"{prefix}{name} is {value!r}; it must be {WORDS[kind]}")
    for name in required:
        if name not in values:
            raise InputError(f"the field {prefix}{name} is missing")
