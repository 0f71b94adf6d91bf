"""What a run is trained and evaluated on, and in which portions."""

import re
from dataclasses import dataclass
from fractions import Fraction

from giantjax.errors import InputError
from giantjax.fields import at_least, check_types, is_number

NUMBER = re.compile(r"\d{1,30}(\.\d{1,30})?|\.\d{1,30}")
"""Plain decimals, which are exact as fractions."""


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from."""

    train: tuple[str, ...] = ()
    """PREFIX[:WEIGHT] ... of indexed pairs PREFIX.bin and PREFIX.idx; or stdlib, the source text of Python's own standard
    library, prepared on first use; or synthetic, random tokens to measure throughput. Several are blended in proportion to
    their weights, and without weights in proportion to their size."""
    validation: str | None = None
    """PREFIX of held-out data; stdlib brings its own and needs none."""
    split: str | None = None
    """Shares of every corpus, in whole documents and in its order, for training, validation and test, such as 969,30,1; None
    trains on all of them."""
    reset_positions: bool = False
    """Count positions from 0 again in each document of a sample."""
    reset_attention: bool = False
    """Let tokens attend only to their own document."""
    mask_document_ends: bool = False
    """Leave out of the loss what follows the end of a document: the first token of the next one."""
    length_warmup: tuple[str, ...] = ()
    """LENGTH:STEPS ...: so many steps on the first LENGTH tokens of each sample, in ascending order, before those of all
    model.sequence_length."""
    prefetch: int = 4
    """Global batches read ahead of the step."""

    def __post_init__(self) -> None:
        check_types(self, "data")
        at_least("data.prefetch", self.prefetch, 1)
        if self.split is not None and self.validation is not None:
            raise InputError(
                f"data.split is {self.split} and data.validation is {self.validation}; either the corpora are split or a corpus of its own "
                "is held out"
            )
        _ = self.corpora, self.shares, self.lengths

    @property
    def corpora(self) -> tuple[tuple[str, Fraction | None], ...]:
        """(PREFIX, weight) of each corpus; weights, where there are any, are exact and sum to 1."""
        found = [_weighted(entry) for entry in self.train]
        if len(found) == 1 and found[0][1] is not None:
            raise InputError(f"data.train is {self.train[0]!r}, but with one corpus a weight has no meaning; write {found[0][0]}")
        names = [prefix for prefix, _ in found]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"data.train names {twice} twice; give it once, with a weight")
        if len(names) > 1 and "synthetic" in names:
            raise InputError("data.train blends synthetic with other corpora, but random tokens stand alone")
        weights = [weight for _, weight in found if weight is not None]
        if len(weights) not in (0, len(found)):
            without = next(prefix for prefix, weight in found if weight is None)
            raise InputError(f"data.train gives weights to some corpora, but none to {without}; give one to each, or to none")
        return tuple((prefix, None if weight is None else weight / sum(weights)) for prefix, weight in found)

    @property
    def shares(self) -> tuple[Fraction, Fraction, Fraction] | None:
        """Of training, validation and test, which sum to 1."""
        if self.split is None:
            return None
        words = [word.strip() for word in self.split.split(",")]
        if len(words) > 3 or not all(NUMBER.fullmatch(word) for word in words) or Fraction(words[0]) == 0:
            raise InputError(
                f"data.split is {self.split!r}; it must be up to three numbers with commas, for training, validation and test, such as "
                "969,30,1, the first above 0"
            )
        train, validation, test = [Fraction(word) for word in words] + [Fraction(0)] * (3 - len(words))
        total = train + validation + test
        return train / total, validation / total, test / total

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(tokens of a sample, last step that takes so many) of each stage of the warm-up."""
        stages: list[tuple[int, int]] = []
        for entry in self.length_warmup:
            length, _, steps = entry.partition(":")
            if not (length.isdecimal() and steps.isdecimal() and int(length) and int(steps)):
                raise InputError(
                    f"data.length_warmup holds {entry!r}; it must be LENGTH:STEPS, two whole numbers above 0, such as 128:1000"
                )
            if stages and int(length) <= stages[-1][0]:
                raise InputError(f"data.length_warmup goes from {stages[-1][0]} to {length} tokens; its lengths must ascend")
            stages.append((int(length), int(steps) + (stages[-1][1] if stages else 0)))
        return tuple(stages)


def _weighted(entry: str) -> tuple[str, Fraction | None]:
    """(PREFIX, weight) of `PREFIX[:WEIGHT]`."""
    prefix, colon, weight = entry.rpartition(":")
    if not (colon and is_number(weight)):
        return entry, None
    if not NUMBER.fullmatch(weight) or Fraction(weight) == 0:
        raise InputError(f"data.train is {entry!r}; a weight is a plain decimal above 0, such as 0.7")
    return prefix, Fraction(weight)
