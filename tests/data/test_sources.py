"""What data.train may say, and every way in which it may be wrong."""

import dataclasses
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from giantjax.config import DataConfig, ModelConfig, RunConfig, TrainingConfig
from giantjax.data import sources
from giantjax.data.corpora import Blend, Synthetic, blended_samples, fingerprint, samples_of
from giantjax.data.indexed import IndexedDataset, TokenizerRecord
from giantjax.data.indexed_writer import write_indexed
from giantjax.data.sources import SHARES, open_corpora, open_source, open_sources, part_of
from giantjax.errors import InputError

RECORD = TokenizerRecord("bytes", 257, 256)
SIZES: dict[str, Any] = {"split": "train", "sequence_length": 8, "vocabulary_size": 257}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(prefix, ids=tuple(range(100)), record=RECORD, dtype=None, documents=1):
    with write_indexed(str(prefix), record, dtype) as writer:
        for part in np.array_split(np.array(ids, np.int64), documents):
            writer.append(part)
            writer.end_document()
    return str(prefix)


def run_config(train, validation=None, eval_every=0, split=None):
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, sequence_length=8, vocabulary_size=257)
    training = TrainingConfig(num_steps=1, global_batch_size=1, eval_every=eval_every)
    return RunConfig(name="test", model=model, training=training, data=DataConfig(train=train, validation=validation, split=split))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("corpas", "data.train is corpas, but there is no corpas.idx; did you mean corpus?"),
        ("./corpas", "did you mean ./corpus?"),
        ("stdlb", "did you mean stdlib?"),
        ("syntetic", "did you mean synthetic?"),
        ("inside/trian", "did you mean inside/train?"),
        ("inside", "a folder; name a pair in it, such as inside/train"),
        ("nothing", "a folder; it holds no indexed pair"),
        ("nowhere/corpus", "there is no folder nowhere"),
        ("book.txt", "prepare_data.py book.txt --output PREFIX"),
        ("tokens", "beside tokens.bin there is no tokens.idx"),
        ("index.idx", "beside index.idx there is no index.bin"),
    ],
)
def test_a_missing_corpus_is_explained(folder, entry, says):
    for name in ("inside", "nothing"):
        (folder / name).mkdir()
    write("corpus")
    write("inside/train")
    for name in ("book.txt", "tokens.bin", "index.idx"):
        (folder / name).write_text("text")
    with pytest.raises(InputError) as refusal:
        open_source(entry, **SIZES)
    assert says in str(refusal.value)


def test_endings_are_taken_off(folder):
    write("corpus")
    assert {open_source(entry, **SIZES).name for entry in ("corpus", "corpus.bin", "corpus.idx")} == {"corpus"}


def test_a_larger_vocabulary_is_refused_with_both_numbers(folder):
    write("corpus", record=dataclasses.replace(RECORD, vocabulary_size=50257))
    with pytest.raises(InputError, match=r"data.train corpus .* 50257 .*model.vocabulary_size is 257; .* at least 50257"):
        open_source("corpus", **SIZES)
    assert open_source("corpus", **SIZES | {"vocabulary_size": 50304})


@pytest.mark.parametrize(("token", "dtype"), [(300, "u2"), (-5, "i4"), (2**32 + 5, "i8"), (257, "u2")])
def test_ids_of_a_corpus_without_a_record_are_looked_at(folder, token, dtype):
    write("corpus", ids=[*range(50), token, *range(50)], record=None, dtype=np.dtype(dtype))
    with pytest.raises(InputError, match=rf"corpus.bin holds the token id {token} \(token 50 of the corpus\).*size is 257: .* 0 to 256"):
        open_source("corpus", **SIZES)


