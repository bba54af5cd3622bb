"""Token files of three layouts come back as they were written, with their documents, and damage is one line."""

from __future__ import annotations

import json
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from vescale.data import TextData, TokenWriter, open_tokens
from vescale.data.token_file import Joined, files_of

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 65_535]]


def _write(path: Path, layout: str, vocab_size: int = 2**16) -> Path:
    writer = TokenWriter(path, layout=layout, vocab_size=vocab_size)
    for document in DOCUMENTS:
        writer.add(np.array(document))
    writer.close()
    return path


@pytest.mark.parametrize("layout", ["raw", "llmc", "megatron"])
@pytest.mark.parametrize("vocab_size", [2**16, 2**16 + 1])
def test_what_is_written_comes_back_with_its_documents(tmp_path: Path, layout: str, vocab_size: int) -> None:
    path = _write(tmp_path / "t.bin", layout, vocab_size)
    wide = vocab_size > 2**16
    kind = ("int32" if layout == "megatron" else "uint32") if wide else "uint16"
    file, problems = open_tokens(path, dtype=kind if layout == "raw" else None)
    assert problems == [] and file is not None and file.dtype == kind
    assert file.tokens.tolist() == sum(DOCUMENTS, []) and isinstance(file.tokens, np.memmap)
    assert file.documents is not None and file.documents.tolist() == [0, 3, 4, 9]
    assert not list(tmp_path.glob("*.partial"))


def test_the_bytes_are_those_of_the_peers(tmp_path: Path) -> None:
    """By hand from karpathy/llm.c's header and NVIDIA/Megatron-LM's index, not by our own reader."""
    ids = np.array(sum(DOCUMENTS, []), "<u2").tobytes()
    llmc = _write(tmp_path / "a.bin", "llmc").read_bytes()
    assert llmc == np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes() + ids
    assert _write(tmp_path / "b.bin", "megatron").read_bytes() == ids
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", 3, 1, 5) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "b.idx").read_bytes() == index


def test_megatrons_documents_may_have_several_sequences(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(np.arange(6, dtype="<u2").tobytes())
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 3)
    rest = struct.pack("<3i", 1, 2, 3) + struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "t.idx").write_bytes(head + rest)
    file, problems = open_tokens(tmp_path / "t.bin", dtype=None)
    assert problems == [] and file is not None and file.documents is not None
    assert file.documents.tolist() == [0, 3, 6]


@pytest.mark.parametrize(
    ("layout", "ending", "damage", "said"),
    [
        ("raw", ".docs", lambda data: data[:-8], "expected rising edges from 0 to 9"),
        ("megatron", ".idx", lambda data: data[:-1], "and 102 bytes, got version 1, dtype code 8 and 101 bytes"),
        ("megatron", ".idx", lambda data: b"X" + data[1:], "does not begin as Megatron's"),
        ("megatron", ".bin", lambda data: data[:-2], "do not lie end to end"),
        ("megatron", ".idx", lambda data: data[:9] + b"\2" + data[10:], "expected version 1, ids of integers"),
        ("megatron", ".idx", lambda data: data[:17] + b"\7" + data[18:], "dtype code 7 and"),
        ("megatron", ".idx", lambda data: data[:-8] + b"\x63" + data[-7:], "documents that follow each other in its 3"),
        ("megatron", ".idx", lambda data: data[:-1] + b"\xff", "documents that follow each other in its 3"),
        ("llmc", ".bin", lambda data: data[:-2], "says 9 tokens of uint16, not 1040 bytes"),
        ("llmc", ".bin", lambda data: data[:4] + b"\2" + data[5:], "is llm.c's: expected its version 1, got 2"),
        ("llmc", ".bin", lambda data: b"\0" + data[1:], "t.docs: expected rising edges from 0 to 521"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, layout: str, ending: str, damage: object, said: str) -> None:
    path = _write(tmp_path / "t.bin", layout).with_suffix(ending)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError) as caught:
        TextData(path=str(tmp_path / "t.bin"), dtype="uint16", seq_len=2, val_fraction=0).open()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_megatrons_ids_may_not_be_negative(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.bin", "megatron", 2**16 + 1)
    ids = np.fromfile(path, "<i4")
    ids[4] = -3
    ids.tofile(path)
    with pytest.raises(ValueError, match="expected token ids >= 0, got -3"):
        TextData(path=str(path), seq_len=2, val_fraction=0, vocab_size=2**17).open()


@pytest.mark.parametrize("ids", [[1, 9], [-1], [2**40]])
def test_an_id_beyond_the_vocabulary_is_never_written(tmp_path: Path, ids: list[int]) -> None:
    said = r"expected ids in \[0, 9\), the vocabulary, got"
    with pytest.raises(ValueError, match=said), TokenWriter(tmp_path / "t.bin", vocab_size=9) as writer:
        writer.add(np.array(ids))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("layout", "lengths"), [("llmc", [3, 3]), ("megatron", [4])])
def test_more_than_a_layout_can_count_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, lengths: list[int]
) -> None:
    monkeypatch.setattr("vescale.data.token_file.MOST", 3)
    path, said = tmp_path / "t.bin", f"{layout} counts at most 3 tokens in a .*; raw has room"
    with pytest.raises(ValueError, match=said), TokenWriter(path, layout=layout, vocab_size=9) as writer:
        for length in lengths:
            writer.add(np.zeros(length, np.uint16))


