"""Text by tokens: what streams out is the text, whole characters at a time, and nothing of a stop string."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from giantjax.continuation import Continuation
from giantjax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

END = 256
MANY = settings(max_examples=200, deadline=None)


class PairTokenizer(ByteTokenizer):
    """Ids above 256 are two bytes, so that a token may hold a stop string's begin or end, or two halves of characters."""

    def decode(self, ids):
        return b"".join(bytes(divmod(token - 257, 256)) if token > END else bytes([token])[: token < END] for token in ids).decode(
            "utf-8", "replace"
        )


def pairs(data: bytes, cuts: list[bool]) -> list[int]:
    """Ids of bytes, some of them two together."""
    ids, place = [], 0
    for together in cuts + [False] * len(data):
        if place >= len(data):
            break
        two = together and place + 1 < len(data)
        ids.append(257 + data[place] * 256 + data[place + 1] if two else data[place])
        place += 1 + two
    return ids


def streamed(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], max_tokens: int, stops: tuple[str, ...] = ()
) -> tuple[str, list[str], Continuation]:
    text = Continuation(tokenizer, prompt, max_tokens, stops)
    pieces = []
    for token in ids:
        if text.ended_by:
            break
        pieces.append(text.add(token))
    return text.prompt_text, pieces, text


@MANY
@given(st.binary(max_size=12), st.binary(max_size=24), st.lists(st.booleans(), max_size=24))
def test_pieces_are_the_text(prompt, data, cuts):
    ids = pairs(data, cuts)
    begin, pieces, text = streamed(PairTokenizer(), list(prompt), [*ids, END], 100)
    assert begin + "".join(pieces) == (prompt + data).decode("utf-8", "replace")
    assert "".join(pieces) == text.text
    assert (text.ended_by, text.num_tokens) == ("document", len(ids))


@MANY
@given(st.text(max_size=12), st.lists(st.booleans(), max_size=40))
def test_no_piece_has_a_part_of_a_character(written, cuts):
    ids = pairs(written.encode(), cuts)
    _, pieces, _ = streamed(PairTokenizer(), [97], [*ids, END], 100)
    assert "".join(pieces) == written


@MANY
@given(st.text("abc", max_size=16), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.booleans(), max_size=16))
@example("aababc", ["abc", "babcc"], [True, True, True])
def test_stop_strings_as_when_looked_for_character_by_character(written, stops, cuts):
    wanted, by = written, "document"
    for end in range(len(written) + 1):
        if ends := [stop for stop in stops if written[:end].endswith(stop)]:
            wanted, by = written[: end - max(map(len, ends))], "stop"
            break
    _, pieces, text = streamed(PairTokenizer(), list(b"abc"), [*pairs(written.encode(), cuts), END], 100, tuple(stops))
    assert "".join(pieces) == text.text == wanted
    assert text.ended_by == by


def test_what_may_become_a_stop_string_waits():
    _, pieces, _ = streamed(ByteTokenizer(), [], [*b"ab\nc\n\nd"], 100, ("\n\nd",))
    assert pieces == ["a", "b", "", "\nc", "", "", ""]


def test_a_stop_string_in_the_prompt_does_not_count():
    begin, pieces, text = streamed(ByteTokenizer(), [*b"a."], [*b"b."], 100, (".",))
    assert (begin, "".join(pieces), text.ended_by, text.num_tokens) == ("a.", "b", "stop", 2)


def test_max_tokens_ends_with_what_waits():
    _, pieces, text = streamed(ByteTokenizer(), [], [*"aé".encode()[:2], 98], 2, ("aX",))
    assert pieces == ["", "a\N{REPLACEMENT CHARACTER}"]
    assert (text.ended_by, text.num_tokens) == ("max_tokens", 2)


def test_a_trained_vocabulary_streams_what_it_decodes(tmp_path, shared):
    tokenizer = load_tokenizer(f"gpt2:{shared / 'data' / 'gpt2-bpe'}")
    written = "Ünïcode — 漢字 and 🙂🙂, spaced  out\n\tdef f(x):"
    ids = tokenizer.encode(written).tolist()
    begin, pieces, _ = streamed(tokenizer, ids[:3], [*ids[3:], tokenizer.end_of_document], 1000)
    assert begin + "".join(pieces) == written and all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