def test_the_look_at_ids_is_bounded_and_spread(folder, monkeypatch):
    monkeypatch.setattr(sources, "PIECE", 10)
    monkeypatch.setattr(sources, "SCANNED_TOKENS", 30)
    looked = []

    def read(self, start, stop):
        looked.append((start, stop))
        return self.tokens[start:stop]

    monkeypatch.setattr(IndexedDataset, "read", read)
    write("corpus", ids=range(95), record=None, dtype=np.dtype("u2"))
    open_source("corpus", **SIZES)
    assert looked == [(0, 10), (30, 40), (60, 70)]


def test_bytes_need_no_look(folder, monkeypatch):
    monkeypatch.setattr(IndexedDataset, "read", None)
    write("corpus", record=None, dtype=np.dtype("u1"))
    open_source("corpus", **SIZES)


def test_a_corpus_too_short_for_one_sample_is_refused(folder):
    write("corpus", ids=range(8))
    with pytest.raises(InputError, match=r"corpus holds 8 tokens, too few .*sequence_length 8 \+ 1; .* 7 or less"):
        open_source("corpus", **SIZES)
    assert samples_of(open_source("corpus", **SIZES | {"sequence_length": 7}), 7, 257).num_samples == 1


def names(*arguments, **options):
    return [source.name for source in open_sources(run_config(*arguments, **options)) if source is not None]


def test_the_sources_of_a_run(folder, monkeypatch):
    write("corpus")
    write("held_out", ids=range(50))
    assert names(("corpus",), "held_out", eval_every=5) == ["corpus", "held_out"]
    assert open_sources(run_config(("corpus",)))[1] is None
    monkeypatch.setattr(sources, "stdlib", lambda: ("corpus", "held_out"))
    assert names(("stdlib",), eval_every=5) == ["corpus", "held_out"]
    assert names(("stdlib",), "corpus") == ["corpus", "corpus"]
    assert names(("synthetic",), "stdlib") == ["synthetic", "held_out"]


def parts(source):
    return [(part.corpus.name, part.first, part.stop) for part in source.parts]


def test_corpora_are_blended(folder):
    for name in ("corpus", "other"):
        write(name, documents=10)
    blend, none = open_sources(run_config(("corpus:3", "other:1.5")))
    assert isinstance(blend, Blend) and none is None
    assert parts(blend) == [("corpus", 0, 10), ("other", 0, 10)] and blend.weights == (Fraction(2, 3), Fraction(1, 3))
    blend, held_out = open_sources(run_config(("corpus", "other"), "other", eval_every=5))
    assert isinstance(blend, Blend) and blend.weights is None and held_out is not None and held_out.name == "other"


def test_corpora_are_split_by_documents(folder):
    write("corpus", documents=10)
    write("other", ids=range(200), documents=20)
    config = run_config(("corpus:3", "other:1"), split="7, 2, 1")
    train, validation = open_sources(config)
    assert validation is not None
    assert parts(train) == [("corpus", 0, 7), ("other", 0, 14)] and parts(validation) == [("corpus", 7, 9), ("other", 14, 18)]
    test = part_of(config, open_corpora(config), "test")
    assert test is not None and parts(test) == [("corpus", 9, 10), ("other", 18, 20)]
    samples = blended_samples(train, 8, 257).parts[1]
    assert samples.num_samples == 17 and samples[0].tolist() == list(range(9))
    held_out = blended_samples(validation, 8, 257).parts[1]
    assert held_out.num_samples == 4 and held_out[0].tolist() == list(range(140, 149)) and held_out[3][-1] < 180
    only, none = open_sources(run_config(("corpus",), split="1"))
    assert none is None and parts(only) == [("corpus", 0, 10)]


@pytest.mark.parametrize("documents", [1, 7, 30, 999, 1000])
@pytest.mark.parametrize("split", ["969,30,1", "98,1,1", "0.5,.5", "1,0,0"])
def test_a_split_is_that_of_megatron_core(folder, split, documents):
    """Bounds are cumulated shares of the documents, each rounded to the nearest whole number."""
    write("corpus", ids=range(9 * documents), documents=documents, record=None, dtype=np.dtype("i4"))
    config = run_config(("corpus",), split=split)
    numbers = [float(word) for word in split.split(",")] + [0.0] * (3 - len(split.split(",")))
    bounds = [round(sum(numbers[:count]) / sum(numbers) * documents) for count in range(4)]
    corpora = open_corpora(dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary_size=10_000)))
    for number, name in enumerate(SHARES):
        if bounds[number] < bounds[number + 1]:
            found = part_of(config, corpora, name)
            assert found is not None and parts(found) == [("corpus", bounds[number], bounds[number + 1])]


