"""The GPT as a record of pure functions: embed, repeated blocks, loss.

Flax NNX modules are made once, split into graph and parameters, and merged inside the functions; everything
outside sees parameters as nested dictionaries of arrays, those of the blocks stacked by layer, `[num_layers, ...]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from giantjax.config import ModelConfig, RunConfig
from giantjax.model.cache import Cache
from giantjax.model.dropout import EMBEDDING, DropoutKey, dropout, dropout_key
from giantjax.model.layers import PRODUCTS, Block, LayerNorm, logits_product, matrix, normal, parameter_of, weight_of
from giantjax.model.loss import cross_entropy
from giantjax.parallel.communication import ONE_DEVICE, Communication
from giantjax.parallel.product import Weight
from giantjax.parallel.stages import Batch, BlockFunction, Model, Params


class Embedding(nnx.Module):
    """Token and learned position embeddings."""

    def __init__(self, config: ModelConfig, comm: Communication, tensor: int, key: Array):
        token_key, position_key = jax.random.split(key)
        positions = normal(position_key, (config.sequence_length, config.hidden_size), config.init_std)
        self.token = matrix(_vocabulary_rows(token_key, config, tensor), "vocabulary", "hidden", casts=config.head == "tied")
        self.position = matrix(positions, "position", "hidden", casts=False)
        self.comm = comm

    def __call__(self, tokens: Int[Array, "B S"], position: Int[Array, "B S"] | None = None) -> Float[Array, "B s H"]:
        """The sum of both embeddings, fp32; `position` is each token's, by default its place in the sample."""
        rows = parameter_of(self.token)
        if self.comm.axis is None:
            looked_up = rows[tokens]
        else:
            # Each device looks up the tokens whose rows it holds; the others get zeros, which the sum leaves out.
            own = tokens - self.comm.index() * rows.shape[0]
            held = (own >= 0) & (own < rows.shape[0])
            looked_up = self.comm.scatter_sequence(jnp.where(held[..., None], rows[jnp.where(held, own, 0)], 0))
        own_places = self.comm.first_position(looked_up.shape[1]) + jnp.arange(looked_up.shape[1])
        return looked_up + self.position[...][own_places if position is None else position[:, own_places]]


class Head(nnx.Module):
    """The last LayerNorm and, where it has weights of its own, the output projection."""

    def __init__(self, config: ModelConfig, comm: Communication, tensor: int, stages: str | None, key: Array):
        self.norm = LayerNorm(config)
        self.stages = stages
        if config.head == "untied":
            self.output = matrix(_vocabulary_rows(key, config, tensor), "vocabulary", "hidden")
        self.comm = comm

    def __call__(self, x: Float[Array, "B s H"], embedding: nnx.Param) -> Float[Array, "B S v"]:
        """fp32 logits over this device's part of the padded vocabulary."""
        weights = self.output if hasattr(self, "output") else embedding
        rows = own_rows(weight_of(weights, x.dtype), self.stages)
        return logits_product(self.comm.gather_sequence(self.norm(x)), rows)


def own_rows(rows: Weight, axis: str | None) -> Weight:
    """This device's share of rows that all devices along a mesh axis hold; all of them where there is no axis.

    Raises:
        ValueError: the devices do not divide the rows.
    """
    if axis is None:
        return rows
    size, left = divmod(rows.copy.shape[0], lax.axis_size(axis))
    if left:
        raise ValueError(f"{rows.copy.shape[0]} rows of the head cannot be shared by {lax.axis_size(axis)} devices")
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size), rows)


def _vocabulary_rows(key: Array, config: ModelConfig, tensor: int) -> Float[Array, "V H"]:
    """A row for each token, and zeros for the padding."""
    drawn = normal(key, (config.vocabulary_size, config.hidden_size), config.init_std)
    return jnp.pad(drawn, ((0, config.padded_vocabulary(tensor) - config.vocabulary_size), (0, 0)))


@dataclass(frozen=True)
class GPT(Model):
    """The record of a GPT, with what generation needs."""

    block: BlockFunction
    """shared, parameters of one block, residual stream, index of the block, microbatch, step -> residual stream."""
    logits: Callable[[Params, Float[Array, "B s H"]], Float[Array, "B S v"]] = field(kw_only=True)
    """shared, last residual stream -> fp32 logits over this device's part of the padded vocabulary."""
    cached_block: Callable[[Params, Array, Cache, Array, Array], tuple[Array, Cache]] = field(kw_only=True)
    """parameters of one block, residual stream of T tokens of each sample, cache, the block's place in it, positions [B, T] of the
    tokens -> residual stream, cache. A token whose position lies past the cache leaves nothing in it."""


