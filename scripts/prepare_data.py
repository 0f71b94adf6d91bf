"""Text files to an indexed corpus: python scripts/prepare_data.py FILE... --output PREFIX."""

import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Literal

import tyro

from giantjax import command_line
from giantjax.data.encode import Rules
from giantjax.data.prepare import prepare


@dataclass(frozen=True)
class Arguments:
    """Turn text files and JSON lines, compressed or not, into PREFIX.bin and PREFIX.idx for --data.train PREFIX."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """Text files, each one document, and files of JSON lines, each of whose objects holds one; by gzip or Zstandard compressed
    ones too. The corpus holds them in this order."""
    output: Annotated[str, tyro.conf.arg(metavar="PREFIX")]
    """Path of the corpus without .bin or .idx; its folder is made if need be. Nothing is overwritten. After a kill, the same command
    goes on from PREFIX.partial."""
    tokenizer: str = "bytes"
    """What makes token ids of the text: bytes; bpe:SIZE, a byte-level BPE of SIZE ids trained on the text; the file of a vocabulary,
    or its folder: tokenizer.json, tokenizer.model, vocab.txt, RANKS.tiktoken, vocab.json with merges.txt, encoder.json with vocab.bpe;
    or, where a name does not tell, KIND:PATH with the kind huggingface, sentencepiece, wordpiece, tiktoken or gpt2."""
    end_of_document: str | None = None
    """Token of the vocabulary, or its id, that ends each document; None is the usual one of the vocabulary, else a new id."""
    format: Literal["auto", "text", "jsonl"] = "auto"
    """Format of every FILE; auto takes .jsonl, .ndjson and .json, also before .gz or .zst, for JSON lines."""
    json_key: str = "text"
    """Key of the text in JSON lines."""
    bad_utf8: Literal["refuse", "replace"] = "refuse"
    """What is done with bytes that are not UTF-8; replace puts U+FFFD in their place."""
    num_processes: int = 1
    """Processes that encode; the result does not depend on their number."""


class Stop:
    """Set by the first SIGTERM or SIGINT; a second one acts as in any other program."""

    def __init__(self) -> None:
        self.signal = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        signal.signal(number, signal.SIG_DFL)

    def is_set(self) -> bool:
        """Whether there was one."""
        return bool(self.signal)


def main() -> int:
    """Check all that can be checked first, then write."""
    arguments = command_line.parse(Arguments, sys.argv[1:])
    stop = Stop()
    prepared = prepare(
        arguments.inputs,
        arguments.output,
        arguments.tokenizer,
        format=arguments.format,
        rules=Rules(arguments.json_key, arguments.bad_utf8),
        end_of_document=arguments.end_of_document,
        num_processes=arguments.num_processes,
        stop=stop.is_set,
    )
    if prepared is None:
        print(f"stopped; the same command goes on from {arguments.output}.partial", file=sys.stderr)
        return 128 + stop.signal
    left_out = f", {prepared.num_empty:,} empty ones left out," if prepared.num_empty else ","
    print(
        f"{prepared.num_documents:,} documents{left_out} {prepared.num_tokens:,} tokens of {prepared.num_bytes:,} bytes of text in "
        f"{prepared.prefix}.bin and {prepared.prefix}.idx"
    )
    if arguments.tokenizer.startswith("bpe:"):
        print(f"a tokenizer of {prepared.vocabulary_size:,} ids, trained on that text, in {prepared.prefix}.tokenizer.json")
    return 0


if __name__ == "__main__":
    command_line.run_main(main)
