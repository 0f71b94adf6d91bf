"""The corpus that every machine has: the source text of Python's own standard library.

Each file is one document of bytes. About one file in twenty is held out for validation, chosen by its path
alone, so that no text of it is ever trained on.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

from giantjax.data.indexed_writer import ENDINGS, sync_folder, write_indexed
from giantjax.data.tokenizer import ByteTokenizer, record_of
from giantjax.errors import InputError
from giantjax.runtime import cache_folder

SPLITS = ("train", "validation")
# Tests are repetitive, and what pip installed is not the standard library.
LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
ONE_FILE_IN = 20


def stdlib() -> tuple[str, str]:
    """(PREFIX of the training part, PREFIX of the validation part), prepared on first use.

    They lie in the user's cache folder, $XDG_CACHE_HOME or ~/.cache, under a name that changes with the
    Python version and its files. A preparation that is killed, or runs beside another one, leaves whole files or none.

    Raises:
        InputError: Python came without the source of its library, or the cache folder cannot be written.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = _source_files(root)
    if not paths:
        raise InputError(f"the corpus stdlib is the source text of Python's library, but {root} holds no .py files; use another corpus")
    folder = cache_folder() / f"stdlib-{platform.python_version()}-{_fingerprint(root, paths)}"
    if not folder.exists():
        _prepare(root, paths, folder)
    missing = [f"{split}{ending}" for split in SPLITS for ending in ENDINGS if not (folder / f"{split}{ending}").exists()]
    if missing:
        raise InputError(f"{folder} lacks {missing[0]}; remove that folder and start again")
    return str(folder / "train"), str(folder / "validation")


def split_of(path: str) -> str:
    """The part, train or validation, that a file belongs to by its path relative to the library."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "little") % ONE_FILE_IN == 0 else "train"


def _source_files(root: Path) -> list[str]:
    """Relative paths, with slashes, of the library's source files in sorted order."""
    found = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in LEFT_OUT]
        found += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return sorted(path for path in found if (root / path).is_file())


def _fingerprint(root: Path, paths: list[str]) -> str:
    listing = "\n".join(f"{path} {(root / path).stat().st_size}" for path in paths)
    return hashlib.blake2b(os.fsencode(listing), digest_size=4).hexdigest()


def _prepare(root: Path, paths: list[str], folder: Path) -> None:
    """Write both parts aside, then give their folder its name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise _no_cache(folder, error) from error
    try:
        _write(root, paths, aside)
        try:
            os.rename(aside, folder)
        except OSError:
            # Another process was faster, and has made the same files.
            if not folder.exists():
                raise
        sync_folder(str(folder.parent))
    except (InputError, OSError) as error:
        raise _no_cache(folder, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _no_cache(folder: Path, error: Exception) -> InputError:
    why = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else str(error)
    return InputError(f"cannot prepare the corpus stdlib in {folder.parent} ({why}); set XDG_CACHE_HOME to a folder with room for 30 MB")


def _write(root: Path, paths: list[str], folder: Path) -> None:
    """Write train and validation into `folder`, a document for each file that is UTF-8."""
    tokenizer = ByteTokenizer()
    record = record_of(tokenizer)
    with write_indexed(str(folder / "train"), record) as train, write_indexed(str(folder / "validation"), record) as validation:
        for path in paths:
            text = (root / path).read_bytes()
            try:
                text.decode("utf-8")
            except UnicodeDecodeError:
                continue
            writer = validation if split_of(path) == "validation" else train
            writer.append(tokenizer.encode(text))
            writer.append(np.array([tokenizer.end_of_document]))
            writer.end_document()
