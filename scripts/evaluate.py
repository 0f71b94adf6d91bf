"""How good the latest checkpoint of a run is: python scripts/evaluate.py --run DIR --data PREFIX."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from giantjax import command_line, runtime
from giantjax.config import RunConfig, RuntimeConfig
from giantjax.data.indexed import IndexedDataset, TokenizerRecord
from giantjax.data.sources import open_source
from giantjax.errors import InputError
from giantjax.json_lines import check_writable
from giantjax.tasks import encode_task, read_task

if TYPE_CHECKING:
    from giantjax.training.run_directory import RunDirectory


@dataclass(frozen=True)
class Arguments:
    """Say how good the latest checkpoint of a run is on a corpus, and at questions."""

    run: str
    """Directory of the run."""
    data: str | None = None
    """Corpus, the PREFIX of prepare_data.py or stdlib: loss, perplexity, bits a byte and next-token accuracy over every token."""
    tasks: tuple[str, ...] = ()
    """Files of JSON lines in the form of lm-evaluation-harness: {"text": ...}, whose last word is asked for, or {"query": ...,
    "choices": [...], "gold": NUMBER}."""
    batch_size: int = 16
    """Samples at a time."""
    json: str | None = None
    """File to write all of it to."""
    mesh: Literal["one", "run"] = "one"
    """Devices: one, or those the run was trained on."""

    def __post_init__(self) -> None:
        if not self.run:
            raise InputError("--run is empty; name the directory of a run")
        if not (self.data or self.tasks):
            raise InputError("--data PREFIX and --tasks FILE are missing; name a corpus or questions to evaluate on")
        if self.data == "synthetic":
            raise InputError("--data is synthetic, random tokens of which nothing could be learned; name the PREFIX of a corpus")
        if self.batch_size < 1:
            raise InputError(f"--batch-size is {self.batch_size}; it must be at least 1")


def main() -> int:
    """Check all that can be checked first, then compute."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    from giantjax.training.run_directory import RunDirectory, read_record, tokenizer_of

    run = RunDirectory(Path(arguments.run))
    config = read_record(run, run.config, RunConfig)
    tokenizer = tokenizer_of(run) if arguments.tasks or run.tokenizer.exists() else None
    corpus = open_corpus(arguments.data, config, run) if arguments.data else None
    tasks = [read_task("--tasks", path) for path in arguments.tasks]
    rows = [encode_task(task, tokenizer, config.model.sequence_length) for task in tasks if tokenizer]
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    runtime.start(runtime.alone(config) if arguments.mesh == "run" else RuntimeConfig())

    from giantjax.evaluate import evaluate_corpus, evaluate_task
    from giantjax.score import build_scorer
    from giantjax.training.restore import load_trained

    trained = load_trained(run, config.mesh if arguments.mesh == "run" else None)
    scorer = build_scorer(trained, arguments.batch_size)
    result: dict[str, Any] = {"run": arguments.run, "step": trained.step, "data": None, "tasks": []}
    print(f"{arguments.run}, step {trained.step}")
    if corpus:
        with progress(corpus.name, corpus.num_tokens - 1) as advance:
            result["data"] = {"corpus": arguments.data} | evaluate_corpus(scorer, corpus, tokenizer, advance)
        print(corpus_in_words(result["data"]))
    for task, encoded in zip(tasks, rows, strict=True):
        with progress(task.path, sum(row.num_scored for row in encoded)) as advance:
            result["tasks"].append(evaluate_task(scorer, task, encoded, advance))
        print(task_in_words(result["tasks"][-1]))
    if arguments.json is not None:
        aside = Path(f"{arguments.json}.part")
        aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, arguments.json)
    return 0


def open_corpus(entry: str, config: RunConfig, run: "RunDirectory") -> IndexedDataset:
    """The corpus to evaluate on.

    Raises:
        InputError: it is missing or damaged, has less than two tokens, or is of another tokenizer than the run.
    """
    from giantjax.training.run_directory import read_record

    # Of two tokens, one of which is predicted: the last sample may be short.
    corpus = open_source(entry, split="validation", field="--data", sequence_length=1, vocabulary_size=config.model.vocabulary_size)
    assert isinstance(corpus, IndexedDataset)
    if corpus.record and run.tokenizer.exists() and corpus.record != (own := read_record(run, run.tokenizer, TokenizerRecord)):
        raise InputError(
            f"--data {entry} was prepared with another tokenizer ({corpus.record.tokenizer} of {corpus.record.vocabulary_size} ids) than "
            f"the run was trained with ({own.tokenizer} of {own.vocabulary_size}); prepare it with that one"
        )
    return corpus


@contextlib.contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, gone when all is done; what is yielded is told how many more of `total` tokens are done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=total)
        yield lambda number: bar.advance(task, number)


def corpus_in_words(found: dict[str, Any]) -> str:
    """What `evaluate_corpus` found."""
    of_bytes = f", {found['bits_per_byte']:.4f} bits a byte" if found["bits_per_byte"] is not None else ""
    return (
        f"{found['corpus']}: loss {found['loss']:.4f} nats a token, perplexity {found['perplexity']:.6g}{of_bytes}, "
        f"next-token accuracy {100 * found['accuracy']:.2f} %, {found['num_tokens']:,} tokens"
    )


def task_in_words(found: dict[str, Any]) -> str:
    """What `evaluate_task` found."""
    rates = [f"{name} {100 * found[name]:.2f} +- {100 * found[f'{name}_stderr']:.2f} %" for name in ("acc", "acc_norm") if name in found]
    rates += [f"perplexity of last words {found['perplexity']:.6g}"] if "perplexity" in found else []
    return f"{found['file']}: {', '.join(rates)}, {found['num_questions']:,} questions"


if __name__ == "__main__":
    command_line.run_main(main)
