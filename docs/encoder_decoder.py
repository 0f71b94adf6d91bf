"""An encoder-decoder that learns to write a text backwards, on four pipeline stages: python docs/encoder_decoder.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

from giantjax import runtime
from giantjax.config import MeshConfig, RuntimeConfig
from giantjax.parallel.communication import ONE_DEVICE, column_parallel, own_part, row_parallel
from giantjax.parallel.mesh import build_mesh
from giantjax.parallel.stages import Model
from giantjax.training.optimizer import Optimizer
from giantjax.training.state import init_state, layout_of
from giantjax.training.step import build_train_step

ORDER = ("encoder",) * 2 + ("decoder",) * 2
LENGTH, WIDTH, HEADS, TOKENS = 8, 64, 4, 24  # the last token begins a text

ATTENTION = {"q": ("hidden", "heads", "head"), "kv": ("hidden", None, "heads", "head"), "out": ("heads", "head", "hidden")}
FEEDFORWARD = {"up": ("hidden", "inner"), "down": ("inner", "hidden")}
KINDS = {
    "encoder": {"own": ATTENTION, "feedforward": FEEDFORWARD},
    "decoder": {"own": ATTENTION, "cross": ATTENTION, "feedforward": FEEDFORWARD},
}
SIZES = {"hidden": WIDTH, "heads": HEADS, "head": WIDTH // HEADS, "inner": 4 * WIDTH, None: 2}
is_dims = lambda value: isinstance(value, tuple)  # noqa: E731


def encoder_decoder(comm=ONE_DEVICE, order=ORDER) -> Model:
    def init(key):
        drawn = iter(jax.random.split(key, 100))
        normal = lambda shape, fan_in: jax.random.normal(next(drawn), shape) / math.sqrt(fan_in)  # noqa: E731
        weight = lambda kind, dims: normal((order.count(kind), *(SIZES[dim] for dim in dims)), WIDTH)  # noqa: E731
        blocks = {kind: jax.tree.map(lambda dims: weight(kind, dims), KINDS[kind], is_leaf=is_dims) for kind in KINDS}  # noqa: B023
        return {"table": normal((TOKENS, WIDTH), WIDTH), "places": normal((2, LENGTH, WIDTH), WIDTH), "blocks": blocks}

    def embed(shared, batch, step):
        own = own_part(comm, LENGTH // (1 if comm.axis is None else jax.lax.axis_size(comm.axis)))
        places = shared["places"][:, own]
        # The boundary: the states of the encoder and those of the decoder, which travel together.
        return shared["table"][batch["source"][:, own]] + places[0], shared["table"][batch["input"][:, own]] + places[1]

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5)

    def attend(weights, x, memory, causal=False):
        q = column_parallel(comm, norm(x), lambda x: jnp.einsum("bsh,hnd->bsnd", x, weights["q"]))
        kv = column_parallel(comm, norm(memory), lambda x: jnp.einsum("bsh,hcnd->bscnd", x, weights["kv"]))
        scores = jnp.einsum("bqnd,bknd->bnqk", q, kv[:, :, 0]) / math.sqrt(q.shape[-1])
        seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)) | (not causal)
        context = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(jnp.where(seen, scores, -1e9)), kv[:, :, 1])
        return x + row_parallel(comm, context, lambda y: jnp.einsum("bsnd,ndh->bsh", y, weights["out"]))

    def feed(weights, x):
        up = column_parallel(comm, norm(x), lambda x: jax.nn.gelu(x @ weights["up"]))
        return x + row_parallel(comm, up, lambda up: up @ weights["down"])

    def encoder(shared, params, states, layer, batch, step):
        encoded, decoded = states
        return feed(params["feedforward"], attend(params["own"], encoded, encoded)), decoded

    def decoder(shared, params, states, layer, batch, step):
        encoded, decoded = states
        decoded = attend(params["own"], decoded, decoded, causal=True)
        return encoded, feed(params["feedforward"], attend(params["cross"], decoded, encoded))

    def loss(shared, states, batch, step):
        logits = norm(states[1]) @ shared["table"].T
        targets = batch["target"][:, own_part(comm, logits.shape[1])]
        right = jnp.sum(jnp.argmax(logits, -1) == targets).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).sum(), {"accuracy": right}

    blocks = jax.tree.map(lambda dims: ("layers", *dims), KINDS, is_leaf=is_dims)
    dims = {"table": (None, "hidden"), "places": (None, None, "hidden"), "blocks": blocks}
    decays = jax.tree.map(lambda _: True, dims, is_leaf=is_dims)
    functions = {"encoder": encoder, "decoder": decoder}
    weight = lambda batch: jnp.float32(batch["target"].size)  # noqa: E731
    return Model(init, dims, decays, embed, functions, loss, weight, order=order)


def batch_of(number: int, size: int = 64) -> dict[str, np.ndarray]:
    source = np.random.default_rng(number).integers(0, TOKENS - 1, (size, LENGTH), np.int32)
    target = source[:, ::-1]
    return {"source": source, "target": target, "input": np.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=TOKENS - 1)}


def main(num_steps: int = 80) -> list[tuple[float, float]]:
    model, rate = encoder_decoder(), optax.constant_schedule(3e-3)
    optimizer = Optimizer(optax.adam(3e-3), rate, clip_norm=1.0)
    layout = layout_of(model, optimizer, build_mesh(MeshConfig(pipe=4)), partition="uniform")
    state = init_state(model, optimizer, layout, seed=0)
    step, measured = build_train_step(model, optimizer, layout, num_microbatches=4), []
    for number in range(num_steps):
        state, metrics = step(state, batch_of(number))
        measured.append((float(metrics.loss), float(metrics.reported["accuracy"])))
    return measured


if __name__ == "__main__":
    runtime.start(RuntimeConfig(num_cpu_devices=4))
    for number, (loss, accuracy) in list(enumerate(main(), 1))[9::10]:
        print(f"step {number}  loss {loss:.3f} nats  accuracy {accuracy:.1%}")
