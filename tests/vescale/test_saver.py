"""A checkpoint is written while training goes on, without a collective, and a failure is everybody's one line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from unprivileged import as_modes_say

from optimizers import AdamW
from vescale import checkpoint
from vescale import saver as saver_module
from vescale.saver import Saver


def _state() -> tuple[nn.Module, Any]:
    from vescale import Optimizer, Rules, fully_shard

    torch.manual_seed(1)
    model = fully_shard(nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 3)))
    return model, Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))


def _tensors(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return checkpoint.tensors(model, optimizer) | checkpoint.random_state()


def _asynchronous(root: Path) -> dict[str, Any]:
    """Changes the weights as soon as save returns, while the thread is held before its first byte."""
    model, optimizer = _state()
    saver, gate, calls = Saver(root, keep=2), threading.Event(), []
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    write, real = Saver._write, dict(vars(dist))
    Saver._write = lambda *args: gate.wait() and write(*args)  # type: ignore[assignment,func-returns-value]
    try:
        names = ["all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "all_reduce"]
        for name in names:
            setattr(dist, name, lambda *args, name=name, **options: calls.append(name) or real[name](*args, **options))
        saver.save(3, tensors=_tensors(model, optimizer), extra={"step": 3})
        during = list(calls)
        assert saver.busy and checkpoint.whole(root) == []
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        gate.set()
        saver.wait()
    finally:
        Saver._write = write  # type: ignore[method-assign]
        for name in names:
            setattr(dist, name, real[name])
    checkpoint.load(root / "step_00000003", model=model, optimizer=optimizer)
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())
    return {"during": during, "after": calls}


def test_a_step_waits_for_the_copy_alone_and_nothing_is_communicated(pool: Any, tmp_path: Path) -> None:
    for found in pool(3).run(_asynchronous, tmp_path / "c"):
        assert found["during"] == [] and {*found["after"]} == {"all_gather_object"}  # wait() agrees on what came of it


def _every_step(root: Path, keep: int, keep_every: int | None) -> int:
    """Saves ten times; returns how often this rank made a plan of what it writes."""
    model, optimizer = _state()
    saver, planned = Saver(root, keep=keep, keep_every=keep_every), list[int]()
    plan = saver_module._items
    saver_module._items = lambda *args: planned.append(1) or plan(*args)  # type: ignore[assignment,func-returns-value]
    try:
        for step in range(1, 11):
            saver.save(step, tensors=_tensors(model, optimizer), extra={})
        saver.wait()
    finally:
        saver_module._items = plan
    return len(planned)


def test_the_last_ones_and_every_nth_stay_and_all_are_written_by_one_plan(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(_every_step, tmp_path / "c", 2, 4) == [1, 1]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [f"step_{n:08}" for n in (4, 8, 9, 10)]


def _guarded(root: Path) -> None:
    """A checkpoint that somebody made read-only stays, and one that cannot be removed costs no later one."""
    model, optimizer = _state()
    saver = Saver(root, keep=1)
    real, removed = checkpoint.remove, list[str]()

    def remove(path: Path) -> None:
        removed.append(path.name)
        if path.name == "step_00000002":
            raise PermissionError(13, "Permission denied", str(path))
        real(path)

    checkpoint.remove = remove
    try:
        for step in (1, 2, 3, 4):
            saver.save(step, tensors=_tensors(model, optimizer), extra={})
            saver.wait()
            (root / "step_00000001").chmod(0o555)
    finally:
        checkpoint.remove = real
        (root / "step_00000001").chmod(0o755)
    assert removed == ["step_00000002", "step_00000002", "step_00000003"]


def _guarded_by_modes(root: Path) -> None:
    as_modes_say(_guarded, root)


def test_a_checkpoint_that_cannot_be_removed_stays_and_costs_nothing(pool: Any, tmp_path: Path) -> None:
    pool(1).run(_guarded_by_modes, tmp_path / "c")
    assert [checkpoint.step_of(path) for path in checkpoint.whole(tmp_path / "c")] == [1, 2, 4]


def test_options_out_of_range_are_refused(pool: Any, tmp_path: Path) -> None:
    pool(1).run(_refuses, tmp_path)


def _refuses(root: Path) -> None:
    for options in ({"keep": 0}, {"keep": 1, "keep_every": 0}):
        with pytest.raises(ValueError, match="keep and keep_every > 0"):
            Saver(root, **options)


def _full_disk(root: Path, rank: int) -> str:
    model, optimizer = _state()
    saver = Saver(root, keep=2)
    write = dcp.FileSystemWriter.write_data

    def full(*args: Any) -> Any:
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return write(*args)

    saver.save(1, tensors=_tensors(model, optimizer), extra={})
    saver.wait()
    dcp.FileSystemWriter.write_data = full
    try:
        saver.save(2, tensors=_tensors(model, optimizer), extra={})
        with pytest.raises(OSError, match="step_00000002 was not written: .*No space left on device") as caught:
            saver.wait()
    finally:
        dcp.FileSystemWriter.write_data = write
    saver.save(3, tensors=_tensors(model, optimizer), extra={})
    saver.wait()
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_everybodys_line_and_the_next_save_works(
    pool: Any, tmp_path: Path, rank: int
) -> None:
    first, *others = pool(2).run(_full_disk, tmp_path / "c", rank)
    assert "\n" not in first and others == [first]
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_00000001", "step_00000003"]


def _sums(root: Path) -> tuple[str, str]:
    model, optimizer = _state()
    saver = Saver(root, keep=1)
    saver.save(1, tensors=_tensors(model, optimizer), extra={}, record={"seed": 7})
    saver.wait()
    dist.barrier()
    record = json.loads((root / "step_00000001" / "record.json").read_text())
    assert record == json.loads((root.parent / "record.json").read_text()) and record["seed"] == 7
    assert record["tensors"].keys() == checkpoint.tensors(model, optimizer).keys()
    return record["weights"], record["optimizer"]


def test_the_checksums_are_the_same_for_any_number_of_ranks(pool: Any, tmp_path: Path) -> None:
    found = {sums for world in (1, 2, 3, 4) for sums in pool(world).run(_sums, tmp_path / str(world) / "c")}
    assert len(found) == 1


def _stock(root: Path) -> None:
    """torch's own loader reads it, and its own converter."""
    model, optimizer = _state()
    saver = Saver(root, keep=1)
    saver.save(1, tensors=_tensors(model, optimizer), extra={})
    saver.wait()
    whole = {f"model.{name}": torch.zeros(p.shape) for name, p in model.named_parameters()}
    dcp.load(whole, checkpoint_id=root / "step_00000001")
    assert all(torch.equal(whole[f"model.{name}"], p.full_tensor()) for name, p in model.named_parameters())


