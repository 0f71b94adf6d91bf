"""Does a run learn more than statistics: its validation loss beside those of n-gram models, and its samples as Python."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from giantjax import runtime
from giantjax.config import RunConfig
from giantjax.data.indexed import IndexedDataset
from giantjax.data.loader import validation_batches
from giantjax.data.sources import open_sources
from giantjax.errors import InputError
from giantjax.training.metrics import read_metrics
from giantjax.training.run_directory import RunDirectory, read_record

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Learning:
    """Train gpt_tiny, or take a finished run, and compare it with a bigram and a trigram model."""

    run: str | None = None
    """Directory of a finished run on a byte corpus; None trains gpt_tiny anew."""
    samples: int = 0
    """Texts to sample and to check with Python's tokenize."""
    sample_tokens: int = 400
    """Length of each sample."""
    temperature: float = 0.6
    """Of the samples."""


def learning(arguments: Learning) -> int:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(arguments.run or folder))
        if arguments.run is None:
            command = [sys.executable, "scripts/pretrain.py", "--config", "gpt_tiny", "--run-dir", folder]
            subprocess.run(command, check=True, cwd=REPOSITORY)
        config = read_record(run, run.config, RunConfig)
        records = read_metrics(run.metrics)
        measured = [record for record in records if record.get("validation_loss") is not None]
        if not measured:
            raise InputError(f"{run.metrics} holds no validation loss; train with --training.eval-every")
        bigram, trigram, positions = ngram_losses(config)
        table = Table("model", "validation loss, nats a byte", "trained", box=None)
        table.add_row("bigram counts", f"{bigram:.3f}", "")
        table.add_row("trigram counts", f"{trigram:.3f}", "")
        last = measured[-1]
        trained = f"{last['step']} steps, {last['consumed_tokens'] / 1e6:.2f}M tokens, {sum(r['step_time_s'] for r in records):.0f} s"
        table.add_row(config.name, f"{last['validation_loss']:.3f}", trained)
        console = Console()
        console.print(table)
        console.print(f"all three on the same {positions:,} positions of text that is not trained on", highlight=False)
        if arguments.samples:
            _check_samples(run, arguments)
    return 0


def ngram_losses(config: RunConfig) -> tuple[float, float, int]:
    """Mean losses in nats of a bigram and a trigram model, and the number of positions they are over.

    Counted on the training tokens and evaluated on the positions a run of `config` is evaluated on, with no more
    context than the run has there. Each order is smoothed towards the one below by one pseudo-count (a Dirichlet
    prior; MacKay and Peto, 1995), the lowest towards uniform.
    """
    train, validation = open_sources(config)
    if not isinstance(train, IndexedDataset) or validation is None:
        raise InputError("n-gram models are counted on an indexed corpus with validation data; data.train is something else")
    size = config.model.vocabulary_size
    if size > 300:
        raise InputError(f"the trigram table of a vocabulary of {size} does not fit in memory; use a byte corpus")
    ids = train.read(0, train.num_tokens).astype(np.int64)
    unigram = (np.bincount(ids, minlength=size) + 1) / (len(ids) + size)
    two = np.bincount(ids[:-1] * size + ids[1:], minlength=size**2).reshape(size, size)
    three = np.bincount((ids[:-2] * size + ids[1:-1]) * size + ids[2:], minlength=size**3).reshape(size, size, size)
    losses, positions = np.zeros(2), 0
    batches = validation_batches(
        validation,
        sequence_length=config.model.sequence_length,
        batch_size=64,
        num_samples=config.training.eval_samples,
        vocabulary_size=size,
    )
    for batch in batches:
        tokens, targets, counted = batch["tokens"], batch["targets"], batch["loss_mask"] > 0
        from_two = _smoothed(two[tokens, targets], two.sum(-1)[tokens], unigram[targets])
        before = np.roll(tokens, 1, axis=1)
        from_three = _smoothed(three[before, tokens, targets], three.sum(-1)[before, tokens], from_two)
        from_three[:, 0] = from_two[:, 0]
        losses -= [np.log(from_two[counted]).sum(), np.log(from_three[counted]).sum()]
        positions += int(counted.sum())
    return float(losses[0] / positions), float(losses[1] / positions), positions


def _smoothed(hits: Int[np.ndarray, "B S"], total: Int[np.ndarray, "B S"], below: Float[np.ndarray, "B S"]) -> Float[np.ndarray, "B S"]:
    return (hits + below) / (total + 1)


def tokenizes(text: str) -> Literal["yes", "open", "no"]:
    """Whether Python's tokenize takes `text` up to its last complete line; `open` where a bracket or string has yet to end."""
    whole = text[: text.rfind("\n") + 1]
    try:
        # Before Python 3.12 what is no token is not raised but passed on.
        wrong = any(token.type == tokenize.ERRORTOKEN for token in tokenize.generate_tokens(io.StringIO(whole).readline))
    except (tokenize.TokenError, SyntaxError) as error:
        return "open" if "EOF in multi-line" in str(error) or "unterminated triple-quoted" in str(error) else "no"
    return "no" if wrong else "yes"


def _check_samples(run: RunDirectory, arguments: Learning) -> None:
    from giantjax.data.tokenizer import ByteTokenizer
    from giantjax.decode import build_decoder
    from giantjax.generate import generate
    from giantjax.sampling import Sampling
    from giantjax.training.restore import load_trained

    config, tokenizer = read_record(run, run.config, RunConfig), ByteTokenizer()
    runtime.start(config.runtime)
    trained = load_trained(run)
    decoder, prompts = build_decoder(trained), [[tokenizer.end_of_document]]
    passed = []
    for seed in range(arguments.samples):
        found: list[int] = []
        with contextlib.closing(generate(decoder, prompts, Sampling(temperature=arguments.temperature), seed)) as tokens:
            for [token] in tokens:
                if token == tokenizer.end_of_document or len(found) == arguments.sample_tokens:
                    break
                found.append(token)
        text = tokenizer.decode(found)
        passed.append(tokenizes(text))
        print(json.dumps({"seed": seed, "tokenizes": passed[-1], "text": text}))
    fine, still_open = passed.count("yes"), passed.count("open")
    print(
        f"step {trained.step}: Python's tokenize takes {fine + still_open} of {len(passed)} samples up to their last complete line, "
        f"{still_open} of them with a bracket or a string that had yet to end"
    )
