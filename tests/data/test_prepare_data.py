"""scripts/prepare_data.py: a corpus that can be trained on, or one sentence and nothing half-written."""

import os
import subprocess
import sys

import pytest

from giantjax.data.indexed import TokenizerRecord, open_indexed
from giantjax.data.tokenizer import ByteTokenizer
from giantjax.errors import InputError
from tests.scripts import SCRIPTS, load_script

SCRIPT = SCRIPTS / "prepare_data.py"
prepare_data = load_script("prepare_data")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"hello \xff\n")
    (tmp_path / "b.txt").write_text("w\u00f6rld")
    (tmp_path / "link.txt").symlink_to("a.txt")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(prepare_data.signal, "signal", lambda *_: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        return prepare_data.main()

    return run


def test_each_file_becomes_a_document(run, capsys, monkeypatch):
    monkeypatch.setattr(prepare_data, "PIECE", 3)
    assert run("b.txt", "a.txt", "--output", "new/deep/corpus", "--tokenizer", "bytes") == 0
    assert capsys.readouterr().out == "2 documents, 16 tokens of 14 bytes of text in new/deep/corpus.bin and new/deep/corpus.idx\n"
    read = open_indexed("new/deep/corpus")
    assert (read.num_documents, read.lengths.tolist(), read.tokens.dtype.name) == (2, [7, 9], "uint16")
    assert [ByteTokenizer().decode(read.sequence(i)) for i in range(2)] == ["w\u00f6rld", "hello \ufffd\n"]
    assert read.sequence(0)[-1] == read.sequence(1)[-1] == 256
    assert read.record == TokenizerRecord("bytes", 257, 256)
    assert sorted(os.listdir("new/deep")) == ["corpus.bin", "corpus.idx", "corpus.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope.txt"], "cannot read nope.txt: No such file"),
        (["folder"], "folder is a folder; name the text files in it"),
        (["empty.txt"], "empty.txt is empty"),
        (["pipe"], "pipe is no regular file"),
        (["a.txt", "b.txt", "a.txt"], "a.txt was given twice; name it once"),
        (["a.txt", "link.txt"], "a.txt was given twice, the second time as link.txt"),
        ([], "no FILE was given"),
        (["a.txt", "--output", "folder"], "--output is 'folder', a folder; add a name"),
        (["a.txt", "--output", "folder/"], "--output is 'folder/', a folder; add a name"),
        (["a.txt", "--output", "b.txt/x"], "its folder b.txt cannot be made"),
        (["a.txt", "--tokenizer", "byte"], "no tokenizer 'byte'"),
        (["a.txt", "--output", "/proc/x"], "cannot write /proc/x.bin: "),
    ],
)
def test_refusals_write_nothing(run, tmp_path, arguments, says):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as refusal:
        run(*arguments, *([] if "--output" in arguments else ["--output", "corpus"]))
    assert says in str(refusal.value) and "\n" not in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("ending", [".bin", ".idx", ".json"])
def test_an_output_that_exists_is_kept(run, tmp_path, ending):
    (tmp_path / f"corpus{ending}").write_text("precious")
    with pytest.raises(InputError, match=rf"corpus{ending} exists already; remove it"):
        run("a.txt", "--output", "corpus")
    assert (tmp_path / f"corpus{ending}").read_text() == "precious"
    assert [path.name for path in tmp_path.glob("corpus*")] == [f"corpus{ending}"]


def test_the_script_exits_with_2_and_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "nope.txt", "--output", "corpus"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: cannot read nope.txt: No such file or directory\n"
