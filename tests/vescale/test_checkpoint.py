"""A checkpoint is whole or not there, moves between numbers of ranks, and damage is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from optimizers import AdamW, Muon


def _run(
    steps: int, *, folder: str | None = None, save_at: int | None = None, resume: bool = False, keep: int = 2
) -> dict[str, torch.Tensor]:
    from vescale import Optimizer, Rules, checkpoint, fully_shard
    from vescale.saver import Saver

    torch.manual_seed(2)
    root = Path(folder or "")
    model = nn.Sequential(nn.Linear(9, 31), nn.GELU(), nn.Linear(31, 5, bias=False))
    rules = Rules(
        matrices=("*weight", Muon(lr=0.02, ns_dtype=torch.float32, wire_dtype=torch.float32)),
        rest=("*", AdamW(lr=0.01)),
    )
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), block_of=rules.block_of)
    optimizer = Optimizer(model.named_parameters(), rules)
    start, saver = 0, Saver(root, keep=keep)
    if resume:
        path = checkpoint.newest(root)
        assert path is not None
        extra = checkpoint.load(path, model=model, optimizer=optimizer)
        start = extra["step"]
    for step in range(start, steps):
        if save_at is not None and step >= save_at:
            saver.save(step, tensors=checkpoint.tensors(model, optimizer), extra={"step": step})
        x = torch.randn(24, 9, generator=torch.Generator().manual_seed(step))
        model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    saver.wait()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_resume_on_any_number_of_ranks_continues_the_run(pool, tmp_path: Path, world: int) -> None:
    whole = pool(4).run(_run, 4, folder=str(tmp_path / "c"), save_at=2)[0]
    resumed = pool(world).run(_run, 4, folder=str(tmp_path / "c"), resume=True)[0]
    for name, value in whole.items():
        if world == 4:
            assert torch.equal(value, resumed[name]), name
        torch.testing.assert_close(value, resumed[name], rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step_00000002", "step_00000003"]


def _load_fails(folder: str, message: str) -> None:
    from vescale import Optimizer, Rules, checkpoint, fully_shard

    model = nn.Sequential(nn.Linear(9, 31), nn.GELU(), nn.Linear(31, 5, bias=False))
    fully_shard(model)
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=message) as caught:
        checkpoint.load(checkpoint.newest(Path(folder)), model=model, optimizer=optimizer)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


def test_damage_is_one_line_on_every_rank_and_changes_nothing(pool, tmp_path: Path) -> None:
    pool(2).run(_run, 1, folder=str(tmp_path / "c"), save_at=0)
    path = tmp_path / "c" / "step_00000000"
    pool(2).run(
        _load_fails,
        str(tmp_path / "c"),
        "another model or optimizer.*lacks optimizer.0.weight.exp_avg.*also holds optimizer.0.weight.momentum",
    )
    shard = path / "__1_0.distcp"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    pool(2).run(_load_fails, str(tmp_path / "c"), "corrupt: checksum of __1_0.distcp differs")
    shard.write_bytes(data[:-100])
    pool(2).run(_load_fails, str(tmp_path / "c"), "corrupt: __1_0.distcp missing or not of its length")
    (path / "seal.json").write_text("{")
    pool(2).run(_load_fails, str(tmp_path / "c"), "corrupt: seal.json")


@pytest.mark.parametrize(
    ("seal", "line"),
    [
        ({"extra": {}, "files": {"a": 5, "b": [1, 2], "c": [1]}}, "files.a, files.b, files.c of another type"),
        ({"extra": {"step": "x", "tokens": 1.0, "data": 3, "health": []}, "files": {}}, "extra.step, extra.tokens, ex"),
        ({"extra": {"step": True}, "files": {}}, "extra.step of another type"),
        ([], "lacks its entries"),
    ],
)
def test_a_seal_of_other_types_is_passed_over_for_the_one_before(tmp_path: Path, seal: object, line: str) -> None:
    from vescale import checkpoint

    for step, value in ((1, {"extra": {"step": 1}, "files": {}}), (2, seal)):
        (tmp_path / f"step_{step:08}").mkdir()
        (tmp_path / f"step_{step:08}" / "seal.json").write_text(json.dumps(value))
    for check in (checkpoint.read_extra, checkpoint.verify):
        path, extra, wrong = checkpoint.newest_good(tmp_path, checkpoint.whole(tmp_path), check)
        assert path is not None and path.name == "step_00000001" and extra == {"step": 1}
        assert len(wrong) == 1 and "step_00000002 is corrupt: seal.json" in wrong[0] and line in wrong[0]


@pytest.mark.parametrize("name", ["x" * 300, "gone", "a\0b"])
def test_a_file_that_cannot_be_is_missing(tmp_path: Path, name: str) -> None:
    from vescale import checkpoint

    (tmp_path / "seal.json").write_text(json.dumps({"extra": {}, "files": {name: [1, "x"]}}))
    with pytest.raises(ValueError, match="corrupt: .* missing or not of its length"):
        checkpoint.read_extra(tmp_path)


def test_what_has_no_seal_is_never_loaded_and_a_partial_one_is_removed(pool, tmp_path: Path) -> None:
    from vescale import checkpoint

    assert checkpoint.newest(tmp_path / "nowhere") is None
    pool(2).run(_run, 1, folder=str(tmp_path / "c"), save_at=0)
    (tmp_path / "c" / "step_00000007").mkdir()
    (tmp_path / "c" / "step_00000009.partial").mkdir()
    (tmp_path / "c" / "step_00000009.partial" / "seal.json").write_text(json.dumps({"extra": {}, "files": {}}))
    newest = checkpoint.newest(tmp_path / "c")
    assert newest is not None and newest.name == "step_00000000"
    pool(2).run(_run, 1, folder=str(tmp_path / "c"), save_at=0)
    assert not (tmp_path / "c" / "step_00000009.partial").exists()
