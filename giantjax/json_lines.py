"""Small files of lines that options name, and JSON lines written for other programs."""

import json
import os
from pathlib import Path

from giantjax.errors import InputError


def read_lines(option: str, path: str) -> list[tuple[int, str]]:
    """(number from 1, text) of the lines of a file that are not blank.

    Raises:
        InputError: it cannot be read, is not UTF-8, or has no such line.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path} cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(f"{option} {path} is not UTF-8: line {line} has the byte 0x{content[error.start]:02x}") from error
    lines = [(number, line.removesuffix("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"{option} {path} holds nothing but blank lines")
    return lines


def read_prompts(option: str, path: str) -> list[str]:
    """The prompts of a file, one a line: a JSON string, or else the line as it is.

    Raises:
        InputError: as `read_lines` does, or a JSON string is empty.
    """
    prompts = []
    for number, line in read_lines(option, path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if value == "":
            raise InputError(f'{option} {path} line {number} is ""; a prompt has at least one character')
        prompts.append(value if isinstance(value, str) else line)
    return prompts


def check_new_file(option: str, path: str) -> None:
    """Make sure, without making it, that a file can be made.

    Raises:
        InputError: there is one already, or it cannot be written.
    """
    if os.path.lexists(path):
        raise InputError(f"{option} {path} is there already; nothing is overwritten, so name another file")
    check_writable(option, path)


def check_writable(option: str, path: str) -> None:
    """Make sure that a file can be written, which may be there already.

    Raises:
        InputError: it is a folder, or its own folder is missing or cannot be written.
    """
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise InputError(f"{option} is {path}, a folder; name a file")
    if not os.path.isdir(folder):
        raise InputError(f"{option} is {path}, but there is no folder {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {path} cannot be written: Permission denied")