def test_what_a_full_disk_does_not_take_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.bin", "raw")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room, count in ((1000, 4000), (1000, 400), (30, 9)):  # ids, ids at the end, edges of documents
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        try:
            with pytest.raises(OSError, match="File too large"), TokenWriter(path, vocab_size=9) as writer:
                for _ in range(count // 3):
                    writer.add(np.zeros(3, np.uint16))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_another_layout_or_ending_is_refused(tmp_path: Path) -> None:
    out, kind = (
        "out: expected a file that ends in .bin, got '.*t.txt'",
        "layout: expected one of raw, llmc, megatron, got",
    )
    for name, layout, said in (
        ("t.txt", "raw", f"^{out}$"),
        ("t.bin", "x", f"^{kind} 'x'$"),
        ("t.txt", "x", f"{out}; {kind}"),
    ):
        with pytest.raises(ValueError, match=said):
            TokenWriter(tmp_path / name, layout=layout, vocab_size=9)


def test_a_file_of_another_layout_leaves_nothing_behind(tmp_path: Path) -> None:
    for layout, beside in (("megatron", "t.idx"), ("raw", "t.docs"), ("megatron", "t.idx"), ("llmc", "t.docs")):
        with TokenWriter(tmp_path / "t.bin", layout=layout, vocab_size=9) as writer:
            writer.add(np.arange(len(layout)))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["t.bin", beside]
        file, problems = open_tokens(tmp_path / "t.bin", dtype="uint16")
        assert problems == [] and file is not None and len(file.tokens) == len(layout)


# --- several files


def test_files_read_as_one_are_the_whole() -> None:
    whole = np.arange(100)
    joined = Joined([whole[:7], whole[7:7], whole[7:40], whole[40:]])
    for start, stop in ((0, 100), (0, 7), (6, 8), (7, 40), (39, 100), (50, 50), (95, 200)):
        assert joined[start:stop].tolist() == whole[start:stop].tolist()
        assert joined.part(start, stop)[0:200].tolist() == whole[start:stop].tolist()
    assert joined[8:30].base is not None  # a span of one file is not copied


def test_a_pattern_is_read_as_one_data_set_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"t_{number:03}.bin").write_bytes(np.arange(number * 50, number * 50 + 50, dtype="<u2").tobytes())
    pattern = str(tmp_path / "t_*.bin")
    data = TextData(path=pattern, dtype="uint16", seq_len=9, val_fraction=0.1).open()
    assert data.train.num_samples == 14 and data.validation is not None
    assert sorted(data.train.read(0, 14).input_ids.flatten().tolist()) == list(range(126))
    assert data.validation.read(0, 1).labels.tolist() == [list(range(136, 145))]
    (tmp_path / "t_001.bin").unlink()
    with pytest.raises(ValueError, match="the shard after .*t_000.bin is missing: number 1"):
        TextData(path=pattern, dtype="uint16", seq_len=9).open()
    assert files_of(str(tmp_path / "none_*.bin"))[1][0].startswith("path: no file is named like")


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["t_9", "t_10", "t_11"], None),  # numbers are ordered as such
        (["t_1", "t_10", "t_2"], "t_2.bin is missing: number 3"),
        (["t-00000-of-00004", "t-00002-of-00004"], "t-00000-of-00004.bin is missing: number 1"),
        (["a_1", "b_7"], None),
        (["t_2023_12", "t_2024_03"], None),
    ],
)
def test_only_a_number_that_names_a_shard_can_be_missing(tmp_path: Path, names: list[str], missing: str | None) -> None:
    for name in names:
        (tmp_path / f"{name}.bin").touch()
    files, problems = files_of(f"{tmp_path}/*.bin")
    assert missing is not None or [file.stem for file in files] == names
    assert [*problems] == [] if missing is None else missing in problems[0]


@pytest.mark.parametrize("name", ["[2024] t.bin", "~nobody here.bin"])
def test_a_name_may_have_letters_that_mean_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    assert files_of(name) == ([Path(name)], [])


def test_shards_that_prepare_made_say_themselves_what_they_are(tmp_path: Path) -> None:
    facts = {"dtype": "uint16", "vocab_size": 320, "tokenizer": "bytes-320", "ignored": 256}
    for number in (0, 1):
        (tmp_path / f"t_{number}.bin").write_bytes(np.arange(50, dtype="<u2").tobytes())
        (tmp_path / f"t_{number}.json").write_text(json.dumps(facts))
    source = TextData(path=str(tmp_path / "t_*.bin"), seq_len=9, val_fraction=0)
    data = source.open()
    assert (data.vocab_size, data.describe()["tokenizer"], data.train.ignored) == (320, "bytes-320", 256)
    (tmp_path / "t_1.json").write_text(json.dumps({**facts, "tokenizer": "other"}))
    with pytest.raises(ValueError, match=r"expected tokenizer bytes-320 \(\S+t_0.json\), got other \(\S+t_1.json\)$"):
        source.open()
