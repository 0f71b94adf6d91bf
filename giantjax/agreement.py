"""What the processes of a job must have in common before any of them trains, and what they find out together. No jax."""

import dataclasses
import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import giantjax
from giantjax.cluster import Cluster, Machine
from giantjax.config import RunConfig
from giantjax.data.corpora import Source, fingerprint
from giantjax.errors import InputError
from giantjax.fields import leaves
from giantjax.parallel.nodes import Nodes, find_nodes, nodes_from, resolve, survey
from giantjax.parallel.schedule import schedule_of_name
from giantjax.parallel.schedule_file import read_schedule
from giantjax.peers import Peers, processes
from giantjax.planner.automatic import resolve_mesh

OWN = ("runtime.coordinator", "runtime.num_processes", "runtime.process_id", "runtime.start_timeout", "runtime.compilation_cache")
"""Fields in which processes may differ."""
PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint")
"""Whose versions decide what is computed or written."""


def settle_run(config: RunConfig, machine: Machine, peers: Peers, cluster: Cluster | None = None) -> tuple[RunConfig, Nodes, str | None]:
    """The configuration with the number of processes and every degree of the mesh, where the devices are, and what the planner chose.

    `cluster` is that of `runtime.cluster`.

    Raises:
        InputError: processes differ in their configurations, versions, clusters, schedule files or devices, or the mesh does not fit
            the devices, or the schedule the mesh.
    """

    def decide(told: list[Any]) -> Any:
        refuse_differences([one["same"] for one in told], [one["survey"]["host"] for one in told])
        return dataclasses.asdict(find_nodes([one["survey"] for one in told]))

    same = {path: value for path, value in leaves(config).items() if path not in OWN} | versions() | {"the kind of device": machine.kind}
    if cluster:
        same["the content of runtime.cluster"] = _digest(repr(cluster).encode())
    if config.pipeline.schedule.endswith(".csv"):
        read_schedule(config.pipeline.schedule)
        same["the content of pipeline.schedule"] = _digest(Path(config.pipeline.schedule).read_bytes())
    nodes = nodes_from(peers.settle({"same": same, "survey": survey(machine, peers.job, peers.host)}, decide))
    job = dataclasses.replace(config.runtime, num_processes=peers.job.num_processes)
    planned, choice = resolve_mesh(dataclasses.replace(config, runtime=job), machine, nodes, cluster)
    config = resolve(planned, nodes)
    if config.pipeline.schedule.endswith(".csv"):
        schedule_of_name(config.pipeline.schedule, config.mesh.pipe, config.num_microbatches, config.pipeline.num_chunks)
    return config, nodes, choice


def settle_data(sources: Mapping[str, Source | None], peers: Peers) -> None:
    """Make sure that all processes have the same corpora, given by their fields.

    Raises:
        InputError: some do not.
    """
    if peers.job.num_processes > 1:
        contents = {f"the content of {field}": source and fingerprint(source) for field, source in sources.items()}
        peers.settle([contents, peers.host], lambda told: refuse_differences(*zip(*told, strict=True)))


def refuse_differences(told: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> None:
    """Raise InputError where processes tell different things; of up to three of them with each value and who has it."""
    fields = [
        field
        for field in dict.fromkeys(field for one in told for field in one)
        if any(one.get(field) != told[0].get(field) for one in told)
    ]
    if not fields:
        return
    sentences = []
    for field in fields[:3]:
        values: dict[str, list[int]] = {}
        for process, one in enumerate(told):
            values.setdefault(_in_words(one.get(field)), []).append(process)
        sentences.append(f"{field} is " + " and ".join(f"{value} on {_who(which, hosts)}" for value, which in values.items()))
    more = f", and {len(fields) - 3} more" if len(fields) > 3 else ""
    raise InputError(f"the processes of this job differ: {', '.join(sentences)}{more}; start them all alike")


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what is computed."""
    found = {"the version of Python": platform.python_version(), "the version of giantjax": giantjax.__version__}
    for package in PACKAGES:
        try:
            found[f"the version of {package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _in_words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else "not there" if value is None else str(value)


def _who(which: Sequence[int], hosts: Sequence[str]) -> str:
    names = list(dict.fromkeys(hosts[process] for process in which))
    return f"{processes(which)} ({names[0]}{', ...' * (len(names) > 1)})"
