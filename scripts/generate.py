"""Sample from the latest checkpoint of a run: python scripts/generate.py --run DIR --prompt TEXT."""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np

from giantjax import command_line, runtime
from giantjax.config import RunConfig, RuntimeConfig
from giantjax.continuation import Continuation
from giantjax.errors import InputError
from giantjax.json_lines import check_new_file, read_prompts


@dataclass(frozen=True)
class Arguments:
    """Sample from the latest checkpoint of a run."""

    run: str
    """Directory of the run."""
    prompt: str = "\n"
    """Text to go on from; what follows it is printed as it comes."""
    prompts: str | None = None
    """In the place of --prompt a file of them, a JSON string or a plain line each. For each a JSON object is written, a line long."""
    output: str | None = None
    """New file for those lines; None prints them."""
    batch_size: int = 16
    """Prompts of the file that are gone on from at the same time."""
    max_tokens: int = 400
    """Tokens to add at most; an end-of-document token ends earlier."""
    stop: tuple[str, ...] = ()
    """Strings before which the text ends."""
    temperature: float = 0.8
    """Randomness: 0 always takes the likeliest token."""
    top_k: int | None = None
    """Choose among so many likeliest tokens; None among all."""
    top_p: float = 1.0
    """Choose among the fewest likeliest tokens whose probabilities sum to this."""
    repetition_penalty: float = 1.0
    """Logits of tokens that the text has are divided by this, negative ones multiplied (CTRL); 1 does nothing, 1.2 is usual."""
    seed: int = 0
    """Seed of the samples: a prompt has the same text beside any others, and another one with another seed."""
    mesh: Literal["one", "run"] = "one"
    """Devices: one, or those the run was trained on."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature is {self.temperature}; it must be a number of at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k is {self.top_k}; it must be at least 1, or None to choose among all")
        if not 0 < self.top_p <= 1:
            raise InputError(f"--top-p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"--repetition-penalty is {self.repetition_penalty}; it must be a number above 0")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed is {self.seed}; it must be from 0 to 4294967295")
        if not self.run:
            raise InputError("--run is empty; name the directory of a run")
        if not self.prompt:
            raise InputError("--prompt is empty; give at least one character to go on from")
        if "" in self.stop:
            raise InputError("--stop has an empty string, before which every text would end; leave it out")
        if self.prompts is not None and self.prompt != Arguments.prompt:
            raise InputError("--prompt and --prompts are both given; put all prompts into the file")


def main() -> int:
    """Print the prompt and what follows it, or write what follows each of many."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    from giantjax.training.run_directory import RunDirectory, read_record, tokenizer_of

    run = RunDirectory(Path(arguments.run))
    config = read_record(run, run.config, RunConfig)
    runtime_config, mesh = (runtime.alone(config), config.mesh) if arguments.mesh == "run" else (RuntimeConfig(), None)
    tokenizer = tokenizer_of(run)
    prompts = [arguments.prompt] if arguments.prompts is None else read_prompts("--prompts", arguments.prompts)
    if arguments.output is not None:
        check_new_file("--output", arguments.output)
    # A text of which nothing becomes a token is the begin of a document.
    encoded = [tokenizer.encode(prompt).tolist() or [tokenizer.end_of_document] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if len(ids) > (length := config.model.sequence_length):
            print(f"note: of the {len(ids)} tokens of the prompt {prompt[:20]!r}... the model sees the last {length}", file=sys.stderr)
    runtime.start(runtime_config)

    from giantjax.decode import build_decoder
    from giantjax.generate import generate
    from giantjax.sampling import Sampling
    from giantjax.training.restore import load_trained

    decoder = build_decoder(load_trained(run, mesh))
    sampling = Sampling(arguments.repetition_penalty, arguments.temperature, arguments.top_k, arguments.top_p)
    new = lambda ids: Continuation(tokenizer, ids, arguments.max_tokens, arguments.stop)  # noqa: E731
    if arguments.prompts is None and arguments.output is None:
        stream(generate(decoder, encoded, sampling, arguments.seed), new(encoded[0]))
        return 0
    with contextlib.ExitStack() as opened:
        file = sys.stdout if arguments.output is None else opened.enter_context(open(arguments.output, "x", encoding="utf-8"))
        for first in range(0, len(prompts), arguments.batch_size):
            some = slice(first, first + arguments.batch_size)
            tokens = generate(decoder, encoded[some], sampling, arguments.seed)
            write(tokens, prompts[some], [new(ids) for ids in encoded[some]], file)
    return 0


def stream(tokens: Iterator[np.ndarray], text: Continuation) -> None:
    """Print a prompt and what follows it as it becomes certain."""
    print(text.prompt_text, end="", flush=True)
    for [token] in tokens:
        print(text.add(int(token)), end="", flush=True)
        if text.ended_by:
            break
    print()


def write(tokens: Iterator[np.ndarray], prompts: Sequence[str], texts: list[Continuation], file: TextIO) -> None:
    """Go on from some prompts at the same time, and write a line for each when all have ended."""
    for latest in tokens:
        for text, token in zip(texts, latest, strict=True):
            if text.ended_by is None:
                text.add(int(token))
        if all(text.ended_by for text in texts):
            break
    for prompt, text in zip(prompts, texts, strict=True):
        line = {"prompt": prompt, "text": text.text, "num_tokens": text.num_tokens, "ended_by": text.ended_by}
        print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    command_line.run_main(main)