def test_parts_are_those_that_megatron_core_made(shared):
    folder = shared / "data/megatron"
    golden = [one for one in json.loads((folder / "gptdataset_golden.json").read_text()) if "split_name" in one]
    mine = [one for one in golden if one["dataset"] == "state_union_text_document"]
    assert [one["split_name"] for one in mine] == ["train", "valid", "test"]
    config = run_config((str(folder / "state_union_text_document"),), split=mine[0]["split"])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocabulary_size=50257))
    corpora = open_corpora(config)
    for one, split in zip(mine, SHARES, strict=True):
        found = part_of(config, corpora, split)
        assert isinstance(found, Blend)
        assert (found.parts[0].first, found.parts[0].stop - 1) == (one["documents"][0], one["documents"][-1])


def test_the_fingerprint_of_a_blend_is_that_of_its_parts_and_weights(folder):
    for name in ("corpus", "other"):
        write(name, ids=range(len(name), 100), documents=10)
    ways = [
        run_config(("corpus", "other")),
        run_config(("other", "corpus")),
        run_config(("corpus:1", "other:1")),
        run_config(("corpus:2", "other:1")),
        run_config(("corpus:4", "other:2")),
        run_config(("corpus", "other"), split="9,1"),
        run_config(("corpus", "other"), split="8,2"),
    ]
    prints = [fingerprint(open_sources(config)[0]) for config in ways]
    assert prints[3] == prints[4] and len(set(prints)) == len(ways) - 1


def test_a_run_that_lacks_data_is_refused(folder):
    write("corpus")
    with pytest.raises(InputError, match=r"data\.train is empty"):
        open_sources(run_config(()))
    with pytest.raises(InputError, match=r"training\.eval_every is 5, but data\.validation"):
        open_sources(run_config(("corpus",), eval_every=5))
    with pytest.raises(InputError, match=r"data\.validation is held_uot, but there is no"):
        open_sources(run_config(("corpus",), "held_uot"))


def test_synthetic_tokens_are_a_function_of_seed_and_number():
    train, validation = open_sources(run_config(("synthetic",), "synthetic"))
    assert validation is not None
    assert isinstance(train, Synthetic) and isinstance(validation, Synthetic)
    samples = samples_of(train, 64, 257)
    np.testing.assert_array_equal(samples[3], samples_of(train, 64, 257)[3])
    assert samples[3].dtype == np.int32 and samples[3].shape == (65,) and samples[3].min() >= 0 and samples[3].max() < 257
    others = [samples[4], samples_of(Synthetic(1), 64, 257)[3], samples_of(validation, 64, 257)[3]]
    assert all((other != samples[3]).any() for other in others)


def test_the_fingerprint_tells_corpora_apart_and_not_places(folder):
    ids = list(range(100))
    write("corpus", ids)
    (folder / "elsewhere").mkdir()
    write("elsewhere/corpus", ids, record=None, dtype=np.dtype("u2"))
    write("documents", ids, documents=2)
    write("dtype", ids, record=None, dtype=np.dtype("i4"))
    write("token", [*ids[:60], 0, *ids[61:]])
    prints = {name: fingerprint(open_source(name, **SIZES)) for name in ("corpus", "documents", "dtype", "token", "synthetic")}
    assert fingerprint(open_source("elsewhere/corpus", **SIZES)) == prints["corpus"]
    assert len(set(prints.values())) == 5 and all(len(text) == 16 for text in prints.values())
