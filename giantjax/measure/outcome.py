"""From times to a cluster file."""

import datetime
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from giantjax.cluster import MOST_GPUS_PER_NODE, MOST_NODES, gpu_of_kind
from giantjax.cluster_file import BETWEEN, read_cluster
from giantjax.errors import InputError
from giantjax.measure.fit import COLLECTIVES, Fit, fit_link, sent_bytes
from giantjax.network import Transport
from giantjax.planner.automatic import STAND_IN


@dataclass(frozen=True)
class Surroundings:
    """What is known of the machines beside times."""

    num_nodes: int
    per_node: int
    simulated: bool
    cards: tuple[tuple[str, float], ...] = ()
    """Fabric and Gb/s of each RDMA card of a node."""
    interface_gbits: float | None = None
    """Of the interface that carries sockets; None where its driver does not tell."""


def fits(times: Mapping[str, Sequence[tuple[int, float]]], where: Surroundings) -> dict[str, Fit]:
    """Of each collective.

    Raises:
        InputError: the times of one do not make a line.
    """
    found = {}
    for name, points in times.items():
        try:
            found[name] = fit_link([(sent_bytes(name, size, where.per_node, where.num_nodes), seconds) for size, seconds in points])
        except InputError as error:
            raise InputError(f"{COLLECTIVES[name]}: {error}") from error
    return found


def link_values(found: Mapping[str, Fit], transport: Transport | None, where: Surroundings) -> dict[str, Any]:
    """The table [network]: line rates as the drivers tell, the share that all GPUs of a node reached in an all-reduce, a hop's latency.

    Where no driver tells, or what was reached is more, what was reached is the line rate, in as many cards as GPUs that do not
    slow each other down.
    """
    reached = found["all_reduce_across"].bandwidth * where.per_node
    rdma = transport is not None and transport.rdma and bool(where.cards)
    if rdma:
        fabric, gbits, cards = where.cards[0][0], where.cards[0][1], len(where.cards)
    else:
        fabric, gbits, cards = "tcp", where.interface_gbits or 0.0, 1
    line = gbits * 1e9 / 8 * cards
    if line < reached:
        alone = found["hop_across_one"].bandwidth
        cards = max(1, min(where.per_node, round(found["hop_across"].bandwidth * where.per_node / alone)))
        line, gbits = reached, reached / cards * 8 / 1e9
    return {
        "fabric": fabric,
        "nic_gbits": _rounded(gbits),
        "nics_per_node": cards,
        "achieved": min(1.0, _rounded(reached / line)),
        "latency_us": _rounded(found["hop_across_one"].latency * 1e6),
    }


def check_path(path: Path) -> None:
    """Raise InputError unless a cluster file can be written to `path`."""
    if path.suffix != ".toml":
        raise InputError(f"--measure {path} must end in .toml, such as {path.with_suffix('.toml')}")
    if path.is_dir():
        raise InputError(f"--measure {path} is a folder; name a file in it, such as {path / 'cluster.toml'}")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(f"--measure {path} cannot be written: {error.strerror}; name a file in a folder that can") from error


def check_nodes(counts: Mapping[str, int]) -> None:
    """Raise InputError where a cluster file could not describe these nodes, or they have no link."""
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{count} on {node}" for node, count in counts.items())
        raise InputError(f"a cluster has equal nodes, but there are {each} GPUs; start every machine with {min(counts.values())}")
    number, per_node = len(counts), next(iter(counts.values()))
    if number > MOST_NODES or per_node > MOST_GPUS_PER_NODE:
        raise InputError(
            f"{number} nodes of {per_node} devices are more than the {MOST_NODES} nodes of {MOST_GPUS_PER_NODE} that a cluster may have; "
            "measure a part of them"
        )
    if number * per_node == 1:
        raise InputError(
            "one device has no link to measure; start a process on every machine (--runtime.coordinator, or a launcher), "
            "or add --runtime.num-cpu-devices 2 to try it on a CPU"
        )


def cluster_values(
    name: str, result: Mapping[str, Any], found: Mapping[str, Fit], transport: Transport | None, where: Surroundings, trials: Sequence[Any]
) -> dict[str, Any]:
    """What the cluster file holds."""
    gpu = gpu_of_kind(result["kind"])
    values: dict[str, Any] = {
        "name": name,
        "gpu": gpu.name if gpu else STAND_IN,
        "num_nodes": where.num_nodes,
        "gpus_per_node": where.per_node,
    }
    if "all_reduce_inside" in found:
        values["inside"] = {"bandwidth_gbytes": _rounded(found["all_reduce_inside"].bandwidth / 1e9)}
    if where.num_nodes > 1:
        values["network"] = link_values(found, transport, where)
        if transport:
            fields = ("interface", "rdma", "socket_threads", "sockets_per_thread")
            values["transport"] = {field: getattr(transport, field) for field in fields if getattr(transport, field) is not None}
    links = {key: {"gbytes": _rounded(fit.bandwidth / 1e9), "latency_us": _rounded(fit.latency * 1e6)} for key, fit in found.items()}
    values["measured"] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "devices": f"{where.num_nodes * where.per_node} x {result['kind']}" + (f", planned as {STAND_IN}" if gpu is None else ""),
        "trials": list(trials),
        "versions": result["versions"],
        "links": {(BETWEEN if key == "all_reduce_across" else key): value for key, value in links.items()},
    }
    return values


def write_cluster(path: Path, values: Mapping[str, Any]) -> None:
    """Write a cluster file aside, read it back and rename it, so that a kill leaves the old file or the new one.

    Raises:
        InputError: it cannot be written.
    """
    aside = path.with_name(f"{path.stem}.{os.getpid()}.part.toml")
    try:
        aside.write_text(f"# Measured by plan.py --measure.\n{_toml(values)}", encoding="utf-8")
        read_cluster(aside)
        os.replace(aside, path)
    except OSError as error:
        raise InputError(f"--measure {path} cannot be written: {error.strerror}; name a file in a folder that can") from error
    finally:
        aside.unlink(missing_ok=True)


def _toml(values: Mapping[str, Any], prefix: str = "") -> str:
    lines = [f"{_key(key)} = {_inline(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    text = "\n".join(lines) + "\n" if lines else ""
    for key, value in values.items():
        if isinstance(value, Mapping):
            heading = "" if value and all(isinstance(one, Mapping) for one in value.values()) else f"\n[{prefix}{_key(key)}]\n"
            text += heading + _toml(value, f"{prefix}{_key(key)}.")
    return text


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + "".join(f"\n    {_inline(one)}," for one in value) + ("\n]" if value else "]")
    return json.dumps(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")
