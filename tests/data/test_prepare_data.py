"""scripts/prepare_data.py: the same corpus whatever the number of processes and of kills, in the documents of the inputs."""

import dataclasses
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from giantjax.data import inputs, partial
from giantjax.data import prepare as prepare_module
from giantjax.data.encode import Rules
from giantjax.data.indexed import TokenizerRecord, open_indexed
from giantjax.data.inputs import check_inputs, read_pieces, zstd
from giantjax.data.prepare import Prepared, prepare
from giantjax.data.tokenizer import ByteTokenizer, load_recorded
from giantjax.data.tokenizer.protocol import WORD_END
from giantjax.errors import InputError
from tests.scripts import SCRIPTS

SCRIPT = SCRIPTS / "prepare_data.py"
ENDINGS = (".bin", ".idx", ".json", ".tokenizer.json")
SENTENCE = "The wörld is all that is the case 1. It is the totality of facts, not of things\n"


def json_lines(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({"id": i, key: text}).encode() + b"\n" for i, text in enumerate(texts))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs of every format, of some thousand bytes each, in the working directory; pieces are of 256 bytes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "PIECE", 256)
    texts = [f"{i} {SENTENCE}" * (i % 4) for i in range(30)]
    lines = json_lines(texts)
    (tmp_path / "a.txt").write_text(SENTENCE * 20)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress((SENTENCE * 10).encode()) + gzip.compress((SENTENCE * 10).encode()))
    (tmp_path / "c.jsonl").write_bytes(lines.replace(b"\n", b"\r\n\n", 3).removesuffix(b"\n"))
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "e.ndjson.zst").write_bytes(zstd.compress(lines[:1000]) + zstd.compress(lines[1000:]))
    (tmp_path / "f.txt.zst").write_bytes(zstd.compress((SENTENCE * 20).encode()))
    return tmp_path


ALL = ("a.txt", "b.txt.gz", "c.jsonl", "d.json.gz", "e.ndjson.zst", "f.txt.zst")


def contents(prefix: str) -> dict[str, bytes]:
    found = {ending: Path(prefix + ending) for ending in ENDINGS}
    return {ending: path.read_bytes() for ending, path in found.items() if path.exists()}


def documents(prefix: str) -> list[str]:
    read = open_indexed(prefix)
    assert read.record is not None
    tokenizer = load_recorded(read.record, f"{prefix}.tokenizer")
    assert all(read.sequence(i)[-1] == tokenizer.end_of_document for i in range(read.num_sequences))
    return [tokenizer.decode(read.sequence(i)) for i in range(read.num_sequences)]


def test_each_file_is_a_document_and_so_is_each_line(folder):
    prepared = prepare(ALL, "new/deep/corpus")
    texts = [text for text in (f"{i} {SENTENCE}" * (i % 4) for i in range(30)) if text]
    assert documents("new/deep/corpus") == [SENTENCE * 20, SENTENCE * 20, *texts * 3, SENTENCE * 20]
    num_bytes = len((SENTENCE * 60 + "".join(texts) * 3).encode())
    assert prepared == Prepared("new/deep/corpus", 3 + 3 * len(texts), num_bytes + 3 + 3 * len(texts), num_bytes, 3 * 8, 257)
    read = open_indexed("new/deep/corpus")
    assert read.record == TokenizerRecord("bytes", 257, 256) and read.tokens.dtype.name == "uint16"
    assert sorted(os.listdir("new/deep")) == ["corpus.bin", "corpus.idx", "corpus.json"]


@pytest.mark.parametrize(("of", "number"), [("bytes", 2), ("bpe:300", 3)])
def test_any_number_of_processes_writes_the_same(folder, of, number):
    prepare(ALL, "one", of)
    prepare(ALL, "several", of, num_processes=number)
    assert len(contents("one")) == (3 if of == "bytes" else 4) and contents("several") == contents("one")
    assert documents("several")[:2] == [SENTENCE * 20] * 2


