"""Documents packed into one sample and told apart: their losses are those they have alone, and nothing crosses between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from giantjax.data.indexed import open_indexed
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.loader import DocumentRules, validation_batches
from giantjax.model.gpt import GPT, gpt
from giantjax.parallel.stages import Batch, Params, apply_blocks
from tests import test_equivalence
from tests.helpers import FORWARD, GRADIENT, cut_whole, loss_and_grads, random_params, relative_error, small_model
from tests.test_equivalence import BATCH, LENGTH, VOCABULARY, Case

MODEL = small_model()
APART = DocumentRules(reset_positions=True, reset_attention=True, mask_document_ends=True)
END = 60
# Two documents that fill one sample of 16 tokens and its last target.
FIRST, SECOND = [3, 14, 15, 9, 26, 5, END], [35, 8, 9, 7, 9, 3, 23, 8, 46, END]


def batch_of(folder: Path, documents: list[list[int]], length: int, rules: DocumentRules = APART) -> dict[str, Any]:
    """The one sample of a corpus of these documents."""
    prefix = str(folder / f"corpus{len(list(folder.iterdir()))}")
    with write_indexed(prefix, dtype=np.dtype("u2")) as writer:
        for document in documents:
            writer.append(np.array(document))
            writer.end_document()
    (batch,) = validation_batches(
        open_indexed(prefix), sequence_length=length, batch_size=1, num_samples=0, vocabulary_size=61, rules=rules
    )
    return batch


@pytest.fixture(scope="module")
def model() -> GPT:
    return gpt(MODEL)


@pytest.fixture(scope="module")
def params(model: GPT) -> Params:
    return random_params(model)


@pytest.fixture(scope="module")
def step(model: GPT) -> Callable[..., tuple[jax.Array, Params]]:
    return loss_and_grads(model)


def test_a_packed_pair_has_the_losses_and_gradients_of_its_documents_alone(tmp_path, step, params):
    packed, packed_grads = step(params, batch_of(tmp_path, [FIRST, SECOND], 16))
    alone = [step(params, batch_of(tmp_path, [document], len(document) - 1)) for document in (FIRST, SECOND)]
    assert relative_error(packed, sum(loss for loss, _ in alone)) <= FORWARD
    assert relative_error(packed_grads, jax.tree.map(jnp.add, *(grads for _, grads in alone))) <= GRADIENT


@pytest.mark.parametrize("left_out", ["reset_positions", "reset_attention", "mask_document_ends"])
def test_it_takes_all_three(tmp_path, step, params, left_out):
    rules = DocumentRules(**vars(APART) | {left_out: False})
    packed = step(params, batch_of(tmp_path, [FIRST, SECOND], 16, rules))[0]
    alone = [step(params, batch_of(tmp_path, [document], len(document) - 1))[0] for document in (FIRST, SECOND)]
    assert relative_error(packed, sum(alone)) > 10 * FORWARD


@pytest.mark.parametrize("recompute", ["none", "full:2"])
def test_no_gradient_crosses_the_end_of_a_document(tmp_path, model, params, recompute):
    batch = {name: jnp.asarray(array) for name, array in batch_of(tmp_path, [FIRST, SECOND], 16).items()}
    end = len(FIRST)
    cut = cut_whole(params, recompute)

    def loss(x: jax.Array, batch: Batch) -> jax.Array:
        return model.loss(params, apply_blocks(model, params, *cut, x, batch, None, recompute), batch, None)[0]

    gradient = jax.jit(jax.grad(loss))
    x = model.embed(params, batch, None)
    of_second = gradient(x, batch | {"loss_mask": batch["loss_mask"].at[:, :end].set(0)})
    assert (of_second[:, :end] == 0).all() and (of_second[:, end:] != 0).any(-1).all()
    of_first = gradient(x, batch | {"loss_mask": batch["loss_mask"].at[:, end:].set(0)})
    assert (of_first[:, end:] == 0).all()
    packed = gradient(
        x, {name: array for name, array in batch.items() if name != "segment"} | {"loss_mask": batch["loss_mask"].at[:, :end].set(0)}
    )
    assert (packed[:, :end] != 0).any()


def test_documents_are_told_apart_on_any_mesh(monkeypatch):
    """Positions and segments of a device's share of the sequence, and of each microbatch on each stage."""
    plain = test_equivalence.batch_of()
    random = np.random.default_rng(1)
    ends = random.random((BATCH, LENGTH)) < 0.3
    segment = np.cumsum(ends, axis=1, dtype=np.int32)
    firsts = np.maximum.accumulate(np.where(ends, np.arange(LENGTH), 0), axis=1)
    documents = {"segment": segment, "position": (np.arange(LENGTH) - firsts).astype(np.int32)}
    assert plain["tokens"].max() < VOCABULARY and segment.max() > 3
    monkeypatch.setattr(test_equivalence, "batch_of", lambda: plain | documents)
    expected = test_equivalence.run(Case(dropout=0.0))
    found = test_equivalence.run(Case(pipe=2, data=2, tensor=2, microbatches=2, dropout=0.0))
    assert relative_error(found.losses, expected.losses) <= FORWARD
    assert relative_error(found.evaluation, expected.evaluation) <= FORWARD
    assert relative_error(found.norms, expected.norms) <= FORWARD
    assert relative_error(found.params, expected.params) <= GRADIENT
