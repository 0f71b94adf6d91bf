"""Text to an indexed corpus: what scripts/prepare_data.py does."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from giantjax.data.encode import USUAL, Rules, encode_pieces, texts_of
from giantjax.data.indexed import without_ending
from giantjax.data.inputs import InputFile, check_inputs, read_pieces
from giantjax.data.partial import Partial, Progress
from giantjax.data.tokenizer import Tokenizer, from_file, load_tokenizer, trained_size
from giantjax.data.tokenizer.protocol import WORD_END
from giantjax.errors import InputError

SAVE_SECONDS = 10.0
"""Between saves: so much work a kill costs at most."""
# Of the inputs a tokenizer is trained on; more of the same text hardly changes it.
TRAINING_BYTES = 512 << 20


@dataclass(frozen=True)
class Prepared:
    """A corpus that was written."""

    prefix: str
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of text, in UTF-8."""
    num_empty: int
    """Documents left out because they are empty."""
    vocabulary_size: int


def prepare(
    inputs: Sequence[str],
    output: str,
    tokenizer: str = "bytes",
    *,
    format: Literal["auto", "text", "jsonl"] = "auto",
    rules: Rules = USUAL,
    end_of_document: str | None = None,
    num_processes: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Prepared | None:
    """Write the corpus of some files, or go on writing it where a kill or a stop left it; None when it was stopped.

    Files follow each other as they are given, and their documents as they stand there, each ended by the tokenizer's end of
    document. The bytes written do not depend on the number of processes, nor on how often the work was interrupted.

    Args:
        inputs: paths of text files, each one document, and of JSON lines, each of whose objects holds one.
        output: PREFIX of the corpus; its folder is made if need be.
        tokenizer: as `--tokenizer` spells it; `bpe:SIZE` is trained on the inputs.
        format: of all files; auto goes by their names.
        rules: how documents are read.
        end_of_document: token that ends a document; None is the usual one of the tokenizer.
        num_processes: that encode, at least 1.
        stop: asked between pieces whether to save and end.

    Raises:
        InputError: an input or option is wrong, or the corpus cannot be written.
    """
    if num_processes < 1:
        raise InputError(f"--num-processes is {num_processes}; it must be at least 1")
    size = trained_size(tokenizer)
    if size is not None and end_of_document is not None:
        raise InputError(f"--end-of-document is {end_of_document}, but a trained tokenizer has an end of its own; leave it out")
    # A tokenizer that cannot be loaded is refused before the inputs are looked at; one that is trained needs them.
    loaded = None if size is not None else load_tokenizer(tokenizer, end_of_document)
    files = check_inputs(inputs, format)
    prefix = check_output(output)
    job = {
        "inputs": [asdict(file) for file in files],
        "--tokenizer": tokenizer,
        "--end-of-document": end_of_document,
        "--json-key": rules.json_key,
        "--bad-utf8": rules.bad_utf8,
    }
    with folder_of(prefix), Partial(prefix, job) as partial, _bar(prefix, files, partial) as show:
        if partial.tokenizer is None:
            partial.begin(loaded or _trained(files, size or 0, rules))
        progress = _write(partial, files, rules, num_processes, stop, show)
        if progress is None:
            return None
        partial.finish(progress)
        assert partial.tokenizer is not None
        written = partial.written
        counts = written.num_documents, written.num_tokens, progress.num_bytes, progress.num_empty
        return Prepared(prefix, *counts, partial.tokenizer.vocabulary_size)


def check_output(output: str) -> str:
    """The PREFIX to write.

    Raises:
        InputError: it names a folder.
    """
    prefix = without_ending(output)
    if not os.path.basename(prefix) or os.path.isdir(prefix):
        raise InputError(f"--output is {output!r}, a folder; add a name for the corpus, such as {os.path.join(output, 'train')}")
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


def _write(
    partial: Partial, files: Sequence[InputFile], rules: Rules, num_processes: int, stop: Callable[[], bool], show: Callable[[int], None]
) -> Progress | None:
    """Encode what is left; None after a stop."""
    progress, saved = partial.progress, time.monotonic()
    if progress.place.file == len(files):
        return progress
    assert partial.tokenizer is not None
    pieces = read_pieces(files, partial.tokenizer.seam, progress.place)
    with contextlib.closing(encode_pieces(pieces, partial.tokenizer, rules, num_processes)) as encoded:
        for one in encoded:
            partial.writer.append_documents(one.ids, one.ends)
            num_bytes, num_empty = progress.num_bytes + one.num_bytes, progress.num_empty + one.num_empty
            progress = Progress(one.piece.end, num_bytes, num_empty, one.piece.consumed)
            show(progress.consumed)
            is_stopped = stop()
            if is_stopped or time.monotonic() - saved > SAVE_SECONDS:
                partial.save(progress)
                saved = time.monotonic()
            if is_stopped:
                return None
    return progress


def _trained(files: Sequence[InputFile], size: int, rules: Rules) -> Tokenizer:
    """A byte-level BPE of up to `size` ids, trained on the beginning of each file, in all on up to TRAINING_BYTES of them."""
    from giantjax.data.tokenizer.convert import train_bpe

    part = min(1, TRAINING_BYTES / sum(file.size for file in files))

    def texts() -> Iterator[str]:
        for file in files:
            for piece in read_pieces([file], WORD_END):
                yield from (text.decode() for text in texts_of(piece, rules))
                if part < 1 and piece.consumed >= part * file.size:
                    break

    return from_file("huggingface", train_bpe(texts(), size), None, "the trained tokenizer")


@contextlib.contextmanager
def _bar(prefix: str, files: Sequence[InputFile], partial: Partial) -> Iterator[Callable[[int], None]]:
    """A bar with the time left, on a terminal; it is told bytes of the inputs."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        total = sum(file.size for file in files)
        task = bar.add_task(f"preparing {os.path.basename(prefix)}", total=total, completed=partial.progress.consumed)
        yield lambda consumed: bar.update(task, completed=consumed)
