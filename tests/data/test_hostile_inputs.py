"""Hostile inputs of scripts/prepare_data.py: one sentence that names the file, exit code 2, nothing written; or text like any other."""

import gzip
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from giantjax.data import encode, inputs
from giantjax.data.indexed import open_indexed
from giantjax.data.inputs import zstd
from giantjax.data.tokenizer import load_recorded
from tests.test_refusals import Run, check_refused, run, snapshot  # noqa: F401 (run is a fixture)

MIB = 1 << 20
LINE = b'{"text": "some text"}\n'
TEXT = b"Some text, of more than one line.\nAnd so on.\n" * 50


class Hostile(NamedTuple):
    """Arguments after `prepare_data`, and what the refusal says; `--output new/p` where they have no other."""

    name: str
    arguments: str
    says: str


HOSTILE = (
    Hostile("empty", "empty.txt", "empty.txt is empty; leave it out"),
    Hostile("empty-compressed", "empty.txt.gz", "empty.txt.gz holds nothing"),
    Hostile("blank-lines", "blank.jsonl", "there is not a single token to write to new/p.bin"),
    Hostile("empty-texts", "emptytexts.jsonl", "there is not a single token"),
    Hostile("nothing-there", "nope.txt", "cannot read nope.txt: No such file or directory"),
    Hostile("no-permission-to-be-a-file", "folder", "folder is a folder; name the text files in it, such as folder/*.txt"),
    Hostile("pipe", "pipe", "pipe is no regular file"),
    Hostile("twice", "a.txt sub/../a.txt", "a.txt was given twice, the second time as sub/../a.txt"),
    Hostile("hard-link", "a.txt hard.txt", "a.txt was given twice, the second time as hard.txt"),
    Hostile("binary", "binary.txt", "binary.txt is no text: byte 1 of it is zero"),
    Hostile("binary-late", "a.txt late.txt", f"late.txt is no text: byte {len(TEXT) * 1000} of it is zero"),
    Hostile("utf16", "utf16.txt", "utf16.txt is no text: byte 2 of it is zero"),
    Hostile("bad-utf8", "latin.txt", "latin.txt is not UTF-8: byte 4 of it is 0xe9; convert it, or replace such bytes with --bad-utf8"),
    Hostile("bad-utf8-late", "latinlate.txt", f"byte {len(TEXT) * 1000} of it is 0xff"),
    Hostile("cut-character", "half.txt", "half.txt is not UTF-8: byte 1 of it is 0xe2"),
    Hostile("lines-bad-utf8", "latin.jsonl", "line 2 of latin.jsonl is not UTF-8: byte 10 of it is 0xff"),
    Hostile("lines-not-json", "nojson.jsonl", "line 2 of nojson.jsonl is not JSON (Expecting value at its character 0)"),
    Hostile("lines-cut-short", "cut.jsonl", "line 3 of cut.jsonl is not JSON (Unterminated string"),
    Hostile("lines-of-lists", "list.jsonl", "line 1 of list.jsonl is JSON, but not an object with the key text"),
    Hostile("lines-nested", "nested.jsonl", "line 1 of nested.jsonl cannot be read as JSON ("),
    Hostile("lines-pretty", "pretty.json", "line 1 of pretty.json is not JSON ("),
    Hostile("lines-binary", "binary.jsonl", "line 1 of binary.jsonl is not JSON ("),
    Hostile("no-key", "content.jsonl", "line 2 of content.jsonl has no key text (its keys: content, id); name the one that holds the text"),
    Hostile("wrong-key", "a.jsonl --json-key body", "line 1 of a.jsonl has no key body (its keys: text)"),
    Hostile("number-for-text", "number.jsonl", "line 1 of number.jsonl has no text at the key text, but 3"),
    Hostile("null-for-text", "null.jsonl", "line 1 of null.jsonl has no text at the key text, but null"),
    Hostile("long-line", "longline.jsonl", "longline.jsonl: line 2 is longer than 4 MiB; divide it"),
    Hostile("long-document", "longdoc.txt --tokenizer words", "longdoc.txt: a document that this tokenizer has to see whole is longer"),
    Hostile("gz-cut-short", "cut.txt.gz", "cut.txt.gz is cut short: its compressed content has no end"),
    Hostile("gz-damaged", "damaged.txt.gz", "damaged.txt.gz is damaged: "),
    Hostile("zst-cut-short", "cut.jsonl.zst", "cut.jsonl.zst is cut short: its compressed content has no end"),
    Hostile("zst-damaged", "damaged.txt.zst", "damaged.txt.zst is damaged: "),
    Hostile("output-exists", "a.txt --output old", "old.bin exists already; remove it, or choose another PREFIX"),
    Hostile("output-tokenizer-exists", "a.txt --output older", "older.tokenizer.model exists already"),
    Hostile("output-begun-otherwise", "a.txt --output begun", "begun.partial cannot be gone on from ("),
    Hostile("no-tokenizer", "a.txt --tokenizer nowhere/tokenizer.json", "there is no tokenizer 'nowhere/tokenizer.json', nor a file"),
    Hostile("no-kind", "a.txt --tokenizer gpt3:words", "there is no tokenizer 'gpt3:words', nor a file of that name"),
    Hostile("tokenizer-of-text", "a.txt --tokenizer huggingface:a.txt", "a.txt is not a Hugging Face tokenizer.json ("),
    Hostile("trained-too-small", "a.txt --tokenizer bpe:100", "--tokenizer is bpe:100; SIZE must be a whole number of at least 257"),
    Hostile("trained-on-bad-input", "a.txt latin.txt --tokenizer bpe:300", "latin.txt is not UTF-8: byte 4"),
    Hostile("no-end", "a.txt --tokenizer words --end-of-document END", "--end-of-document is END, but the vocabulary has no such token"),
    Hostile("end-of-text", "a.txt --tokenizer words --end-of-document some", "--end-of-document is some, but that token is ordinary text"),
    Hostile("end-of-bytes", "a.txt --end-of-document 7", "--end-of-document is 7, but the tokenizer bytes ends documents with 256"),
    Hostile("no-process", "a.txt --num-processes 0", "--num-processes is 0; it must be at least 1"),
    Hostile("no-format", "a.txt --format xml", "--format is 'xml'; it must be one of"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of the table, in the working directory."""
    files = {
        "a.txt": TEXT,
        "a.jsonl": LINE * 3,
        "empty.txt": b"",
        "empty.txt.gz": gzip.compress(b""),
        "blank.jsonl": b"\n \n\r\n",
        "emptytexts.jsonl": b'{"text": ""}\n' * 3,
        "binary.txt": b"\x7f\0\1\2",
        "late.txt": TEXT * 1000 + b"\0",
        "utf16.txt": "\ufeffabc".encode("utf-16-be"),
        "latin.txt": "caf\xe9\xe9".encode("latin-1").replace(b"f", b"ff"),
        "latinlate.txt": TEXT * 1000 + b"\xff",
        "half.txt": b"a\xe2\x82",
        "latin.jsonl": LINE + b'{"text": "\xff"}\n',
        "nojson.jsonl": LINE + b"some text\n" + LINE,
        "cut.jsonl": LINE + LINE + LINE[:15],
        "list.jsonl": b'["some text"]\n',
        "nested.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
        "pretty.json": json.dumps({"text": "some text"}, indent=1).encode(),
        "binary.jsonl": bytes(range(256)),
        "content.jsonl": LINE + b'{"content": "some text", "id": 7}\n',
        "number.jsonl": b'{"text": 3}\n',
        "null.jsonl": b'{"text": null}\n',
        "longline.jsonl": LINE + b'{"text": "' + b"x" * (5 * MIB) + b'"}\n',
        "longdoc.txt": TEXT * 3000,
        "cut.txt.gz": gzip.compress(os.urandom(1000).hex().encode())[:-30],
        "damaged.txt.gz": b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + b"\xff" * 50,
        "cut.jsonl.zst": zstd.compress(os.urandom(10_000).hex().encode())[:-100],
        "damaged.txt.zst": b"\x28\xb5\x2f\xfd" + b"\xff" * 50,
        "old.bin": b"precious",
        "older.tokenizer.model": b"precious",
        "begun.partial/state.json": b"{}",
        "begun.partial/lock": b"",
        "words/vocab.txt": "\n".join(["[UNK]", "[SEP]", "some", "text", *map(chr, range(33, 127))]).encode(),
        "folder/inner.txt": TEXT,
        "sub/inner.txt": TEXT,
    }
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    os.mkfifo("pipe")
    os.link("a.txt", "hard.txt")
    # As low as a test can afford; the sentence is the same.
    monkeypatch.setattr(inputs, "LONGEST", 4 * MIB)
    monkeypatch.setattr(encode, "LONGEST", 4 * MIB)
    return tmp_path


def test_there_are_cases_enough() -> None:
    assert len(HOSTILE) >= 30 and len({case.name for case in HOSTILE}) == len(HOSTILE)


@pytest.mark.parametrize("case", HOSTILE, ids=[case.name for case in HOSTILE])
def test_it_is_refused_and_nothing_is_written(case: Hostile, folder: Path, run: Run) -> None:  # noqa: F811
    before = snapshot(folder)
    check_refused(run(f"prepare_data {case.arguments}{'' if '--output' in case.arguments else ' --output new/p'}"), case.says)
    assert snapshot(folder) == before


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "bpe:300"])
def test_names_of_special_tokens_in_a_text_are_text(tokenizer: str, folder: Path, run: Run) -> None:  # noqa: F811
    texts = ["<|endoftext|>", "[SEP] some [UNK] text", "</s><s>", "a<|endoftext|>b"]
    Path("special.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert run(f"prepare_data special.jsonl --output p --tokenizer {tokenizer}").code == 0
    read = open_indexed("p")
    assert read.num_documents == len(texts) and read.record is not None
    end = read.record.end_of_document
    assert [read.sequence(i).tolist().count(end) for i in range(len(texts))] == [1] * len(texts)
    loaded = load_recorded(read.record, "p.tokenizer")
    found = [loaded.decode(read.sequence(i)).replace(" ", "") for i in range(len(texts))]
    # Letters that this WordPiece vocabulary does not hold as parts of a word are unknown to it.
    assert tokenizer == "words" or found == [text.replace(" ", "") for text in texts]
