"""How fast text becomes tokens, how fast batches come beside what a step takes, and how large an index may be."""

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from giantjax import command_line
from giantjax.cluster import cluster_of_name
from giantjax.data.corpora import Blend, Part, Source
from giantjax.data.indexed import DTYPES, HEADER, MAGIC, PIECE, IndexedDataset, open_indexed
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.loader import PACKED, Batch, DocumentRules, training_batches
from giantjax.data.prepare import prepare
from giantjax.errors import InputError
from giantjax.planner.search import search

REPOSITORY = Path(__file__).resolve().parents[2]
NEEDS = (("gpt2_124m", "a100x1-tcp100"), ("gpt_345m", "v100x1-tcp100"), ("gpt3_1b3", "a100x4-tcp100"), ("gpt13b", "a100x4-tcp100"))
"""Configurations, and clusters on which the planner says how many samples a second they take."""


@dataclass(frozen=True)
class Data:
    """Time prepare_data by tokenizer and process count, the loader beside what a step needs, and a large document index."""

    megabytes: int = 16
    """Text of each preparation, Python's own source as JSON lines."""
    tokenizers: tuple[str, ...] = ("bytes", "bpe:8192")
    """As prepare_data spells them; bpe:SIZE is trained beforehand."""
    processes: tuple[int, ...] = (1, 2)
    """Of prepare_data."""
    documents: int = 10_000_000
    """Of the index; 100 million take 2 GB of disk."""
    batches: int = 50
    """Timed of each way to load."""

    def __post_init__(self) -> None:
        for name in ("megabytes", "documents", "batches"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} is {getattr(self, name)}; it must be at least 1")


def data(arguments: Data) -> int:
    """Print the tables."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_lines(folder / "text.jsonl", arguments.megabytes * 10**6)
        console.print(f"prepare_data: {text / 1e6:.0f} MB of JSON lines, {os.cpu_count()} cores")
        console.print(preparations(arguments, folder, text))
        console.print(f"the loader: {arguments.batches} batches of 32 samples, one thread")
        console.print(loading(arguments, folder))
        console.print("what a step takes, as the planner expects it of the fastest plan")
        console.print(needs())
        console.print(f"an index of {arguments.documents:,} documents")
        console.print(index(arguments, folder))
    return 0


def write_lines(path: Path, size: int) -> int:
    """About `size` bytes of JSON lines, a line for each source file of Python's library, again and again; bytes written."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(each for each in root.glob("*.py") if each.is_file())
    with path.open("w", encoding="utf-8") as file:
        for each in itertools.cycle(files):
            file.write(json.dumps({"text": each.read_text("utf-8", "replace")}) + "\n")
            if file.tell() >= size:
                return file.tell()
    raise AssertionError


def preparations(arguments: Data, folder: Path, text: int) -> Table:
    """Speed of the script by tokenizer and number of processes, their start included."""
    table = Table("tokenizer", "processes", "MB of input/s", "tokens/s", box=None)
    for number, spelling in enumerate(arguments.tokenizers):
        tokenizer = spelling
        if spelling.startswith("bpe:"):
            sample = folder / "sample.jsonl"
            write_lines(sample, min(text, 4 * 10**6))
            prepare([str(sample)], str(folder / f"trained{number}"), spelling)
            tokenizer = str(folder / f"trained{number}.tokenizer.json")
        for processes in arguments.processes:
            output = str(folder / f"{number}-{processes}")
            command = [sys.executable, "scripts/prepare_data.py", str(folder / "text.jsonl"), "--output", output]
            begin = time.perf_counter()
            subprocess.run(
                [*command, "--tokenizer", tokenizer, "--num-processes", str(processes)], check=True, cwd=REPOSITORY, capture_output=True
            )
            seconds = time.perf_counter() - begin
            num_tokens = open_indexed(output).num_tokens
            table.add_row(os.path.basename(spelling), str(processes), f"{text / seconds / 1e6:.2f}", f"{num_tokens / seconds:,.0f}")
    return table


