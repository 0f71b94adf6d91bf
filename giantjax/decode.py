"""Decoding on any mesh with a cache of keys and values: a prompt once, then a token a step.

A step is one `shard_map` over the whole mesh. Samples are shared by the batch axes and heads by `tensor`, as in training; positions
are not, for a token cannot be divided. A pipeline's stages take the tokens one after the other: in each of as many ticks as there are
stages all of them compute, what the one whose turn it is leaves is kept, and that of the others is not. They would wait otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from giantjax.model.cache import DIMS, Cache
from giantjax.model.gpt import GPT, decoding_model
from giantjax.parallel.mesh import AXES, BATCH_AXES
from giantjax.parallel.sharding import partition_spec
from giantjax.parallel.stage import PIPE
from giantjax.parallel.stages import BLOCKS, Params, shared_of
from giantjax.parallel.varying import varying, varying_axes
from giantjax.training.precision import DTYPES
from giantjax.training.restore import Trained
from giantjax.training.state import Layout

SHORTEST = 16
"""Tokens of the shortest prefill: prompts are filled up to this times a power of two, and each such length is compiled once."""


@dataclass(frozen=True, eq=False)
class Decoder:
    """A trained model, ready to decode; made by `build_decoder`."""

    trained: Trained
    step: jax.stages.Wrapped
    """Of `build_decode_step`."""
    num_ways: int
    """Devices that see different samples; the number of rows is a multiple of it."""

    def new_cache(self, num_rows: int) -> Cache:
        """A cache of `num_rows` samples with nothing in it yet."""
        sizes, layout = self.trained.config.model, self.trained.layout
        shape = (layout.layers.size, num_rows, sizes.sequence_length, sizes.num_heads, sizes.head_size)
        sharding = NamedSharding(layout.mesh, partition_spec(DIMS))
        return Cache(*(jnp.zeros(shape, jnp.float32, device=sharding) for _ in Cache._fields))


def build_decoder(trained: Trained) -> Decoder:
    """The decoder of a model from `load_trained`, on the mesh it was loaded for."""
    model = decoding_model(trained.config, DTYPES["fp32"])
    ways = math.prod(trained.layout.mesh.shape[axis] for axis in BATCH_AXES)
    return Decoder(trained, build_decode_step(model, trained.layout, trained.config.model.vocabulary_size), ways)


def build_decode_step(model: GPT, layout: Layout, vocabulary_size: int) -> jax.stages.Wrapped:
    """parameters, cache, tokens int32 [B, T], start int32 [B], count int32 [B] -> fp32 logits [B, vocabulary_size], cache.

    Of each row the first `count` tokens stand at `start` and on; logits are of what follows the last of them. A row whose count
    is 0 is left as it is, and its logits mean nothing. The cache is donated.

    Args:
        model: from `decoding_model`.
        layout: where its parameters lie.
        vocabulary_size: without padding.
    """
    assert layout.num_chunks == 1 and layout.zero_stage < 3
    num_stages, padded = len(layout.layers), bool((layout.layers < 0).any())

    def blocks(params: Params, x: Array, cache: Cache, position: Array) -> tuple[Array, Cache]:
        def one(carry: tuple[Array, Cache], entry: tuple[Array, Array, Params]) -> tuple[tuple[Array, Cache], None]:
            slot, layer, block = entry
            y, cache = model.cached_block(block, *carry, slot, position)
            return varying((jnp.where(layer >= 0, y, carry[0]) if padded else y, cache)), None

        layers = jnp.asarray(layout.layers)[lax.axis_index(PIPE)]
        return lax.scan(one, (x, cache), (jnp.arange(layers.size), layers, params[BLOCKS]))[0]

    def step(
        params: Params, cache: Cache, tokens: Int[Array, "B T"], start: Int[Array, "B"], count: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], Cache]:
        params, stage, length = varying(params), lax.axis_index(PIPE), cache.key.shape[2]
        offset = jnp.arange(tokens.shape[1])
        position = jnp.where(offset < count[:, None], start[:, None] + offset, length)
        places = jnp.minimum(position, length - 1)
        entering = varying(model.embed(shared_of(params), {"tokens": tokens, "position": places}, None))

        def tick(carry: tuple[Array, Cache], number: Array) -> tuple[tuple[Array, Cache], None]:
            x, cache = carry
            received = lax.ppermute(x, PIPE, [(i, i + 1) for i in range(num_stages - 1)]) if num_stages > 1 else x
            # Past the end of the cache, where nothing is kept, while it is another stage's turn.
            own = varying(jnp.where(number == stage, position, length))
            return blocks(params, jnp.where(stage == 0, entering, received), cache, own), None

        (x, cache), _ = lax.scan(tick, (entering, varying(cache)), jnp.arange(num_stages))
        last = x[jnp.arange(x.shape[0]), jnp.maximum(count - 1, 0)]
        logits = model.logits(shared_of(params), last[:, None])[:, 0]
        if lax.axis_size("tensor") > 1:
            logits = lax.all_gather(logits, "tensor", axis=1, tiled=True, to="invarying")
        logits = jnp.where(stage == num_stages - 1, logits, 0)[:, :vocabulary_size]
        return lax.psum(logits, tuple(axis for axis in AXES if axis in varying_axes(logits) and axis not in BATCH_AXES)), cache

    # One spec stands for both arrays of the cache.
    rows, caches = partition_spec(("batch",)), partition_spec(DIMS)
    specs = (layout.params, caches, rows, rows, rows)
    return jax.jit(jax.shard_map(step, mesh=layout.mesh, in_specs=specs, out_specs=(rows, caches)), donate_argnums=1)


class Window:
    """Texts, and what of each a decoder has in its cache.

    Learned positions end where the model's sequence length does. A text that comes there is begun anew with the last half of its
    tokens, which are read at once: so every token is computed twice at most, and sees at least half of the window.
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[Sequence[int]]):
        self._decoder, self._length = decoder, decoder.trained.config.model.sequence_length
        self._texts = [list(prompt) for prompt in prompts]
        self._num_rows = -(-len(prompts) // decoder.num_ways) * decoder.num_ways
        self._cache = decoder.new_cache(self._num_rows)
        # Tokens of each row in the cache; 0 means that it has yet to begin.
        self._held = np.zeros(self._num_rows, np.int32)

    def next_logits(self) -> Float[Array, "B V"]:
        """Reads what has not been read; logits of what follows each text. Rows after the last text mean nothing."""
        read, begun = {}, {}
        for row, text in enumerate(self._texts):
            if self._held[row] in (0, self._length):
                begun[row] = text[-(max(self._length // 2, 1) if self._held[row] else self._length) :]
                self._held[row] = 0
            else:
                read[row] = text[-1:]
        if not (read and begun):
            return self._read(read or begun)
        is_begun = np.isin(np.arange(self._num_rows), list(begun))[:, None]
        return jnp.where(is_begun, self._read(begun), self._read(read))

    def append(self, tokens: Int[np.ndarray, "B"]) -> None:
        """What each text goes on with."""
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(int(token))

    def _read(self, parts: dict[int, list[int]]) -> Array:
        longest = max(map(len, parts.values()))
        size = 1 if longest == 1 else SHORTEST
        while size < longest:
            size *= 2
        size = min(size, self._length)
        tokens, count = np.zeros((self._num_rows, size), np.int32), np.zeros(self._num_rows, np.int32)
        for row, part in parts.items():
            tokens[row, : len(part)], count[row] = part, len(part)
        logits, self._cache = self._decoder.step(self._decoder.trained.params, self._cache, tokens, self._held, count)
        # A new array, for the device may still read the old one.
        self._held = self._held + count
        return logits
