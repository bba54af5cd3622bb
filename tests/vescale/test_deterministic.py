"""The sums of a deterministic run are one tree, and its losses have the same bits on 1, 2 and 4 ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimizers import AdamW, Muon
from vescale import Rules, train
from vescale.deterministic import TreeSum, check, halved, in_order, reduce_, tree
from vescale.tracking import read_metrics

VALUES = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 16)[:, None]


def _pairwise(rows: torch.Tensor) -> torch.Tensor:
    """The definition."""
    if len(rows) == 1:
        return rows[0]
    return _pairwise(rows[: len(rows) // 2]) + _pairwise(rows[len(rows) // 2 :])


def test_terms_given_in_order_and_rows_are_added_as_the_tree_says() -> None:
    total, expected = TreeSum(), _pairwise(VALUES)
    for row in VALUES:
        total.add_([row.clone()])
    assert torch.equal(total.total()[0], expected) and torch.equal(halved(VALUES), expected)
    assert not torch.equal(VALUES.flip(0).cumsum(0)[-1], expected)  # another order has other bits
    assert torch.equal(tree(VALUES[:, 0][:11]), _pairwise(torch.cat([VALUES[:11, 0], torch.zeros(5)])[:, None])[0])


def _reduced() -> tuple[torch.Tensor, torch.Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    part = reduce_(VALUES[rank].clone(), group=dist.group.WORLD)  # type: ignore[arg-type]
    mine = list(range(rank, 16, world))
    return part, in_order([VALUES[i, 0] for i in mine], mine, 16)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_reduce_as_the_tree_says(pool: Any, world: int) -> None:
    found = pool(world).run(_reduced)
    assert torch.equal(torch.cat([part for part, _ in found]), _pairwise(VALUES[:world]))
    assert {float(total) for _, total in found} == {float(_pairwise(VALUES[:, :1])[0])}


ARGV = [
    *("model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=1", "data.seq_len=8"),
    *("trainer.log_every=1", "trainer.eval_every=50", "trainer.eval_sequences=5", "trainer.save_every=1000"),
    *("trainer.steps=100", "trainer.global_batch=4", "trainer.device=cpu", "tracking.mode=disabled"),
    "trainer.deterministic=true",
]


def _run(argv: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert train.main(argv) == 0
    return out.getvalue()


def test_a_hundred_steps_have_the_same_bits_on_1_2_and_4_ranks(pool: Any, tmp_path: Path) -> None:
    kept = ("loss", "grad_norm", "validation_loss")
    runs = {}
    for world in (1, 2, 4):
        said = pool(world).run(_run, [*ARGV, f"run_dir={tmp_path / str(world)}"])
        cost = r"^deterministic: a sample at a time; 0.1 MiB of unreduced gradient, 0.\d of partial sums$"
        assert re.search(cost, said[0], flags=re.M), said[0]
        rows = read_metrics(tmp_path / str(world) / "metrics.jsonl")
        runs[world] = [{key: row[key] for key in kept if key in row} for row in rows]
    losses = [row["loss"] for row in runs[1] if "loss" in row]
    assert (len(runs[1]), len(losses)) == (102, 100) and losses[-1] < losses[0]
    assert runs[1] == runs[2] == runs[4]


def test_what_has_no_tree_is_refused_in_one_line() -> None:
    known = Rules(a=("*w", Muon()), b=("*", AdamW()))
    check(rules=known, world=4, global_batch=8, model=SimpleNamespace())
    other = Rules(a=("*", type("Other", (AdamW,), {})()))
    with pytest.raises(NotImplementedError) as caught:
        check(rules=other, world=3, global_batch=2, model=SimpleNamespace(expert_units=lambda: [1]))
    for part in (
        "ranks: expected a power of two, got 3",
        "at least one sample for each of 3 ranks",
        "expected AdamW and Muon, got Other",
        "model: expected a dense one",
    ):
        assert part in str(caught.value)
