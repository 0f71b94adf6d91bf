"""Sampling: the model's own choices, from the prompt on, for as long as was asked."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax import generate as generation
from giantjax import runtime
from giantjax.config import RunConfig
from giantjax.errors import InputError
from giantjax.generate import generate
from giantjax.model.gpt import Params, gpt
from giantjax.training.restore import Trained, load_trained
from giantjax.training.run_directory import directory_of
from tests.helpers import logits_of, program, random_params, run_config, small_model
from tests.scripts import SCRIPTS, load_script
from tests.training.runs import copy_of, small_run, train_here, write_corpus

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
def run(tmp_path_factory) -> RunConfig:
    """A run of two steps that is done."""
    folder = tmp_path_factory.mktemp("generate")
    config = small_run(folder / "run", write_corpus(folder / "corpus"), **{"training.num_steps": 2, "training.eval_every": 0})
    assert train_here(config) == 0
    return config


def first(number: int, params: Params, prompt: np.ndarray, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
    trained = Trained(CONFIG, program(CONFIG).model, program(CONFIG).layout, params, 0)  # type: ignore[arg-type]
    return list(itertools.islice(generate(trained, prompt, temperature=temperature, seed=seed), number))


@pytest.fixture(scope="module")
def likeliest(params) -> Callable[[list[int]], list[int]]:
    """By one forward pass: sixteen tokens -> the likeliest after each."""
    forward = jax.jit(lambda tokens: logits_of(gpt(CONFIG.model), params, {"tokens": tokens}))

    def choose(tokens: list[int]) -> list[int]:
        assert len(tokens) == 16
        logits = np.asarray(forward(jnp.array([tokens], jnp.int32)))[0]
        return np.argmax(logits[:, : CONFIG.model.vocabulary_size], axis=-1).tolist()

    return choose


def test_temperature_0_takes_the_likeliest_token(params, likeliest):
    found = first(12, params, PROMPT)
    assert found == likeliest([*PROMPT.tolist(), *found[:11]])[4:]
    assert len(set(found)) > 3
    assert first(12, params, PROMPT, seed=5) == found


def test_beyond_the_window_the_last_tokens_count(params, likeliest):
    long = np.random.default_rng(0).integers(0, 61, 40).astype(np.int32)
    found = first(4, params, long)
    assert found == first(4, params, long[-16:])
    assert found[0] == likeliest(long[-16:].tolist())[-1]
    # The second token sees the first and no longer the oldest.
    assert found[1] == likeliest([*long[-15:].tolist(), found[0]])[-1]


def test_samples_depend_on_the_seed_alone(params):
    once = first(12, params, PROMPT, temperature=1.0, seed=1)
    np.random.seed(3)  # the generator that must not matter
    assert first(12, params, PROMPT, temperature=1.0, seed=1) == once
    assert first(12, params, PROMPT, temperature=1.0, seed=2) != once


def test_samples_follow_the_distribution(params):
    """Cold samples are the likeliest token; hot ones are spread over the vocabulary, and never in its padding."""
    assert first(5, params, PROMPT, temperature=1e-4, seed=3) == first(5, params, PROMPT)
    hot = first(300, params, PROMPT, temperature=1e4)
    assert max(hot) < CONFIG.model.vocabulary_size
    assert len(set(hot)) > 50


def test_the_script_stops_at_the_end_of_a_document(run, monkeypatch, capsys):
    endings = {(65, 66, 256, 67): "aAB\n", (65, 66, 67, 68, 69): "aABC\n"}
    monkeypatch.setattr(runtime, "start", lambda _: None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--run", str(run.run_dir), "--prompt", "a", "--max-tokens", "3"])
    for tokens, text in endings.items():
        monkeypatch.setattr(generation, "generate", lambda *_, tokens=tokens, **__: iter(tokens))
        assert script.main() == 0
        assert capsys.readouterr().out == text


def test_the_script_prints_what_the_checkpoint_says(run):
    arguments = ["--run", str(run.run_dir), "--prompt", "Grüße", "--max-tokens", "6", "--temperature", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    trained = load_trained(directory_of(run))
    prompt = "Grüße".encode()
    choices = generate(trained, np.frombuffer(prompt, np.uint8), temperature=0, seed=0)
    assert trained.step == 2
    # After two steps the end of a document is not likely yet.
    assert done.stdout == (prompt + bytes(itertools.islice(choices, 6))).decode("utf-8", "replace") + "\n"


def test_a_damaged_checkpoint_is_named(run, tmp_path):
    config = copy_of(run, tmp_path / "run", 2)
    damaged = directory_of(config).checkpoints / "2"
    (damaged / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(InputError, match=rf"checkpoint {damaged} cannot be read"):
        load_trained(directory_of(config))
