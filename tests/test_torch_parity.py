"""The model and AdamW against transformers and torch, from the same weights on the same batches."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from giantjax.config import ModelConfig
from giantjax.model.gpt import gpt
from tests.helpers import FORWARD, from_huggingface, logits_of, random_batch, relative_error, run_config, small_model, train

torch = pytest.importorskip("torch", reason="needs torch, which the extra [torch] installs")
transformers = pytest.importorskip("transformers", reason="needs transformers, which the extra [torch] installs")


def peer_of(config: ModelConfig) -> Any:
    """A GPT2LMHeadModel of this shape whose every parameter is random."""
    peer = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocabulary_size,
            n_positions=config.sequence_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.feedforward_size,
            activation_function={"gelu-tanh": "gelu_new", "gelu-erf": "gelu"}[config.activation],
            layer_norm_epsilon=config.layer_norm_epsilon,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=config.head == "tied",
            attn_implementation="eager",
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return peer


def params_of(peer: Any, config: ModelConfig) -> Any:
    return from_huggingface({name: tensor.numpy() for name, tensor in peer.state_dict().items()}, config)


def as_torch(array: Any) -> Any:
    return torch.from_numpy(np.array(array, np.int64))


@pytest.mark.parametrize("head", ["tied", "untied"])
@pytest.mark.parametrize("activation", ["gelu-tanh", "gelu-erf"])
def test_logits_equal_those_of_transformers(activation, head):
    config = small_model(num_layers=3, feedforward_size=96, activation=activation, head=head)
    peer, batch, model = peer_of(config), random_batch(config, 4), gpt(config)
    logits = jax.jit(lambda params, batch: logits_of(model, params, batch))(params_of(peer, config), batch)
    with torch.no_grad():
        expected = peer(as_torch(batch["tokens"])).logits.numpy()
    assert relative_error(logits[..., : config.vocabulary_size], expected) <= FORWARD


def test_fifty_steps_of_adamw_equal_those_of_torch():
    config = run_config(
        small_model(), num_steps=50, batch_size=8, learning_rate=3e-3, min_learning_rate=3e-4, warmup=10, weight_decay=0.1, clip_norm=1.0
    )
    peer = peer_of(config.model)
    params, batches = params_of(peer, config.model), [random_batch(config.model, 8, seed=step % 7) for step in range(50)]
    matrices = [p for p in peer.parameters() if p.ndim > 1]
    vectors = [p for p in peer.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    expected, norms = [], []
    for step, batch in enumerate(batches):
        through = (step - 10) / 40
        rate = 3e-3 * step / 10 if step < 10 else 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * through)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = peer(as_torch(batch["tokens"])).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), as_torch(batch["targets"]).flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)))
        optimizer.step()
        expected.append(loss.item())
    metrics, _ = train(config, params, batches)
    assert max(norms) > 1 > min(norms), "clipping is at work in some steps"
    assert np.max(np.abs(metrics.loss - expected)) <= 1e-4
    assert np.max(np.abs(metrics.grad_norm / norms - 1)) <= 1e-3
    assert expected[-1] < expected[0] - 0.3
