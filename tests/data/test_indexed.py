"""Megatron's indexed format: written back byte for byte, read back exactly, refused where damaged."""

import hashlib
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from giantjax.data import indexed_writer
from giantjax.data.indexed import DTYPES, HEADER, MAGIC, TokenizerRecord, open_indexed, read_record, token_dtype, without_ending
from giantjax.data.indexed_writer import write_indexed
from giantjax.errors import InputError

GOLDEN = Path(__file__).parents[2].parent / "shared" / "data" / "megatron"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the files written by megatron-core are not on this machine")

INTEGERS = sorted(np.dtype(name).newbyteorder("<").str for name in DTYPES.values() if np.dtype(name).kind != "f")


def write_documents(prefix, documents, dtype, record=None):
    with write_indexed(str(prefix), record, np.dtype(dtype)) as writer:
        for sequences in documents:
            for ids in sequences:
                writer.append(np.array(ids, np.int64))
                writer.end_sequence()
            writer.end_document()


def write_raw(prefix, lengths, offsets, document_index, data=b"\0" * 64, code=1, magic=MAGIC, version=1):
    """An index as given, right or wrong."""
    index = HEADER.pack(magic, version, code, len(lengths), len(document_index))
    index += np.array(lengths, "<i4").tobytes() + np.array(offsets, "<i8").tobytes() + np.array(document_index, "<i8").tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(data)


@needs_golden
@pytest.mark.parametrize("name", ["state_union_text_document", "inaugural_bytes_uint8"])
def test_megatrons_files_are_written_back_byte_for_byte(tmp_path, name):
    read = open_indexed(str(GOLDEN / name))
    bounds = read.document_index
    documents = [[read.sequence(i) for i in range(bounds[d], bounds[d + 1])] for d in range(read.num_documents)]
    write_documents(tmp_path / name, documents, read.tokens.dtype)
    for ending in (".bin", ".idx"):
        assert (tmp_path / (name + ending)).read_bytes() == (GOLDEN / (name + ending)).read_bytes()


@needs_golden
def test_megatrons_tokens_are_read_as_megatron_reads_them():
    expected = json.loads((GOLDEN / "state_union_text_document.expected.json").read_text())
    read = open_indexed(str(GOLDEN / "state_union_text_document"))
    assert read.tokens.dtype.name == expected["dtype"] == token_dtype(50257).name
    assert (read.num_sequences, read.num_documents) == (expected["num_sequences"], expected["num_documents"])
    assert read.num_tokens == expected["total_tokens"] and read.starts is None and read.record is None
    assert read.lengths[:5].tolist() == expected["sequence_lengths_head"]
    assert read.document_index[:6].tolist() == expected["document_indices_head"]
    assert read.sequence(0)[:16].tolist() == expected["seq0_head"]
    assert read.sequence(64)[-8:].tolist() == expected["seq_last_tail"]
    assert read.sequence(3)[10:15].tolist() == expected["seq3_offset10_len5"]
    assert hashlib.sha256(read.read(0, read.num_tokens).tobytes()).hexdigest() == expected["sha256"][".bin"]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(INTEGERS))
def test_round_trip(data, dtype):
    limits = np.iinfo(dtype)
    ids = st.lists(st.integers(int(limits.min), int(limits.max)), max_size=6)
    documents = data.draw(st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=5))
    sequences = [ids for document in documents for ids in document]
    joined = [token for ids in sequences for token in ids]
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/corpus"
        if not joined:
            with pytest.raises(InputError, match="not a single token"):
                write_documents(prefix, documents, dtype)
            assert not list(Path(folder).iterdir())
            return
        write_documents(prefix, documents, dtype)
        read = open_indexed(prefix)
        assert [read.sequence(i).tolist() for i in range(read.num_sequences)] == sequences
        assert np.diff(read.document_index).tolist() == [len(document) for document in documents]
        assert read.tokens.dtype == np.dtype(dtype) and read.num_tokens == len(joined)
        start = data.draw(st.integers(0, len(joined)))
        stop = data.draw(st.integers(start, len(joined)))
        assert read.read(start, stop).tolist() == joined[start:stop]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=8), st.data())
def test_gaps_between_sequences_are_skipped(places, data):
    """Each sequence comes after a gap of so many tokens."""
    gaps, lengths = zip(*places, strict=True)
    ends = np.cumsum(np.array(places).sum(axis=1))
    offsets, total = ends - np.array(lengths), sum(lengths)
    stored = np.arange(int(ends[-1]) + 1, dtype="<u2")
    joined = np.concatenate([stored[o : o + n] for o, n in zip(offsets, lengths, strict=True)]).tolist()
    with tempfile.TemporaryDirectory() as folder:
        write_raw(f"{folder}/corpus", lengths, offsets * 2, [0, len(lengths)], stored.tobytes(), code=8)
        if total == 0:
            with pytest.raises(InputError, match="without a single token"):
                open_indexed(f"{folder}/corpus")
            return
        read = open_indexed(f"{folder}/corpus")
        assert (read.starts is None) == (sum(gaps) == 0)
        start = data.draw(st.integers(0, total))
        stop = data.draw(st.integers(start, total))
        assert read.read(start, stop).tolist() == joined[start:stop]


