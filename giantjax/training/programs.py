"""The train step, compiled once for each sequence length."""

import time
from collections.abc import Callable
from typing import Any

import jax

from giantjax.parallel.stages import Batch


class Programs:
    """The step for each length of batches, of which only the warm-up has more than one."""

    def __init__(self, step: jax.stages.Wrapped, full_length: int, say: Callable[[str], None]):
        self._step, self._full_length, self._say = step, full_length, say
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def lack(self, batch: Batch) -> bool:
        """Whether no batch as long as this one came before."""
        return batch["tokens"].shape[1] not in self._compiled

    def compile(self, state: Any, batch: Batch) -> None:
        """Make the program for batches as long as this one."""
        length = batch["tokens"].shape[1]
        self._say("compiling" + (f" for the first {length} tokens of each sample" if length < self._full_length else ""))
        begin = time.perf_counter()
        self._compiled[length] = self._step.lower(state, batch).compile()
        self._say(f"compiled in {time.perf_counter() - begin:.1f} s")

    def of(self, batch: Batch) -> jax.stages.Compiled:
        """The program for this batch."""
        return self._compiled[batch["tokens"].shape[1]]