class Countdown:
    """Says stop when it was asked often enough."""

    def __init__(self, number: int):
        self.left = number

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_a_stop_after_any_piece_changes_nothing(folder, monkeypatch):
    """Also where a kill came instead, some pieces after the last save."""
    prepare(ALL, "whole", "bpe:280")
    expected, stops = contents("whole"), 0
    trained = prepare_module._trained
    monkeypatch.setattr(prepare_module, "_trained", lambda *arguments: trained(*arguments) if not stops else pytest.fail("trained again"))
    while prepare(ALL, "stopped", "bpe:280", stop=Countdown(1 + stops % 5)) is None:
        stops += 1
        with open("stopped.partial/bin", "ab") as file:
            file.write(b"torn")
        with open("stopped.partial/lengths", "ab") as file:
            file.write(b"torn!")
    assert stops > 20 and contents("stopped") == expected
    assert not os.path.exists("stopped.partial")


def start(*arguments: str, before: str = "") -> subprocess.Popen:
    """The script in a process of its own, after the statements `before`."""
    program = f"import sys\nsys.argv = sys.argv[1:]\n{before}\nimport runpy\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_kill_while_files_get_their_names(folder):
    whole = prepare(ALL, "whole", "bpe:280")
    for name in ("killed.bin", "killed.json", "killed.idx"):
        kill = f"import os\nrename = os.rename\nos.rename = lambda path, final: os._exit(9) if final == {name!r} else rename(path, final)"
        process = start(*ALL, "--output", "killed", "--tokenizer", "bpe:280", before=kill)
        assert process.communicate(timeout=60) == ("", "") and process.returncode == 9
        assert not os.path.exists("killed.idx")
    done = prepare(ALL, "killed", "bpe:280")
    assert done is not None and dataclasses.replace(done, prefix="whole") == whole
    assert contents("killed") == contents("whole")


SLOW = """
from giantjax.data import inputs, prepare
from giantjax.data.partial import Partial
import time
inputs.PIECE, prepare.SAVE_SECONDS, save = 256, 0.0, Partial.save
Partial.save = lambda *arguments: (save(*arguments), time.sleep(0.02))
"""


@pytest.mark.parametrize(
    ("number", "code", "processes"),
    [(signal.SIGKILL, -9, "1"), (signal.SIGKILL, -9, "2"), (signal.SIGTERM, 143, "2"), (signal.SIGINT, 130, "1")],
)
def test_a_signal_in_the_middle(folder, number, code, processes):
    """The same command goes on where it was, and writes what an undisturbed one writes."""
    (folder / "large.txt").write_text(SENTENCE * 700)
    process = start("large.txt", "c.jsonl", "--output", "p", "--num-processes", processes, before=SLOW)
    state = folder / "p.partial" / "state.json"
    wait_until(state, 2000, process)
    # Like a scheduler's, a polite signal goes to the processes of the pool too.
    os.killpg(process.pid, number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == code
    assert number == signal.SIGKILL or told == "stopped; the same command goes on from p.partial\n"
    assert 2000 < json.loads(state.read_text())["num_tokens"] < 50_000 and not os.path.exists("p.idx")
    for output in ("p", "whole"):
        assert prepare(["large.txt", "c.jsonl"], output) is not None
    assert contents("p") == contents("whole")


def wait_until(state: Path, num_tokens: int, process: subprocess.Popen) -> None:
    """Until more than so many tokens are saved."""
    end = time.monotonic() + 60
    while not (state.exists() and json.loads(state.read_text())["num_tokens"] > num_tokens):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.002)


