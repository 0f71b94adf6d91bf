"""Train a GPT: python scripts/pretrain.py --config NAME [--section.field VALUE ...]."""

import signal
import sys

from giantjax import command_line, runtime
from giantjax.cluster import this_machine
from giantjax.planner.automatic import resolve_mesh
from giantjax.planner.fit import check_fits


def main() -> int:
    """Check everything that can be checked without a device, then train."""
    # Python's own handler would wait until a compilation is over.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    config = command_line.parse_run(sys.argv[1:], "Train a GPT, or go on training where its run directory stands.")
    machine = this_machine(config.runtime.num_cpu_devices)
    config, choice = resolve_mesh(config, machine)
    check_fits(config, machine, map(command_line.preset, command_line.preset_names()))

    from giantjax.data.sources import open_sources
    from giantjax.training.run_directory import check_run_directory

    run = check_run_directory(config)
    train_data, validation_data = open_sources(config)
    if choice:
        print(choice)
    runtime.start(config.runtime)

    from giantjax.training.loop import train

    return train(config, run, train_data, validation_data)


if __name__ == "__main__":
    command_line.run_main(main)
