"""Sample from the latest checkpoint of a run: python scripts/generate.py --run DIR --prompt TEXT."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from giantjax import command_line, runtime
from giantjax.config import RunConfig, RuntimeConfig
from giantjax.errors import InputError


@dataclass(frozen=True)
class Arguments:
    """Sample from the latest checkpoint of a run."""

    run: str
    """Directory of the run."""
    prompt: str = "\n"
    """Text to go on from."""
    max_tokens: int = 400
    """Tokens to add at most; an end-of-document token ends earlier."""
    temperature: float = 0.8
    """Randomness: 0 always takes the likeliest token."""
    seed: int = 0
    """Seed of the samples."""
    mesh: Literal["one", "run"] = "one"
    """Devices: one, or those the run was trained on."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature is {self.temperature}; it must be a number of at least 0")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed is {self.seed}; it must be from 0 to 4294967295")
        if not self.run:
            raise InputError("--run is empty; name the directory of a run")
        if not self.prompt:
            raise InputError("--prompt is empty; give at least one character to go on from")


def main() -> int:
    """Print the prompt and what follows it."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    from giantjax.training.run_directory import RunDirectory, read_record, tokenizer_of

    run = RunDirectory(Path(arguments.run))
    config = read_record(run, run.config, RunConfig)
    runtime_config, mesh = (whole(config), config.mesh) if arguments.mesh == "run" else (RuntimeConfig(), None)
    tokenizer = tokenizer_of(run)
    runtime.start(runtime_config)

    from giantjax.generate import generate
    from giantjax.training.restore import load_trained

    trained = load_trained(run, mesh)
    prompt = tokenizer.encode(arguments.prompt)
    found = [int(token) for token in prompt]
    for token in generate(trained, prompt, temperature=arguments.temperature, seed=arguments.seed):
        if token == tokenizer.end_of_document or len(found) - len(prompt) == arguments.max_tokens:
            break
        found.append(token)
    print(tokenizer.decode(found))
    return 0


def whole(config: RunConfig) -> RuntimeConfig:
    """The runtime of a run for one process, which simulates the devices of all."""
    simulated = config.runtime.num_cpu_devices and config.mesh.num_devices
    return replace(config.runtime, num_cpu_devices=simulated)


if __name__ == "__main__":
    command_line.run_main(main)
