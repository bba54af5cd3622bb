"""Promises of vescale/data.py: a pure order, the same samples for any number of ranks, errors at the door."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale.data.token_file
from vescale.data import IGNORED, SHIPPED_FILE, ByteTokenizer, Dataset, Samples, TextData, permute

TEXT_SHA256 = "4ea31573b537e8d007c358af8371396942a00278301f3182cdf0e132f1a95737"
PINNED = ([7, 8, 2, 11, 10, 3, 0, 4, 5, 1, 9, 6], [2, 9, 0, 11, 8, 7, 5, 1, 10, 6, 4, 3])
QUICK = settings(max_examples=20, deadline=None)
SEEDS = st.integers(-(2**63), 2**64 - 1)


def order(size: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    return permute(np.arange(size), size=size, seed=seed, epoch=np.full(size, epoch)).tolist()


def counting(count: int, *, seq_len: int = 4, seed: int = 0) -> Samples:
    return Samples(tokens=np.arange(count, dtype=np.uint32), seq_len=seq_len, seed=seed)


def write_bin(path: Path, tokens: list[int], *, dtype: str = "<u2", header: list[int] | None = None) -> str:
    front = np.array([*header, *[0] * (256 - len(header))], "<i4").tobytes() if header else b""
    path.write_bytes(front + np.array(tokens, dtype).tobytes())
    return str(path)


@pytest.fixture(scope="module")
def shipped() -> Dataset:
    return TextData(seq_len=128).open()


# ---- tokenizer


@QUICK
@given(st.text())
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text, bos=True, eos=True)) == text


@QUICK
@given(st.binary())
def test_any_bytes_come_back_from_their_ids(data: bytes) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode_bytes(tokenizer.encode(data)) == data


def test_special_ids_lie_beyond_the_bytes_and_inside_the_padded_vocabulary() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("a", bos=True, eos=True) == [256, 97, 257]
    assert len({tokenizer.bos, tokenizer.eos, tokenizer.pad}) == 3
    assert min(tokenizer.bos, tokenizer.eos, tokenizer.pad) >= 256
    assert max(tokenizer.bos, tokenizer.eos, tokenizer.pad) < tokenizer.vocab_size == 320


def test_ids_that_are_no_utf8_decode_without_failing() -> None:
    assert ByteTokenizer().decode(torch.tensor([0xE2, 0x82, 319, 65])) == "\ufffdA"


# ---- the order


@QUICK
@given(size=st.integers(1, 3000), seed=SEEDS, epoch=st.integers(0, 2**40))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(size, seed=seed, epoch=epoch)) == list(range(size))


@QUICK
@given(size=st.integers(2**40, 2**61), seed=SEEDS, data=st.data())
def test_an_epoch_of_any_size_needs_no_table_and_maps_no_two_samples_together(
    size: int, seed: int, data: st.DataObject
) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True)))
    places = permute(index, size=size, seed=seed, epoch=np.zeros(len(index), np.int64))
    assert len({*places.tolist()}) == len(index)
    assert places.min() >= 0 and places.max() < size


def test_the_order_never_changes() -> None:
    """Another order would make resumed runs repeat and skip samples in silence; if it must change, rename ORDER."""
    assert vescale.data.ORDER == "feistel-8"
    assert order(12) == PINNED[0]
    assert order(12, seed=1, epoch=3) == PINNED[1]


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(order(50, seed=seed, epoch=epoch)) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


def test_each_sample_is_as_likely_at_each_place() -> None:
    size, epochs = 7, 7000
    epoch, index = np.divmod(np.arange(size * epochs), size)
    seen = np.zeros((size, size))
    np.add.at(seen, (index, permute(index, size=size, seed=3, epoch=epoch)), 1)
    assert np.abs(seen / epochs - 1 / size).max() < 0.02  # five standard deviations of a fair draw


# ---- batches


@QUICK
@given(step=st.integers(0, 10**6), seed=SEEDS, count=st.integers(5, 4000))
def test_the_ranks_batches_end_to_end_are_the_same_for_every_world_size(step: int, seed: int, count: int) -> None:
    samples = counting(count, seed=seed)
    whole = samples.batch(step, global_batch=840)
    for world in range(1, 9):
        parts = [samples.batch(step, rank=rank, world=world, global_batch=840) for rank in range(world)]
        assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
        assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


@QUICK
@given(count=st.integers(5, 400), global_batch=st.integers(1, 50), seed=SEEDS)
def test_an_epoch_reads_each_sample_once_and_the_next_begins_without_a_seam(
    count: int, global_batch: int, seed: int
) -> None:
    samples = counting(count, seed=seed)
    size = samples.num_samples
    steps = -(-2 * size // global_batch)
    firsts = torch.cat([samples.batch(step, global_batch=global_batch).input_ids[:, 0] for step in range(steps)])
    everything = [place * samples.seq_len for place in range(size)]
    assert sorted(firsts[:size].tolist()) == sorted(firsts[size : 2 * size].tolist()) == everything


def test_an_epoch_predicts_every_token_after_the_first_once() -> None:
    samples = counting(4 * 25 + 1)
    labels = samples.read(0, samples.num_samples).labels
    assert sorted(labels.flatten().tolist()) == list(range(1, 101))


def test_labels_are_the_next_tokens_in_the_models_dtype() -> None:
    input_ids, labels = counting(1000, seq_len=16).batch(2, global_batch=4)
    assert input_ids.shape == labels.shape == (4, 16)
    assert input_ids.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, input_ids + 1)
    assert input_ids.is_contiguous() and labels.is_contiguous()


def test_micro_batches_read_one_after_another_are_the_batch() -> None:
    samples = counting(500)
    whole = samples.batch(3, rank=1, world=2, global_batch=12)
    parts = [samples.read(3 * 12 + 6 + start, 2) for start in range(0, 6, 2)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)


def test_an_ignored_token_is_an_input_but_never_a_label() -> None:
    samples = Samples(tokens=np.array([7, 1, 7, 2, 3], np.uint16), seq_len=4, seed=0, ignored=7)
    input_ids, labels = samples.read(0, 1)
    assert input_ids.tolist() == [[7, 1, 7, 2]]
    assert labels.tolist() == [[1, IGNORED, 2, 3]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"global_batch": 6, "world": 4}, "multiple of the 4 ranks, got 6"),
        ({"global_batch": 0}, "got 0"),
        ({"global_batch": 4, "rank": 2, "world": 2}, "got rank 2 of world 2"),
        ({"global_batch": 4, "step": -1}, "step: expected >= 0, got -1"),
    ],
)
def test_a_share_that_cannot_be_is_refused(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        counting(100).batch(arguments.pop("step", 0), **arguments)


def test_all_that_is_wrong_with_a_share_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="step: .*; rank: .*; global_batch: "):
        counting(100).batch(-1, rank=3, world=2, global_batch=3)


# ---- the two parts


@pytest.mark.parametrize("val_fraction", [0.01, 0.05, 0.5, 0.9])
def test_the_parts_share_no_token_and_lose_none(tmp_path: Path, val_fraction: float) -> None:
    path = write_bin(tmp_path / "t.bin", list(range(3000)))
    data = TextData(path=path, dtype="uint16", seq_len=8, val_fraction=val_fraction).open()
    assert data.validation is not None
    assert [*data.train.tokens, *data.validation.tokens] == list(range(3000))
    assert len(data.validation.tokens) == int(3000 * val_fraction)


def test_without_a_fraction_there_is_no_validation_part(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "t.bin", list(range(9)))
    data = TextData(path=path, dtype="uint16", seq_len=8, val_fraction=0).open()
    assert data.validation is None
    assert data.train.num_samples == 1


# ---- the shipped text


def test_the_shipped_text_is_the_one_its_readme_describes(shipped: Dataset) -> None:
    text = lzma.decompress(SHIPPED_FILE.read_bytes())
    assert hashlib.sha256(text).hexdigest() == TEXT_SHA256
    assert shipped.fingerprint == f"sha256:{TEXT_SHA256}"
    assert len(text) == 5_057_239 and text.count(b"\f") == 41 and text.isascii()
    assert SHIPPED_FILE.stat().st_size < 2_000_000
    works = [line for line in (SHIPPED_FILE.parent / "README.md").read_text().splitlines() if "gutenberg.org/" in line]
    sizes = [int(line.split("|")[3].replace(",", "")) for line in works]
    assert sizes == [len(work) for work in text.split(b"\f")]


def test_the_shipped_text_carries_its_attribution_and_licence() -> None:
    folder = SHIPPED_FILE.parent
    readme, notice = ((folder / name).read_text() for name in ("README.md", "COPYING.txt"))
    for needed in (
        "Open Knowledge\nFoundation",
        "CC BY 2.5",
        "creativecommons.org/licenses/by/2.5/legalcode",
        TEXT_SHA256,
    ):
        assert needed in readme
    assert "copyright (c) 2005-6, the Open Knowledge Foundation" in notice
    assert "Creative Commons Attribution license\nv2.5" in notice


def test_the_shipped_text_is_read_as_42_documents_and_comes_back(shipped: Dataset) -> None:
    assert shipped.tokenizer is not None and shipped.validation is not None
    tokens = np.concatenate([shipped.train.tokens, shipped.validation.tokens])
    counts = Counter(tokens[tokens >= 256].tolist())
    assert counts == {ByteTokenizer.bos: 42, ByteTokenizer.eos: 42}
    assert tokens[0] == ByteTokenizer.bos and tokens[-1] == ByteTokenizer.eos
    works = lzma.decompress(SHIPPED_FILE.read_bytes()).replace(b"\f", b"")
    assert shipped.tokenizer.decode_bytes(tokens) == works


def test_no_loss_is_counted_for_the_beginning_of_a_document(shipped: Dataset) -> None:
    labels = shipped.train.read(0, shipped.train.num_samples).labels
    assert ByteTokenizer.bos not in labels
    begun = int((shipped.train.tokens[1 : labels.numel() + 1] == ByteTokenizer.bos).sum())
    assert (labels == IGNORED).sum() == begun > 30


def test_opening_twice_gives_the_same_batches(shipped: Dataset) -> None:
    again = TextData(seq_len=128).open()
    assert torch.equal(again.train.batch(5, global_batch=4).input_ids, shipped.train.batch(5, global_batch=4).input_ids)
    other = TextData(seq_len=128, seed=1).open()
    assert not torch.equal(
        other.train.batch(5, global_batch=4).input_ids, shipped.train.batch(5, global_batch=4).input_ids
    )


# ---- files


def test_a_text_files_documents_are_wrapped_and_its_empty_ones_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"ab\f\fc\xff\r\n\f")
    data = TextData(path=str(path), seq_len=3, val_fraction=0).open()
    assert data.train.tokens.tolist() == [256, 97, 98, 257, 256, 99, 255, 13, 10, 257]
    assert data.vocab_size == 320


@pytest.mark.parametrize(
    ("dtype", "header"),
    [
        ("uint16", None),
        ("uint32", None),
        ("uint16", [20240520, 1, 100]),
        ("uint32", [20240801, 7, 100]),
    ],
)
def test_a_bin_is_mapped_and_read_with_and_without_a_header(
    tmp_path: Path, dtype: str, header: list[int] | None
) -> None:
    largest = np.iinfo(dtype).max
    tokens = [*range(99), largest]
    path = write_bin(tmp_path / "t.bin", tokens, dtype=dtype, header=header)
    data = TextData(path=path, dtype=None if header else dtype, seq_len=9, val_fraction=0).open()
    assert isinstance(data.train.tokens, np.memmap)
    labels = data.train.read(0, 11).labels
    assert sorted(labels.flatten().tolist()) == [*range(1, 99), largest]
    assert data.tokenizer is None and data.vocab_size is None


def test_a_long_bins_fingerprint_sees_its_ends_and_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vescale.data.token_file, "WHOLE", 1000)
    monkeypatch.setattr(vescale.data.token_file, "BLOCK", 64)
    monkeypatch.setattr(vescale.data.token_file, "NUM_BLOCKS", 4)

    def fingerprint(tokens: list[int]) -> str:
        path = write_bin(tmp_path / "t.bin", tokens)
        return TextData(path=path, dtype="uint16", seq_len=8).open().fingerprint

    base = list(range(5000))
    variants = [base, [1, *base[1:]], [*base[:-1], 0], base[:-1], [0] * 5000, [0] * 5001]
    prints = [fingerprint(variant) for variant in variants]
    assert len({*prints}) == len(variants)
    assert all(text.startswith("sampled-sha256:") for text in prints)
    assert fingerprint(base) == prints[0]


# ---- resume


def test_a_description_survives_json_and_is_accepted_by_the_same_data(shipped: Dataset) -> None:
    saved = json.loads(json.dumps(shipped.describe()))
    assert saved == shipped.describe()
    shipped.check(saved)


def test_every_difference_from_the_checkpoint_is_named(tmp_path: Path, shipped: Dataset) -> None:
    path = write_bin(tmp_path / "t.bin", list(range(200)))
    data = TextData(path=path, dtype="uint16", seq_len=4, seed=9, val_fraction=0.5).open()
    with pytest.raises(ValueError) as caught:
        data.check({**shipped.describe(), "order": "lcg", "world": 3})
    said = str(caught.value)
    assert "seq_len: expected 128 (checkpoint), got 4" in said
    assert "world: expected 3 (checkpoint), got nothing" in said
    for key in ("fingerprint", "tokenizer", "seed", "val_fraction", "order", "ignored"):
        assert f"{key}: expected" in said
    assert "\n" not in said and path in said


def test_a_checkpoint_that_says_too_little_is_refused(shipped: Dataset) -> None:
    with pytest.raises(ValueError, match="fingerprint: expected nothing"):
        shipped.check({key: value for key, value in shipped.describe().items() if key != "fingerprint"})


# ---- errors at the door


def test_a_missing_file_says_where_it_was_looked_for_and_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        TextData(path=str(tmp_path / "gone.txt")).open()
    assert "no file" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "'shakespeare' (shipped), a .txt file, or a .bin" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"val_fraction": 1.0}, "val_fraction: expected 0 <= val_fraction < 1, got 1.0"),
        ({"val_fraction": -0.1}, "got -0.1"),
        ({"val_fraction": float("nan")}, "got nan"),
        ({"seq_len": 0}, "seq_len: expected >= 1, got 0"),
        ({"dtype": "uint16"}, "dtype: only a .bin takes it"),
        ({"vocab_size": 300}, "vocab_size: only a .bin takes it"),
        ({"ignored": 0}, "ignored: only a .bin takes it"),
        ({"validation": {"": "t.txt"}}, "validation: expected sets that have names"),
        ({"path": __file__}, "unknown ending '.py'"),
        ({"path": str(Path(__file__).parent)}, "is a folder"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        TextData(**options).open()  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_short_validation_set_is_named_by_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "ff.txt").write_bytes(b"\f\f\f")
    with pytest.raises(ValueError, match=r"^data: \S+/ff.txt: expected at least 17 tokens for seq_len=16 .*, got 0$"):
        TextData(seq_len=16, validation={"x": str(tmp_path / "ff.txt")}).open()


def test_everything_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "odd.bin"
    path.write_bytes(b"12345")
    with pytest.raises(ValueError) as caught:
        TextData(path=str(path), dtype="uint32", seq_len=-1, val_fraction=2.0, vocab_size=0).open()
    said = str(caught.value)
    for part in ("seq_len", "val_fraction", "vocab_size", "expected a multiple of 4 bytes (uint32), got 5"):
        assert part in said
    assert "\n" not in said


@pytest.mark.parametrize(("seq_len", "val_fraction"), [(8, 0.0), (8, 0.05), (8, 0.3), (31, 0.5), (5, 0.99), (1, 0.07)])
def test_a_short_file_is_told_the_length_that_would_just_do(tmp_path: Path, seq_len: int, val_fraction: float) -> None:
    def open_with(count: int) -> Dataset:
        path = write_bin(tmp_path / "t.bin", list(range(count)))
        return TextData(path=path, dtype="uint16", seq_len=seq_len, val_fraction=val_fraction).open()

    with pytest.raises(ValueError, match="got 0") as caught:
        open_with(0)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    with pytest.raises(ValueError, match=f"at least {needed} tokens .* got {needed - 1}"):
        open_with(needed - 1)
    data = open_with(needed)
    parts = [data.train] if data.validation is None else [data.train, data.validation]
    assert min(part.num_samples for part in parts) == 1


def test_a_bin_without_header_must_say_its_dtype_and_one_with_header_agree(tmp_path: Path) -> None:
    raw = write_bin(tmp_path / "raw.bin", list(range(100)))
    with pytest.raises(ValueError, match="no header that says it; give uint16 or uint32"):
        TextData(path=raw).open()
    headed = write_bin(tmp_path / "headed.bin", list(range(100)), header=[20240520, 1, 101])
    with pytest.raises(ValueError, match="expected uint16 .*, got uint32; .* says 101 tokens of uint16"):
        TextData(path=headed, dtype="uint32").open()


def test_a_raw_bin_is_of_one_of_two_dtypes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data: dtype: expected uint16 or uint32 \(\S+t.bin\), got 'int64'$"):
        TextData(path=write_bin(tmp_path / "t.bin", [1] * 99), dtype="int64", seq_len=9).open()


def test_ids_must_be_the_models_where_the_data_do_not_say_how_many_they_have(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "t.bin", [*range(99), 500])
    data = TextData(path=path, dtype="uint16", seq_len=9, val_fraction=0.0)
    assert data.open(vocab_size=501).vocab_size == 501
    with pytest.raises(ValueError, match=r"t.bin \(uint16\): expected token ids below vocab_size=400, got 500"):
        data.open(vocab_size=400)
    (tmp_path / "t.json").write_text('{"vocab_size": 600}')  # which says more than the model, to be told by preflight
    assert data.open(vocab_size=400).vocab_size == 600


@pytest.mark.parametrize("said", ["[1]", '{"dtype": 3, "vocab_size": "x", "ignored": null}', "[" * 100_000, '{"dtype'])
def test_what_somebody_else_wrote_beside_a_bin_is_passed_over(tmp_path: Path, said: str) -> None:
    path = write_bin(tmp_path / "t.bin", list(range(99)))
    (tmp_path / "t.json").write_text(said)
    with pytest.raises(ValueError, match="no header that says it"):
        TextData(path=path, seq_len=9).open()


def test_several_texts_are_read_as_one_and_kinds_are_not_mixed(tmp_path: Path) -> None:
    for name, text in (("t_10.txt", "c"), ("t_2.txt", "b"), ("t_1.txt", "a")):
        (tmp_path / name).write_text(text)
    pattern = str(tmp_path / "t_*")
    with pytest.raises(ValueError, match="the shard after .*t_2.txt is missing: number 3"):
        TextData(path=pattern, seq_len=2, val_fraction=0).open()
    (tmp_path / "t_10.txt").rename(tmp_path / "t_3.txt")
    assert TextData(path=pattern, seq_len=2, val_fraction=0).open().train.tokens.tolist()[1::3] == [97, 98, 99]
    write_bin(tmp_path / "t_4.bin", list(range(99)))
    with pytest.raises(ValueError, match="expected files of one kind, got .*, which names .bin, .txt"):
        TextData(path=pattern, seq_len=2, dtype="uint16").open()


def test_ids_beyond_the_stated_vocabulary_are_refused_when_opened_and_when_read(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "t.bin", [*range(99), 500])
    options = {"path": path, "dtype": "uint16", "seq_len": 9, "val_fraction": 0.0}
    with pytest.raises(ValueError, match="below vocab_size=500, got 500"):
        TextData(**options, vocab_size=500).open()  # type: ignore[arg-type]
    assert TextData(**options, vocab_size=501).open().vocab_size == 501  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="below vocab_size=4, got"):
        Samples(tokens=np.arange(9, dtype=np.uint16), seq_len=8, seed=0, vocab_size=4).read(0, 1)