def test_processes_end_with_the_first_that_is_killed(folder):
    (folder / "large.txt").write_text(SENTENCE * 700)
    process = start("large.txt", "--output", "p", "--num-processes", "2", before=SLOW)
    wait_until(folder / "p.partial/state.json", 0, process)
    children = [Path("/proc", number) for number in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(children) >= 2
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while any(child.exists() and child.joinpath("stat").read_text().split()[2] != "Z" for child in children):
        assert time.monotonic() < end
        time.sleep(0.01)


def stopped(*arguments: Any, **options: Any) -> None:
    assert prepare(*arguments, stop=Countdown(5), **options) is None


def test_another_command_does_not_go_on_from_it(folder):
    stopped(["a.txt", "c.jsonl"], "corpus")
    before = sorted(folder.rglob("*"))
    for says, again in (
        ("differs in inputs;", lambda: prepare(["a.txt", "d.json.gz"], "corpus")),
        ("differs in --tokenizer;", lambda: prepare(["a.txt", "c.jsonl"], "corpus", "bpe:300")),
        ("differs in --json-key, --bad-utf8;", lambda: prepare(["a.txt", "c.jsonl"], "corpus", rules=Rules("content", "replace"))),
    ):
        with pytest.raises(InputError, match=rf"corpus\.partial was left by a preparation that {says} repeat that one"):
            again()
    assert sorted(folder.rglob("*")) == before
    (folder / "corpus.partial/state.json").write_text("{")
    with pytest.raises(InputError, match=r"corpus\.partial cannot be gone on from \(.*\); remove it"):
        prepare(["a.txt", "c.jsonl"], "corpus")


def test_one_process_at_a_time(folder):
    stopped(["a.txt"], "corpus")
    with (
        partial.Partial("other", {}),
        pytest.raises(InputError, match="another process is preparing other; wait for its end"),
    ):
        prepare(["a.txt"], "other")
    assert not (folder / "other.partial").exists()


def test_an_error_of_the_system_keeps_what_was_saved(folder, monkeypatch):
    prepare(ALL, "whole")
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", -1.0)
    append, left = partial.IndexedWriter.append_documents, Countdown(9)

    def full(self, ids, ends):
        if left():
            raise InputError("cannot write full.bin: No space left on device") from OSError(28, "No space left on device")
        append(self, ids, ends)

    with monkeypatch.context() as patch:
        patch.setattr(partial.IndexedWriter, "append_documents", full)
        with pytest.raises(InputError, match=r"No space left on device; full\.partial keeps what is done, and the same command goes on"):
            prepare(ALL, "full")
    assert prepare(ALL, "full") is not None and contents("full") == contents("whole")


def test_a_process_that_is_killed_is_told_and_costs_no_work(folder, monkeypatch):
    prepare(ALL, "whole")
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", -1.0)
    append = partial.IndexedWriter.append_documents

    def then_kill(self, ids, ends):
        append(self, ids, ends)
        for child in multiprocessing.active_children():
            child.kill()

    with monkeypatch.context() as patch:
        patch.setattr(partial.IndexedWriter, "append_documents", then_kill)
        with pytest.raises(InputError, match=r"one of the 2 processes was killed, .*; corpus\.partial keeps what is done"):
            prepare(ALL, "corpus", num_processes=2)
    assert prepare(ALL, "corpus") is not None and contents("corpus") == contents("whole")


def test_a_wrong_input_leaves_nothing_although_much_was_saved(folder, monkeypatch):
    monkeypatch.setattr(prepare_module, "SAVE_SECONDS", -1.0)
    (folder / "g.jsonl").write_bytes(json_lines(["fine"] * 50) + b"{}\n")
    for number in (1, 2):
        with pytest.raises(InputError, match=r"line 51 of g\.jsonl has no key text"):
            prepare([*ALL, "g.jsonl"], "new/corpus", num_processes=number)
        assert not (folder / "new").exists()


def test_the_first_of_two_wrong_inputs_is_told_for_any_number_of_processes(folder):
    (folder / "bad.txt").write_bytes(SENTENCE.encode() * 3 + b"\xff")
    whole = (folder / "b.txt.gz").read_bytes()
    (folder / "cut.txt.gz").write_bytes(whole[:-20])
    for number in (1, 2):
        with pytest.raises(InputError, match=r"bad\.txt is not UTF-8: byte 243 of it is 0xff"):
            prepare(["a.txt", "bad.txt", "cut.txt.gz"], "corpus", num_processes=number)
        with pytest.raises(InputError, match=r"cut\.txt\.gz is cut short"):
            prepare(["a.txt", "cut.txt.gz", "bad.txt"], "corpus", num_processes=number)


@pytest.mark.parametrize("of", ["bytes", "bpe:400"])
def test_bad_bytes_may_be_replaced(folder, of):
    (folder / "bad.txt").write_bytes(b"\xef\xbb\xbfa\xff\xe2\x82b")
    (folder / "bad.jsonl").write_bytes(b'\xef\xbb\xbf{"t": "a\xff"}\n{"t": "\\ud800 \\u0000"}\n')
    prepare(["bad.txt", "bad.jsonl"], "corpus", of, rules=Rules("t", "replace"))
    assert documents("corpus") == ["a\ufffd\ufffdb", "a\ufffd", "\ufffd \0"]


def test_formats_may_be_said(folder):
    (folder / "lines").write_bytes(json_lines(["one", "two"], "content"))
    prepare(["lines"], "lines_of", format="jsonl", rules=Rules("content"))
    assert documents("lines_of") == ["one", "two"]
    prepare(["c.jsonl"], "text_of", format="text")
    assert documents("text_of") == [(folder / "c.jsonl").read_bytes().decode()]


def test_another_corpus_takes_a_trained_tokenizer(folder):
    prepare(["a.txt", "c.jsonl"], "train", "bpe:300")
    prepare(["f.txt.zst"], "held_out", "train.tokenizer.json")
    assert documents("held_out") == [SENTENCE * 20]
    assert open_indexed("held_out").record == open_indexed("train").record


def test_training_on_a_part_takes_the_beginning_of_each_file(folder, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr("giantjax.data.tokenizer.convert.train_bpe", lambda texts, size: seen.extend(texts))
    monkeypatch.setattr(prepare_module, "from_file", lambda *_: None)
    prepare_module._trained(check_inputs(ALL, "auto"), 300, Rules())
    assert len("".join(seen)) == len(SENTENCE) * 60 + 3 * sum(len(f"{i} {SENTENCE}") * (i % 4) for i in range(30))
    monkeypatch.setattr(prepare_module, "TRAINING_BYTES", sum(os.path.getsize(path) for path in ("a.txt", "c.jsonl")) // 4)
    seen.clear()
    prepare_module._trained(check_inputs(["a.txt", "c.jsonl"], "auto"), 300, Rules())
    assert 0.2 < len("".join(seen).encode()) / prepare_module.TRAINING_BYTES < 1.5
    assert seen[0].startswith("The wörld") and seen[-1].startswith("7 The wörld")


@pytest.mark.parametrize("seam", [ByteTokenizer.seam, WORD_END, None])
def test_pieces_do_not_depend_on_where_reading_began(folder, seam):
    files = check_inputs(ALL, "auto")
    pieces = list(read_pieces(files, seam))
    assert [piece.consumed for piece in pieces] == sorted(piece.consumed for piece in pieces)
    assert pieces[-1].consumed == sum(file.size for file in files) and pieces[-1].end.file == len(files)
    for number, piece in enumerate(pieces[:-1]):
        assert list(read_pieces(files, seam, piece.end)) == pieces[number + 1 :]
    if seam is not None:
        assert max(len(piece.data) for piece in pieces if piece.format == "text") <= 256


def test_what_is_too_long_is_refused(folder, monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST", 1024)
    (folder / "long.jsonl").write_bytes(json_lines(["short", "x" * 2000]))
    (folder / "word.txt").write_text("x" * 2000)
    for path, seam, says in (
        ("long.jsonl", WORD_END, r"long\.jsonl: line 2 is longer than 0\.000976562 MiB; divide it"),
        ("word.txt", WORD_END, r"word\.txt: a document that this tokenizer has to see whole is longer"),
        ("a.txt", None, r"a\.txt: a document that this tokenizer has to see whole is longer"),
    ):
        with pytest.raises(InputError, match=says):
            list(read_pieces(check_inputs([path], "auto"), seam))


def test_a_terminal_sees_a_bar_with_the_time_left(folder, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    prepare(ALL, "corpus")
    told = capsys.readouterr().err
    assert "preparing corpus" in told and "100%" in told and "0:00:00" in told
