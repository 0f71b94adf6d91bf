"""What rounding gradients between nodes costs, and what feeding the errors back is for.

Two measurements: losses after training, of several seeds, each with the same initial weights and samples for every rounding, so
that their differences are compared; and, without chance, how far the sums of all gradients drift from exact ones along one run.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.progress import track
from rich.table import Table

from giantjax import command_line, runtime
from giantjax.config import MeshConfig, RunConfig, RuntimeConfig
from giantjax.errors import InputError

if TYPE_CHECKING:
    from giantjax.benchmarks.rounding import Rounding

LAST = 50
"""Steps at the end whose losses are averaged."""
MARKS = (1, 10, 50, 100, 200)
"""Steps after which the drift is measured."""
FEW_LEVELS = 7
"""On each side of zero, in place of int8's 127: four bits, which feedback has more to do for."""


@dataclass(frozen=True)
class Compressed:
    """Train with gradients rounded between nodes, with and without feedback of the errors, and compare."""

    steps: int = 500
    """Of each run."""
    seeds: int = 8
    """Runs of each rounding."""
    replicas: int = 2
    """Nodes, simulated as one device each."""
    learning_rate: float = 1e-3
    """Peak. At three times this rate chance alone moves a run's loss by 0.5 %, which would hide what is measured."""

    def __post_init__(self) -> None:
        for name, least in (("steps", LAST), ("seeds", 2), ("replicas", 2)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} is {getattr(self, name)}; it must be at least {least}")


def compression(arguments: Compressed) -> int:
    """Print the tables."""
    runtime.start(RuntimeConfig(num_cpu_devices=arguments.replicas))
    from giantjax.benchmarks.rounding import EXACT, Rounding, drift, trainers

    roundings = [EXACT, *(Rounding(kind, fed) for kind in ("bf16", "int8") for fed in (True, False))]
    roundings += [Rounding("int8", fed, FEW_LEVELS) for fed in (True, False)]
    config, console = small_run(arguments), Console(highlight=False, width=140)
    found = trainers(config, roundings)
    runs = [(rounding, seed) for seed in range(arguments.seeds) for rounding in roundings]
    losses: dict[Rounding, list[tuple[float, float]]] = {rounding: [] for rounding in roundings}
    for rounding, seed in track(runs, "training", console=Console(stderr=True), transient=True):
        each, validation = found[rounding].losses(seed)
        losses[rounding].append((float(np.mean(each[-LAST:])), validation))
    console.print(loss_table({rounding: np.array(pairs) for rounding, pairs in losses.items()}))
    console.print(
        f"{arguments.steps} steps of AdamW on {arguments.replicas} replicas, {arguments.seeds} seeds: means, and differences of runs of "
        f"the same seed with their standard error\ntraining loss over the last {LAST} steps; validation loss on the same "
        f"{config.training.eval_samples} held-out samples; without feedback is set against with\n"
    )
    console.print(drift_table(drift(found, MARKS)))
    console.print(
        "how far the sum of all gradients is from the exact sum, in units of one gradient, along one run that is trained with exact ones;\n"
        "for none, the size of the exact sum"
    )
    return 0


def small_run(arguments: Compressed) -> RunConfig:
    """gpt_tiny, smaller, so that many runs take minutes."""
    base = command_line.preset("gpt_tiny")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, num_layers=2, hidden_size=64, sequence_length=32),
        training=dataclasses.replace(base.training, num_steps=arguments.steps, precision="fp32"),
        # Without clipping, so that what the optimizer is given is what was summed.
        optimizer=dataclasses.replace(base.optimizer, learning_rate=arguments.learning_rate, clip_norm=None),
        mesh=MeshConfig(replica=arguments.replicas),
    )


def loss_table(losses: "Mapping[Rounding, Float[np.ndarray, 'seeds 2']]") -> Table:
    """Of training and validation losses by rounding, the exact ones first."""
    columns = [f"{kind} loss" for kind in ("training", "validation")]
    table = Table("rounding", "fed back", *(name for column in columns for name in (column, "to exact", "to fed back")), box=None)
    exact = next(iter(losses.values()))
    for rounding, pairs in losses.items():
        cells = [*_words(rounding)]
        for which in (0, 1):
            fed = losses[rounding._replace(feedback=True)][:, which]
            cells.append(f"{pairs[:, which].mean():.4f}")
            cells.append("" if pairs is exact else paired(pairs[:, which], exact[:, which]))
            cells.append("" if rounding.feedback else paired(pairs[:, which], fed))
        table.add_row(*cells)
    return table


def drift_table(drifts: "Mapping[Rounding, Sequence[float]]") -> Table:
    """Of drifts at the steps `MARKS` by rounding, each with feedback next to without."""
    table = Table("rounding", "fed back", *(f"step {mark}" for mark in MARKS), "without / with", box=None)
    for rounding, listed in drifts.items():
        ratio = "" if rounding.feedback else f"{listed[-1] / drifts[rounding._replace(feedback=True)][-1]:.0f} x"
        table.add_row(*_words(rounding), *(f"{100 * drift:.2f} %" for drift in listed), ratio)
    return table


def paired(values: Float[np.ndarray, "seeds"], others: Float[np.ndarray, "seeds"]) -> str:
    """The mean of `values` relative to the `others` of the same seeds, with its standard error: `+0.144 ± 0.041 %`."""
    ratios = 100 * (values / others - 1)
    return f"{ratios.mean():+.3f} ± {ratios.std(ddof=1) / np.sqrt(len(ratios)):.3f} %"


def _words(rounding: "Rounding") -> tuple[str, str]:
    kind = f"int8, ±{rounding.levels} only" if rounding.levels == FEW_LEVELS else rounding.compression
    return kind, "" if rounding.compression == "none" else "yes" if rounding.feedback else "no"
