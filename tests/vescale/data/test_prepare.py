"""Text becomes tokens: the same for any number of workers, after a kill too, and what it is is written beside it."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import tokenizers
from pyarrow import parquet
from waiting import wait_for

from vescale.data import ByteTokenizer, JsonTokenizer, TextData
from vescale.data.__main__ import main
from vescale.data.prepare import Piece, Work, _alone, _begin, _do, _join, documents, pieces, prepare

LINES = ["first", "zweiter \u00fc", "", "a\nline", "x" * 200]


@pytest.fixture
def inputs(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "a.txt").write_bytes(b"one\f\ftwo \xff")
    rows = "".join(json.dumps({"text": line, "id": i}) + "\n" for i, line in enumerate(LINES))
    (tmp_path / "b.jsonl").write_text(rows + "\n")
    return str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")


def _expected() -> list[int]:
    texts = [b"one", b"two \xff", *(line.encode() for line in LINES)]
    return sum((ByteTokenizer().encode(text, bos=True, eos=True) for text in texts), [])


def test_the_pieces_of_a_file_hold_each_document_once(inputs: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for file, expected in zip(inputs, ([b"one", b"two \xff"], LINES), strict=True):
        work = Work(inputs=(file,), out="t.bin")
        for size in (1, 7, 40, 1000):
            monkeypatch.setattr("vescale.data.prepare.PIECE", size)
            assert [text for piece in pieces(work) for text in documents(work, piece)] == expected


def test_a_piece_in_which_no_document_begins_is_empty(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a document of two pieces\fb")
    work = Work(inputs=(str(tmp_path / "t.txt"),), out=str(tmp_path / "t.bin"))
    halves = [
        Piece(0, work.inputs[0], 0, 10, 10),
        Piece(1, work.inputs[0], 10, 20, 10),
        Piece(2, work.inputs[0], 20, 26, 6),
    ]
    for piece in halves:
        _do(work, piece, str(tmp_path))
    counts = [len(np.fromfile(tmp_path / f"00000{i}.bin", "<u2")) for i in range(3)]
    assert counts == [26, 0, 3]
    assert _join(work, tmp_path, halves)["documents"] == 2


def test_a_column_of_a_parquet_file_is_read_in_its_row_groups(tmp_path: Path, capsys: Any) -> None:
    table = pyarrow.table({"body": LINES, "id": list(range(len(LINES)))})
    file, out = tmp_path / "b.parquet", tmp_path / "t.bin"
    parquet.write_table(table, file, row_group_size=2)
    assert main(["prepare", str(file), "--out", str(out), "--workers", "1", "--key", "body"]) == 0
    expected = sum((ByteTokenizer().encode(line, bos=True, eos=True) for line in LINES), [])
    assert np.fromfile(out, "<u2").tolist() == expected and np.fromfile(out.with_suffix(".docs"), "<i8").size == 6
    capsys.readouterr()
    assert main(["prepare", str(file), "--out", str(out), "--workers", "1"]) == 2
    assert "has no column 'text' (--key), but body, id" in capsys.readouterr().err
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    assert main(["prepare", str(file), "--out", str(out), "--workers", "1"]) == 2
    assert "b.parquet, row 1 of group 0: expected text under 'text', got NoneType" in capsys.readouterr().err
    assert np.fromfile(out, "<u2").tolist() == expected  # what was there stays


def test_without_pyarrow_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="b.parquet: parquet needs the package pyarrow: pip install pyarrow"):
        pieces(Work(inputs=(str(tmp_path / "b.parquet"),), out="t.bin"))


class Terminal(io.StringIO):
    """Takes lines as a terminal does."""

    def isatty(self) -> bool:
        return True


def test_the_pieces_are_done_side_by_side_under_a_bar(
    inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)  # a piece is done when the other has begun

    def meets(*args: Any) -> int:
        both.wait(60)
        return _do(*args)

    class Threads(ThreadPoolExecutor):
        def __init__(self, workers: int, **options: Any) -> None:
            super().__init__(workers)

    monkeypatch.setattr("vescale.data.prepare.ProcessPoolExecutor", Threads)
    monkeypatch.setattr("vescale.data.prepare._do", meets)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["prepare", *inputs, "--out", str(tmp_path / "t.bin"), "--workers", "2"]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", sys.stderr.getvalue())  # type: ignore[attr-defined]
    assert re.search(r"preparing \S+ (\d+)/\1 bytes 0:00:00", shown), shown
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr("vescale.data.prepare._do", _do)
    prepare(Work(inputs=inputs, out=str(tmp_path / "u.bin")), workers=1, advance=lambda *done: seen.append(done))
    sizes = [Path(name).stat().st_size for name in inputs]
    assert seen == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]
    assert (tmp_path / "t.bin").read_bytes() == (tmp_path / "u.bin").read_bytes()


def test_what_is_prepared_is_trained_on_without_saying_more(
    inputs: tuple[str, ...], tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out" / "t.bin"
    assert main(["prepare", *inputs, "--out", str(out), "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"7 documents, {len(_expected())} tokens of uint16" in printed and "data.path=" in printed
    data = TextData(path=str(out), seq_len=8, val_fraction=0, documents_apart=True).open()
    assert [*data.train.tokens] == _expected() and data.vocab_size == 320
    facts = json.loads(out.with_suffix(".json").read_text())
    assert (facts["documents"], facts["tokens"], facts["tokenizer"]) == (7, len(_expected()), "bytes-320")
    with pytest.raises(ValueError, match=r"dtype: expected uint16 \(.*t.json\), got uint32"):
        TextData(path=str(out), seq_len=8, val_fraction=0, dtype="uint32").open()
    assert facts["fingerprint"] == data.fingerprint and data.describe()["tokenizer"] == "bytes-320"
    assert f"\n{data.fingerprint}\n" in printed
    assert sorted(path.name for path in out.parent.iterdir()) == ["t.bin", "t.docs", "t.json"]


def test_a_stopped_run_goes_on_from_its_pieces_and_other_work_is_refused(
    inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "t.bin", tmp_path / "t.bin.pieces"
    work = Work(inputs=inputs, out=str(out))
    with monkeypatch.context() as stopped, pytest.raises(KeyboardInterrupt):
        stopped.setattr("vescale.data.prepare._join", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        prepare(work, workers=1)
    (folder / "000001.bin").unlink()  # it had not come to this one
    before = (folder / "000000.bin").stat().st_mtime_ns
    for other, said in (
        (Work(inputs=inputs[:1], out=str(out)), "t.bin.pieces holds pieces of other work: of other inputs; remove it"),
        (Work(inputs=inputs, out=str(out), key="body"), "of other work: key was text, now body; remove it"),
    ):
        with pytest.raises(ValueError, match=said):
            prepare(other, workers=1)
    with pytest.MonkeyPatch.context() as changed, pytest.raises(ValueError, match="b.jsonl was changed, piece was"):
        changed.setattr("vescale.data.prepare.PIECE", 99)
        times = Path(inputs[1]).stat()
        os.utime(inputs[1], (0, 0))
        try:
            prepare(work, workers=1)
        finally:
            os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    seen: list[int] = []
    with monkeypatch.context() as kept:
        kept.setattr(
            "vescale.data.prepare.shutil.rmtree", lambda path: seen.append((path / "000000.bin").stat().st_mtime_ns)
        )
        prepare(work, workers=1)
    assert seen == [before]
    assert np.fromfile(out, "<u2").tolist() == _expected()


def test_a_mistake_is_mended_without_removing_anything(tmp_path: Path, capsys: Any) -> None:
    file, out = tmp_path / "t.jsonl", tmp_path / "t.bin"
    file.write_text('{"body": "a"}\n')
    words = ["prepare", str(file), "--out", str(out), "--workers", "1"]
    assert main(words) == 2 and "with the key 'text'" in capsys.readouterr().err
    assert main([*words, "--key", "body"]) == 0
    assert np.fromfile(out, "<u2").tolist() == [256, 97, 257]


def test_two_at_the_same_work_do_not_meet(inputs: tuple[str, ...], tmp_path: Path) -> None:
    folder = tmp_path / "t.bin.pieces"
    folder.mkdir()
    with _alone(folder), pytest.raises(ValueError, match="t.bin.pieces: another process is at this work"):
        prepare(Work(inputs=inputs, out=str(tmp_path / "t.bin")), workers=1)


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    _tokenizer(tmp_path / "bpe.json")
    work = {"inputs": (str(tmp_path / "a.txt"),), "tokenizer": str(tmp_path / "bpe.json")}
    with pytest.raises(ValueError, match=r"out: '\S+bpe.json', which is to say what is in .*, is a file of something"):
        prepare(Work(**work, out=str(tmp_path / "bpe.bin")), workers=1)  # type: ignore[arg-type]
    for _ in range(2):  # its own file is written over
        prepare(Work(**work, out=str(tmp_path / "t.bin")), workers=1)  # type: ignore[arg-type]


def test_a_worker_ends_with_the_process_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sentinel, starter = os.pipe()
    codes: list[int] = []
    monkeypatch.setattr("multiprocessing.parent_process", lambda: SimpleNamespace(sentinel=sentinel))
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    _begin()
    assert not codes
    os.close(starter)  # as the kernel does when a process ends
    assert wait_for(lambda: codes == [1])
    os.close(sentinel)


def _tokenizer(path: Path) -> Any:
    """A tokenizer of 300 tokens, written to ``path``."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.save(str(path))
    return tokenizer


