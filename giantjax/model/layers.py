"""The layers of a decoder block, each parameter naming its dims.

They are written for one device, and ask the `Communication` handed to them where devices that share a layer must talk.
The letters of array names: B samples, S positions, s this device's share of them, H hidden, N heads, D head, F feed-forward.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from giantjax.config import ModelConfig
from giantjax.kernels.attention import cached_attention, causal_attention
from giantjax.model.cache import Cache, of_layer, with_layer
from giantjax.model.dropout import ATTENTION_OUTPUT, ATTENTION_WEIGHTS, FEEDFORWARD_OUTPUT, DropoutKey, dropout
from giantjax.parallel.communication import Communication, column_parallel, row_parallel
from giantjax.parallel.product import Weight, product

PRODUCTS = ("qkv", "context", "residual", "up")
"""Names in a block of what the backward pass would have to multiply matrices to make again, the attention core's weights excepted."""


def matrix(value: Array, *dims: str, casts: bool = True) -> nnx.Param:
    """A parameter that weight decay pulls to zero; `dims` names its dims for the sharding table.

    Products read it in the type of activations: it `casts`, unless it is only looked up.
    """
    return nnx.Param(value, dims=dims, decays=True, casts=casts)


def vector(value: Array, *dims: str) -> nnx.Param:
    """A bias or a scale, which weight decay leaves alone, and which is used in fp32."""
    return nnx.Param(value, dims=dims, decays=False, casts=False)


def normal(key: Array, shape: tuple[int, ...], std: float) -> Float[Array, "..."]:
    """fp32 samples of a normal distribution around 0."""
    return std * jax.random.normal(key, shape, jnp.float32)


def weight_of(variable: nnx.Param, dtype: DTypeLike) -> Weight:
    """A parameter with its copy in `dtype`: the one made once a step where there is one, else made here."""
    value = variable.get_value()
    return value if isinstance(value, Weight) else Weight(value, lax.stop_gradient(value).astype(dtype))


def parameter_of(variable: nnx.Param) -> Array:
    """The fp32 parameter."""
    value = variable.get_value()
    return value.parameter if isinstance(value, Weight) else value


@jax.custom_vjp
def logits_product(x: Float[Array, "B S H"], rows: Weight) -> Float[Array, "B S v"]:
    """fp32 logits of activations with embedding rows in their type; the rows' gradient is never rounded."""
    return jnp.einsum("bsh,vh->bsv", x, rows.copy, preferred_element_type=jnp.float32)


def _logits_forward(x: Array, rows: Weight) -> tuple[Array, tuple[Array, Array]]:
    return logits_product(x, rows), (x, rows.copy)


def _logits_backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Weight]:
    x, copy = saved
    # Products of two compute-type operands run on tensor cores; their sums are fp32.
    dy = dy.astype(x.dtype)
    dx = jnp.einsum("bsv,vh->bsh", dy, copy)
    return dx, Weight(jnp.einsum("bsv,bsh->vh", dy, x, preferred_element_type=jnp.float32), jnp.zeros_like(copy))


logits_product.defvjp(_logits_forward, _logits_backward)


def add_bias(x: Float[Array, "B S *O"], bias: Float[Array, "*O"]) -> Float[Array, "B S *O"]:
    """The sum in fp32, rounded once to the type of `x`; so the bias' gradient is a sum in fp32."""
    return (x.astype(jnp.float32) + bias).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer normalisation over the hidden dim (Ba et al., 2016), in fp32."""

    def __init__(self, config: ModelConfig):
        self.scale = vector(jnp.ones(config.hidden_size), "hidden")
        self.bias = vector(jnp.zeros(config.hidden_size), "hidden")
        self.epsilon = config.layer_norm_epsilon

    def __call__(self, x: Float[Array, "B S H"]) -> Float[Array, "B S H"]:
        """Normalised `x` in the type of `x`."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, -1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), -1, keepdims=True)
        return (centred * lax.rsqrt(variance + self.epsilon) * self.scale[...] + self.bias[...]).astype(x.dtype)


class Dense(nnx.Module):
    """A kernel and a bias, over one or more input and output dims."""

    def __init__(self, key: Array, inputs: dict[str, int], outputs: dict[str, int], std: float):
        shape = (*inputs.values(), *outputs.values())
        self.kernel = matrix(normal(key, shape, std), *inputs, *outputs)
        self.bias = vector(jnp.zeros(tuple(outputs.values())), *outputs)

    def columns(self, comm: Communication, x: Float[Array, "B s ..."]) -> Float[Array, "B S ..."]:
        """x W + b, where devices share the output dims."""
        return add_bias(column_parallel(comm, x, self._product), self.bias[...])

    def rows(self, comm: Communication, x: Float[Array, "B S ..."]) -> Float[Array, "B s ..."]:
        """x W + b, where devices share the input dims."""
        return add_bias(row_parallel(comm, x, self._product), self.bias[...])

    def _product(self, x: Array) -> Array:
        return product(x, weight_of(self.kernel, x.dtype))


