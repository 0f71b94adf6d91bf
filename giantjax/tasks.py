"""Questions to a model, as lm-evaluation-harness has them: a text whose last word is to be found, or choices to be weighed."""

import json
from typing import Any, Literal, NamedTuple

from giantjax.data.tokenizer import Tokenizer
from giantjax.errors import InputError
from giantjax.json_lines import read_lines

FORMS = '{"text": ...}, whose last word is asked for, or {"query": ..., "choices": [...], "gold": NUMBER}'


class Request(NamedTuple):
    """How likely is a continuation?"""

    context: str
    continuation: str


class Question(NamedTuple):
    """One line of a file."""

    line: int
    requests: tuple[Request, ...]
    """One for each choice; the only one, where the last word is asked for."""
    gold: int
    """Number of the right choice."""
    lengths: tuple[int, ...]
    """Characters of each choice."""


class Task(NamedTuple):
    """All questions of a file."""

    path: str
    kind: Literal["last_word", "multiple_choice"]
    questions: list[Question]


class Row(NamedTuple):
    """A request as tokens."""

    ids: list[int]
    num_scored: int
    """Ids at the end that are the continuation."""


def read_task(option: str, path: str) -> Task:
    """The questions of a file of JSON lines, all of one form; other fields than those of its form are left alone.

    Raises:
        InputError: it cannot be read, or a line is not of that form.
    """
    questions, kinds = [], []
    for number, line in read_lines(option, path):
        where = f"{option} {path} line {number}"
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is not JSON ({error}); each line is {FORMS}") from error
        if not isinstance(document, dict):
            raise InputError(f"{where} is not a JSON object; each line is {FORMS}")
        if {"query", "choices", "gold"} <= document.keys():
            kinds.append("multiple_choice")
            questions.append(_multiple_choice(where, number, document))
        elif "text" in document and not {"choices", "query", "gold"} & document.keys():
            kinds.append("last_word")
            questions.append(_last_word(where, number, document))
        else:
            names = ", ".join(map(str, document)) or "no fields at all"
            raise InputError(f"{where} has {names[:200]}; each line is {FORMS}")
        if kinds[-1] != kinds[0]:
            raise InputError(f"{where} is of another form than line {questions[0].line}; put them into files of their own")
    return Task(path, kinds[0], questions)  # type: ignore[arg-type]


def _last_word(where: str, number: int, document: dict[str, Any]) -> Question:
    text = document["text"]
    if not isinstance(text, str):
        raise InputError(f"{where}: text is {text!r:.80}; it must be a string")
    context, _, word = text.rstrip().rpartition(" ")
    if not context.strip():
        raise InputError(f"{where}: text is {text!r:.80}; it must have two words at least, of which the last is asked for")
    return Question(number, (Request(context, f" {word}"),), 0, (len(word),))


def _multiple_choice(where: str, number: int, document: dict[str, Any]) -> Question:
    query, choices, gold = (document[name] for name in ("query", "choices", "gold"))
    if not isinstance(query, str):
        raise InputError(f"{where}: query is {query!r:.80}; it must be a string")
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(choice, str) and choice for choice in choices):
        raise InputError(f"{where}: choices are {choices!r:.80}; they must be a list of two strings or more, none of them empty")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise InputError(f"{where}: gold is {gold!r:.80}; it must be the number of a choice, from 0 to {len(choices) - 1}")
    # A space stands between question and answer, as the harness' target_delimiter has it, and is no part of the length.
    return Question(number, tuple(Request(query, f" {choice}") for choice in choices), gold, tuple(map(len, choices)))


def encode_task(task: Task, tokenizer: Tokenizer, sequence_length: int) -> list[Row]:
    """The requests of all questions in order, cut off at their begin where they are longer than the model sees.

    Raises:
        InputError: a continuation alone is longer than that.
    """
    rows = []
    for question in task.questions:
        for request in question.requests:
            row = encode_request(request, tokenizer)
            if row.num_scored > sequence_length:
                raise InputError(
                    f"{task.path} line {question.line}: {request.continuation[:40]!r}... has {row.num_scored} tokens, more than "
                    f"model.sequence_length, {sequence_length}"
                )
            rows.append(Row(row.ids[-(sequence_length + 1) :], row.num_scored))
    return rows


def encode_request(request: Request, tokenizer: Tokenizer) -> Row:
    """Both parts as one text, for tokens may reach over the seam; those after as many as the context has alone are the continuation.

    Spaces at the end of the context belong to the continuation, for tokens begin with them. Where there is no context an end of
    document stands for it.
    """
    context = request.context.rstrip()
    before = tokenizer.encode(context).tolist()
    ids = tokenizer.encode(context + request.context[len(context) :] + request.continuation).tolist()
    num_scored = max(len(ids) - len(before), 1)
    return Row(ids if before else [tokenizer.end_of_document, *ids], num_scored)
