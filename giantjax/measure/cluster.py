"""Measures the links of the machines that this job runs on, and writes a cluster file. No jax here: each trial is a process of its own."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from giantjax.agreement import refuse_differences, versions
from giantjax.cluster import this_machine
from giantjax.config import RuntimeConfig
from giantjax.errors import TrainingFault
from giantjax.launch import Job, find_job
from giantjax.measure.fit import COLLECTIVES, Fit, measurable, sent_bytes
from giantjax.measure.outcome import Surroundings, check_nodes, check_path, cluster_values, fits, write_cluster
from giantjax.measure.timing import Request
from giantjax.measure.transports import SETTINGS, common, interface_to, interfaces, line_rate, rdma_cards, transports
from giantjax.nccl import in_words, listen
from giantjax.network import Transport
from giantjax.parallel.nodes import Nodes, find_nodes, nodes_from, survey
from giantjax.peers import Peers

SECONDS = 60.0
"""For everything: once they are short no further transport is tried."""
TRIAL = Request((), (2**20, 2**22, 2**24), 3.0, 45)
"""Of one transport, by what training does with gradients."""
WHOLE_TIMEOUT = 120
"""Seconds after which the timing of everything is given up."""
SIZES = tuple(2**exponent for exponent in (14, 17, 20, 23, 26))
"""Up to the buckets in which gradients are summed."""
SIZES_SIMULATED = SIZES[:-1]


@dataclass
class Measurement:
    """What process 0 decides by: which transport comes next, and what came of the others."""

    path: Path
    job: Job
    where: Surroundings
    queue: list[Transport | None] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)
    trials: list[tuple[Transport | None, float]] = field(default_factory=list)
    """Each transport that worked, and the bytes/s that it took out of a node."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Of each transport, for the file."""
    now: Transport | None = None
    stage: str = "trial"
    began: float = 0.0
    longest: float = 0.0

    def decide(self, outcomes: list[Any]) -> dict[str, Any]:
        """What every process does next, after the outcomes of what it did last; None before the first.

        Raises:
            InputError: what was timed makes no cluster file.
        """
        if outcomes[0] is not None:
            self.longest = max(self.longest, time.monotonic() - self.began)
            wrong = next((f"process {i}: {one['error']}" for i, one in enumerate(outcomes) if "error" in one), None)
            if self.stage == "whole":
                if not wrong:
                    _finish(self, outcomes[0])
                return {"stage": "done", "fault": wrong}
            self._take(wrong, outcomes[0])
        self.began = time.monotonic()
        left = SECONDS - (self.began - self.begin) - 2.5 * self.longest
        if self.queue and len(self.queue) + len(self.told) > 1 and (left > 0 or not self.trials):
            self.now = self.queue.pop(0)
            last = measurable(self.where.per_node, self.where.num_nodes)[-1]
            return self._order("trial", dataclasses.replace(TRIAL, collectives=(last,)))
        if self.queue and self.told:
            say(f"no time for {len(self.queue)} more")
        if self.told and not self.trials:
            return {"stage": "done", "fault": f"no transport works; the last failed with {self.told[-1]['failed']}"}
        self.now = max(self.trials, key=lambda one: one[1])[0] if self.trials else self.queue[0]
        names = measurable(self.where.per_node, self.where.num_nodes)
        if self.trials:
            say(f"best: {_named(self.now)}")
        sizes = SIZES_SIMULATED if self.where.simulated else SIZES
        say(f"timing {len(names)} collectives of {sizes[0] / 2**10:g} KiB to {sizes[-1] / 2**20:g} MiB")
        return self._order("whole", Request(names, sizes, 24.0 / len(names), WHOLE_TIMEOUT))

    def _order(self, stage: str, request: Request) -> dict[str, Any]:
        self.stage = stage
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        host = "" if self.job.coordinator is None else self.job.coordinator.rpartition(":")[0]
        environment = self.now.environment() if self.now else {}
        address = f"{host}:{port}" if host else None
        return {"stage": stage, "request": dataclasses.asdict(request), "coordinator": address, "environment": environment}

    def _take(self, wrong: str | None, outcome: Mapping[str, Any]) -> None:
        """Note what came of a trial."""
        said, asked = {"settings": in_words(self.now.environment()) if self.now else ""}, self.now
        if not wrong and asked and asked.rdma and outcome["network"] == "Socket":
            wrong = "NCCL took sockets instead of RDMA"
        if wrong:
            say(f"  {_named(asked)}: {wrong}")
            self.told.append(said | {"failed": wrong})
            return
        ((name, points),) = outcome["times"].items()
        size, seconds = points[-1]
        rate = sent_bytes(name, size, self.where.per_node, self.where.num_nodes) * self.where.per_node / seconds
        say(f"  {_named(asked)}: {rate / 1e9:.3g} GB/s out of a node")
        self.trials.append((asked, rate))
        self.told.append(said | {"gbytes": float(f"{rate / 1e9:.4g}")})