def gpt(
    config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    *,
    seed: int = 0,
    comm: Communication = ONE_DEVICE,
    tensor: int = 1,
    stages: str | None = None,
) -> GPT:
    """The decoder `config` describes.

    Args:
        config: its sizes.
        dtype: of matrix products.
        seed: of dropout.
        comm: how devices that share layers talk.
        tensor: how many they are, which the vocabulary is padded for.
        stages: the mesh axis whose devices, which all hold the whole head, share its work by parts of the vocabulary; None shares none.
    """
    axes = (comm.axis,) if isinstance(comm.axis, str) else comm.axis or ()
    vocabulary = comm if stages is None else Communication((*axes, stages))
    makers: dict[str, Callable[[Array], nnx.Module]] = {
        "embedding": lambda key: Embedding(config, comm, tensor, key),
        "blocks": lambda key: Block(config, comm, key),
        "head": lambda key: Head(config, comm, tensor, stages, key),
    }
    graphs, abstract = {}, {}
    for name, maker in makers.items():
        graphs[name], abstract[name] = nnx.split(nnx.eval_shape(lambda maker=maker: maker(jax.random.key(0))))
    drops = config.attention_dropout > 0 or config.hidden_dropout > 0

    def key_of(batch: Batch, step: Array | None) -> DropoutKey | None:
        return dropout_key(seed, step, batch["sample"]) if drops and step is not None else None

    def init(key: Array) -> Params:
        keys = dict(zip(makers, jax.random.split(key, len(makers)), strict=True))
        layer_keys = jax.vmap(lambda layer: jax.random.fold_in(keys["blocks"], layer))(jnp.arange(config.num_layers))
        params = {name: _pure(maker(keys[name])) for name, maker in makers.items() if name != "blocks"}
        return params | {"blocks": jax.vmap(lambda layer_key: _pure(makers["blocks"](layer_key)))(layer_keys)}

    def embed(shared: Params, batch: Batch, step: Array | None) -> Array:
        x = nnx.merge(graphs["embedding"], shared["embedding"])(batch["tokens"], batch.get("position")).astype(dtype)
        first = comm.first_position(x.shape[1])
        return dropout(x, config.hidden_dropout, key_of(batch, step), config.num_layers, EMBEDDING, first)

    def block(shared: Params, params: Params, x: Array, layer: Array, batch: Batch, step: Array | None) -> Array:
        return nnx.merge(graphs["blocks"], params)(x, layer, key_of(batch, step), batch.get("segment"))

    def cached_block(params: Params, x: Array, cache: Cache, slot: Array, position: Array) -> tuple[Array, Cache]:
        return nnx.merge(graphs["blocks"], params).cached(x, cache, slot, position)

    def logits(shared: Params, x: Array) -> Array:
        token = nnx.merge(graphs["embedding"], shared["embedding"]).token
        return nnx.merge(graphs["head"], shared["head"])(x, token)

    def loss(shared: Params, x: Array, batch: Batch, step: Array | None) -> tuple[Array, dict[str, Array]]:
        losses = cross_entropy(logits(shared, x), batch["targets"], config.vocabulary_size, vocabulary)
        # Not a product alone: the loss of a masked position may be infinite.
        return jnp.sum(jnp.where(batch["loss_mask"] == 0, 0, losses * batch["loss_mask"])), {}

    dims = {name: _metadata(state, "dims") for name, state in abstract.items()}
    dims["blocks"] = jax.tree.map(lambda names: ("layers", *names), dims["blocks"], is_leaf=lambda names: isinstance(names, tuple))
    decays = {name: _metadata(state, "decays") for name, state in abstract.items()}
    casts = {name: _metadata(state, "casts") for name, state in abstract.items()}
    return GPT(
        init,
        dims,
        decays,
        embed,
        block,
        loss,
        weight=lambda batch: jnp.sum(batch["loss_mask"]),
        sizes={"vocabulary": config.vocabulary_size},
        casts=casts,
        dtype=dtype,
        spreads_head=stages is not None,
        ends=(("embedding",), ("embedding", "head") if config.head == "tied" else ("head",)),
        kept={"none": (*PRODUCTS, "attention_weights"), "selective": PRODUCTS},
        logits=logits,
        cached_block=cached_block,
    )


def model_on_mesh(config: RunConfig, dtype: DTypeLike) -> GPT:
    """The model of a run, as its train step runs it inside a `shard_map`."""
    tensor = config.mesh.tensor
    stages = "pipe" if config.pipeline.head == "shared" and config.mesh.pipe > 1 else None
    return gpt(config.model, dtype, seed=config.seed, comm=Communication("tensor" if tensor > 1 else None), tensor=tensor, stages=stages)


def decoding_model(config: RunConfig, dtype: DTypeLike) -> GPT:
    """The model of a run for single tokens, whose positions devices cannot share; its parameters lie as those of `model_on_mesh`."""
    tensor = config.mesh.tensor
    return gpt(config.model, dtype, comm=Communication("tensor" if tensor > 1 else None, "whole"), tensor=tensor)


def whole_head(config: RunConfig) -> RunConfig:
    """`config` for evaluation, in which no stage is to do a part of another's work."""
    return replace(config, pipeline=replace(config.pipeline, head="everywhere"))


def _pure(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module))


def _metadata(state: Any, name: str) -> Params:
    return nnx.to_pure_dict(jax.tree.map(lambda v: v.get_metadata()[name], state, is_leaf=lambda v: isinstance(v, nnx.Variable)))
