"""Collectives over two levels of a cluster: fast inside a node, slow between nodes.

Each equals the flat collective over both mesh axes, with the device's index outermost by node, and sends over the slow
level no more than it must. They are called inside a `shard_map`. Letters: I devices inside a node, A nodes across.

Bytes each device sends over each level, for an array of n bytes (rings: Thakur et al., 2005):

| collective | inside | across |
|---|---|---|
| all_reduce | 2 n (I-1)/I | 2 n/I (A-1)/A |
| reduce_scatter | n (I-1)/I | n/I (A-1)/A |
| all_gather, of n bytes in all | n (I-1)/I | n/I (A-1)/A |
| all_to_all | n (I-1)/I | n (A-1)/A, in A-1 messages in the place of I (A-1) |
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Compression = Literal["none", "bf16", "int8"]
BLOCK = 256
"""Values that share a scale in int8: 1.6 % more bytes for the scales."""
LEVELS = 127
"""Of int8 on each side of zero: the largest value of a block is the last of them."""
BYTES_A_VALUE = {"none": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK}
"""Of what crosses between nodes."""


def all_reduce(x: Array, inside: str, across: str) -> Array:
    """The sum of `x` over both axes, the same on every device: scattered in the node, summed across, gathered in the node."""
    flat, share = _padded(x, lax.axis_size(inside))
    own = lax.psum(lax.psum_scatter(flat.reshape(-1, share), inside, scatter_dimension=0, tiled=True), across)
    return lax.all_gather(own.ravel(), inside, tiled=True, to="invarying")[: x.size].reshape(x.shape)


def reduce_scatter(x: Float[Array, "n ..."], inside: str, across: str) -> Float[Array, "n/(A*I) ..."]:
    """This device's part, along the first dim, of the sum of `x` over both axes.

    Raises:
        ValueError: the devices do not divide the first dim.
    """
    nodes, devices = lax.axis_size(across), lax.axis_size(inside)
    parts = _parts(x, nodes, devices)
    own = lax.psum_scatter(parts, inside, scatter_dimension=1, tiled=True)
    own = lax.psum_scatter(own, across, scatter_dimension=0, tiled=True)
    return own.reshape(-1, *x.shape[1:])


def all_gather(x: Float[Array, "n ..."], inside: str, across: str) -> Float[Array, "n*A*I ..."]:
    """The parts of every device along the first dim: each crosses between nodes once, then spreads in the node."""
    nodes = lax.all_gather(x, across, to="invarying")
    everything = lax.all_gather(nodes, inside, axis=1, to="invarying")
    return everything.reshape(-1, *x.shape[1:])


def all_to_all(x: Float[Array, "n ..."], inside: str, across: str) -> Float[Array, "n ..."]:
    """Part d of the first dim to device d, and in its place what device d had for this one.

    What a node sends to another goes in one message a device, gathered inside the node first.

    Raises:
        ValueError: the devices do not divide the first dim.
    """
    parts = _parts(x, lax.axis_size(across), lax.axis_size(inside))
    parts = lax.all_to_all(parts, inside, split_axis=1, concat_axis=1, tiled=True)
    parts = lax.all_to_all(parts, across, split_axis=0, concat_axis=0, tiled=True)
    return parts.reshape(x.shape)


def _parts(x: Array, nodes: int, devices: int) -> Array:
    """[A, I, n / (A I), ...]."""
    if x.shape[0] % (nodes * devices):
        raise ValueError(f"the first dim has {x.shape[0]} entries, which {nodes} nodes x {devices} devices do not divide")
    return x.reshape(nodes, devices, -1, *x.shape[1:])


def _padded(x: Array, ways: int) -> tuple[Array, int]:
    """`x` flat, with zeros to the next multiple of `ways`, and the size of each of the `ways` shares."""
    share = -(-x.size // ways)
    return jnp.pad(x.ravel(), (0, share * ways - x.size)), share


class Errors(NamedTuple):
    """What rounding took off in the last step, to be added in the next (error feedback: Seide et al., 2014)."""

    sent: Float[Array, "n"]
    """Of this device's summand."""
    summed: Float[Array, "n/A"]
    """Of its part of the sum."""


def compressed_sum(
    x: Float[Array, "n"], axis: str, compression: Literal["bf16", "int8"], errors: Errors | None
) -> tuple[Float[Array, "n"], Errors]:
    """The sum of fp32 `x` over `axis`, the same on every device, with values rounded on the way but never summed rounded.

    Each device sends a part of its rounded values to each, adds what it received in fp32, and sends the rounded sum to all
    (Tang et al., 2021). A ring would round at every hop. int8 sends a quarter of fp32's bytes, bf16 half.

    Args:
        x: n values; A devices x BLOCK must divide n (`padded_size`).
        axis: the mesh axis between nodes.
        compression: how values are rounded.
        errors: what this function returned in the last step; None adds nothing.
    """
    encode, decode = _CODECS[compression]
    nodes = lax.axis_size(axis)
    wanted = x if errors is None else x + errors.sent
    code = encode(wanted)
    received = [lax.all_to_all(a.reshape(nodes, -1, *a.shape[1:]), axis, split_axis=0, concat_axis=0) for a in code]
    parts = decode([a.reshape(-1, *a.shape[2:]) for a in received]).reshape(nodes, -1)
    total = jnp.sum(parts, axis=0) if errors is None else jnp.sum(parts, axis=0) + errors.summed
    rounded = encode(total)
    result = decode([lax.all_gather(a, axis, tiled=True, to="invarying") for a in rounded])
    return result, Errors(wanted - decode(code), total - decode(rounded))


def padded_size(size: int, inside: int, across: int) -> int:
    """The least number of values, `size` or more, that `inside` devices can share and `compressed_sum` takes over `across`."""
    return math.ceil(size / (inside * across * BLOCK)) * inside * across * BLOCK


def _encode_bf16(x: Float[Array, "n"]) -> list[Array]:
    return [x.astype(jnp.bfloat16)]


def _decode_bf16(code: list[Array]) -> Float[Array, "n"]:
    return code[0].astype(jnp.float32)


def _encode_int8(x: Float[Array, "n"]) -> list[Array]:
    """int8 [n / BLOCK, BLOCK] and fp32 scales [n / BLOCK]."""
    blocks = x.reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1) / LEVELS
    levels = jnp.round(blocks / jnp.where(scales == 0, 1, scales)[:, None])
    return [levels.astype(jnp.int8), scales]


def _decode_int8(code: list[Array]) -> Float[Array, "n"]:
    levels, scales = code
    return (levels.astype(jnp.float32) * scales[:, None]).ravel()


_CODECS: dict[str, tuple[Callable[[Array], list[Array]], Callable[[list[Array]], Array]]] = {
    "bf16": (_encode_bf16, _decode_bf16),
    "int8": (_encode_int8, _decode_int8),
}
