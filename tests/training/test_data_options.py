"""Runs on blends, splits, documents and shorter samples: the same numbers after a kill, and the tokenizer kept."""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from giantjax import generate as generation
from giantjax import runtime
from giantjax.data.prepare import prepare
from giantjax.data.tokenizer import load_tokenizer
from giantjax.errors import InputError
from giantjax.training.run_directory import directory_of, tokenizer_of
from tests.helpers import FORWARD, GRADIENT, relative_error
from tests.scripts import SCRIPTS, load_script
from tests.training.runs import assert_same_run, changed, copy_of, records_of, saved_steps, small_run, train_here, write_corpus

pytestmark = pytest.mark.xdist_group("data-options")

OPTIONS: dict[str, Any] = {
    "data.split": "2,1",
    "data.validation": None,
    "data.reset_positions": True,
    "data.reset_attention": True,
    "data.mask_document_ends": True,
    "data.length_warmup": ("4:4", "8:4"),
    "training.num_steps": 12,
    "checkpoint.every": 3,
    "checkpoint.keep": 4,
    "training.eval_every": 6,
    "logging.tensorboard": False,
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """(PREFIX:WEIGHT, PREFIX:WEIGHT)."""
    folder = tmp_path_factory.mktemp("corpora")
    return f"{write_corpus(folder / 'a', 0)}:0.7", f"{write_corpus(folder / 'b', 1)}:0.3"


@pytest.fixture(scope="module")
def whole(corpora, tmp_path_factory):
    """A run with every option, undisturbed."""
    config = small_run(tmp_path_factory.mktemp("whole") / "run", Path("none"), **OPTIONS | {"data.train": corpora})
    assert train_here(config) == 0
    return config


def test_a_run_goes_on_exactly_from_any_stage_of_the_warmup(whole, tmp_path):
    assert saved_steps(whole) == [3, 6, 9, 12]
    for step in (3, 6):
        config = copy_of(whole, tmp_path / f"run{step}", step)
        assert train_here(config) == 0
        assert_same_run(config, whole)


def test_tokens_are_counted_by_the_length_of_each_step(whole):
    records = records_of(whole)
    lengths = [4] * 4 + [8] * 4 + [16] * 4
    assert [record["consumed_samples"] for record in records] == [8 * step for step in range(1, 13)]
    assert [record["consumed_tokens"] for record in records] == [8 * total for total in itertools.accumulate(lengths)]
    for record, length in zip(records, lengths, strict=True):
        assert record["tokens_per_s"] == pytest.approx(length * record["samples_per_s"])


def test_the_options_change_what_is_learned_and_may_not_change_on_the_way(whole, tmp_path):
    for name in ("reset_positions", "reset_attention", "mask_document_ends"):
        with pytest.raises(InputError, match=rf"data\.{name} was True and is False"):
            train_here(copy_of(whole, tmp_path / name, 9, **{f"data.{name}": False}))
    first, second = whole.data.train
    with pytest.raises(InputError, match=r"data\.train was .*:0\.7 .*:0\.3 \(\w+\) and is .*:0\.5"):
        train_here(copy_of(whole, tmp_path / "weights", 9, **{"data.train": (first.replace("0.7", "0.5"), second.replace("0.3", "0.5"))}))
    assert changed(whole, **{"data.prefetch": 1}).data.prefetch == 1


def test_shorter_samples_have_their_positions_on_a_mesh(whole, tmp_path):
    """Of four tokens each of two devices holds two."""
    mesh = {"mesh.tensor": 2, "mesh.pipe": 2, "pipeline.num_microbatches": 2, "training.num_steps": 2, "training.eval_every": 0}
    config = changed(whole, run_dir=str(tmp_path / "run"), **mesh)
    assert train_here(config) == 0
    for found, expected in zip(records_of(config), records_of(whole)[:2], strict=True):
        assert relative_error(found["loss"], expected["loss"]) <= FORWARD
        assert relative_error(found["grad_norm"], expected["grad_norm"]) <= GRADIENT


def test_each_length_is_compiled_once(whole, tmp_path, capsys):
    config = changed(whole, run_dir=str(tmp_path / "run"))
    assert train_here(config) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compiling")]
    assert told == ["compiling for the first 4 tokens of each sample", "compiling for the first 8 tokens of each sample", "compiling"]


def test_a_run_keeps_its_tokenizer_and_samples_with_it(tmp_path, monkeypatch, capsys):
    (tmp_path / "text.txt").write_text("some text of which a tokenizer is made. " * 60)
    prefix = str(tmp_path / "corpus")
    assert prepare([str(tmp_path / "text.txt")], prefix, "bpe:280") is not None
    config = small_run(tmp_path / "run", Path(prefix), **OPTIONS | {"data.train": (prefix,), "data.split": None, "training.num_steps": 2})
    config = changed(config, **{"model.vocabulary_size": 280, "training.eval_every": 0, "data.length_warmup": ()})
    with pytest.raises(InputError, match=r"vocabulary of 280 \(tokenizer huggingface\), but model\.vocabulary_size is 279"):
        train_here(changed(config, **{"model.vocabulary_size": 279}))
    assert train_here(config) == 0
    copy = directory_of(config).path / "tokenizer" / "tokenizer.json"
    assert copy.read_bytes() == Path(f"{prefix}.tokenizer.json").read_bytes()
    Path(f"{prefix}.tokenizer.json").unlink()
    tokenizer, original = tokenizer_of(directory_of(config)), load_tokenizer(str(copy))
    assert tokenizer.encode("some text").tolist() == original.encode("some text").tolist() and len(tokenizer.encode("some text")) < 9
    monkeypatch.setattr(runtime, "start", lambda _: None)
    tokens = [*tokenizer.encode(" made"), tokenizer.end_of_document, 7]
    monkeypatch.setattr(generation, "generate", lambda *_: iter([np.array([token]) for token in tokens]))
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "generate.py"), "--run", str(config.run_dir), "--prompt", "is"])
    assert load_script("generate").main() == 0
    assert capsys.readouterr().out.endswith("is made\n")
    copy.write_bytes(b"{}")
    with pytest.raises(InputError, match=r"tokenizer/tokenizer\.json is not the tokenizer that was recorded"):
        tokenizer_of(directory_of(config))
