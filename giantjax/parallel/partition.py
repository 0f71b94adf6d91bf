"""How the blocks of a model are dealt to pipeline stages: the words of `pipeline.partition`, and what they come to. No jax.

What is dealt to is a part: a stage, or where stages hold several chunks, a chunk of a stage. Parts are in the order in which the
model runs through them: the first chunk of every stage, then the second of every stage, and so on.
"""

import itertools
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from giantjax.errors import InputError, did_you_mean

BLOCK = "block"
"""The kind of every block of a model that has one kind."""
MEGATRON_BLOCKS = ("TransformerLayer", "ParallelTransformerLayer", "ParallelTransformerLayerPipe", "ParallelTransformerLayerPiped")
"""What that kind is called in Megatron-LM and veGiantModel, for `type:REGEX`."""
ENTRIES_BEFORE = 3
"""Pipeline entries that veGiantModel's GPTs have before the blocks: batch or cast, embedding, transposition."""
ENTRIES_AFTER = (3, 4)
"""And after them: transposition, LayerNorm, logits, and in half precision a cast."""
FORMS = ("uniform", "parameters", "profile", "type:REGEX", "manual:COUNT,COUNT,...", "manual:N:BOUNDARY,BOUNDARY,...")


class Method(NamedTuple):
    """`pipeline.partition`, read; made by `read_partition`."""

    name: Literal["uniform", "parameters", "profile", "type", "manual"]
    regex: str = ""
    numbers: tuple[int, ...] = ()
    """Blocks of each part; or under `total` boundaries, as veGiantModel has them."""
    total: int | None = None
    """Of what the boundaries are of: blocks, or pipeline entries."""


class Weights(NamedTuple):
    """What parts are to have equal shares of, in whole units."""

    blocks: tuple[int, ...]
    """Of each block."""
    first: int = 0
    """Of what the first part has besides."""
    last: int = 0
    """Of what the last part has besides."""


