"""Evaluation against oracles: the training loop's own validation, and sums of log-softmaxes taken by hand."""

import json
import math
import sys
from typing import Any

import jax
import numpy as np
import pytest

from giantjax import runtime
from giantjax.config import MeshConfig, RunConfig
from giantjax.data.indexed import TokenizerRecord, open_indexed
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.loader import DocumentRules
from giantjax.data.tokenizer import ByteTokenizer
from giantjax.errors import InputError
from giantjax.evaluate import count_bytes, evaluate_corpus, evaluate_task, score_rows
from giantjax.model.gpt import gpt
from giantjax.score import Scorer, build_scorer
from giantjax.tasks import encode_task, read_task
from giantjax.training.restore import load_trained
from giantjax.training.run_directory import directory_of
from tests.helpers import FORWARD, logits_of, relative_error
from tests.scripts import SCRIPTS, load_script
from tests.training.runs import records_of, small_run, train_here, write_corpus

pytestmark = pytest.mark.xdist_group("evaluate")

MESHES = {"one": None, "pipe-tensor-data": MeshConfig(pipe=2, tensor=2, data=2)}
RULES = {"data.reset_positions": True, "data.reset_attention": True, "data.mask_document_ends": True}
QUESTIONS: list[dict[str, Any]] = [
    {"query": "ABCD", "choices": ["EFG", "G", "a longer one"], "gold": 1},
    {"query": "", "choices": ["BBB", "Grüße"], "gold": 0},
    {"query": "QRSTUVWXYZabcdefghijk", "choices": ["l", "mnopq"], "gold": 1},
]
WORDS = [{"text": "ABC DEF"}, {"text": "to be or not to be, that is"}]


