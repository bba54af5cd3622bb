"""Documents that are kept apart, named validation sets, mixtures: the same samples for any number of ranks."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_for

from vescale.data import IGNORED, Mixture, Part, Prefetch, Samples, TextData
from vescale.data.mixture import BLOCK, quotas


def _text(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


# --- documents


def test_documents_kept_apart_are_jagged_and_none_foretells_the_next() -> None:
    edges = np.array([0, 3, 4, 9, 12])
    samples = Samples(tokens=np.arange(13, dtype=np.uint16), seq_len=4, seed=0, documents=edges)
    order = samples.places(0, 3).tolist()
    batch = samples.read(0, 3)
    rows = {0: ([[0, 1, 2], [3]], [[1, 2, -100], [-100]]), 1: ([[4, 5, 6, 7]], [[5, 6, 7, 8]])}
    rows[2] = ([[8], [9, 10, 11]], [[-100], [10, 11, -100]])
    inputs, labels = (sum((rows[place][side] for place in order), []) for side in (0, 1))
    assert [part.tolist() for part in batch.input_ids.unbind()] == inputs
    assert [part.tolist() for part in batch.labels.unbind()] == labels
    assert batch.input_ids.values().numel() == 12


def test_the_texts_own_documents_are_found(tmp_path: Path) -> None:
    path = _text(tmp_path, "t.txt", "abc\fd\fefghijkl")
    data = TextData(path=path, seq_len=5, val_fraction=0, documents_apart=True).open()
    begins = [part[0].item() for part in data.train.read(0, data.train.num_samples).input_ids.unbind()]
    assert begins.count(256) == 3  # every document begins with bos, and one that a sample cuts goes on in the next
    joined = TextData(path=path, seq_len=5, val_fraction=0).open()
    assert data.describe()["documents"] == "apart" and "documents" not in joined.describe()


def test_without_edges_documents_cannot_be_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(200))
    with pytest.raises(ValueError, match="documents_apart: .*t.bin has no .docs or .idx"):
        TextData(path=str(tmp_path / "t.bin"), dtype="uint16", seq_len=4, documents_apart=True).open()


# --- validation


def test_validation_sets_have_names_and_what_is_past_the_end_counts_nothing(tmp_path: Path) -> None:
    other = _text(tmp_path, "other.txt", "x" * 100)
    data = TextData(path=_text(tmp_path, "t.txt", "a" * 400), seq_len=8, validation={"other": other}).open()
    assert [(name, share) for name, (_, share) in data.validations.items()] == [("", 1.0), ("other", 0.0)]
    samples = data.validations["other"][0]
    assert samples.num_samples == 12  # all of it is held out
    labels = samples.read(0, 4, counted=1).labels
    assert (labels[1:] == IGNORED).all() and (labels[0] != IGNORED).any()
    assert (samples.read(0, 2, counted=-3).labels == IGNORED).all()


# --- mixtures


def _mixture(folder: Path, **weights: float) -> Mixture:
    texts = {"a": "a" * 3000, "b": "b" * 500, "c": "c" * 900}
    parts = {
        name: Part(weight=weight, data=TextData(path=_text(folder, f"{name}.txt", texts[name]), seq_len=8))
        for name, weight in weights.items()
    }
    return Mixture(parts=parts, seed=3)


def test_weights_are_kept_in_every_block_and_each_part_is_read_in_its_own_order(tmp_path: Path) -> None:
    data = _mixture(tmp_path, a=3, b=1).open()
    owners = data.train.whose(0, 2 * BLOCK)
    for block in (owners[:BLOCK], owners[BLOCK:]):
        assert Counter(part for part, _ in block) == {0: 768, 1: 256}
    for part in (0, 1):
        assert [number for owner, number in owners if owner == part] == list(range(2 * (768, 256)[part]))
    assert [owner for owner, _ in owners[:BLOCK]] != [owner for owner, _ in owners[BLOCK:]]


def test_a_mixtures_samples_do_not_depend_on_how_they_are_read(tmp_path: Path) -> None:
    samples = _mixture(tmp_path, a=3, b=1, c=2).open().train
    whole = samples.read(1000, 60)
    parts = [samples.read(1000 + start, 20) for start in (0, 20, 40)]
    assert torch.equal(torch.cat([part.input_ids for part in parts]), whole.input_ids)
    letters = Counter(whole.input_ids[:, 3].tolist())
    assert {ord("a"), ord("b"), ord("c")} >= {*letters} and letters[ord("a")] > letters[ord("b")]


def test_a_mixture_validates_on_its_parts_and_knows_its_data(tmp_path: Path) -> None:
    data = _mixture(tmp_path, a=3, b=1).open()
    assert [(name, share) for name, (_, share) in data.validations.items()] == [("a", 0.75), ("b", 0.25)]
    saved = data.describe()
    data.check(saved)
    with pytest.raises(ValueError, match="a.fingerprint: .*; shares: expected .768, 256."):
        (tmp_path / "a.txt").write_text("z" * 3000)
        parts = {name: Part(weight=1, data=part.data) for name, part in data.source.parts.items()}
        Mixture(parts=parts, seed=3).open().check(saved)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"a": 1, "b": 0}, "parts.b.weight: expected a number > 0, got 0"),
        ({"a": float("nan"), "b": -1}, "parts.a.weight: expected a number > 0, got nan; parts.b.weight: .* got -1"),
        ({"a": float("inf")}, "parts.a.weight: expected a number > 0, got inf"),
        ({"a": 1e308, "b": 1e308}, "expected weights that have a sum"),
    ],
)
def test_weights_that_share_nothing_out_are_refused(tmp_path: Path, weights: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _mixture(tmp_path, **weights).open()


def test_a_mixture_of_more_parts_than_samples_in_a_block_is_refused(tmp_path: Path) -> None:
    part = Part(weight=1, data=TextData(path="gone.txt"))
    with pytest.raises(ValueError, match="parts: expected at most 1024, got 1025"):
        Mixture(parts={str(i): part for i in range(BLOCK + 1)}).open()


def test_the_named_sets_of_a_part_are_validated_on_too(tmp_path: Path) -> None:
    path, other = _text(tmp_path, "t.txt", "a" * 400), _text(tmp_path, "o.txt", "b" * 100)
    held = TextData(path=path, seq_len=8, validation={"o": other})
    parts = {"x": Part(weight=3, data=held), "y": Part(weight=1, data=dataclasses.replace(held, val_fraction=0))}
    sets = Mixture(parts=parts).open().validations
    assert [(name, share) for name, (_, share) in sets.items()] == [("x", 0.75), ("x/o", 0), ("y/o", 0.25)]


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [1e-9, 1], [0.1] * 10, [5, 3, 2, 0.001]])
def test_shares_are_whole_and_add_up(weights: list[float]) -> None:
    shares = quotas(weights)
    assert sum(shares) == BLOCK and min(shares) >= 1
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    assert all(abs(share - want) < 2 for share, want in zip(shares, exact, strict=True))


# --- prefetch


def test_what_is_read_ahead_costs_no_step_anything() -> None:
    read: list[int] = []

    def slow(step: int) -> int:
        time.sleep(0.02)
        read.append(step)
        return step * step

    batches = Prefetch(slow, last=10)
    found, waited = [], []
    for step in range(10):
        before = batches.waited_s
        found.append(batches.take(step))
        waited.append(batches.waited_s - before)
        ahead = [*range(min(step + 3, 10))]
        assert wait_for(functools.partial(read.__eq__, ahead))  # a step: two more are read without being asked for
    assert found == [step * step for step in range(10)] and read == list(range(10))
    # Seconds: two clocks differ by a little, and others may hold this process up, so the median.
    assert waited[0] >= 0.015 and sorted(waited[1:])[4] < 0.01


def test_what_reading_raises_is_raised_where_it_is_taken() -> None:
    def broken(step: int) -> int:
        raise ValueError(f"step {step}")

    with pytest.raises(ValueError, match="step 3"):
        Prefetch(broken, last=9).take(3)
