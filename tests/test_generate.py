"""Sampling: the model's own choices, from the prompt on, for as long as was asked."""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from giantjax import generate as generation
from giantjax import runtime
from giantjax.config import RunConfig
from giantjax.decode import Decoder, build_decoder
from giantjax.errors import InputError
from giantjax.generate import generate
from giantjax.model.gpt import Params, gpt
from giantjax.sampling import Sampling
from giantjax.training.restore import Trained, load_trained
from giantjax.training.run_directory import directory_of, write_record
from tests.helpers import logits_of, program, random_params, run_config, small_model
from tests.scripts import SCRIPTS, load_script
from tests.training.runs import changed, copy_of, small_run, train_here, write_corpus

pytestmark = pytest.mark.xdist_group("generate")

SCRIPT = SCRIPTS / "generate.py"
script = load_script("generate")

# Positions 16, ids up to 60 in 64 rows.
CONFIG = run_config(small_model(), num_steps=1, batch_size=1)
PROMPT = np.array([3, 14, 15, 9, 26], np.int32)


@pytest.fixture(scope="module")
def params() -> Params:
    # Larger than as initialized, so that the likeliest token depends on those before it.
    return jax.tree.map(lambda leaf: 4 * leaf, random_params(gpt(CONFIG.model)))


@pytest.fixture(scope="module")
def decoder(params) -> Decoder:
    return build_decoder(Trained(CONFIG, program(CONFIG).model, program(CONFIG).layout, params, 0))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunConfig:
    """A run of two steps that is done."""
    folder = tmp_path_factory.mktemp("generate")
    config = small_run(folder / "run", write_corpus(folder / "corpus"), **{"training.num_steps": 2, "training.eval_every": 0})
    assert train_here(config) == 0
    return config


def first(number: int, decoder: Decoder, *prompts: np.ndarray, temperature: float = 0.0, seed: int = 0, **sampling: Any) -> list[list[int]]:
    """So many tokens after each prompt."""
    tokens = itertools.islice(generate(decoder, prompts, Sampling(temperature=temperature, **sampling), seed), number)
    return np.array(list(tokens)).T.tolist()


@pytest.fixture(scope="module")
def likeliest(params) -> Callable[[list[int]], list[int]]:
    """By one forward pass: up to sixteen tokens -> the likeliest after each."""
    forward = jax.jit(lambda tokens: logits_of(gpt(CONFIG.model), params, {"tokens": tokens}))

    def choose(tokens: list[int]) -> list[int]:
        padded = np.pad(np.array([tokens], np.int32), [(0, 0), (0, 16 - len(tokens))])
        logits = np.asarray(forward(padded))[0, : len(tokens)]
        return np.argmax(logits[:, : CONFIG.model.vocabulary_size], axis=-1).tolist()

    return choose


def test_temperature_0_takes_the_likeliest_token(decoder, likeliest):
    [found] = first(12, decoder, PROMPT)
    assert found == likeliest([*PROMPT.tolist(), *found[:11]])[4:]
    assert len(set(found)) > 3
    assert first(12, decoder, PROMPT, seed=5) == [found]


def test_beyond_the_window_half_of_it_counts(decoder, likeliest):
    long = np.random.default_rng(0).integers(0, 61, 40).astype(np.int32)
    [found] = first(12, decoder, long)
    assert [found] == first(12, decoder, long[-16:])
    assert found[0] == likeliest(long[-16:].tolist())[-1]
    # Then positions have run out: the last eight tokens are the text from there on, until it is full again.
    begun = [*long[-7:].tolist(), *found]
    assert found[1:10] == likeliest(begun[:16])[7:]
    assert found[10:] == likeliest(begun[9:18])[7:]


def test_samples_depend_on_the_seed_alone(decoder):
    once = first(12, decoder, PROMPT, temperature=1.0, seed=1)
    np.random.seed(3)  # the generator that must not matter
    assert first(12, decoder, PROMPT, temperature=1.0, seed=1) == once
    assert first(12, decoder, PROMPT, temperature=1.0, seed=2) != once


