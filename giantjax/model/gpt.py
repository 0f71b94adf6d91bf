"""The GPT as a record of pure functions: embed, repeated blocks, loss.

Flax NNX modules are made once, split into graph and parameters, and merged inside the functions; everything
outside sees parameters as nested dictionaries of arrays, those of the blocks stacked by layer, `[num_layers, ...]`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from giantjax.config import ModelConfig
from giantjax.model.dropout import EMBEDDING, DropoutKey, dropout
from giantjax.model.layers import Block, LayerNorm, matrix, normal
from giantjax.model.loss import cross_entropy

Params = dict[str, Any]
Batch = dict[str, Array]
"""tokens int32 [B, S], targets int32 [B, S], loss_mask fp32 [B, S], sample uint32 [B]."""


class Embedding(nnx.Module):
    """Token and learned position embeddings."""

    def __init__(self, config: ModelConfig, key: Array, tensor: int):
        token_key, position_key = jax.random.split(key)
        size = config.hidden_size
        # Rows of the padding are drawn with the others, so that the first rows do not depend on the padding's size.
        self.token = matrix(_rows(token_key, config.padded_vocabulary(tensor), size, config.init_std), "vocabulary", "hidden")
        self.position = matrix(_rows(position_key, config.sequence_length, size, config.init_std), "position", "hidden")

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S H"]:
        """The sum of both embeddings, fp32."""
        return self.token[...][tokens] + self.position[...][: tokens.shape[1]]


class Head(nnx.Module):
    """The last LayerNorm and, where it has weights of its own, the output projection."""

    def __init__(self, config: ModelConfig, key: Array, tensor: int):
        self.norm = LayerNorm(config)
        if config.head == "untied":
            self.output = matrix(_rows(key, config.padded_vocabulary(tensor), config.hidden_size, config.init_std), "vocabulary", "hidden")

    def __call__(self, x: Float[Array, "B S H"], embedding: Float[Array, "V H"]) -> Float[Array, "B S V"]:
        """fp32 logits over the padded vocabulary."""
        weights = self.output[...] if hasattr(self, "output") else embedding
        return jnp.einsum("bsh,vh->bsv", self.norm(x), weights.astype(x.dtype), preferred_element_type=jnp.float32)


def _rows(key: Array, num_rows: int, size: int, std: float) -> Float[Array, "R H"]:
    """Normal rows, each from its own key: row i is the same however many rows there are."""
    return jax.vmap(lambda row: normal(jax.random.fold_in(key, row), (size,), std))(jnp.arange(num_rows))


@dataclass(frozen=True)
class Model:
    """What a train step knows of a model: parameters, and pure functions from batch to boundary to loss."""

    init: Callable[[Array], Params]
    """PRNG key -> fp32 parameters: {"embedding": ..., "blocks": stacked by layer, "head": ...}."""
    dims: Params
    """The names of every parameter's dims, as a tuple in the parameter's place."""
    decays: Params
    """Whether weight decay applies, in the parameter's place."""
    embed: Callable[[Params, Batch, DropoutKey | None], Float[Array, "B S H"]]
    """Parameters, batch -> the residual stream that enters the first block."""
    block: Callable[[Params, Float[Array, "B S H"], Array, DropoutKey | None], Float[Array, "B S H"]]
    """Parameters of one block, residual stream, layer index -> residual stream."""
    logits: Callable[[Params, Float[Array, "B S H"]], Float[Array, "B S V"]]
    """Parameters, last residual stream -> fp32 logits over the padded vocabulary."""
    loss: Callable[[Params, Float[Array, "B S H"], Batch], Float[Array, ""]]
    """Parameters, last residual stream, batch -> sum of the losses of positions whose loss_mask is not 0, each times its mask."""


