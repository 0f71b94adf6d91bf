"""How good a trained model is: on a corpus, and by questions."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from giantjax.data.indexed import IndexedDataset
from giantjax.data.loader import Batch, DocumentRules, every_token, rules_of
from giantjax.data.tokenizer import Tokenizer
from giantjax.errors import InputError
from giantjax.score import Scorer, scores
from giantjax.tasks import Row, Task
from giantjax.training.restore import Trained

SHORTEST = 32
"""Positions of the shortest batch of questions: they are filled up to this times a power of two, and each such length is compiled once."""
DECODED = 1 << 20
"""Tokens decoded in one go to count their bytes."""


def evaluate_corpus(
    scorer: Scorer, corpus: IndexedDataset, tokenizer: Tokenizer | None, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """Loss in nats a token, its perplexity, bits a byte and next-token accuracy over every token of a corpus but its first.

    What documents mean to each other, and whether the first token of one counts, is as in the training of the run. Bytes are those
    of the text of what counts, so an end of document adds to the loss and not to the bytes; without a tokenizer there are none.

    Args:
        scorer: from `build_scorer`.
        corpus: with at least two tokens.
        tokenizer: of its ids.
        advance: told how many more tokens are done.

    Raises:
        InputError: no token of it counts.
    """
    config = scorer.trained.config
    rules, sizes = rules_of(config.data), config.model
    batches = every_token(
        corpus,
        sequence_length=sizes.sequence_length,
        batch_size=scorer.batch_size,
        vocabulary_size=sizes.vocabulary_size,
        rules=rules,
    )
    num_tokens = 0

    def count(number: int) -> None:
        nonlocal num_tokens
        num_tokens += number
        advance(number)

    total, hits = scores(scorer, batches, count).sum(axis=0).tolist()
    if num_tokens == 0:
        raise InputError(f"no token of {corpus.name} counts: each is the first of its document, which data.mask_document_ends leaves out")
    num_bytes = count_bytes(corpus, tokenizer, rules) if tokenizer else None
    loss = total / num_tokens
    return {
        "loss": loss,
        "perplexity": _perplexity(loss),
        "bits_per_byte": total / math.log(2) / num_bytes if num_bytes else None,
        "accuracy": hits / num_tokens,
        "num_tokens": num_tokens,
        "num_bytes": num_bytes,
    }


def count_bytes(corpus: IndexedDataset, tokenizer: Tokenizer, rules: DocumentRules) -> int:
    """UTF-8 bytes of the text of all tokens that count as targets; documents of over a million tokens are decoded in parts."""
    total = 0
    for document in range(corpus.num_documents):
        start, stop = corpus.document_start(document), corpus.document_start(document + 1)
        start += int(start == 0 or rules.mask_document_ends)
        for first in range(start, stop, DECODED):
            total += len(tokenizer.decode(corpus.read(first, min(first + DECODED, stop))).encode())
    return total


def _perplexity(loss: float) -> float:
    # Of any text that is no noise the loss is below ln V; beyond 700 a float ends.
    return math.exp(min(loss, 700))


def evaluate_task(scorer: Scorer, task: Task, rows: Sequence[Row], advance: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Accuracy of a file of questions, as lm-evaluation-harness defines it.

    Where the last word is asked for: `acc`, of how many each of its tokens is the likeliest, and the `perplexity` of last words.
    Of choices: `acc`, of how many the right one is the likeliest, and `acc_norm`, the same of the log-likelihood over the choice's
    number of characters. Each with its standard error.

    Args:
        scorer: from `build_scorer`.
        task: the questions.
        rows: their requests, from `encode_task`.
        advance: told how many more tokens are done.
    """
    found = score_rows(scorer, rows, advance)
    result: dict[str, Any] = {"file": task.path, "kind": task.kind, "num_questions": len(task.questions)}
    if task.kind == "last_word":
        right = found[:, 1] == [row.num_scored for row in rows]
        return result | _accuracy("acc", right) | {"perplexity": _perplexity(float(found[:, 0].mean()))}
    acc, acc_norm, first = [], [], 0
    for question in task.questions:
        losses = found[first : first + len(question.requests), 0]
        first += len(question.requests)
        acc.append(int(np.argmin(losses)) == question.gold)
        acc_norm.append(int(np.argmin(losses / question.lengths)) == question.gold)
    return result | _accuracy("acc", np.array(acc)) | _accuracy("acc_norm", np.array(acc_norm))


def _accuracy(name: str, right: np.ndarray) -> dict[str, float]:
    mean = float(right.mean())
    return {name: mean, f"{name}_stderr": math.sqrt(mean * (1 - mean) / max(len(right) - 1, 1))}


def score_rows(scorer: Scorer, rows: Sequence[Row], advance: Callable[[int], None] = lambda _: None) -> Float[np.ndarray, "N 2"]:
    """(-log-likelihood in nats, tokens that were the likeliest) of each row's continuation."""
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].ids))
    groups = [order[first : first + scorer.batch_size] for first in range(0, len(order), scorer.batch_size)]
    found = scores(scorer, (_batch_of([rows[number] for number in group], scorer) for group in groups), advance)
    result = np.empty((len(rows), 2))
    for place, group in enumerate(groups):
        result[group] = found[place * scorer.batch_size :][: len(group)]
    return result


def _batch_of(rows: Sequence[Row], scorer: Scorer) -> Batch:
    length = _filled_length(max(len(row.ids) for row in rows) - 1, scorer.trained)
    shape = (scorer.batch_size, length)
    tokens, targets, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for place, (ids, num_scored) in enumerate(rows):
        used = len(ids) - 1
        tokens[place, :used], targets[place, :used] = ids[:-1], ids[1:]
        mask[place, used - num_scored : used] = 1
    return {"tokens": tokens, "targets": targets, "loss_mask": mask}


def _filled_length(longest: int, trained: Trained) -> int:
    """Positions of a batch: few of many lengths, each divided by the devices that share them."""
    length, most = SHORTEST, trained.config.model.sequence_length
    while length < longest:
        length *= 2
    return length if length < most and length % trained.layout.mesh.shape["tensor"] == 0 else most
