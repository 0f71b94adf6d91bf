"""Questions: what a file of them means, in tokens."""

import json
import re

import pytest

from giantjax.data.prepare import prepare
from giantjax.data.tokenizer import ByteTokenizer, load_tokenizer
from giantjax.errors import InputError
from giantjax.tasks import Request, encode_request, encode_task, read_task


def write(path, *lines) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def test_the_last_word_is_asked_for(tmp_path):
    path = write(tmp_path / "words", {"text": "one two  three. "}, "", {"text": "a b", "id": 3})
    task = read_task("--tasks", path)
    assert (task.kind, [question.line for question in task.questions]) == ("last_word", [1, 3])
    assert [question.requests for question in task.questions] == [(Request("one two ", " three."),), (Request("a", " b"),)]


def test_choices_follow_the_query_after_a_space(tmp_path):
    path = write(tmp_path / "choices", {"query": "Q: x\nA:", "choices": ["yes", "nöö"], "gold": 1, "label": "1", "text": "left alone"})
    [question] = read_task("--tasks", path).questions
    assert question.requests == (Request("Q: x\nA:", " yes"), Request("Q: x\nA:", " nöö"))
    assert (question.gold, question.lengths) == (1, (3, 3))


WRONG = {
    "no-json": (["{"], "line 1 is not JSON"),
    "a-list": (["[1]"], "line 1 is not a JSON object"),
    "other-fields": ([{"text": "a b"}, {"ctx": "a", "endings": ["b"]}], 'line 2 has ctx, endings; each line is {"text": ...}'),
    "no-fields": ([{}], "line 1 has no fields at all"),
    "half": ([{"query": "a", "choices": ["b", "c"]}], "line 1 has query, choices; each line is"),
    "mixed": ([{"text": "a b"}, {"query": "a", "choices": ["b", "c"], "gold": 0}], "line 2 is of another form than line 1"),
    "text-number": ([{"text": 3}], "text is 3; it must be a string"),
    "one-word": ([{"text": " word "}], "text is ' word '; it must have two words at least"),
    "query-number": ([{"query": 3, "choices": ["b", "c"], "gold": 0}], "query is 3; it must be a string"),
    "one-choice": ([{"query": "a", "choices": ["b"], "gold": 0}], "choices are ['b']; they must be a list of two strings or more"),
    "empty-choice": ([{"query": "a", "choices": ["b", ""], "gold": 0}], "choices are ['b', '']; they must be"),
    "gold-too-large": ([{"query": "a", "choices": ["b", "c"], "gold": 2}], "gold is 2; it must be the number of a choice, from 0 to 1"),
    "gold-letter": ([{"query": "a", "choices": ["b", "c"], "gold": "A"}], "gold is 'A'; it must be the number"),
    "gold-boolean": ([{"query": "a", "choices": ["b", "c"], "gold": True}], "gold is True; it must be the number"),
    "blank": (["", " "], "holds nothing but blank lines"),
}


@pytest.mark.parametrize(("lines", "says"), WRONG.values(), ids=WRONG)
def test_other_forms_are_refused(lines, says, tmp_path):
    with pytest.raises(InputError, match=re.escape(says)):
        read_task("--tasks", write(tmp_path / "task", *lines))


def test_tokens_of_a_request(tmp_path):
    tokenizer = ByteTokenizer()
    assert encode_request(Request("ab", " c"), tokenizer) == ([*b"ab c"], 2)
    assert encode_request(Request("ab ", " c"), tokenizer) == ([*b"ab  c"], 3)
    assert encode_request(Request("", " c"), tokenizer) == ([256, *b" c"], 2)
    # A trained vocabulary has words with the space before them.
    (tmp_path / "text").write_text("a cat and a cat and a hat. " * 50)
    assert prepare([str(tmp_path / "text")], str(tmp_path / "corpus"), "bpe:300") is not None
    trained = load_tokenizer(str(tmp_path / "corpus.tokenizer.json"))
    for context in ("a cat and", "a cat and "):
        ids, num_scored = encode_request(Request(context, "" if context[-1] == " " else " "), trained)
        assert trained.decode(ids[: len(ids) - num_scored]) == "a cat and"
    ids, num_scored = encode_request(Request("a cat and", " a hat."), trained)
    assert trained.decode(ids[-num_scored:]) == " a hat." and trained.decode(ids) == "a cat and a hat."


def test_long_contexts_lose_their_begin_and_long_continuations_are_refused(tmp_path):
    task = read_task("--tasks", write(tmp_path / "long", {"text": "a long context and a word"}))
    [row] = encode_task(task, ByteTokenizer(), 8)
    assert row == ([*b"nd a word"], 5)
    with pytest.raises(InputError, match=r"long line 1: ' word'\.\.\. has 5 tokens, more than model\.sequence_length, 4"):
        encode_task(task, ByteTokenizer(), 4)
