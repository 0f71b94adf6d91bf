"""Every kind of tokenizer: text comes back, expected ids, the end of a document, and refusals."""

import hashlib
import io
import itertools
import json
import lzma
import sys
import tarfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from giantjax.data.tokenizer import Tokenizer, ending_of, load_recorded, load_tokenizer, record_of, trained_size
from giantjax.data.tokenizer.convert import train_bpe
from giantjax.errors import InputError

BYTES = load_tokenizer("bytes")
WORDS = ["the", "theory", "of", "other", "hello", "wörld", "ünder", "<|endoftext|>", "</s>", "a1", "\n", "  ", "it's", "日本", "🎉"]
TEXT = " ".join(WORDS * 40) + "\n\n" + "The theory of other things.\n" * 60
CONTROLS = ("<|endoftext|>", "</s>", "<s>", "[SEP]", "[UNK]", "<unk>", "<|start|>")
# Words, spaces in every place, and any Unicode that is text.
PARTS = st.one_of(st.text(max_size=8), st.sampled_from([*WORDS, *CONTROLS, " ", "  ", "\r\n", "\t", "\0", "'ll", "ﬁ", "é", "'"]))
TEXTS = st.lists(PARTS).map("".join)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary of every kind, in the folder of its kind."""
    folder = tmp_path_factory.mktemp("tokenizers")

    def write(name: str, content: str | bytes) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    trained = train_bpe([TEXT], 300)
    write("trained/tokenizer.json", trained)
    model = json.loads(trained)["model"]
    write("gpt2/vocab.json", json.dumps(model["vocab"]))
    write("gpt2/merges.txt", "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    ranks = "\n".join(f"{b64encode(token).decode()} {rank}" for token, rank in ranks_of(model).items())
    write("ranks/some.tiktoken", ranks)
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("\u2581", -2.0), ("the", -2.5), ("\u2581the", -2.4)]
    pieces += [(character, -5.0) for character in sorted(set("".join(CONTROLS) + "helory sz\n") - {" "})]
    unigram = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    unigram.add_special_tokens([AddedToken(token, special=True) for token in ("</s>", "<s>", "<unk>")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    unigram.enable_padding(length=64, pad_id=0)
    unigram.enable_truncation(5)
    write("unigram/tokenizer.json", unigram.to_str())
    wordpieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##ory", "of", "hello", "un", "##der", ".", "[", "]", "sep", "<", ">", "/"]
    write("wordpiece/vocab.txt", "\n".join(wordpieces))
    write("cased/vocab.txt", "\n".join([*wordpieces, "The"]))
    for name, options in (("exact", dict(byte_fallback=True, normalization_rule_name="identity", **EXACT)), ("usual", {})):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT.splitlines()),
            model_writer=written,
            vocab_size=310 if options else 60,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        write(f"{name}/tokenizer.model", written.getvalue())
    return folder


EXACT: dict[str, Any] = dict(add_dummy_prefix=False, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)


def ranks_of(model: dict) -> dict[bytes, int]:
    """The ranks of a byte-level BPE whose vocabulary is in the order of its merges, as tiktoken counts them."""
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in letters]
    byte_of = {chr(letter): letter for letter in letters} | {chr(256 + place): byte for place, byte in enumerate(others)}
    tokens = sorted((token for token in model["vocab"] if token != "<|endoftext|>"), key=model["vocab"].__getitem__)
    return {bytes(byte_of[character] for character in token): rank for rank, token in enumerate(tokens)}


EXACTLY = ("bytes", "trained", "gpt2", "tiktoken-gpt2:ranks/some.tiktoken", "tiktoken-cl100k:ranks/some.tiktoken", "exact")
OTHERS = ("tiktoken-o200k:ranks/some.tiktoken", "unigram", "wordpiece", "cased", "usual")


@pytest.fixture(scope="session")
def tokenizer_of(files: Path) -> Callable[[str], Tokenizer]:
    made: dict[str, Tokenizer] = {}

    def load(spelling: str) -> Tokenizer:
        kind, colon, path = spelling.rpartition(":")
        if spelling not in made:
            made[spelling] = load_tokenizer("bytes" if spelling == "bytes" else f"{kind}{colon}{files / path}")
        return made[spelling]

    return load


@pytest.mark.parametrize("spelling", [*EXACTLY, "tiktoken-o200k:ranks/some.tiktoken"])
@settings(deadline=None, max_examples=100)
@example(text="<|endoftext|>")
@example(text=" \u2581 \u2047")
@given(text=TEXTS)
def test_text_comes_back(tokenizer_of, spelling, text):
    tokenizer = tokenizer_of(spelling)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and tokenizer.decode(ids) == expected_back(spelling, text)
    assert tokenizer.decode([*ids, tokenizer.end_of_document, tokenizer.vocabulary_size + 70, -1]) == expected_back(spelling, text)


def expected_back(spelling: str, text: str) -> str:
    # SentencePiece itself writes a space as U+2581.
    return text.replace("\u2581", " ") if spelling == "exact" else text


@pytest.mark.parametrize("spelling", [*EXACTLY, *OTHERS])
@settings(deadline=None, max_examples=100)
@example(text="</s>[SEP]<|endoftext|> <unk>")
@given(text=TEXTS)
def test_no_text_encodes_to_a_control_token(tokenizer_of, spelling, text):
    tokenizer = tokenizer_of(spelling)
    ids = tokenizer.encode(text)
    assert (ids >= 0).all() and (ids < tokenizer.vocabulary_size).all() and tokenizer.end_of_document not in ids
    controls = {"unigram": [1, 2], "wordpiece": [0, 2, 3], "cased": [0, 2, 3], "exact": [1, 2], "usual": [1, 2]}.get(spelling, [])
    assert not set(controls) & set(ids.tolist())


def test_the_name_of_a_control_token_is_spelled(tokenizer_of):
    unigram = tokenizer_of("unigram")
    assert unigram.decode(unigram.encode("the </s> the")) == "the </s> the"
    assert tokenizer_of("wordpiece").decode(tokenizer_of("wordpiece").encode("[SEP] hello")) == "[ sep ] hello"


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_wordpiece_gives_back_its_normalised_words(tokenizer_of, text):
    """Words and marks one space apart; case, accents, control characters and what the vocabulary lacks do not come back."""
    tokenizer = tokenizer_of("wordpiece")
    clean = normalizers.BertNormalizer(lowercase=True).normalize_str(text)
    words = [word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(clean)]
    known = [word if tokenizer.encode(word).tolist() != [1] else "[UNK]" for word in words]
    again = tokenizer.decode(tokenizer.encode(text))
    # The decoder joins marks to words, by rules of its own.
    assert again.replace(" ", "") == "".join(known).replace(" ", "")


@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_sentencepiece_gives_back_its_normalised_text(files, tokenizer_of, text):
    tokenizer = tokenizer_of("usual")
    model = sentencepiece.SentencePieceProcessor(model_file=str(files / "usual" / "tokenizer.model"))
    clean = model.normalize(text).replace("\u2581", " ").strip(" ")
    known = set("".join(model.id_to_piece(i) for i in range(3, model.vocab_size())))
    again = tokenizer.decode(tokenizer.encode(text))
    if set(clean) <= known | {" "}:
        assert again.strip(" ") == clean
    else:
        assert "\u2047" in again


@pytest.mark.parametrize("spelling", [spelling for spelling in (*EXACTLY, "tiktoken-o200k:ranks/some.tiktoken") if spelling != "exact"])
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_a_text_cut_at_seams_has_the_ids_of_the_whole(tokenizer_of, spelling, text):
    tokenizer, data = tokenizer_of(spelling), text.encode()
    cuts = [0, *(match.start() for match in tokenizer.seam.finditer(data)), len(data)]
    parts = [tokenizer.encode(data[first:last]) for first, last in itertools.pairwise(cuts)]
    assert np.concatenate(parts).tolist() == tokenizer.encode(text).tolist()


def test_kinds_that_read_a_text_whole_have_no_seam(tokenizer_of):
    assert all(tokenizer_of(spelling).seam is None for spelling in ("exact", "usual", "unigram", "wordpiece"))


@pytest.mark.parametrize("spelling", [*EXACTLY, *OTHERS])
def test_what_is_recorded_is_loaded_again(tokenizer_of, tmp_path, spelling):
    tokenizer = tokenizer_of(spelling)
    record = record_of(tokenizer)
    assert record.end_of_document < record.vocabulary_size and ending_of(record) == tokenizer.ending
    if tokenizer.ending:
        (tmp_path / f"copy{tokenizer.ending}").write_bytes(tokenizer.file)
    again = load_recorded(record, str(tmp_path / "copy"))
    assert record_of(again) == record and again.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()
    if tokenizer.ending:
        (tmp_path / f"copy{tokenizer.ending}").write_bytes(tokenizer.file + b"\n")
        with pytest.raises(InputError, match="is not the tokenizer that was recorded"):
            load_recorded(record, str(tmp_path / "copy"))
        (tmp_path / f"copy{tokenizer.ending}").unlink()
        with pytest.raises(InputError, match=r"cannot read .*copy.*No such file"):
            load_recorded(record, str(tmp_path / "copy"))


@pytest.mark.parametrize(
    ("spelling", "end", "size"),
    [
        ("bytes", 256, 257),
        ("trained", 0, 300),
        ("gpt2", 0, 300),
        ("unigram", 1, None),
        ("wordpiece", 3, 17),
        ("exact", 2, None),
        ("tiktoken-gpt2:ranks/some.tiktoken", 299, 300),
    ],
)
def test_the_end_of_a_document(tokenizer_of, spelling, end, size):
    tokenizer = tokenizer_of(spelling)
    assert tokenizer.end_of_document == end and size in (None, tokenizer.vocabulary_size)


def test_another_end_of_a_document(files):
    assert load_tokenizer(str(files / "unigram"), "<s>").end_of_document == 2
    assert load_tokenizer(str(files / "exact"), "<s>").end_of_document == 1
    assert load_tokenizer(f"tiktoken-gpt2:{files / 'ranks/some.tiktoken'}", "299").end_of_document == 299
    for spelling, token, says in (
        (str(files / "unigram"), "<nope>", "the vocabulary has no such token; its ids are 0 to"),
        (str(files / "trained"), "the", "ordinary text"),
        (f"tiktoken-gpt2:{files / 'ranks/some.tiktoken'}", "7", "ordinary text"),
        (f"tiktoken-gpt2:{files / 'ranks/some.tiktoken'}", "301", "no such token"),
        ("bytes", "256", "the tokenizer bytes ends documents with 256"),
    ):
        with pytest.raises(InputError, match=says):
            load_tokenizer(spelling, token)


def test_arguments_that_are_not_utf8_keep_their_bytes():
    assert BYTES.encode(b"\xff!".decode("utf-8", "surrogateescape")).tolist() == [255, 33]


@pytest.mark.parametrize("spelling", [*EXACTLY[1:], *OTHERS])
def test_what_is_no_unicode_is_replaced(tokenizer_of, spelling):
    tokenizer = tokenizer_of(spelling)
    assert tokenizer.encode("a\ud800b").tolist() == tokenizer.encode("a\ufffdb").tolist() == tokenizer.encode(b"a\xffb").tolist()


def test_a_path_speaks_for_itself(files):
    for path in ("gpt2", "gpt2/vocab.json", "gpt2/merges.txt", "trained", "trained/tokenizer.json", "wordpiece", "wordpiece/vocab.txt"):
        assert load_tokenizer(str(files / path)).name == "huggingface"
    for path in ("usual", "usual/tokenizer.model"):
        assert load_tokenizer(str(files / path)).name == "sentencepiece"
    ranks = files / "ranks" / "some.tiktoken"
    (files / "ranks" / "tokenizer.model").write_bytes(ranks.read_bytes())
    for path in (ranks, ranks.with_name("tokenizer.model")):
        with pytest.raises(InputError, match=r"holds 299 ranks.*say which pattern they are for: tiktoken-gpt2:"):
            load_tokenizer(str(path))


def test_the_case_of_a_vocabulary_decides_that_of_the_text(tokenizer_of):
    assert tokenizer_of("wordpiece").encode("The").tolist() == [4] and tokenizer_of("cased").encode("The the").tolist() == [17, 4]


def test_a_trained_vocabulary_is_a_function_of_its_texts():
    assert train_bpe(iter([TEXT, "more"]), 300) == train_bpe(iter([TEXT, "more"]), 300) != train_bpe(iter([TEXT]), 301)


REFUSED = (
    ("byte", None, "no tokenizer 'byte', nor a file of that name; did you mean bytes?"),
    ("gpt2:nowhere", None, "--tokenizer is gpt2:nowhere, but there is no file nowhere"),
    ("tokenizer.json", b"{}", "tokenizer.json is not a Hugging Face tokenizer.json (it has no 'model')"),
    ("tokenizer.json", b"\xff\xfe", "tokenizer.json is not a Hugging Face tokenizer.json ("),
    ("tokenizer.json", b"[" * 100_000, "tokenizer.json is not a Hugging Face tokenizer.json ("),
    ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "tokenizer.json has an empty vocabulary"),
    ("huggingface:tokenizer.json", b"", "tokenizer.json is not a Hugging Face tokenizer.json ("),
    ("tokenizer.model", b"\n\5hello", "tokenizer.model is not a SentencePiece model"),
    ("sentencepiece:tokenizer.model", b"", "tokenizer.model is not a SentencePiece model"),
    ("a.tiktoken", b"", "a.tiktoken is not a whole file of tiktoken ranks: it does not hold each of the 256 bytes"),
    ("a.tiktoken", b"YQ== 0\nnonsense", "a.tiktoken is not a file of tiktoken ranks: line 2 is not"),
    ("a.tiktoken", b"YQ== zero", "line 1 is not a token in base64 and its rank"),
    ("vocab.txt", b"the\nof", "vocab.txt is not a WordPiece vocabulary: it has no line [UNK]"),
    ("vocab.json", b"{}", "a GPT-2 BPE is a pair in one folder: encoder.json with vocab.bpe"),
    ("words.txt", b"the\nof", "whose name does not tell its kind; write KIND:words.txt"),
    (".", None, "--tokenizer is ., a folder without tokenizer.json, encoder.json with vocab.bpe"),
    ("gpt2:.", None, "a folder without encoder.json with vocab.bpe"),
    ("tiktoken:.", None, "name the file itself"),
)


@pytest.mark.parametrize(("spelling", "content", "says"), REFUSED)
def test_refusals(tmp_path, monkeypatch, capfd, spelling, content, says):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(spelling.rpartition(":")[2]).write_bytes(content)
    with pytest.raises(InputError) as refusal:
        load_tokenizer(spelling)
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("vocabulary", "merges", "says"),
    [
        (b"[]", b"a b", "vocab.json is not the vocabulary of a byte-level BPE (it is not an object"),
        (b"nonsense", b"a b", "vocab.json is not the vocabulary of a byte-level BPE ("),
        (b'{"a": 0}', b"a b", "the symbol ! of a byte is not in it"),
        (None, b"a b c", "merges.txt is not a list of merges"),
        (None, b"", "merges.txt is not a list of merges"),
        (None, b"zz yy", "merges.txt merges to zz, which"),
    ],
)
def test_a_pair_that_is_none(files, tmp_path, vocabulary, merges, says):
    (tmp_path / "vocab.json").write_bytes((files / "gpt2/vocab.json").read_bytes() if vocabulary is None else vocabulary)
    (tmp_path / "merges.txt").write_bytes(merges)
    with pytest.raises(InputError) as refusal:
        load_tokenizer(str(tmp_path))
    assert says in str(refusal.value)


@pytest.mark.parametrize(("package", "path"), [("sentencepiece", "usual"), ("tiktoken", "ranks/some.tiktoken")])
def test_a_package_that_is_not_installed_is_named(files, monkeypatch, package, path):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs the package {package}, which is not installed; pip install -e '\.\[{package}\]'"):
        load_tokenizer(str(files / path))


def test_the_size_of_a_trained_one():
    assert [trained_size(spelling) for spelling in ("bytes", "bpe:300", "bpe", "gpt2:x")] == [None, 300, None, None]
    for spelling in ("bpe:", "bpe:x", "bpe:256", "bpe:-1"):
        with pytest.raises(InputError, match="SIZE must be a whole number of at least 257"):
            trained_size(spelling)


@pytest.fixture(scope="session")
def expected(shared: Path) -> dict:
    return json.loads((shared / "data/gpt2-bpe/expected_ids.json").read_text())


def corpus_text(folder: Path, name: str) -> str:
    path, _, member = name.partition(": ")
    path = path.partition(" ")[0]
    if member:
        with tarfile.open(folder / path) as archive:
            extracted = archive.extractfile(member)
            assert extracted is not None
            return extracted.read().decode()
    data = (folder / path).read_bytes()
    return (lzma.decompress(data) if path.endswith(".xz") else data).decode()


def test_ids_of_gpt2_are_the_expected_ones(shared, expected, tmp_path, monkeypatch):
    """By the library of Hugging Face, and by that of OpenAI from a file of ranks, without a network."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    folder = shared / "data/gpt2-bpe"
    vocabulary = json.loads((folder / "encoder.json").read_text())
    ranks = ranks_of({"vocab": vocabulary})
    (tmp_path / "r50k.tiktoken").write_text("\n".join(f"{b64encode(token).decode()} {rank}" for token, rank in ranks.items()))
    for tokenizer in (load_tokenizer(str(folder)), load_tokenizer(str(tmp_path / "r50k.tiktoken"))):
        assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (50257, 50256)
        for one in expected["strings"]:
            ids = tokenizer.encode(one["text"]).tolist()
            if one["text"] == "<|endoftext|>":
                # There it stands for the token itself; in a text it is text.
                assert one["ids"] == [tokenizer.end_of_document] and tokenizer.decode(ids) == one["text"]
            else:
                assert ids == one["ids"]
        for one in expected["corpora"]:
            ids = tokenizer.encode(corpus_text(shared / "data", one["corpus"]))
            assert len(ids) == one["n_tokens"] and ids[:16].tolist() == one["first16"]
            assert hashlib.sha256(ids.astype("<u2").tobytes()).hexdigest() == one["sha256_uint16le"]


def test_the_model_of_sentencepieces_own_tests(shared):
    tokenizer = load_tokenizer(str(shared / "data/sentencepiece/sentencepiece_test_model_1000.model"))
    assert (tokenizer.vocabulary_size, tokenizer.end_of_document) == (1000, 2)
    text = "This is a test of the model, and of its pieces."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert not {1, 2} & set(tokenizer.encode("<s> </s>").tolist())