def measure_cluster(path: Path, asked: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Time the links of this job's machines and write what was found to `path`, on process 0.

    Raises:
        InputError: the file cannot be written, there is no link, nodes are unequal, or processes differ.
        TrainingFault: no transport works, or a process is lost.
    """
    job = find_job(environment, coordinator=asked.coordinator, num_processes=asked.num_processes, process_id=asked.process_id)
    with Peers(job, asked.start_timeout) as peers:
        if job.process_id == 0:
            check_path(path)
        machine = this_machine(asked.num_cpu_devices)
        told = peers.settle(_here(job, peers, machine, environment), _survey)
        # From here on one waits for the others' trials.
        peers.seconds = max(peers.seconds, 2 * WHOLE_TIMEOUT)
        nodes = nodes_from(told["nodes"])
        counts = nodes.per_node
        where = Surroundings(
            len(counts),
            min(counts.values()),
            machine.simulated,
            tuple((fabric, gbits) for fabric, gbits in told["cards"]),
            told["gbits"],
        )
        measurement = Measurement(path, job, where)
        if job.process_id == 0:
            measurement.queue = _queue(job, where, nodes, told["interface"], environment)
        outcome: Any = None
        while (order := peers.settle(outcome, measurement.decide))["stage"] != "done":
            outcome = _run(order, asked, job, nodes, environment)
        if order["fault"]:
            raise TrainingFault(f"the links could not be measured: {order['fault']}")
    return 0


def _here(job: Job, peers: Peers, machine: Any, environment: Mapping[str, str]) -> dict[str, Any]:
    """What this process tells of itself."""
    interface = environment.get("NCCL_SOCKET_IFNAME")
    if interface is None and job.coordinator and job.process_id:
        interface = interface_to(job.coordinator.rpartition(":")[0].strip("[]"))
    settings = {name: environment.get(name) for name in SETTINGS}
    return {
        "same": versions() | {"the kind of device": machine.kind} | settings,
        "survey": survey(machine, job, peers.host),
        "interface": interface,
        "interfaces": interfaces(),
        "gbits": line_rate(interface),
        "cards": rdma_cards(),
    }


def _survey(told: list[Any]) -> dict[str, Any]:
    """Nodes, interface and cards out of what all processes told; decided by process 0."""
    refuse_differences([one["same"] for one in told], [one["survey"]["host"] for one in told])
    nodes = find_nodes([one["survey"] for one in told])
    check_nodes(nodes.per_node)
    # Whoever is on the machine of process 0 does not see the interface that leads there; the others do.
    interface = common([one["interface"] for one in told if one["interface"]])
    known = any(one["interface"] for one in told) and all(one["interface"] or interface in one["interfaces"] for one in told)
    return {
        "nodes": dataclasses.asdict(nodes),
        "interface": interface if known else None,
        "gbits": common([one["gbits"] for one in told if one["interface"]]) if known else None,
        "cards": common([one["cards"] for one in told]) or [],
    }


def _queue(job: Job, where: Surroundings, nodes: Nodes, interface: str | None, environment: Mapping[str, str]) -> list[Transport | None]:
    """Transports to try; None is what there is without NCCL."""
    say(f"measuring {nodes.in_words}" + (f" in {job.num_processes} processes" if job.num_processes > 1 else "") + ", about a minute")
    if where.num_nodes == 1:
        say("one node: nothing is measured between nodes")
        return [None]
    if where.simulated:
        say("CPU devices talk through gloo: NCCL's transport settings are not tried")
        return [None]
    queue = transports(interface, rdma=bool(where.cards), environment=environment)
    say(f"trying {len(queue)} transports, interface {interface or 'as NCCL chooses'}:")
    return list(queue)


def _run(order: Mapping[str, Any], asked: RuntimeConfig, job: Job, nodes: Nodes, environment: Mapping[str, str]) -> dict[str, Any]:
    """Time what is ordered in a new process; its result, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="giantjax-", ignore_cleanup_errors=True) as folder:
        inherited = dict(order["environment"]) | dict(environment)
        if job.process_id == 0:
            listen(Path(folder), inherited)
        told = {
            "request": order["request"],
            "nodes": dataclasses.asdict(nodes),
            "job": dataclasses.asdict(dataclasses.replace(job, coordinator=order["coordinator"])),
            "runtime": dataclasses.asdict(dataclasses.replace(asked, start_timeout=min(asked.start_timeout, order["request"]["timeout"]))),
        }
        result, timeout = Path(folder) / "result.json", order["request"]["timeout"] + 5
        child = subprocess.Popen(
            [sys.executable, "-m", "giantjax.measure.timing", str(result)],
            env=inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = child.communicate(json.dumps(told), timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout:g} s"}
        finally:
            child.kill()
            child.wait()
        with contextlib.suppress(OSError, ValueError):
            return json.loads(result.read_text())
    if child.returncode == -signal.SIGALRM:
        return {"error": f"not done after {order['request']['timeout']:g} s"}
    said = [line for line in errors.splitlines() if re.match(r"(\w+\.)*\w*(Error|Exception|stopped|error)\w*: ", line)]
    return {"error": said[-1][:300] if said else f"it ended with exit code {child.returncode}"}


def _finish(done: Measurement, result: Mapping[str, Any]) -> None:
    """Say what was found and write it."""
    path = done.path
    found = fits(result["times"], done.where)
    values = cluster_values(path.stem, result, found, done.now, done.where, done.told)
    for name, fit in found.items():
        say(f"  {COLLECTIVES[name]}: {_fit_in_words(fit, result['times'][name])}")
    if "hop_across" in found:
        say(f"  {_contention(found, done.where)}")
    if result["choice"] and done.where.num_nodes > 1:
        say(result["choice"])
    write_cluster(path, values)
    say(f"written in {time.monotonic() - done.begin:.0f} s: {path}; python scripts/plan.py --config NAME --cluster {path}")
    if done.where.num_nodes == 1:
        say(
            "it has one node and no link: for several, start this on every machine at once (--runtime.coordinator, or a launcher), "
            "or add a table [network] and set num_nodes"
        )


def _fit_in_words(fit: Fit, points: Any) -> str:
    size = points[-1][0]
    return (
        f"{fit.latency * 1e6:.3g} us + bytes / {fit.bandwidth / 1e9:.3g} GB/s a GPU; {len(points)} sizes up to {size / 2**20:.3g} MiB, "
        f"all within {100 * fit.deviation:.0f} %"
    )


def _contention(found: Mapping[str, Fit], where: Surroundings) -> str:
    alone, together = found["hop_across_one"].bandwidth, found["hop_across"].bandwidth
    return (
        f"of a node's {where.per_node} GPUs one alone sends {alone / 1e9:.3g} GB/s, all at once {together / 1e9:.3g} each, "
        f"{together * where.per_node / 1e9:.3g} in all"
    )


def _named(transport: Transport | None) -> str:
    return in_words(transport.environment()) if transport else "as it is"


def say(text: str) -> None:
    """Print at once, for this takes a while."""
    print(text, flush=True)
