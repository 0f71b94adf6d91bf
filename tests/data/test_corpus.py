"""The standard library as a corpus: split by file, whole or absent in the cache."""

import multiprocessing
from pathlib import Path

import pytest

from giantjax.data import corpus
from giantjax.data.corpus import split_of, stdlib
from giantjax.data.indexed import open_indexed
from giantjax.data.tokenizer import ByteTokenizer
from giantjax.errors import InputError


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library of its own, small, and an empty cache."""
    root = tmp_path / "lib"
    for name in [*(f"package/module{i}.py" for i in range(60)), "zz.py", "aa.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name} \u00e9\n")
    for name in (
        "test/t.py",
        "package/tests/t.py",
        "idlelib/idle_test/t.py",
        "site-packages/p.py",
        "dist-packages/p.py",
        "__pycache__/c.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("LEFT OUT")
    (root / "latin.py").write_bytes(b"LEFT OUT \xff")
    (root / "data.txt").write_text("LEFT OUT")
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root


def documents(prefix):
    read = open_indexed(prefix)
    tokenizer = ByteTokenizer()
    assert all(read.sequence(i)[-1] == tokenizer.end_of_document for i in range(read.num_sequences))
    return [tokenizer.decode(read.sequence(i)) for i in range(read.num_sequences)]


def test_each_file_is_a_document_of_one_part(library):
    parts = [documents(prefix) for prefix in stdlib()]
    names = [f"package/module{i}.py" for i in range(60)] + ["zz.py", "aa.py"]
    for part, split in zip(parts, ("train", "validation"), strict=True):
        assert part == [f"# {name} \u00e9\n" for name in sorted(names) if split_of(name) == split]
    assert parts[1] and len(parts[0]) > len(parts[1])


def test_the_cache_is_used_until_the_files_change(library, monkeypatch):
    first = stdlib()
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write", None)
        assert stdlib() == first
    (library / "aa.py").write_text("longer than it was before")
    assert stdlib() != first
    assert "longer than it was before" in documents(stdlib()[split_of("aa.py") == "validation"])


def test_a_preparation_cut_short_leaves_nothing(library, tmp_path, monkeypatch):
    write = corpus._write

    def cut_short(*arguments):
        write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write", cut_short)
        with pytest.raises(KeyboardInterrupt):
            stdlib()
    assert not list((tmp_path / "cache" / "giantjax").iterdir())
    assert documents(stdlib()[0])


def test_the_slower_of_two_preparations_takes_the_other_ones_files(library, tmp_path, monkeypatch):
    write, made = corpus._write, []

    def overtaken(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(corpus, "_write", write)
            made.append(stdlib())
        write(*arguments)

    monkeypatch.setattr(corpus, "_write", overtaken)
    assert [stdlib()] == made
    assert len(list((tmp_path / "cache" / "giantjax").iterdir())) == 1


def test_a_cache_that_cannot_be_written_is_named(library, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"file/giantjax \(.*\); set XDG_CACHE_HOME to a folder"):
        stdlib()


def test_a_full_disk_names_the_cache_and_leaves_nothing(library, tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(InputError, match=r"File too large.*; set XDG_CACHE_HOME"):
            stdlib()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "cache" / "giantjax").iterdir())


def test_a_cache_with_a_hole_is_named(library):
    Path(stdlib()[1] + ".json").unlink()
    with pytest.raises(InputError, match=r"lacks validation\.json; remove that folder"):
        stdlib()


def test_a_python_without_its_sources_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match=r"holds no \.py files"):
        stdlib()


def _first_tokens(queue):
    queue.put(open_indexed(stdlib()[1]).read(0, 64).tolist())


def test_the_real_library_prepared_by_three_processes_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_first_tokens, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found[0] == found[1] == found[2]
    train, validation = (open_indexed(prefix) for prefix in stdlib())
    assert train.num_tokens > 5_000_000
    assert 0.02 < validation.num_tokens / train.num_tokens < 0.15
    assert len(list((tmp_path / "giantjax").iterdir())) == 1