DAMAGED: dict[str, dict[str, Any]] = {
    "sequence 1 begins before": dict(lengths=[4, 4], offsets=[0, 3], document_index=[0, 2]),
    "sequence 1 ends after the 64 bytes": dict(lengths=[4, 61], offsets=[0, 4], document_index=[0, 2]),
    "sequence 1 begins outside": dict(lengths=[4, 4], offsets=[0, 65], document_index=[0, 2]),
    "sequence 0 begins outside": dict(lengths=[4], offsets=[-1], document_index=[0, 1]),
    "sequence 0 has a negative length": dict(lengths=[-4, 8], offsets=[0, 0], document_index=[0, 2]),
    "multiple of the 2 bytes": dict(lengths=[4], offsets=[1], document_index=[0, 1], code=8),
    "goes from 0 to 1": dict(lengths=[4, 4], offsets=[0, 4], document_index=[0, 1]),
    "goes from 1 to 2": dict(lengths=[4, 4], offsets=[0, 4], document_index=[1, 2]),
    "document index is missing": dict(lengths=[4], offsets=[0], document_index=[]),
    "document 1 ends before": dict(lengths=[4, 4], offsets=[0, 4], document_index=[0, 2, 1, 2]),
    "without a single token": dict(lengths=[], offsets=[], document_index=[0]),
    "does not begin with": dict(lengths=[4], offsets=[0], document_index=[0, 1], magic=b"PK\3\4" + b"\0" * 5),
    "version 7": dict(lengths=[4], offsets=[0], document_index=[0, 1], version=7),
    "codes are 1 to 8": dict(lengths=[4], offsets=[0], document_index=[0, 1], code=9),
    "holds float32, but token ids are integers": dict(lengths=[4], offsets=[0], document_index=[0, 1], code=7),
    "corpus.bin is empty": dict(lengths=[4], offsets=[0], document_index=[0, 1], data=b""),
}


@pytest.mark.parametrize("says", DAMAGED)
def test_damage_is_named(tmp_path, says):
    write_raw(tmp_path / "corpus", **DAMAGED[says])
    with pytest.raises(InputError, match=says) as refusal:
        open_indexed(str(tmp_path / "corpus"))
    assert str(tmp_path / "corpus") in str(refusal.value) and "\n" not in str(refusal.value)


def test_an_index_of_any_wrong_size_is_refused(tmp_path):
    write_raw(tmp_path / "corpus", [4, 4], [0, 4], [0, 1, 2])
    whole = (tmp_path / "corpus.idx").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "corpus.idx").write_bytes(whole[:size])
        with pytest.raises(InputError, match=r"corpus\.idx is (cut off|empty)"):
            open_indexed(str(tmp_path / "corpus"))
    (tmp_path / "corpus.idx").write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="goes on after its end"):
        open_indexed(str(tmp_path / "corpus"))
    # A count that no file could hold asks for no memory.
    (tmp_path / "corpus.idx").write_bytes(whole[:18] + struct.pack("<Q", 2**62) + whole[26:])
    with pytest.raises(InputError, match="cut off"):
        open_indexed(str(tmp_path / "corpus"))


def test_checks_look_at_every_piece(tmp_path, monkeypatch):
    monkeypatch.setattr("giantjax.data.indexed.PIECE", 3)
    monkeypatch.setattr("giantjax.data.indexed_writer.PIECE", 3)
    write_documents(tmp_path / "corpus", [[[1, 2]] * 2] * 4, "<u2")
    read = open_indexed(str(tmp_path / "corpus"))
    assert read.starts is None and read.num_tokens == 16 and read.offsets.tolist() == list(range(0, 32, 4))
    for at, value, says in ((34 + 4 * 8 + 8 * 6, 19, "sequence 6"), (34 + 12 * 8 + 8 * 3, 99, "document 3")):
        index = bytearray((tmp_path / "corpus.idx").read_bytes())
        index[at : at + 8] = struct.pack("<q", value)
        (tmp_path / "corpus.idx").write_bytes(index)
        with pytest.raises(InputError, match=says):
            open_indexed(str(tmp_path / "corpus"))