def test_torchs_own_loader_reads_it(pool: Any, tmp_path: Path) -> None:
    pool(3).run(_stock, tmp_path / "c")


def _woken(root: Path) -> list[str]:
    """Rank 1 of a run before, whose checkpoint of the same step nobody will complete, writes while ours is written."""
    model, optimizer = _state()
    old, new = Saver(root, keep=1), Saver(root, keep=1)
    tensors = _tensors(model, optimizer)
    if dist.get_rank() == 1:
        old.save(1, tensors=tensors, extra={})
    new.save(1, tensors=tensors, extra={})
    new.wait()
    if dist.get_rank() == 1:
        assert old.busy  # it waits for a folder of its own
        old._given_up.set()
        old.join(timeout_s=60)
    dist.barrier()
    checkpoint.verify(root / "step_00000001")
    return sorted(path.name for path in root.iterdir())


def test_a_rank_of_a_run_before_adds_nothing(pool: Any, tmp_path: Path) -> None:
    assert pool(2).run(_woken, tmp_path / "c") == [["step_00000001"]] * 2


def _left_behind(root: Path) -> None:
    Saver(root, keep=1)
    dist.barrier()
    assert list(root.iterdir()) == [root / "step_00000001"]


def test_what_a_killed_run_left_half_written_is_removed(pool: Any, tmp_path: Path) -> None:
    for name in ("step_00000001", "step_00000002.partial", "step_00000001.old.partial"):
        (tmp_path / "c" / name).mkdir(parents=True)
    pool(2).run(_left_behind, tmp_path / "c")


def test_a_checkpoint_that_is_removed_stops_being_one_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "step_00000001"
    path.mkdir()
    (path / "seal.json").touch()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *args, **options: None)  # a kill comes here
    checkpoint.remove(path)
    assert checkpoint.whole(tmp_path) == []


def _altered(root: Path) -> str:
    model, optimizer = _state()
    saver = Saver(root, keep=1)
    saver.save(1, tensors=_tensors(model, optimizer), extra={"tokens": 12})
    saver.wait()
    path = root / "step_00000001"
    assert checkpoint.verify(path) == {"tokens": 12}
    seal = (path / "seal.json").read_text()
    (path / "seal.json").write_text(seal.replace("12", "13", 1))
    with pytest.raises(ValueError) as caught:
        checkpoint.read_extra(path)
    return str(caught.value)


def test_a_value_that_was_changed_in_the_seal_is_damage(pool: Any, tmp_path: Path) -> None:
    assert "step_00000001 is corrupt: seal.json is not what was written" in pool(1).run(_altered, tmp_path / "c")[0]
