"""Text that grows by tokens: which of it is certain, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Literal

from giantjax.data.tokenizer import Tokenizer

Ending = Literal["document", "stop", "max_tokens"]


class Continuation:
    """What follows a prompt, token by token.

    Characters of which tokens hold only some bytes wait for the others, and so does what could still become a stop string.

    Args:
        tokenizer: of the ids.
        prompt: ids of the prompt; stop strings are looked for only after its text.
        max_tokens: after so many tokens the text ends.
        stops: the text ends before the one of these that is complete first; of several, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], max_tokens: int, stops: Sequence[str] = ()):
        self._tokenizer, self._max_tokens, self._stops = tokenizer, max_tokens, stops
        # The last ids, which show how the next ones are written, and how many of them have had their text taken.
        self._ids, self._num_taken = [int(token) for token in prompt], 0
        self._waiting = ""
        self.num_tokens = 0
        self.text = ""
        """What is certain of the continuation."""
        self.ended_by: Ending | None = None
        self.prompt_text = self._take()
        """The text of the prompt, but for a last character that is not whole."""

    def add(self, token: int) -> str:
        """Go on with a token; the text that is certain now and was not before."""
        assert self.ended_by is None
        if token == self._tokenizer.end_of_document:
            return self._end("", "document")
        self._ids.append(int(token))
        self.num_tokens += 1
        self._waiting += self._take()
        certain = self._certain()
        if self.ended_by is None and self.num_tokens == self._max_tokens:
            return self._end(certain, "max_tokens")
        self.text += certain
        return certain

    def _end(self, certain: str, by: Ending) -> str:
        """`certain` and all that waits; what never came whole is U+FFFD."""
        self._waiting += self._take(whole=False)
        certain += self._certain()
        if self.ended_by is None:
            certain, self.ended_by = certain + self._waiting, by
        self.text += certain
        return certain

    def _take(self, whole: bool = True) -> str:
        """The text of ids whose text was not taken yet; where it has to be `whole`, nothing while its last character is not."""
        before = self._tokenizer.decode(self._ids[: self._num_taken])
        now = self._tokenizer.decode(self._ids)
        if whole and now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._ids, self._num_taken = self._ids[self._num_taken :], len(self._ids) - self._num_taken
        # What is written of a token rarely depends on the next one, as with marks after a space.
        same = next((place for place, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
        return now[same:]

    def _certain(self) -> str:
        """What of the waiting text no stop string can take away any more."""
        found = [(place + len(stop), place) for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
        if found:
            self.ended_by, cut = "stop", min(found)[1]
        else:
            starts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
            cut = len(self._waiting) - max((len(start) for start in starts if self._waiting.endswith(start)), default=0)
        certain, self._waiting = self._waiting[:cut], self._waiting[cut:]
        return certain