@pytest.mark.parametrize("sampling", [{}, {"top_k": 9, "top_p": 0.8, "repetition_penalty": 1.3}], ids=["plain", "all-options"])
def test_a_text_is_the_same_alone_and_beside_others(decoder, sampling):
    """Of any length, so that windows are full and begun anew at different times."""
    random = np.random.default_rng(1)
    prompts = [random.integers(0, 61, length).astype(np.int32) for length in (1, 5, 14, 16, 30)]
    together = first(24, decoder, *prompts, temperature=1.0, seed=4, **sampling)
    for prompt, found in zip(prompts, together, strict=True):
        assert first(24, decoder, prompt, temperature=1.0, seed=4, **sampling) == [found]


def test_samples_follow_the_distribution(decoder):
    """Cold samples are the likeliest token; hot ones are spread over the vocabulary, and never in its padding."""
    assert first(5, decoder, PROMPT, temperature=1e-4, seed=3) == first(5, decoder, PROMPT)
    [hot] = first(300, decoder, PROMPT, temperature=1e4)
    assert max(hot) < CONFIG.model.vocabulary_size
    assert len(set(hot)) > 50


def test_a_penalty_avoids_tokens_of_the_prompt_and_of_the_text(decoder):
    [found] = first(30, decoder, PROMPT, repetition_penalty=1e6)
    assert len({*PROMPT.tolist(), *found}) == len(PROMPT) + 30


def test_the_script_stops_at_the_end_of_a_document(run, monkeypatch, capsys):
    endings = {(65, 66, 256, 67): "aAB\n", (65, 66, 67, 68, 69): "aABC\n"}
    monkeypatch.setattr(runtime, "start", lambda _: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--run", str(run.run_dir), "--prompt", "a", "--max-tokens", "3"])
    for tokens, text in endings.items():
        monkeypatch.setattr(generation, "generate", lambda *_, tokens=tokens: iter([np.array([token]) for token in tokens]))
        assert script.main() == 0
        assert capsys.readouterr().out == text


def test_the_script_prints_what_the_checkpoint_says(run):
    arguments = ["--run", str(run.run_dir), "--prompt", "Grüße", "--max-tokens", "6", "--temperature", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    trained = load_trained(directory_of(run))
    prompt = "Grüße".encode()
    choices = (int(token) for [token] in generate(build_decoder(trained), [list(prompt)], Sampling(temperature=0), 0))
    assert trained.step == 2
    # After two steps the end of a document is not likely yet.
    assert done.stdout == (prompt + bytes(itertools.islice(choices, 6))).decode("utf-8", "replace") + "\n"


def test_a_file_of_prompts_becomes_lines(run, tmp_path, monkeypatch, capsys):
    """On one device, and on the mesh of a run, in groups of any size: the same texts, which are those of each prompt alone."""
    prompts = ["a", "two\nlines", "Grüße, longer than sixteen bytes"]
    (tmp_path / "prompts").write_text("a\r\n\n" + json.dumps(prompts[1]) + "\n" + prompts[2])
    config = copy_of(run, tmp_path / "run", 2)
    write_record(directory_of(config).config, changed(config, **{"mesh.pipe": 2, "mesh.data": 2, "mesh.tensor": 2}))
    monkeypatch.setattr(runtime, "start", lambda _: None)
    options = ["--max-tokens", "20", "--seed", "3", "--top-k", "200", "--stop", "xyz", "--run", str(config.run_dir)]

    def lines(*more: str) -> list[dict[str, Any]]:
        output = tmp_path / "lines"
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, *more, "--output", str(output)])
        assert script.main() == 0
        found = [json.loads(line) for line in output.read_text().splitlines()]
        output.unlink()
        return found

    file = ["--prompts", str(tmp_path / "prompts")]
    found = lines(*file)
    assert [line["prompt"] for line in found] == prompts
    assert {tuple(line) for line in found} == {("prompt", "text", "num_tokens", "ended_by")}
    assert lines(*file, "--batch-size", "2", "--mesh", "run") == found
    assert [lines("--prompt", prompt)[0] for prompt in prompts] == found
    assert "of the 34 tokens of the prompt 'Grüße, longer than s'... the model sees the last 16" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options, "--prompt", "a"])
    assert script.main() == 0
    assert capsys.readouterr().out == "a" + found[0]["text"] + "\n"


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    config = copy_of(run, tmp_path / "run", 2)
    damaged = directory_of(config).checkpoints / "2"
    (damaged / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(InputError, match=rf"checkpoint {damaged} cannot be read"):
        load_trained(directory_of(config))