def test_any_tokenizer_json_will_do(inputs: tuple[str, ...], tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path / "tokenizer.json")
    facts = prepare(
        Work(inputs=inputs[1:], out=str(tmp_path / "t.bin"), tokenizer=str(tmp_path / "tokenizer.json"), layout="llmc"),
        workers=1,
    )
    data = TextData(path=str(tmp_path / "t.bin"), seq_len=2, val_fraction=0).open()
    ids = [sum(([*tokenizer.encode(line).ids, tokenizer.token_to_id("</s>")] for line in LINES), [])]
    assert [[*map(int, data.train.tokens)]] == ids
    assert facts["tokenizer"].startswith("tokenizer-sha256:") == data.tokenizer_name.startswith("tokenizer-sha256:")


def test_a_tokenizers_file_may_not_cut_documents_nor_hide_its_last_ids(tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path / "t.json")
    tokenizer.enable_truncation(max_length=3)
    tokenizer.enable_padding(length=7, pad_id=5)
    told = json.loads(tokenizer.to_str())
    told["model"]["vocab"]["far"] = 70_000  # ids with a hole: the number of tokens is no bound
    (tmp_path / "t.json").write_text(json.dumps(told))
    text = "a document of some length"
    found = JsonTokenizer(tmp_path / "t.json")
    assert found.vocab_size == 70_001
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert found.encode_documents([text, "b"])[0].tolist()[:-1] == tokenizer.encode(text).ids


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gone.txt"], "'gone.txt' is no file"),
        (["b.csv"], "'b.csv': expected .txt, .jsonl, .parquet"),
        (["bad.jsonl"], "bad.jsonl, byte 14: expected a JSON object with the key 'text'"),
        (["number.jsonl"], "number.jsonl, byte 0: expected text under 'text', got int"),
        (["key.jsonl"], "key.jsonl, byte 0: expected a JSON object with the key 'text': KeyError"),
        (["half.jsonl"], "half.jsonl, byte 0: expected text under 'text': 'utf-8' codec can't encode"),
        (["latin.jsonl"], "latin.jsonl, byte 0: expected a JSON object with the key 'text': UnicodeDecodeError"),
        (["latin.txt", "--tokenizer", "tokenizer.json"], "latin.txt, byte 5: expected UTF-8, got b'\\xe9'"),
        (["empty.txt", "empty.jsonl"], "no document in empty.txt, empty.jsonl; nothing was written"),
        (["a.parquet"], "a.parquet: is no parquet file"),
        (["deep.jsonl"], "deep.jsonl, byte 0: expected a JSON object with the key 'text': RecursionError"),
        (["a.txt", "link.txt"], "'link.txt' is given twice"),
        (["a.txt", "--eos", "x"], "eos: only a tokenizer.json takes it; bytes end a document with 257"),
        (["a.txt", "--out", "t.txt"], "data: out: expected a file that ends in .bin, got 't.txt'\n"),
        (["a.txt", "--workers", "0"], "workers: expected a number > 0, got 0"),
        (["a.txt", "--tokenizer", "none.json"], "'none.json' is no tokenizer.json"),
    ],
)
def test_what_cannot_be_prepared_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.csv").touch()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text')
    (tmp_path / "number.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "key.jsonl").write_text('{"txt": "a"}\n')
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xe9"}\n')
    (tmp_path / "latin.txt").write_bytes(b"a\fcaf\xe9")
    (tmp_path / "empty.txt").write_text("\f\f")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.parquet").write_text("a")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "link.txt").symlink_to("a.txt")
    _tokenizer(tmp_path / "tokenizer.json")
    assert main(["prepare", "--out", "t.bin", "--workers", "1", *words]) == 2
    line = capsys.readouterr().err
    assert said in line and line.startswith("vescale.data: ") and line.count("\n") == 1