class Attention(nnx.Module):
    """Multi-head causal self-attention."""

    def __init__(self, config: ModelConfig, comm: Communication, key: Array):
        self.comm = comm
        hidden, heads = {"hidden": config.hidden_size}, {"heads": config.num_heads, "head": config.head_size}
        qkv_key, output_key = jax.random.split(key)
        self.qkv = Dense(qkv_key, hidden, {"qkv": 3} | heads, config.init_std)
        self.output = Dense(output_key, heads, hidden, config.init_std / math.sqrt(2 * config.num_layers))
        self.rate = config.attention_dropout

    def __call__(
        self, x: Float[Array, "B s H"], layer: Array | int, key: DropoutKey | None, segment: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B s H"]:
        """Attention over the positions of each sample, or of each of its segments."""
        qkv_BSCND = checkpoint_name(self.qkv.columns(self.comm, x), "qkv")
        q_BSND, k_BSND, v_BSND = (qkv_BSCND[:, :, i] for i in range(3))
        head = self.comm.index() * q_BSND.shape[2]
        drop = lambda w: dropout(w, self.rate, key, layer, ATTENTION_WEIGHTS, head)  # noqa: E731
        context_BSND = causal_attention(q_BSND, k_BSND, v_BSND, drop, segment)
        return self.output.rows(self.comm, checkpoint_name(context_BSND, "context"))

    def cached(
        self, x: Float[Array, "B T H"], cache: Cache, slot: Int[Array, ""], position: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Cache]:
        """Attention of tokens at `position` over all up to them, and the cache with theirs at layer `slot`."""
        qkv_BTCND = self.qkv.columns(self.comm, x)
        cache = with_layer(cache, slot, position, qkv_BTCND[:, :, 1], qkv_BTCND[:, :, 2])
        context_BTND = cached_attention(qkv_BTCND[:, :, 0], *of_layer(cache, slot), position)
        return self.output.rows(self.comm, context_BTND), cache


class FeedForward(nnx.Module):
    """Two projections with a GELU between them (Hendrycks and Gimpel, 2016)."""

    def __init__(self, config: ModelConfig, comm: Communication, key: Array):
        self.comm = comm
        hidden, inner = {"hidden": config.hidden_size}, {"inner": config.inner_size}
        up_key, down_key = jax.random.split(key)
        self.up = Dense(up_key, hidden, inner, config.init_std)
        self.down = Dense(down_key, inner, hidden, config.init_std / math.sqrt(2 * config.num_layers))
        self.approximate = config.activation == "gelu-tanh"

    def __call__(self, x: Float[Array, "B s H"]) -> Float[Array, "B s H"]:
        """The layer's output, position by position."""
        up_BSF = checkpoint_name(self.up.columns(self.comm, x), "up")
        return self.down.rows(self.comm, jax.nn.gelu(up_BSF, approximate=self.approximate))


class Block(nnx.Module):
    """A pre-LayerNorm transformer block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, comm: Communication, key: Array):
        self.comm = comm
        attention_key, feedforward_key = jax.random.split(key)
        self.attention_norm = LayerNorm(config)
        self.attention = Attention(config, comm, attention_key)
        self.feedforward_norm = LayerNorm(config)
        self.feedforward = FeedForward(config, comm, feedforward_key)
        self.rate = config.hidden_dropout

    def __call__(
        self, x: Float[Array, "B s H"], layer: Array | int, key: DropoutKey | None = None, segment: Int[Array, "B S"] | None = None
    ) -> Float[Array, "B s H"]:
        """The residual stream after this block; `layer` is the block's index, which dropout depends on.

        `segment` numbers the documents of each sample, all positions of it; tokens then attend to their own.
        """
        position = self.comm.first_position(x.shape[1])
        attended = self.attention(self.attention_norm(x), layer, key, segment)
        x = checkpoint_name(x + dropout(attended, self.rate, key, layer, ATTENTION_OUTPUT, position), "residual")
        fed = self.feedforward(self.feedforward_norm(x))
        return x + dropout(fed, self.rate, key, layer, FEEDFORWARD_OUTPUT, position)

    def cached(
        self, x: Float[Array, "B T H"], cache: Cache, slot: Int[Array, ""], position: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Cache]:
        """The residual stream of tokens at `position` after this block, without dropout, and the cache with what is theirs at `slot`."""
        attended, cache = self.attention.cached(self.attention_norm(x), cache, slot, position)
        x = x + attended
        return x + self.feedforward(self.feedforward_norm(x)), cache
