"""Pieces of input to token ids, in this process or in several, in order."""

import collections
import dataclasses
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Literal

import numpy as np

from giantjax.data.indexed import TokenizerRecord, token_dtype
from giantjax.data.inputs import BOM, LONGEST, Piece
from giantjax.data.tokenizer import Tokenizer, from_file, record_of
from giantjax.data.tokenizer.protocol import as_text
from giantjax.errors import InputError

# Text given to a tokenizer at a time, where it can be cut: what libraries need for it grows with it.
PART = 1 << 20


@dataclass(frozen=True)
class Rules:
    """What is a document, and what is done with text that is not UTF-8."""

    json_key: str = "text"
    """Of a JSON object's text."""
    bad_utf8: Literal["refuse", "replace"] = "refuse"
    """Whether bytes that are not UTF-8 are refused or become U+FFFD."""


USUAL = Rules()


@dataclass(frozen=True, eq=False)
class Encoded:
    """What became of a piece."""

    piece: Piece
    """Without its data."""
    ids: np.ndarray
    """[tokens], in the dtype that the corpus stores."""
    ends: list[int]
    """Place in `ids` after each document that ends in the piece; what follows the last belongs to one that goes on."""
    num_bytes: int
    """Of its text, in UTF-8."""
    num_empty: int
    """Documents left out because they are empty."""


def encode_piece(piece: Piece, tokenizer: Tokenizer, rules: Rules) -> Encoded:
    """The token ids of a piece, with the end of each document.

    Raises:
        InputError: it is not UTF-8, or holds a zero byte, which no text does, or is no JSON object with the key.
    """
    dtype = token_dtype(tokenizer.vocabulary_size)
    end = np.array([tokenizer.end_of_document], dtype)
    parts: list[np.ndarray] = []
    ends: list[int] = []
    num_ids = num_bytes = num_empty = 0
    for text in texts_of(piece, rules):
        if piece.format == "jsonl" and not text:
            num_empty += 1
            continue
        found = [ids.astype(dtype) for ids in _encode(text, tokenizer, piece)]
        if piece.format == "jsonl" or piece.is_last:
            found.append(end)
            ends.append(num_ids + sum(map(len, found)))
        parts += found
        num_ids += sum(map(len, found))
        num_bytes += len(text)
    ids = np.concatenate(parts) if parts else np.empty(0, dtype)
    return Encoded(dataclasses.replace(piece, data=b""), ids, ends, num_bytes, num_empty)


def texts_of(piece: Piece, rules: Rules) -> Iterable[bytes]:
    """UTF-8 of each document of a piece, or of its part of one.

    Raises:
        InputError: as `encode_piece` does.
    """
    return _texts_of_lines(piece, rules) if piece.format == "jsonl" else [_text_of(piece, rules)]


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, rules: Rules, num_processes: int) -> Generator[Encoded, None, None]:
    """What becomes of each piece, in order, whatever the number of processes.

    Raises:
        InputError: the first that reading or encoding raises, in the order of the input; or a process was killed.
    """
    if num_processes == 1:
        for piece in pieces:
            yield encode_piece(piece, tokenizer, rules)
        return
    # Not forked: libraries of tokenizers start threads, which a fork would leave behind in the middle of their work.
    context = multiprocessing.get_context("spawn")
    record = record_of(tokenizer)
    with ProcessPoolExecutor(num_processes, context, _start, (record, tokenizer.file, rules)) as pool:
        waiting: collections.deque[Future[Encoded]] = collections.deque()
        failure, source = None, iter(pieces)
        try:
            while failure is None:
                try:
                    waiting.append(pool.submit(_encode_here, next(source)))
                except StopIteration:
                    break
                except InputError as error:
                    # Of the pieces before, one may be wrong too.
                    failure = error
                # Enough that no process waits, few enough to hold in memory.
                if len(waiting) > 2 * num_processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise InputError(
                f"one of the {num_processes} processes was killed, perhaps for want of memory; give fewer with --num-processes"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
        if failure:
            raise failure


_here: tuple[Tokenizer, Rules]
"""Of a process of the pool."""


def _start(record: TokenizerRecord, file: bytes, rules: Rules) -> None:
    global _here
    # What a terminal or a scheduler sends goes to every process; the first one decides.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here = from_file(record.tokenizer, file, record.end_of_document, "the tokenizer"), rules


def _end_with_parent() -> None:
    """A process of a pool whose first process was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _encode_here(piece: Piece) -> Encoded:
    return encode_piece(piece, *_here)


def _encode(text: bytes, tokenizer: Tokenizer, piece: Piece) -> Iterator[np.ndarray]:
    """The ids of UTF-8, in parts where it is long and may be cut."""
    first = 0
    while len(text) - first > PART and tokenizer.seam:
        found = tokenizer.seam.search(text, first + PART)
        if found is None:
            break
        yield tokenizer.encode(text[first : found.start()])
        first = found.start()
    if len(text) - first > LONGEST:
        raise InputError(f"{piece.path}: a document that this tokenizer has to see whole is longer than {LONGEST / 2**20:g} MiB; divide it")
    yield tokenizer.encode(text[first:])


def _text_of(piece: Piece, rules: Rules) -> bytes:
    """UTF-8 of a part of a text file."""
    data = piece.data
    zero = data.find(b"\0")
    if zero >= 0:
        raise InputError(f"{piece.path} is no text: byte {piece.begin.offset + zero} of it is zero")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if rules.bad_utf8 == "replace":
            return _without_mark(data, piece).decode("utf-8", "replace").encode()
        raise InputError(
            f"{piece.path} is not UTF-8: byte {piece.begin.offset + error.start} of it is 0x{data[error.start]:02x}; convert it, "
            "or replace such bytes with --bad-utf8 replace"
        ) from error
    return _without_mark(data, piece)


def _without_mark(data: bytes, piece: Piece) -> bytes:
    """Without the byte order mark at the beginning of a file."""
    return data.removeprefix(BOM) if piece.begin.offset == 0 else data


def _texts_of_lines(piece: Piece, rules: Rules) -> Iterator[bytes]:
    """UTF-8 of the text of each line, blank lines left out."""
    for number, line in enumerate(_without_mark(piece.data, piece).split(b"\n"), piece.begin.line):
        if line.isspace() or not line:
            continue
        where = f"line {number} of {piece.path}"
        try:
            values = json.loads(line.decode("utf-8", "replace" if rules.bad_utf8 == "replace" else "strict"))
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where} is not UTF-8: byte {error.start} of it is 0x{line[error.start]:02x}; convert it, or replace such bytes with "
                "--bad-utf8 replace"
            ) from error
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON ({error.msg} at its character {error.pos})") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} cannot be read as JSON ({error})") from error
        if not isinstance(values, dict):
            raise InputError(f"{where} is JSON, but not an object with the key {rules.json_key}")
        if rules.json_key not in values:
            keys = ", ".join(list(values)[:5]) or "none"
            raise InputError(f"{where} has no key {rules.json_key} (its keys: {keys}); name the one that holds the text with --json-key")
        text = values[rules.json_key]
        if not isinstance(text, str):
            raise InputError(f"{where} has no text at the key {rules.json_key}, but {json.dumps(text)[:40]}")
        # JSON can spell half of a surrogate pair, which UTF-8 cannot.
        yield as_text(text).encode()