def gpt(config: ModelConfig, dtype: DTypeLike = jnp.float32, tensor: int = 1) -> Model:
    """The decoder `config` describes, computing in `dtype`, its vocabulary padded for `tensor` devices."""

    def embedding(key: Array) -> Embedding:
        return Embedding(config, key, tensor)

    def block(key: Array) -> Block:
        return Block(config, key)

    def head(key: Array) -> Head:
        return Head(config, key, tensor)

    makers = {"embedding": embedding, "block": block, "head": head}
    graphs, abstract = {}, {}
    for name, maker in makers.items():
        graphs[name], abstract[name] = nnx.split(nnx.eval_shape(lambda maker=maker: maker(jax.random.key(0))))

    def init(key: Array) -> Params:
        embedding_key, blocks_key, head_key = jax.random.split(key, 3)
        layer_keys = jax.vmap(lambda layer: jax.random.fold_in(blocks_key, layer))(jnp.arange(config.num_layers))
        return {
            "embedding": _pure(embedding(embedding_key)),
            "blocks": jax.vmap(lambda layer_key: _pure(block(layer_key)))(layer_keys),
            "head": _pure(head(head_key)),
        }

    def embed(params: Params, batch: Batch, key: DropoutKey | None) -> Array:
        x = nnx.merge(graphs["embedding"], params["embedding"])(batch["tokens"]).astype(dtype)
        return dropout(x, config.hidden_dropout, key, config.num_layers, EMBEDDING)

    def apply_block(params: Params, x: Array, layer: Array, key: DropoutKey | None) -> Array:
        return nnx.merge(graphs["block"], params)(x, layer, key)

    def logits(params: Params, x: Array) -> Array:
        return nnx.merge(graphs["head"], params["head"])(x, params["embedding"]["token"])

    def loss(params: Params, x: Array, batch: Batch) -> Array:
        losses = cross_entropy(logits(params, x), batch["targets"], config.vocabulary_size)
        # Not a product alone: the loss of a masked position may be infinite.
        return jnp.sum(jnp.where(batch["loss_mask"] == 0, 0, losses * batch["loss_mask"]))

    dims = {name: _metadata(state, "dims") for name, state in abstract.items()}
    dims["blocks"] = jax.tree.map(lambda names: ("layers", *names), dims.pop("block"), is_leaf=_is_dims)
    decays = {name: _metadata(state, "decays") for name, state in abstract.items()}
    decays["blocks"] = decays.pop("block")
    return Model(init, dims, decays, embed, apply_block, logits, loss)


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module))


def _metadata(state: nnx.State, name: str) -> Params:
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()[name], state, is_leaf=lambda v: isinstance(v, nnx.Variable)))


def _is_dims(value: Any) -> bool:
    return isinstance(value, tuple)


def apply_blocks(model: Model, blocks: Params, x: Float[Array, "B S H"], key: DropoutKey | None, recompute: str) -> Float[Array, "B S H"]:
    """All stacked blocks in order, keeping for the backward pass what the policy `recompute` names.

    `none` keeps the results of matrix products and redoes only elementwise work; `selective` makes the attention core
    again too (Korthikanti et al., 2022); `full` keeps only the input of each block; `full:K` of every K-th.
    """
    num_layers = jax.tree.leaves(blocks)[0].shape[0]
    kind, _, interval = recompute.partition(":")
    every = int(interval or 1)
    whole = num_layers // every * every

    def one(x: Array, layer_and_params: tuple[Array, Params]) -> tuple[Array, None]:
        layer, params = layer_and_params
        return model.block(params, x, layer, key), None

    def group(x: Array, stacked: tuple[Array, Params]) -> tuple[Array, None]:
        return lax.scan(one, x, stacked)

    layers = (jnp.arange(num_layers), blocks)
    if kind != "full":
        kept = ["qkv", "context", "residual", "up"] + (["attention_weights"] if kind == "none" else [])
        policy = jax.checkpoint_policies.save_only_these_names(*kept)
        return lax.scan(jax.checkpoint(one, policy=policy), x, layers)[0]
    grouped = jax.tree.map(lambda a: a[:whole].reshape(whole // every, every, *a.shape[1:]), layers)
    x, _ = lax.scan(jax.checkpoint(group), x, grouped)
    if whole < num_layers:
        x, _ = jax.checkpoint(group)(x, jax.tree.map(lambda a: a[whole:], layers))
    return x