def test_a_missing_file_is_named(tmp_path):
    for missing in (".idx", ".bin"):
        write_raw(tmp_path / "corpus", [4], [0], [0, 1])
        (tmp_path / f"corpus{missing}").unlink()
        with pytest.raises(InputError, match=f"corpus{missing}: No such file"):
            open_indexed(str(tmp_path / "corpus"))


def test_nothing_is_left_of_a_pair_that_was_not_finished(tmp_path):
    with pytest.raises(KeyboardInterrupt), write_indexed(str(tmp_path / "corpus"), TokenizerRecord("bytes", 257, 256)) as writer:
        writer.append(np.arange(5))
        assert [path.name.partition(".bin")[0] for path in tmp_path.iterdir()] == ["corpus"]
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_index_appears_last_and_a_failed_renaming_leaves_nothing(tmp_path, monkeypatch):
    appeared, really_rename = [], os.rename

    def rename(source, target):
        appeared.append(Path(target).name)
        if target.endswith(".idx"):
            raise OSError(28, "No space left on device")
        really_rename(source, target)

    monkeypatch.setattr(indexed_writer.os, "rename", rename)
    with pytest.raises(InputError, match=r"cannot write .*corpus\.idx: No space left"):
        write_documents(tmp_path / "corpus", [[[1]]], "<u2", TokenizerRecord("bytes", 257, 256))
    assert appeared[:3] == ["corpus.bin", "corpus.json", "corpus.idx"] and not list(tmp_path.iterdir())


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
        with pytest.raises(InputError, match=r"cannot write .*corpus\.bin: File too large"):
            write_documents(tmp_path / "corpus", [[[7] * (1 << 20)]], "<u2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", [".bin", ".json", ".idx"])
def test_nothing_is_overwritten(tmp_path, ending):
    (tmp_path / f"corpus{ending}").write_text("precious")
    with pytest.raises(InputError, match=f"corpus{ending} exists already"):
        write_documents(tmp_path / "corpus", [[[1]]], "<u2")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_an_id_that_does_not_fit_is_refused(tmp_path):
    for token in (-1, 65536):
        with pytest.raises(InputError, match=f"token id {token} does not fit uint16"):
            write_documents(tmp_path / "corpus", [[[1, token]]], "<u2")


def test_a_document_too_long_for_an_int32_becomes_several_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed_writer, "LONGEST_SEQUENCE", 4)
    with write_indexed(str(tmp_path / "corpus"), dtype=np.dtype("u1")) as writer:
        for length in (10, 8):
            writer.append(np.arange(length))
            writer.end_document()
    read = open_indexed(str(tmp_path / "corpus"))
    assert read.lengths.tolist() == [4, 4, 2, 4, 4] and read.document_index.tolist() == [0, 3, 5] and read.num_tokens == 18


def test_the_record_comes_back_and_a_foreign_json_is_refused(tmp_path):
    prefix, record = str(tmp_path / "corpus"), TokenizerRecord("bytes", 257, 256)
    assert read_record(prefix) is None
    write_documents(prefix, [[[1]]], "<u2", record)
    assert open_indexed(prefix).record == record
    assert json.loads(Path(f"{prefix}.json").read_text()) == {"tokenizer": "bytes", "vocabulary_size": 257, "end_of_document": 256}
    for text, why in (
        ('{"text": "hello"}\n{"text": "world"}\n', "Extra data"),
        ("[1, 2]", "not a JSON object"),
        ("\0\xff", "value"),
        ('{"tokenizer": "bytes", "vocabulary_size": 257}', "end_of_document is missing"),
        ('{"tokenizer": "bytes", "vocabulary_size": "257", "end_of_document": 256}', "a whole number"),
        ('{"tokenizer": "bytes", "vocabulary_size": 256, "end_of_document": 256}', "below vocabulary_size, 256"),
        ("[" * 100_000, "too large"),
    ):
        Path(f"{prefix}.json").write_text(text)
        with pytest.raises(InputError, match=f"corpus.json is not the tokenizer record of .*{why}"):
            open_indexed(prefix)


def test_endings_may_be_written(tmp_path):
    write_documents(tmp_path / "corpus", [[[1]]], "<u2")
    assert {without_ending(f"{tmp_path}/corpus{ending}") for ending in ("", ".bin", ".idx")} == {f"{tmp_path}/corpus"}
    write_documents(tmp_path / "odd.bin", [[[1]]], "<u2")
    assert without_ending(f"{tmp_path}/odd.bin") == f"{tmp_path}/odd.bin"


def test_ids_are_stored_as_megatron_stores_them():
    assert [token_dtype(size).name for size in (257, 50257, 65536, 65537)] == ["uint16", "uint16", "uint16", "int32"]