def write_documents(prefix, *documents: list[int]) -> str:
    with write_indexed(str(prefix), TokenizerRecord("bytes", 257, 256)) as writer:
        for ids in documents:
            writer.append(np.array([*ids, 256]))
            writer.end_document()
    return str(prefix)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a corpus of 24 whole samples, in documents of which none ends where a sample does."""
    folder = tmp_path_factory.mktemp("evaluate")
    random = np.random.default_rng(1)
    sizes = [100, 7, 150, 24 * 16 + 1 - 4 - 257]
    write_documents(folder / "held_out", *[(np.cumsum(random.choice([1, 2], size)) % 50 + 65).tolist() for size in sizes])
    write_documents(folder / "tiny", [*"Grüße,".encode()], [*b"a b c"])
    (folder / "choices.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, WORDS)))
    return folder


def trained_run(folder, name: str, **changes) -> RunConfig:
    changes = {"training.num_steps": 20, "training.eval_every": 20, "training.eval_samples": 0} | changes
    config = small_run(folder / name, write_corpus(folder / f"{name}-corpus"), **changes | {"data.validation": str(folder / "held_out")})
    assert train_here(config) == 0
    return config


@pytest.fixture(scope="module")
def run(folder) -> RunConfig:
    return trained_run(folder, "run")


@pytest.fixture(scope="module", params=list(MESHES.values()), ids=list(MESHES))
def scorer(request, run) -> Scorer:
    return build_scorer(load_trained(directory_of(run), request.param), 4)


@pytest.fixture(scope="module")
def log_softmax(run):
    """ids up to sixteen -> log-probabilities of what follows each, by one pass over them."""
    params = load_trained(directory_of(run)).params
    forward = jax.jit(lambda tokens: logits_of(gpt(run.model), params, {"tokens": tokens}))

    def of(ids: list[int]) -> np.ndarray:
        logits = np.asarray(forward(np.pad(np.array([ids], np.int32), [(0, 0), (0, 16 - len(ids))])), np.float64)[0, : len(ids), :257]
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    return of


@pytest.mark.parametrize("rules", [{}, RULES], ids=["packed", "by-document"])
def test_the_loss_is_that_of_the_training_loop(folder, run, rules):
    config = trained_run(folder, "by-document", **rules) if rules else run
    found = evaluate_corpus(build_scorer(load_trained(directory_of(config)), 5), open_indexed(str(folder / "held_out")), None)
    assert found["loss"] == pytest.approx(records_of(config)[-1]["validation_loss"], rel=FORWARD)
    assert found["num_tokens"] == 24 * 16 - (3 if rules else 0)
    assert found["bits_per_byte"] is None


def test_every_token_counts_once_and_bits_are_by_the_byte(folder, scorer, log_softmax):
    """Windows of a corpus that ends within one, by hand."""
    corpus, tokenizer = open_indexed(str(folder / "tiny")), ByteTokenizer()
    ids = corpus.read(0, corpus.num_tokens).tolist()
    assert len(ids) == 15
    told: list[int] = []
    found = evaluate_corpus(scorer, corpus, tokenizer, told.append)
    logs = log_softmax(ids[:-1])
    nats = -sum(logs[place, token] for place, token in enumerate(ids[1:]))
    hits = sum(int(np.argmax(logs[place])) == token for place, token in enumerate(ids[1:]))
    assert found["loss"] == pytest.approx(nats / 14, rel=FORWARD)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 14), rel=10 * FORWARD)
    # 8 bytes and 5 bytes; the first is no target, and an end of document has none.
    assert found["num_bytes"] == 12
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / 12, rel=FORWARD)
    assert (found["accuracy"], found["num_tokens"], sum(told)) == (hits / 14, 14, 14)


def test_a_last_window_is_filled_up(folder, scorer, run, log_softmax):
    ids = [65 + number % 50 for number in range(16 + 5)]
    corpus = open_indexed(write_documents(folder / f"short-{scorer.trained.config.mesh.pipe}", ids))
    whole = [*ids, 256]
    parts = [(whole[0:16], whole[1:17]), (whole[16:21], whole[17:22])]
    nats = -sum(log_softmax(tokens)[np.arange(len(targets)), targets].sum() for tokens, targets in parts)
    found = evaluate_corpus(scorer, corpus, None)
    assert (found["num_tokens"], found["loss"]) == (21, pytest.approx(nats / 21, rel=FORWARD))


def test_bytes_of_masked_tokens_do_not_count(folder):
    corpus, tokenizer = open_indexed(str(folder / "tiny")), ByteTokenizer()
    assert count_bytes(corpus, tokenizer, DocumentRules()) == 12
    assert count_bytes(corpus, tokenizer, DocumentRules(mask_document_ends=True)) == 11


def test_likelihoods_are_sums_of_log_softmaxes(folder, scorer, log_softmax):
    task = read_task("--tasks", str(folder / "choices.jsonl"))
    rows = encode_task(task, ByteTokenizer(), 16)
    wanted = []
    for ids, num_scored in rows:
        logs, targets = log_softmax(ids[:-1])[-num_scored:], ids[-num_scored:]
        wanted.append((-logs[np.arange(num_scored), targets].sum(), (np.argmax(logs, axis=1) == targets).sum()))
    found = score_rows(scorer, rows)
    assert relative_error(found, wanted) < FORWARD
    losses, acc, acc_norm = iter(np.array(wanted)[:, 0]), [], []
    for question in QUESTIONS:
        own = np.array([next(losses) for _ in question["choices"]])
        acc.append(np.argmax(-own) == question["gold"])
        acc_norm.append(np.argmax(-own / [len(choice) for choice in question["choices"]]) == question["gold"])
    result = evaluate_task(scorer, task, rows)
    assert (result["acc"], result["acc_norm"]) == (np.mean(acc), np.mean(acc_norm))
    assert result["acc_stderr"] == pytest.approx(np.std(acc, ddof=1) / math.sqrt(3))


def test_a_last_word_is_found_where_each_of_its_tokens_is_the_likeliest(folder, scorer, log_softmax):
    """One question is made of what the model itself says."""
    ids = [*b"AB"]
    while len(ids) < 5:
        logs = log_softmax(ids)[-1]
        ids.append(int(np.argmax(logs)))
    task = read_task("--tasks", str(folder / "words.jsonl"))
    rows = encode_task(task, ByteTokenizer(), 16)
    own = rows[0]._replace(ids=ids, num_scored=3)
    result = evaluate_task(scorer, task, [own, rows[1]])
    losses = [
        log_softmax(row.ids[:-1])[-row.num_scored :][range(row.num_scored), row.ids[-row.num_scored :]].sum() for row in (own, rows[1])
    ]
    assert result["acc"] == 0.5
    assert result["perplexity"] == pytest.approx(math.exp(-np.mean(losses)), rel=10 * FORWARD)


def test_the_script_prints_and_writes_all_of_it(folder, run, monkeypatch, capsys, tmp_path):
    script = load_script("evaluate")
    monkeypatch.setattr(runtime, "start", lambda _: None)
    options = [
        "--run",
        str(run.run_dir),
        "--data",
        str(folder / "tiny"),
        "--tasks",
        str(folder / "words.jsonl"),
        str(folder / "choices.jsonl"),
    ]
    monkeypatch.setattr(sys, "argv", [str(SCRIPTS / "evaluate.py"), *options, "--json", str(tmp_path / "found.json")])
    assert script.main() == 0
    found, lines = json.loads((tmp_path / "found.json").read_text()), capsys.readouterr().out.splitlines()
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    assert (found["step"], found["data"]["num_bytes"], [task["kind"] for task in found["tasks"]]) == (
        20,
        12,
        ["last_word", "multiple_choice"],
    )
    assert lines[0] == f"{run.run_dir}, step 20" and len(lines) == 4
    assert f"loss {found['data']['loss']:.4f} nats a token" in lines[1] and "bits a byte" in lines[1] and lines[1].endswith("14 tokens")
    assert lines[2].startswith(f"{folder / 'words.jsonl'}: acc ") and lines[2].endswith("2 questions") and "acc_norm" in lines[3]


def test_a_corpus_of_another_tokenizer_is_refused(folder, run, monkeypatch):
    with write_indexed(str(folder / "other"), TokenizerRecord("bytes", 257, 255)) as writer:
        writer.append(np.arange(9))
        writer.end_document()
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "--run", str(run.run_dir), "--data", str(folder / "other")])
    with pytest.raises(InputError, match=r"other was prepared with another tokenizer \(bytes of 257 ids\)"):
        load_script("evaluate").main()