def read_partition(text: str) -> Method:
    """What `pipeline.partition` says, before it is held against a model.

    Raises:
        InputError: it says nothing that there is.
    """
    name, _, rest = text.partition(":")
    if text in ("uniform", "parameters", "profile"):
        return Method(text)  # type: ignore[arg-type]
    if name == "type" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise InputError(
                f"pipeline.partition is {text!r}, but {rest!r} is no regular expression: {error}; such as type:transformer"
            ) from error
        return Method("type", regex=rest)
    if re.fullmatch(r"manual:\d+(,\d+)*", text):
        return Method("manual", numbers=_numbers(rest))
    if re.fullmatch(r"manual:\d+:\d+(,\d+)*", text):
        total, _, boundaries = rest.partition(":")
        return Method("manual", numbers=_numbers(boundaries), total=int(total))
    hint = f"; did you mean manual:{text}?" if re.fullmatch(r"\d+(,\d+)*", text) else did_you_mean(text, FORMS)
    raise InputError(f"pipeline.partition is {text!r}; it must be {', '.join(FORMS[:-1])} or {FORMS[-1]}{hint}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def counts_of(text: str, kinds: Sequence[str], num_parts: int, weights: Weights | None = None) -> tuple[int, ...]:
    """How many blocks each part holds.

    `uniform` gives the first parts one more where the blocks do not divide. `parameters` and `profile` divide `weights`, which are
    counts of parameters or measured times, so that the largest part is as small as can be; `type:REGEX` divides the blocks
    of matching kinds so. `manual` says how many blocks each part holds, `manual:10,10,10,10`; or in veGiantModel's words of
    how many, and where each part begins and the last ends, `manual:40:0,10,20,30,40`. There, what is counted is blocks or the
    entries of its pipeline, whichever the number is that of.

    Args:
        text: `pipeline.partition`.
        kinds: the kind of each block, in order.
        num_parts: how many to deal to.
        weights: what `parameters` divides, or `profile` once it is measured; None takes blocks as alike.

    Raises:
        InputError: the blocks cannot be dealt so; the sentence names what could be.
    """
    method, number = read_partition(text), len(kinds)
    if number < num_parts:
        raise InputError(f"mesh.pipe x pipeline.num_chunks is {num_parts}, but the model has {number} blocks; each part holds at least one")
    if method.name == "manual":
        return _manual(text, method, number, num_parts)
    if method.name == "uniform":
        return _uniform(number, num_parts)
    if method.name == "type":
        weights = Weights(tuple(int(_matches(method.regex, kind)) for kind in kinds))
        if not any(weights.blocks):
            raise InputError(f"pipeline.partition is {text!r}, which matches no block of the model; its blocks are called {_called(kinds)}")
    return balanced(weights or Weights((1,) * number), num_parts)


def said(text: str, counts: Sequence[int]) -> str:
    """A partition in words, for the start of a run."""
    method, total = read_partition(text), sum(counts)
    counted = ""
    if method.total is not None:
        counted = (
            ", counting blocks" if method.total == total else f", counting pipeline entries, {ENTRIES_BEFORE} of them before the blocks"
        )
    return f"partition {text}{counted}: {', '.join(map(str, counts))} layers"


def layer_table(counts: Sequence[int], num_stages: int) -> Int[np.ndarray, "S L"]:
    """Which layers each stage holds, chunk after chunk, all chunks of one length; -1 pads those that hold fewer."""
    num_chunks = len(counts) // num_stages
    table = np.full((num_chunks * num_stages, max(counts)), -1, np.int32)
    for part, (count, end) in enumerate(zip(counts, itertools.accumulate(counts), strict=True)):
        table[part, :count] = np.arange(end - count, end)
    return table.reshape(num_chunks, num_stages, -1).transpose(1, 0, 2).reshape(num_stages, -1)


def held(table: Int[np.ndarray, "S L"], num_chunks: int) -> tuple[int, ...]:
    """How many blocks each part holds, by a layer table."""
    return tuple((table.reshape(len(table), num_chunks, -1) >= 0).sum(-1).T.ravel().tolist())


def balanced(weights: Weights, num_parts: int) -> tuple[int, ...]:
    """How many blocks each part holds where the heaviest is as light as can be; each holds at least one.

    Of such partitions the one whose parts are most alike (least sum of squares), and of those one that gives more to the first.
    """
    ends = np.concatenate([[0], np.cumsum(weights.blocks, dtype=np.float64)])
    share = ends[None, :] - ends[:, None]  # of blocks [row, column)
    parts = [share + (part == 0) * weights.first + (part == num_parts - 1) * weights.last for part in range(num_parts)]
    heaviest = _fold(parts, np.maximum)[0][0, 0]
    squares = [np.where(part > heaviest * (1 + 1e-12), np.inf, np.square(part / (heaviest or 1))) for part in parts]
    counts, first = [], 0
    for choice in _fold(squares, np.add)[1]:
        counts.append(int(choice[first]))
        first += counts[-1]
    return tuple(counts)


def _fold(parts: list[Float[np.ndarray, "N N"]], join: np.ufunc) -> tuple[Float[np.ndarray, "P N"], Int[np.ndarray, "P N"]]:
    """The least that parts p.. of blocks n.. come to, and how many blocks part p takes for that.

    `parts` has what part p comes to with the blocks [n, m), and `join` what two parts come to together.
    """
    number = len(parts[0])
    blocks = np.arange(number)[None, :] > np.arange(number)[:, None]
    after = np.where(np.arange(number) == number - 1, 0, np.inf)
    least, taken = [], []
    for part in reversed(parts):
        cost = np.where(blocks, join(part, after[None, :]), np.inf)
        after = cost.min(axis=1)
        # The last of those that are equal but for rounding.
        good = cost <= (after + np.abs(after) * 1e-9)[:, None]
        taken.append(number - 1 - np.argmax(good[:, ::-1], axis=1) - np.arange(number))
        least.append(after)
    return np.stack(least[::-1]), np.stack(taken[::-1])


def _uniform(number: int, num_parts: int) -> tuple[int, ...]:
    size, more = divmod(number, num_parts)
    return tuple(size + (part < more) for part in range(num_parts))


def _manual(text: str, method: Method, number: int, num_parts: int) -> tuple[int, ...]:
    wrong, even = f"pipeline.partition is {text}", _uniform(number, num_parts)
    if method.total is None:
        example, counts = f"such as manual:{_listed(even)}", method.numbers
        if len(counts) != num_parts:
            raise InputError(f"{wrong}, {len(counts)} counts, but mesh.pipe x pipeline.num_chunks is {num_parts}; {example}")
        if sum(counts) != number:
            raise InputError(f"{wrong}, {sum(counts)} layers in all, but the model has {number}; {example}")
    else:
        bounds = method.numbers
        lead = 0 if method.total == number else ENTRIES_BEFORE
        entries = [number + ENTRIES_BEFORE + after for after in ENTRIES_AFTER]
        ends = [0, *itertools.accumulate(even)]
        inner = [lead + end for end in ends[1:-1]]
        example = f"such as manual:{method.total}:{_listed([0, *inner, method.total])}"
        if method.total not in (number, *entries):
            raise InputError(
                f"{wrong}, but the model has {number} blocks, which are {entries[0]} pipeline entries of veGiantModel or, with a cast at "
                f"the end, {entries[1]}; such as manual:{number}:{_listed(ends)}"
            )
        if len(bounds) != num_parts + 1:
            raise InputError(f"{wrong}, {len(bounds)} boundaries, but mesh.pipe x pipeline.num_chunks is {num_parts}, 1 too few; {example}")
        if bounds[0] != 0 or bounds[-1] != method.total or list(bounds) != sorted(bounds):
            raise InputError(f"{wrong}; boundaries rise from 0 to {method.total}, {example}")
        inside = np.clip(np.array(bounds) - lead, 0, number)
        counts = tuple(int(count) for count in np.diff(inside))
    if 0 in counts:
        raise InputError(f"{wrong}, which leaves part {counts.index(0)} without a block; each holds at least one, {example}")
    return counts


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _names(kind: str) -> tuple[str, ...]:
    return (kind, *MEGATRON_BLOCKS) if kind == BLOCK else (kind,)


def _matches(regex: str, kind: str) -> bool:
    return any(re.search(regex, name, re.IGNORECASE) for name in _names(kind))


def _called(kinds: Sequence[str]) -> str:
    return " or ".join(name for kind in dict.fromkeys(kinds) for name in _names(kind))
