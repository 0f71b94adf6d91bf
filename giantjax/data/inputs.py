"""Input files of a corpus, read in pieces: plain text or JSON lines, compressed by gzip or Zstandard or not at all.

A piece is a function of where it begins and of nothing that was read before, so reading can begin again at the end of any.
"""

import contextlib
import gzip
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal, NamedTuple, cast

from giantjax.errors import InputError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# Bytes of text in a piece, unless it cannot be cut there.
PIECE = 1 << 20
# Of one line, or of one document that a tokenizer has to see whole.
LONGEST = 64 << 20
JSON_LINES = (".jsonl", ".ndjson", ".json")
BOM = b"\xef\xbb\xbf"
Format = Literal["text", "jsonl"]


@dataclass(frozen=True)
class InputFile:
    """A file that was found good to read."""

    path: str
    size: int
    """Bytes on the disk, compressed or not."""
    modified: int
    """When, in nanoseconds."""
    format: Format
    """text: the file is one document. jsonl: each line is a JSON object that holds one."""


class Place(NamedTuple):
    """Where reading stands."""

    file: int = 0
    """Number of the input."""
    offset: int = 0
    """Bytes of its uncompressed content before this place."""
    line: int = 1
    """Number of its line that begins here, where it is of lines."""


START = Place()


@dataclass(frozen=True)
class Piece:
    """Some text of one file."""

    path: str
    format: Format
    data: bytes
    """UTF-8, if all is well; whole lines, or a part of a document."""
    begin: Place
    end: Place
    """Where the next piece begins."""
    is_last: bool
    """Whether it is the last one of its file."""
    consumed: int
    """Bytes on the disk, of all inputs, read up to its end."""


def check_inputs(paths: Sequence[str], format: Literal["auto", "text", "jsonl"]) -> list[InputFile]:
    """The input files; `auto` takes JSON lines for what is called .jsonl, .ndjson or .json, compressed or not.

    Raises:
        InputError: a path is no file of its own that can be read and holds something, or there is none.
    """
    if not paths:
        raise InputError("no FILE was given; name the text files to prepare")
    seen: dict[tuple[int, int], str] = {}
    files = []
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
        name = path.removesuffix(".gz").removesuffix(".zst")
        of_lines = name.endswith(JSON_LINES) if format == "auto" else format == "jsonl"
        files.append(InputFile(path, found.st_size, found.st_mtime_ns, "jsonl" if of_lines else "text"))
    return files


def read_pieces(files: Sequence[InputFile], seam: re.Pattern[bytes] | None, begin: Place = START) -> Iterator[Piece]:
    """The pieces of all files in order.

    Args:
        files: from `check_inputs`.
        seam: where a document may be cut; None never cuts one.
        begin: where to begin: at the end of an earlier piece.

    Raises:
        InputError: a file cannot be read, is damaged or cut short, or holds nothing, or a line or document is too long.
    """
    before = sum(file.size for file in files[: begin.file])
    for number, file in enumerate(files[begin.file :], begin.file):
        start = begin if number == begin.file else Place(number)
        with _reading(file.path), open(file.path, "rb") as raw, _uncompressed(raw) as content:
            _skip(content, start.offset)
            for data, following in _cut(file, content, start, seam):
                is_last, end = following is None, following or Place(number + 1)
                consumed = before + (file.size if is_last else raw.tell())
                yield Piece(file.path, file.format, data, start, end, is_last, consumed)
                start = end
        before += file.size


def _cut(file: InputFile, content: IO[bytes], place: Place, seam: re.Pattern[bytes] | None) -> Iterator[tuple[bytes, Place | None]]:
    """(data, place after it or None at the end of the file) of what follows `place`; of lines a piece ends with one, of text at a seam."""
    held = b""
    while True:
        wanted, end = PIECE, 0
        # One byte more says whether anything follows.
        while len(held) <= wanted and (more := content.read(wanted + 1 - len(held))):
            held += more
            if len(held) > wanted and not (end := _end_of(held, file.format, seam)):
                wanted += PIECE
                if wanted > LONGEST:
                    what = f"line {place.line}" if file.format == "jsonl" else "a document that this tokenizer has to see whole"
                    raise InputError(f"{file.path}: {what} is longer than {LONGEST / 2**20:g} MiB; divide it")
        if not held and place.offset == 0:
            raise InputError(f"{file.path} holds nothing; leave it out")
        if len(held) <= wanted:
            yield held, None
            return
        lines = held.count(b"\n", 0, end) if file.format == "jsonl" else 0
        place = Place(place.file, place.offset + end, place.line + lines)
        yield held[:end], place
        held = held[end:]


def _end_of(held: bytes, format: Format, seam: re.Pattern[bytes] | None) -> int:
    """Where a piece ends: at the last seam, or end of a line, of its first PIECE bytes, else at the first one after; 0 is nowhere."""
    if format == "jsonl":
        return held.rfind(b"\n", 0, PIECE) + 1 or held.find(b"\n", PIECE) + 1
    if seam is None:
        return 0
    for first in (max(PIECE - 4096, 1), 1):
        places = [found.start() for found in seam.finditer(held, first, PIECE + 1) if 0 < found.start() <= PIECE]
        if places:
            return places[-1]
    later = seam.search(held, PIECE)
    return later.start() if later and later.start() < len(held) else 0


def _skip(content: IO[bytes], offset: int) -> None:
    """Go on to `offset`; of compressed content that is to read it once more."""
    if isinstance(content, (gzip.GzipFile, zstd.ZstdFile)):
        while offset > 0:
            offset -= len(content.read(min(offset, PIECE))) or offset
    else:
        content.seek(offset)


@contextlib.contextmanager
def _uncompressed(raw: IO[bytes]) -> Iterator[IO[bytes]]:
    """The content of a file; what is compressed is known by its first bytes, with which no UTF-8 can begin."""
    first = raw.read(4)
    raw.seek(0)
    if first[:2] == b"\x1f\x8b":
        with gzip.GzipFile(fileobj=raw) as content:
            yield cast(IO[bytes], content)
    elif first == b"\x28\xb5\x2f\xfd":
        # Up to the longest window that there is, which the command zstd makes with --long=31.
        options = {int(zstd.DecompressionParameter.window_log_max): 31}
        with zstd.ZstdFile(raw, options=options) as content:
            yield cast(IO[bytes], content)
    else:
        yield raw


@contextlib.contextmanager
def _reading(path: str) -> Iterator[None]:
    """What a broken file raises, as an InputError about it."""
    try:
        yield
    except EOFError as error:
        raise InputError(f"{path} is cut short: its compressed content has no end") from error
    except (gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
        raise InputError(f"{path} is damaged: {str(error)[:1].lower()}{str(error)[1:]}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