def loading(arguments: Data, folder: Path) -> Table:
    """Samples a second of ways to load, by sequence length."""
    random = np.random.default_rng(0)
    corpora = []
    for name in "abc":
        with write_indexed(str(folder / name), dtype=np.dtype("u2")) as writer:
            for length in random.geometric(1 / 700, 20_000):
                writer.append(random.integers(0, 50_000, length))
                writer.end_document()
        corpora.append(open_indexed(str(folder / name)))
    parts = tuple(Part(corpus, 0, corpus.num_documents) for corpus in corpora)
    blend = Blend(parts, (Fraction(7, 10), Fraction(2, 10), Fraction(1, 10)))
    apart = DocumentRules(reset_positions=True, reset_attention=True, mask_document_ends=True)
    table = Table("source", "sequence", "samples/s", "tokens/s", box=None)
    for name, source, rules in (("one corpus", corpora[0], PACKED), ("blend of three", blend, PACKED), ("documents apart", blend, apart)):
        for length in (1024, 2048):
            speed = _samples_per_second(source, length, rules, arguments.batches)
            table.add_row(name, str(length), f"{speed:,.0f}", f"{speed * length:,.0f}")
    return table


def _samples_per_second(source: Source, length: int, rules: DocumentRules, number: int, size: int = 32) -> float:
    with contextlib.closing(_batches(source, length, size, rules)) as batches:
        next(batches)
        begin = time.perf_counter()
        for _ in range(number):
            next(batches)
        return number * size / (time.perf_counter() - begin)


def _batches(source: Source, length: int, size: int, rules: DocumentRules = PACKED, start: int = 0) -> Generator[Batch, None, None]:
    return training_batches(
        source,
        seed=0,
        sequence_length=length,
        global_batch_size=size,
        start_sample=start,
        vocabulary_size=1 << 16,
        prefetch=1,
        rules=rules,
    )


def needs() -> Table:
    """Samples a second that configurations take on clusters, in all and in each process of one a node."""
    table = Table("config", "cluster", "sequence", "samples/s", "of which a node reads", box=None)
    for name, where in NEEDS:
        config, cluster = command_line.preset(name), cluster_of_name(where)
        best = search(config, cluster).fitting[0]
        # Data-parallel nodes read samples of their own; stages of one pipeline all read the same.
        own = best.cost.samples_per_s / min(best.plan.replica, cluster.num_nodes)
        table.add_row(name, where, str(config.model.sequence_length), f"{best.cost.samples_per_s:,.0f}", f"{own:,.0f}")
    return table


def index(arguments: Data, folder: Path) -> Table:
    """Opening an index, and the first batch of 32 samples of 1024, documents told apart, at its beginning and far into training."""
    prefix = str(folder / "large")
    write_index(prefix, arguments.documents)
    table = Table("", "seconds", box=None)
    begin = time.perf_counter()
    corpus = open_indexed(prefix)
    table.add_row(f"open and check {os.path.getsize(f'{prefix}.idx') / 1e9:.2f} GB", f"{time.perf_counter() - begin:.2f}")
    apart = DocumentRules(reset_positions=True, reset_attention=True, mask_document_ends=True)
    # The first batch of a process imports what reads ahead.
    _first_batch(corpus, apart, 1)
    for power in (0, 6, 9, 15):
        times = [_first_batch(corpus, apart, 10**power + 1000 * again) for again in range(9)]
        table.add_row(f"first batch after 10^{power} samples", f"{statistics.median(times):.3f}")
    return table


def _first_batch(corpus: IndexedDataset, rules: DocumentRules, start: int) -> float:
    begin = time.perf_counter()
    with contextlib.closing(_batches(corpus, 1024, 32, rules, start)) as batches:
        next(batches)
        return time.perf_counter() - begin


def write_index(prefix: str, documents: int, length: int = 100) -> None:
    """A pair of so many documents of `length` tokens of one byte, of which the tokens are a hole in the file."""
    code = next(code for code, name in DTYPES.items() if name == "<u1")
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(documents * length)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, 1, code, documents, documents + 1))
        pieces = [(first, min(first + PIECE, documents)) for first in range(0, documents, PIECE)]
        for first, last in pieces:
            file.write(np.full(last - first, length, "<i4").tobytes())
        for first, last in pieces:
            file.write((np.arange(first, last, dtype="<i8") * length).tobytes())
        for first, last in [*pieces, (documents, documents + 1)]:
            file.write(np.arange(first, last, dtype="<i8").tobytes())
