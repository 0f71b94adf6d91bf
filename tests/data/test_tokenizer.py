"""Bytes are ids: any text comes back, wherever it is cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giantjax.data.tokenizer import load_tokenizer
from giantjax.errors import InputError

BYTES = load_tokenizer("bytes")


@given(st.text())
def test_text_comes_back(text):
    ids = BYTES.encode(text)
    assert ids.dtype == np.int32 and BYTES.decode(ids) == text
    assert BYTES.decode([*ids, BYTES.end_of_document, BYTES.vocabulary_size + 70, -1]) == text


@given(st.binary(), st.integers(0, 100))
def test_pieces_of_a_text_are_pieces_of_its_ids(data, cut):
    pieces = np.concatenate([BYTES.encode(data[:cut]), BYTES.encode(data[cut:])])
    np.testing.assert_array_equal(pieces, BYTES.encode(data))
    assert pieces.tolist() == list(data)
    assert BYTES.decode(pieces) == data.decode(errors="replace")


def test_ids_lie_below_the_vocabulary_and_no_text_ends_a_document():
    ids = BYTES.encode(bytes(range(256)))
    assert ids.max() < BYTES.end_of_document < BYTES.vocabulary_size == 257
    assert load_tokenizer(BYTES.name).name == "bytes"


def test_arguments_that_are_not_utf8_keep_their_bytes():
    assert BYTES.encode(b"\xff!".decode("utf-8", "surrogateescape")).tolist() == [255, 33]


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match="no tokenizer 'byte'; this version has bytes; did you mean bytes"):
        load_tokenizer("byte")
