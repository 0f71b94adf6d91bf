"""A model of one's own on two pipeline stages of two tensor-parallel devices: python docs/own_model.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from giantjax import runtime
from giantjax.config import MeshConfig, RuntimeConfig
from giantjax.parallel.communication import Communication, column_parallel, own_part, row_parallel
from giantjax.parallel.mesh import build_mesh
from giantjax.parallel.stages import Model
from giantjax.training.optimizer import Optimizer
from giantjax.training.state import init_state, layout_of
from giantjax.training.step import build_train_step

comm = Communication("tensor")


def init(key):
    a, b, c = jax.random.split(key, 3)
    blocks = {"up": 0.1 * jax.random.normal(a, (4, 32, 128)), "down": 0.1 * jax.random.normal(b, (4, 128, 32))}
    return {"table": jax.random.normal(c, (100, 32)), "blocks": blocks}  # the table is used twice: a tied weight


def embed(shared, batch, step):
    return shared["table"][batch["tokens"][:, own_part(comm, 8)]]


def block(shared, params, x, layer, batch, step):
    up = column_parallel(comm, x, lambda x: jax.nn.relu(x @ params["up"]))
    return x + row_parallel(comm, up, lambda up: up @ params["down"])


def loss(shared, x, batch, step):
    targets = batch["targets"][:, own_part(comm, 8)]
    return optax.softmax_cross_entropy_with_integer_labels(x @ shared["table"].T, targets).sum(), {}


def main() -> list[float]:
    dims = {"table": (None, "hidden"), "blocks": {"up": ("layers", "hidden", "inner"), "down": ("layers", "inner", "hidden")}}
    decays = jax.tree.map(lambda _: True, dims, is_leaf=lambda names: isinstance(names, tuple))
    model = Model(init, dims, decays, embed, block, loss, weight=lambda batch: jnp.float32(batch["targets"].size))
    optimizer = Optimizer(optax.adam(3e-3), optax.constant_schedule(3e-3), clip_norm=1.0)
    layout = layout_of(model, optimizer, build_mesh(MeshConfig(pipe=2, tensor=2)))
    state = init_state(model, optimizer, layout, seed=0)
    step, losses = build_train_step(model, optimizer, layout, num_microbatches=4), []
    for number in range(50):
        tokens = np.random.default_rng(number).integers(0, 100, (16, 16), np.int32)
        state, metrics = step(state, {"tokens": tokens, "targets": (3 * tokens + 1) % 100})
        losses.append(float(metrics.loss))
    return losses


if __name__ == "__main__":
    runtime.start(RuntimeConfig(num_cpu_devices=4))
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats")
