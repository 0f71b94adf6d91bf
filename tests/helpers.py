"""What several tests need: tolerances, small models and batches, weights in Hugging Face's layout."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from giantjax.config import MeshConfig, ModelConfig, OptimizerConfig, PipelineConfig, RunConfig, TrainingConfig
from giantjax.model.gpt import GPT, gpt
from giantjax.parallel.mesh import build_mesh
from giantjax.parallel.partition import BLOCK
from giantjax.parallel.spans import Span, cut, spans_of
from giantjax.parallel.stages import Batch, Model, Params, apply_blocks
from giantjax.training.optimizer import Optimizer, build_optimizer
from giantjax.training.state import Layout, TrainState, layout_of
from giantjax.training.step import BATCH_SPEC, build_train_step

FORWARD = 1e-5
GRADIENT = 1e-4


def relative_error(a: Any, b: Any) -> float:
    """max|a - b| / max|b| of the worst array of two pytrees alike; NaN where either holds one."""

    def one(x: Any, y: Any) -> float:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, f"shapes differ: {x.shape} and {y.shape}"
        difference, size = float(np.max(np.abs(x - y))), float(np.max(np.abs(y)))
        return difference / size if size else (0.0 if difference == 0 else np.inf * difference)

    return float(np.max(jax.tree.leaves(jax.tree.map(one, a, b))))


def small_model(**changes: Any) -> ModelConfig:
    """Two layers and a vocabulary of 61 padded to 64, with `changes`."""
    sizes: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_heads=4, sequence_length=16, vocabulary_size=61, vocabulary_multiple=64)
    return ModelConfig(**(sizes | changes))


def random_params(model: Model, seed: int = 0) -> Params:
    """Every parameter random, none of them as it starts: matrices around 0, biases too, scales around 1."""
    random = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct, decays: bool) -> Array:
        centre = 1 if jax.tree_util.keystr(path[-1:], simple=True) == "scale" else 0
        return jnp.asarray(centre + (0.05 if decays else 0.02) * random.standard_normal(leaf.shape, np.float32))

    return jax.tree.map_with_path(fill, jax.eval_shape(model.init, jax.random.key(0)), model.decays)


def random_batch(config: ModelConfig, num_samples: int, seed: int = 0) -> dict[str, Any]:
    """Random tokens, targets that follow them, and a mask of ones, on the host."""
    tokens = np.random.default_rng(seed).integers(0, config.vocabulary_size, (num_samples, config.sequence_length + 1), np.int32)
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((num_samples, config.sequence_length), np.float32),
        "sample": np.arange(100, 100 + num_samples, dtype=np.uint32),
    }


def cut_whole(params: Params, recompute: str = "none") -> tuple[list[Span], list[Array], list[Params]]:
    """All blocks of a model on one device, for `apply_blocks`."""
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    spans = spans_of((BLOCK,) * num_layers, np.arange(num_layers)[None], 1, recompute)
    return spans, *cut(spans, jnp.arange(num_layers), {BLOCK: params["blocks"]})


def last_stream(model: Model, params: Params, batch: Batch, step: Array | None = None, recompute: str = "none") -> Array:
    """The residual stream after the last block; dropout is that of `step`."""
    spans, layers, blocks = cut_whole(params, recompute)
    return apply_blocks(model, params, spans, layers, blocks, model.embed(params, batch, step), batch, step, recompute)


def logits_of(model: GPT, params: Params, batch: Batch, step: Array | None = None, recompute: str = "none") -> Array:
    """fp32 logits over the padded vocabulary."""
    return model.logits(params, last_stream(model, params, batch, step, recompute))


def loss_of(model: Model, params: Params, batch: Batch, step: Array | None = None, recompute: str = "none") -> Array:
    """The masked sum of losses."""
    return model.loss(params, last_stream(model, params, batch, step, recompute), batch, step)[0]


def loss_and_grads(model: Model, recompute: str = "none") -> Callable[..., tuple[Array, Params]]:
    """parameters, batch, optional step -> loss and gradients, compiled."""
    return jax.jit(jax.value_and_grad(lambda params, batch, step=None: loss_of(model, params, batch, step, recompute)))


def run_config(
    model: ModelConfig, *, num_steps: int, batch_size: int, data: int = 1, num_microbatches: int = 1, **optimizer: Any
) -> RunConfig:
    """A run of `model` in fp32 on `data` devices."""
    return RunConfig(
        name="test",
        model=model,
        training=TrainingConfig(num_steps=num_steps, global_batch_size=batch_size, precision="fp32"),
        optimizer=OptimizerConfig(**optimizer),
        mesh=MeshConfig(data=data),
        pipeline=PipelineConfig(num_microbatches=num_microbatches),
        seed=7,
    )


class Curves(NamedTuple):
    """What training measured, a float64 value a step."""

    loss: np.ndarray
    grad_norm: np.ndarray
    learning_rate: np.ndarray


class Program(NamedTuple):
    """What trains one configuration."""

    model: Model
    optimizer: Optimizer
    layout: Layout
    step: jax.stages.Wrapped

    def place(self, params: Params) -> TrainState:
        """The state before the first step, starting from `params`, which it shares no memory with."""
        moments = jax.eval_shape(self.optimizer.transform.init, params)
        state = TrainState(np.int32(0), jax.device_get(params), jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), moments))
        return jax.device_put(state, self.layout.shardings)

    def place_batch(self, batch: Batch) -> Batch:
        """A global batch, spread over the mesh."""
        return jax.device_put(batch, NamedSharding(self.layout.mesh, BATCH_SPEC))


@functools.cache
def program(config: RunConfig) -> Program:
    """The program of `config`, compiled once in a process."""
    model = gpt(config.model, seed=config.seed)
    optimizer = build_optimizer(config, model.decays)
    layout = layout_of(model, optimizer, build_mesh(config.mesh))
    return Program(model, optimizer, layout, build_train_step(model, optimizer, layout, num_microbatches=config.num_microbatches))


def train(config: RunConfig, params: Params, batches: list[dict[str, Any]]) -> tuple[Curves, TrainState]:
    """One step a batch from `params`: what was measured, and the last state, both on the host."""
    trainer = program(config)
    state, metrics = trainer.place(params), []
    for batch in batches:
        state, measured = trainer.step(state, trainer.place_batch(batch))
        metrics.append(jax.device_get(measured)[:3])
    return Curves(*np.array(metrics, np.float64).T), jax.device_get(state)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The fp32 arrays of a safetensors file: a u64 length, a JSON header, the data."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    arrays = {}
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            assert entry["dtype"] == "F32", f"{name} in {path} is {entry['dtype']}"
            begin, end = (start + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(content[begin:end], "<f4").reshape(entry["shape"])
    return arrays


def from_huggingface(tensors: Mapping[str, np.ndarray], config: ModelConfig) -> Params:
    """Parameters from the tensors of a GPT2LMHeadModel, whose kernels are [inputs, outputs]."""
    hidden, heads, size = config.hidden_size, config.num_heads, config.head_size

    def stacked(name: str, *shape: int) -> Array:
        layers = [tensors[f"transformer.h.{layer}.{name}"] for layer in range(config.num_layers)]
        return jnp.asarray(np.stack([layer.reshape(shape or layer.shape) for layer in layers]))

    def rows(name: str) -> Array:
        return jnp.pad(jnp.asarray(tensors[name]), ((0, config.padded_vocabulary() - config.vocabulary_size), (0, 0)))

    def norm(name: str) -> Params:
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    head: Params = {
        "norm": {"scale": jnp.asarray(tensors["transformer.ln_f.weight"]), "bias": jnp.asarray(tensors["transformer.ln_f.bias"])}
    }
    if config.head == "untied":
        head["output"] = rows("lm_head.weight")
    return {
        "embedding": {"token": rows("transformer.wte.weight"), "position": jnp.asarray(tensors["transformer.wpe.weight"])},
        "blocks": {
            "attention_norm": norm("ln_1"),
            "attention": {
                "qkv": {
                    "kernel": stacked("attn.c_attn.weight", hidden, 3, heads, size),
                    "bias": stacked("attn.c_attn.bias", 3, heads, size),
                },
                "output": {"kernel": stacked("attn.c_proj.weight", heads, size, hidden), "bias": stacked("attn.c_proj.bias")},
            },
            "feedforward_norm": norm("ln_2"),
            "feedforward": {
                "up": {"kernel": stacked("mlp.c_fc.weight"), "bias": stacked("mlp.c_fc.bias")},
                "down": {"kernel": stacked("mlp.c_proj.weight"), "bias": stacked("mlp.c_proj.bias")},
            },
        },
        "head": head,
    }
