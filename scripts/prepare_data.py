"""Text files to an indexed corpus: python scripts/prepare_data.py FILE... --output PREFIX."""

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress

from giantjax import command_line
from giantjax.data.indexed import TokenizerRecord, without_ending
from giantjax.data.indexed_writer import refuse_existing, write_indexed
from giantjax.data.tokenizer import Tokenizer, load_tokenizer
from giantjax.errors import InputError

# Bytes of text in memory at a time.
PIECE = 1 << 20


@dataclass(frozen=True)
class Arguments:
    """Turn text files, each one document, into PREFIX.bin and PREFIX.idx for --data.train PREFIX."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """Text files; the corpus holds them in this order."""
    output: Annotated[str, tyro.conf.arg(metavar="PREFIX")]
    """Path of the corpus without .bin or .idx; its folder is made if need be. Nothing is overwritten."""
    tokenizer: str = "bytes"
    """What makes token ids of the text: bytes."""


def main() -> int:
    """Check all that can be checked first, then write."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    # A polite kill cleans up as an error does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    tokenizer = load_tokenizer(arguments.tokenizer)
    check_inputs(arguments.inputs)
    prefix = check_output(arguments.output)
    with folder_of(prefix):
        num_documents, num_tokens, num_bytes = prepare(arguments.inputs, tokenizer, prefix)
    print(f"{num_documents:,} documents, {num_tokens:,} tokens of {num_bytes:,} bytes of text in {prefix}.bin and {prefix}.idx")
    return 0


def check_inputs(paths: tuple[str, ...]) -> None:
    """Raise InputError unless each path is a file of its own that can be read and holds something."""
    if not paths:
        raise InputError("no FILE was given; name the text files to prepare")
    seen: dict[tuple[int, int], str] = {}
    for path in paths:
        try:
            found = os.stat(path)
            if stat.S_ISDIR(found.st_mode):
                raise InputError(f"{path} is a folder; name the text files in it, such as {os.path.join(path, '*.txt')}")
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path} is no regular file; write what it gives to a file first")
            with open(path, "rb"):
                pass
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        if found.st_size == 0:
            raise InputError(f"{path} is empty; leave it out")
        # The same file under another name is still the same text.
        identity = (found.st_dev, found.st_ino)
        if identity in seen:
            again = "" if seen[identity] == path else f", the second time as {path}"
            raise InputError(f"{seen[identity]} was given twice{again}; name it once")
        seen[identity] = path


def check_output(output: str) -> str:
    """The PREFIX to write.

    Raises:
        InputError: it names a folder, or something is there already.
    """
    prefix = without_ending(output)
    if not os.path.basename(prefix) or os.path.isdir(prefix):
        raise InputError(f"--output is {output!r}, a folder; add a name for the corpus, such as {os.path.join(output, 'train')}")
    refuse_existing(prefix)
    return prefix


@contextlib.contextmanager
def folder_of(prefix: str) -> Iterator[None]:
    """Make the folder of PREFIX where it is missing, and take it back when the block raises.

    Raises:
        InputError: it cannot be made.
    """
    folder = Path(prefix).parent
    made: list[Path] = []
    try:
        try:
            made += [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--output is {prefix}, but its folder {folder} cannot be made: {error.strerror}") from error
        yield
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise


def prepare(inputs: tuple[str, ...], tokenizer: Tokenizer, prefix: str) -> tuple[int, int, int]:
    """Write each input as one document that ends with the tokenizer's end of document; (documents, tokens, bytes of text)."""
    record = TokenizerRecord(tokenizer.name, tokenizer.vocabulary_size, tokenizer.end_of_document)
    end = np.array([tokenizer.end_of_document], np.int32)
    num_bytes, total = 0, sum(os.path.getsize(path) for path in inputs)
    console = Console(stderr=True)
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        write_indexed(prefix, record) as writer,
    ):
        task = progress.add_task(f"preparing {os.path.basename(prefix)}", total=total)
        for path in inputs:
            for piece in read_pieces(path):
                writer.append(tokenizer.encode(piece))
                num_bytes += len(piece)
                progress.update(task, completed=num_bytes)
            writer.append(end)
            writer.end_document()
    return writer.num_documents, writer.num_tokens, num_bytes


def read_pieces(path: str) -> Iterator[bytes]:
    """The bytes of a file, up to PIECE at a time."""
    try:
        with open(path, "rb") as file:
            while piece := file.read(PIECE):
                yield piece
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


if __name__ == "__main__":
    command_line.run_main(main)
