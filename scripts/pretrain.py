"""Train a GPT: python scripts/pretrain.py --config NAME [--section.field VALUE ...]."""

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path

from giantjax import command_line, runtime
from giantjax.agreement import settle_data, settle_run
from giantjax.cluster import cluster_of_field, this_machine
from giantjax.launch import find_job
from giantjax.nccl import export_transport, listen
from giantjax.peers import Peers
from giantjax.planner.fit import check_fits


def main() -> int:
    """Check everything that can be checked without a device, then train."""
    # Python's own handler would wait until a compilation is over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = command_line.parse_run(sys.argv[1:], "Train a GPT, or go on training where its run directory stands.")
    asked = config.runtime
    job = find_job(os.environ, coordinator=asked.coordinator, num_processes=asked.num_processes, process_id=asked.process_id)
    with Peers(job, config.runtime.start_timeout) as peers:
        machine = this_machine(config.runtime.num_cpu_devices)
        cluster = cluster_of_field("runtime.cluster", config.runtime.cluster) if config.runtime.cluster else None
        config, nodes, choice = settle_run(config, machine, peers, cluster)
        check_fits(config, machine, map(command_line.preset, command_line.preset_names()))

        from giantjax.data.sources import open_sources
        from giantjax.training.run_directory import check_run_directories

        run = check_run_directories(config, peers)
        train_data, validation_data = open_sources(config)
        settle_data({"data.train": train_data, "data.validation": validation_data}, peers)
    if job.process_id == 0:
        if job.num_processes > 1:
            print(f"{job.num_processes} processes with {nodes.in_words}, which met at {job.coordinator} ({job.source})", flush=True)
        if choice:
            print(choice, flush=True)
    if cluster and cluster.has_link:
        said = export_transport(cluster.network.transport, os.environ)
        if job.process_id == 0:
            print(f"transport of {config.runtime.cluster}: {said}", flush=True)
    with contextlib.ExitStack() as opened:
        log = None
        if job.process_id == 0 and not machine.simulated and sum(nodes.per_node.values()) > 1:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="giantjax-", ignore_cleanup_errors=True))
            log = listen(Path(folder), os.environ)
        runtime.start(config.runtime, job, nodes.places[job.process_id].visible)

        from giantjax.training.loop import train

        return train(config, run, train_data, validation_data, nodes, log)


if __name__ == "__main__":
    command_line.run_main(main)
