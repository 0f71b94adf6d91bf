"""The measurements that the documentation quotes: python scripts/benchmark.py NAME [--help]."""

import sys
from collections.abc import Callable
from typing import Any

from giantjax import command_line
from giantjax.benchmarks.comparison import Published, published
from giantjax.benchmarks.compression import Compressed, compression
from giantjax.benchmarks.data import Data, data
from giantjax.benchmarks.learning import Learning, learning
from giantjax.benchmarks.memory import Estimates, estimates
from giantjax.benchmarks.pipeline import Pipeline, pipeline
from giantjax.benchmarks.planner import Planner, planner
from giantjax.benchmarks.step import Step, step
from giantjax.errors import InputError, did_you_mean

BENCHMARKS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "compression": (Compressed, compression),
    "data": (Data, data),
    "learning": (Learning, learning),
    "memory": (Estimates, estimates),
    "pipeline": (Pipeline, pipeline),
    "planner": (Planner, planner),
    "published": (Published, published),
    "step": (Step, step),
}


def main() -> int:
    """Run the named benchmark with the arguments that follow its name."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(__doc__)
        for each, (kind, _) in BENCHMARKS.items():
            print(f"  {each:11} {kind.__doc__}")
        return 0
    if name not in BENCHMARKS:
        raise InputError(f"there is no benchmark {name}{did_you_mean(name, BENCHMARKS)} (there are {', '.join(BENCHMARKS)})")
    kind, run = BENCHMARKS[name]
    return run(command_line.parse(kind, arguments))


if __name__ == "__main__":
    command_line.run_main(main)
