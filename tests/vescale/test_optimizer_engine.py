"""What the Optimizer promises beside the update: nothing half done, nothing lost between worlds, refusals named."""

from __future__ import annotations

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from waiting import wait_for

from optimizers import SOAP, Adam8bit, AdamW, Muon, Shampoo

REST = ("*", AdamW(lr=0.01))
RULES: dict[str, dict[str, Any]] = {
    "muon": {"matrices": ("*.weight", Muon(lr=0.02)), "rest": REST},
    "adam8bit": {"all": ("*", Adam8bit(lr=0.01, min_numel=512))},
    "shampoo": {"matrices": ("*.weight", Shampoo(lr=0.01, block_size=16, refresh=2)), "rest": REST},
    "soap": {"matrices": ("*.weight", SOAP(lr=0.01, block_size=16, refresh=2)), "rest": REST},
}


class Net(nn.Sequential):
    """Matrices that edges cut, vectors shorter than the world, and a frozen one."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(nn.Linear(24, 40), nn.Linear(40, 33), nn.Linear(33, 3))
        self[2].weight.requires_grad = False


def _build(
    rule: str, rules: dict[str, Any] | None = None, max_padding: float = 0.0, **options: Any
) -> tuple[nn.Module, Any]:
    from vescale import Optimizer, Rules, fully_shard

    ours, model = Rules(**(rules or RULES[rule])), Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, block_of=ours.block_of, max_padding=max_padding)
    return model, Optimizer(model.named_parameters(), ours, **options)


def _step(model: nn.Module, optimizer: Any, step: int, *, bad: str | None = None, **options: Any) -> None:
    from vescale import distribute

    for name, param in model.named_parameters():
        if param.requires_grad:
            seed = sum(map(ord, name)) * 1000 + step
            grad = torch.randn(tuple(param.shape), generator=torch.Generator().manual_seed(seed))
            grad = grad.fill_(torch.nan) if name == bad else grad
            param.grad = distribute(grad, param.device_mesh, param.placements)
    optimizer.step(**options)


def _everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    values = {**dict(model.named_parameters()), **optimizer.named_state()}
    return {
        name: (value.full_tensor() if hasattr(value, "device_mesh") else value).detach().clone()
        for name, value in values.items()
    }


# --- state ---


def _states(rule: str) -> dict[str, Any]:
    model, optimizer = _build(rule)
    first = {
        name: (tuple(value.shape), str(value.dtype), [type(p).__name__ for p in getattr(value, "placements", ())])
        for name, value in optimizer.named_state().items()
    }
    owners = {
        name: value.placements[0].local_units for name, value in optimizer.named_state().items() if ".left" in name
    }
    for step in range(2):
        _step(model, optimizer, step)
    assert list(first) == list(optimizer.named_state())
    return {
        "state": first,
        "units": owners,
        "bytes": sum(v.to_local().nbytes for v in optimizer.named_state().values() if hasattr(v, "device_mesh")),
    }


@pytest.mark.parametrize("rule", RULES)
def test_every_rank_has_the_same_keys_from_the_beginning_and_every_tensor_a_placement(pool, rule: str) -> None:
    ranks = pool(8).run(_states, rule)
    assert all(rank["state"] == ranks[0]["state"] and rank["units"] == ranks[0]["units"] for rank in ranks)
    assert not any("2.weight" in name for name in ranks[0]["state"]), "a frozen parameter has none"
    for name, (shape, _, placements) in ranks[0]["state"].items():
        assert placements == (["RaggedShard"] if shape else []), name
    if rule == "soap":  # 40 x 24 in blocks of 16: three rows of two; 33 x 40: three rows of three
        assert sum(ranks[0]["units"]["0.weight.left"]) == 6 and sum(ranks[0]["units"]["1.weight.left"]) == 9
        assert 0 in ranks[0]["units"]["0.weight.left"], "some rank owns none"
    if rule == "adam8bit":
        assert ranks[0]["state"]["0.weight.exp_avg"][1] == "torch.uint8"
        assert sum(rank["bytes"] for rank in ranks) <= 2.04 * (960 + 1320) + 8 * (40 + 33 + 3)


def _save(rule: str, folder: str) -> dict[str, torch.Tensor]:
    from vescale import checkpoint
    from vescale.saver import Saver

    model, optimizer = _build(rule)
    for step in range(3):
        _step(model, optimizer, step)
    saver = Saver(Path(folder), keep=1)
    saver.save(3, tensors=checkpoint.tensors(model, optimizer), extra={})
    saver.wait()
    for step in range(3, 6):
        _step(model, optimizer, step)
    return _everything(model, optimizer)


def _continue(rule: str, folder: str, max_padding: float) -> dict[str, torch.Tensor]:
    from vescale import checkpoint

    model, optimizer = _build(rule, max_padding=max_padding)
    checkpoint.load(Path(folder) / "step_00000003", model=model, optimizer=optimizer)
    for step in range(3, 6):
        _step(model, optimizer, step)
    return _everything(model, optimizer)


@pytest.mark.parametrize("rule", RULES)
def test_a_checkpoint_goes_on_with_equal_updates_on_any_number_of_ranks(pool, rule: str, tmp_path: Path) -> None:
    for old, others in ((4, (1, 3, 8)), (1, (2,))):
        folder = tmp_path / str(old)
        expected = pool(old).run(_save, rule, str(folder))[0]
        for world in others:
            found = pool(world).run(_continue, rule, str(folder), 1e9 if world == 3 else 0.0)[0]
            assert found.keys() == expected.keys()
            different = [name for name, value in found.items() if not torch.equal(value, expected[name])]
            assert not different, f"saved on {old}, continued on {world} ranks: {different}"


def _sum_convention() -> None:
    """A momentum that was written as a sum is an average after it was loaded."""
    model, optimizer = _build("muon")
    for step in range(2):
        _step(model, optimizer, step)
    state = optimizer.state[model[0].weight]
    average = state["momentum"].full_tensor().clone()
    state["momentum"].mul_(20.0)  # 1 / (1 - 0.95)
    state["settles_at"].fill_(20.0)
    optimizer.state_was_loaded()
    torch.testing.assert_close(state["momentum"].full_tensor(), average, rtol=1e-6, atol=0)
    assert state["settles_at"] == 1


def test_a_momentum_of_the_other_convention_is_converted(pool) -> None:
    pool(2).run(_sum_convention)


def _state_dict_of_other_dtypes() -> None:
    """State that was saved in another dtype takes the dtype it has here; codes stay codes."""
    for rule, name, wanted in (("muon", "momentum", torch.float32), ("adam8bit", "exp_avg", torch.uint8)):
        model, optimizer = _build(rule)
        _step(model, optimizer, 0)
        saved = optimizer.state_dict()
        state = {
            key: {n: v.to(torch.bfloat16) if v.is_floating_point() else v.clone() for n, v in values.items()}
            for key, values in saved["state"].items()
        }
        optimizer.load_state_dict({**saved, "state": state})
        assert optimizer.state[model[0].weight][name].dtype is wanted
        _step(model, optimizer, 1)


def test_loaded_state_has_the_dtype_it_had(pool) -> None:
    pool(2).run(_state_dict_of_other_dtypes)


def _load_refusals() -> None:
    """One line that names parameter, state, what was expected and what came; every bit stays."""
    model, optimizer = _build("adam8bit")
    _step(model, optimizer, 0)
    before, saved = _everything(model, optimizer), optimizer.state_dict()
    values = saved["state"][3]  # of 1.bias, too small for bytes: float32; the parameters before it fit
    other = {**saved["state"][0], "exp_avg": torch.ones(40, 24)}
    for key, state, problem in (
        (3, {**values, "exp_avg": torch.ones(1)}, r"1\.bias: exp_avg: expected shape \(33,\), got \(1,\)"),
        (3, {**values, "exp_avg": 1.0}, r"1\.bias: exp_avg: expected a tensor, got float"),
        (3, {**values, "exp_avg": torch.empty(33, device="meta")}, r"1\.bias: exp_avg: expected .* dense memory"),
        (3, {**values, "step": values["exp_avg"]}, r"1\.bias: step: expected shape \(\), got \(33,\)"),
        (3, {"step": values["step"]}, r"1\.bias: expected names of state .*exp_avg.*, got \['step'\]"),
        (0, other, r"0\.weight: exp_avg: expected torch.uint8, got torch.float32"),
    ):
        fine = {k: {n: v.clone().zero_() for n, v in of.items()} for k, of in saved["state"].items()}
        with pytest.raises(ValueError, match=f"load_state_dict: {problem}"):
            optimizer.load_state_dict({**saved, "state": {**fine, key: state}})
    fine = {k: {n: v.clone().zero_() for n, v in of.items()} for k, of in saved["state"].items()}
    (group,) = saved["param_groups"]
    for wrong, problem in (
        ([{**group, "name": "gone"}], "hold other parameters"),
        ([{**group, "lr": -1.0}], "lr"),
    ):
        with pytest.raises(ValueError, match=problem):
            optimizer.load_state_dict({"param_groups": wrong, "state": fine})
    with pytest.raises(ValueError, match=r"expected the keys param_groups and state, got \['state'\]"):
        optimizer.load_state_dict({"state": fine})
    after = _everything(model, optimizer)
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []
    optimizer.load_state_dict({**saved, "state": fine})
    loaded = {name: value for name, value in _everything(model, optimizer).items() if name in optimizer.named_state()}
    assert [name for name, value in loaded.items() if value.any()] == []


def test_state_that_does_not_fit_is_named_and_nothing_is_loaded(pool) -> None:
    pool(2).run(_load_refusals)


# --- nothing half done ---


def _no_dispatch(rule: str) -> None:
    from vescale.ragged_tensor import RaggedTensor

    model, optimizer = _build(rule)
    _step(model, optimizer, 0)
    seen: list[Any] = []
    original = RaggedTensor.__torch_dispatch__

    def counted(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return original(func, types, args, kwargs)

    RaggedTensor.__torch_dispatch__ = classmethod(counted)  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        RaggedTensor.__torch_dispatch__ = original  # type: ignore[method-assign]
    assert not seen


@pytest.mark.parametrize("rule", RULES)
def test_a_step_sees_local_tensors_only(pool, rule: str) -> None:
    pool(2).run(_no_dispatch, rule)


def _failing(rule: str, **options: Any) -> None:
    """An exception in a block names the parameter, and nothing was written."""
    model, optimizer = _build(rule, **options)
    _step(model, optimizer, 0)
    before = _everything(model, optimizer)
    kind = type(optimizer.runs[0].rule)
    original = kind.block

    def failing(self: Any, payloads: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        result = original(self, payloads, *args, **options)  # what it writes in place is taken back too
        if len(calls) == 3:
            raise FloatingPointError("no such number")
        return result

    calls: list[int] = []
    kind.block = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(
            RuntimeError,
            match=r"1\.weight: \w+\.block failed on block 0 .*no such number"
            if rule == "muon"
            else r"0\.weight: \w+\.block failed on block 2 .*: no such number",
        ):
            if rule == "muon":
                calls.append(1)
            _step(model, optimizer, 1)
    finally:
        kind.block = original  # type: ignore[method-assign]
    after = _everything(model, optimizer)
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []
    _step(model, optimizer, 1)  # and the next step is as if nothing had been


@pytest.mark.parametrize("rule", ["muon", "shampoo", "soap"])
def test_an_exception_in_a_block_names_the_parameter_and_leaves_everything(pool, rule: str) -> None:
    pool(1).run(_failing, rule)
    pool(1).run(_failing, rule, offload_state=True)


def _step_after_a_failure() -> None:
    """Where there are other ranks, which may have taken the step, a rank on which it failed takes no other."""
    model, optimizer = _build("muon")

    def failing(*args: Any) -> None:
        raise RuntimeError("0.weight: no such number")

    optimizer._run = failing
    with pytest.raises(RuntimeError, match=r"0\.weight: no such number"):
        _step(model, optimizer, 0)
    del optimizer._run
    before = _everything(model, optimizer)
    with pytest.raises(RuntimeError, match="other ranks may have taken it: end the job .* from a checkpoint"):
        _step(model, optimizer, 0)
    after = _everything(model, optimizer)
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []


def test_after_an_exception_beside_other_ranks_no_step_is_taken(pool) -> None:
    pool(2).run(_step_after_a_failure)


def test_after_an_exception_behind_a_finished_bucket_no_step_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parameters outside any unit are three buckets: the first is stepped while the third is computed."""
    from vescale import Optimizer, Rules

    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", Muon(lr=0.02))))
    model(torch.ones(2, 4)).sum().backward()
    before, block, calls = _everything(model, optimizer), Muon.block, []

    def failing(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return block(*args, **options) if len(calls) < 3 else 1 / 0

    monkeypatch.setattr(Muon, "block", failing)
    with pytest.raises(RuntimeError, match=r"2\.weight: Muon.block failed"):
        optimizer.step()
    after = _everything(model, optimizer)
    assert {name[0] for name, value in after.items() if not torch.equal(value, before[name])} == {"0"}
    with pytest.raises(RuntimeError, match="some of it was taken here"):
        optimizer.step()


def test_a_sparse_gradient_is_named_and_nothing_changes() -> None:
    from vescale import Optimizer, Rules

    model = nn.ModuleDict({"head": nn.Linear(4, 4), "embed": nn.Embedding(5, 4, sparse=True)})
    optimizer = Optimizer(model.named_parameters(), Rules(**RULES["muon"]))
    model["head"](model["embed"](torch.tensor([1, 3]))).sum().backward()
    before = _everything(model, optimizer)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(ValueError, match=r"embed\.weight: expected a dense gradient, got torch.sparse_coo"):
            call()
    after = _everything(model, optimizer)
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []


def _skipping(rule: str) -> None:
    from vescale.grad_norm import non_finite

    model, optimizer = _build(rule)
    for step in range(2):
        _step(model, optimizer, step)
    before = _everything(model, optimizer)
    for step in (2, 3):  # whether blocks are to refresh or not
        _step(model, optimizer, step, bad="1.weight", skip=torch.ones(()))
        norm = optimizer.clip_grad_norm_(1.0)
        assert non_finite(norm) == 1
        after = _everything(model, optimizer)
        different = [name for name, value in after.items() if not torch.equal(value, before[name])]
        assert different == []
    _step(model, optimizer, 4, skip=torch.zeros(()))
    assert not torch.equal(_everything(model, optimizer)["1.weight"], before["1.weight"])


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_that_is_not_finite_skips_the_step_to_the_bit(pool, rule: str) -> None:
    pool(3).run(_skipping, rule)


def _live(rule: str) -> list[int]:
    model, optimizer = _build(rule)
    sizes: list[int] = []
    for step in range(5):
        _step(model, optimizer, step)
        optimizer.zero_grad()
        if step < 2:
            time.sleep(0.05)  # gloo's threads let go of a tensor a moment after its collective
        else:
            wait_for(lambda: _held() <= sizes[1], 20)
        sizes.append(_held())
    return sizes


def _held() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) and not o.is_meta]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("rule", RULES)
def test_no_step_leaves_more_behind_than_the_second(pool, rule: str) -> None:
    for sizes in pool(2).run(_live, rule):
        assert max(sizes[2:]) <= sizes[1], sizes


# --- offloaded state ---


def _offloaded() -> None:
    """Held in the CPU's memory, copied to the parameters' device for each bucket and back: the same bits."""
    for rule in RULES:
        (model, optimizer), (plain, reference) = _build(rule, offload_state=True), _build(rule)
        for step in range(4):
            options = {"skip": torch.tensor(float(step == 2))}
            _step(model, optimizer, step, **options)
            _step(plain, reference, step, **options)
            assert all(run.all_state == {} for run in optimizer.runs), "no copy outlives the step"
        assert all(value.device.type == "cpu" for value in optimizer.named_state().values())
        ours, expected = _everything(model, optimizer), _everything(plain, reference)
        assert [name for name, value in ours.items() if not torch.equal(value, expected[name])] == []
        again, resumed = _build(rule, offload_state=True)
        resumed.load_state_dict(reference.state_dict())  # offloading is no property of a checkpoint
        again.load_state_dict(plain.state_dict())
        for net, stepper in ((again, resumed), (plain, reference)):
            _step(net, stepper, 4)
        ours, expected = _everything(again, resumed), _everything(plain, reference)
        assert [name for name, value in ours.items() if not torch.equal(value, expected[name])] == []


def test_offloaded_state_gives_the_same_bits(pool) -> None:
    pool(2).run(_offloaded)


# --- clipping ---


def _clipping() -> None:
    model, optimizer = _build("muon")
    single = Net()
    reference = torch.nn.utils.get_total_norm
    for policy in ("all", "non_matrix", "none"):
        _step(model, optimizer, 7)
        grads = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = optimizer.clip_grad_norm_(0.5, policy=policy)
        torch.testing.assert_close(norm, reference(grads.values()))
        assert type(norm) is torch.Tensor
        for name, param in model.named_parameters():
            if param.grad is not None:
                scaled = policy == "all" or (policy == "non_matrix" and name.endswith("bias"))
                expected = grads[name] * (0.5 / (norm + 1e-6)) if scaled else grads[name]
                torch.testing.assert_close(param.grad.full_tensor(), expected)
    assert len(list(single.parameters())) == 6
    with pytest.raises(ValueError, match="expected a policy of .*got 'matrix'"):
        optimizer.clip_grad_norm_(1.0, policy="matrix")


def test_a_policy_says_which_gradients_are_scaled_and_the_norm_is_of_all(pool) -> None:
    pool(3).run(_clipping)


def test_the_matrices_update_does_not_feel_the_clip_of_the_others() -> None:
    from vescale import Optimizer, Rules

    steps = []
    for bound in (1e-3, 1e3):
        model = Net()
        optimizer = Optimizer(model.named_parameters(), Rules(**RULES["muon"]))
        before = model[0].weight.detach().clone()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.clip_grad_norm_(bound, policy="non_matrix")
        optimizer.step()
        steps.append(model[0].weight.detach() - before)
    assert torch.equal(*steps)


# --- numbers between steps, tables, refusals ---


def _numbers(rule: str) -> None:
    model, optimizer = _build(rule)
    _step(model, optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    _step(model, optimizer, 1)
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = 0.5, torch.tensor(2.0)
        if "betas" in group:
            group["betas"] = (0.0, torch.tensor(0.5))
    _step(model, optimizer, 2)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert not any(torch.equal(dict(model.named_parameters())[n].full_tensor(), before[n]) for n in trained)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    _step(model, optimizer, 3)
    scheduler.step()
    assert {float(group["lr"]) for group in optimizer.param_groups} == {0.25}, "every group follows the schedule"


@pytest.mark.parametrize("rule", RULES)
def test_rates_decay_and_betas_change_between_steps_in_every_group(pool, rule: str) -> None:
    pool(2).run(_numbers, rule)


def _report(rule: str) -> str:
    _, optimizer = _build(rule)
    return optimizer.report()


def _loads(rule: str) -> list[Any]:
    from vescale import Optimizer, Rules, fully_shard

    rules = Rules(**{key: value for key, value in RULES[rule].items() if key != "rest"})
    model = nn.Sequential(*(nn.Linear(*size, bias=False) for _ in range(8) for size in ((64, 96), (96, 64), (64, 64))))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = nn.Sequential()
    for at in range(0, 24, 3):
        layer = nn.Sequential(*model[at : at + 3])
        fully_shard(layer, mesh=mesh, block_of=rules.block_of, max_padding=0.0)
        layers.append(layer)
    fully_shard(layers, mesh=mesh)
    (load,) = Optimizer(layers.named_parameters(), rules).loads
    return [load.flops, load.largest, load.bound, str(load)]


@pytest.mark.parametrize("rule", ["muon", "soap"])
@pytest.mark.parametrize("world", [4, 5])
def test_no_rank_has_much_more_work_than_the_mean(pool, rule: str, world: int) -> None:
    ranks = pool(world).run(_loads, rule)
    flops, largest, bound, line = ranks[0]
    print(line)
    assert all(rank == ranks[0] for rank in ranks)
    assert max(flops) <= max(1.2 * sum(flops) / world, largest), line


def test_the_table_says_who_steps_what_and_what_travels(pool) -> None:
    (report, *others) = pool(4).run(_report, "soap")
    lines = report.splitlines()
    assert all(other == report for other in others)
    assert lines[1].split()[:6] == ["matrices", "SOAP", "2", "2,280", "256", "640"]
    assert lines[2].split()[:6] == ["rest", "AdamW", "3", "76", "1", "1"]
    assert "load max/mean" in lines[-1] and "longest-first bound" in lines[-1]


def _refusals() -> None:
    from vescale import Optimizer, Rules, fully_shard

    model, optimizer = _build("muon")
    model.double()
    with pytest.raises(ValueError, match=r"has become torch.float64: expected float32"):
        optimizer.step()
    for said in ((0, 3), "ab", (3, 4, 5), None):
        net = fully_shard(nn.Linear(6, 6), block_of=lambda name, param, said=said: said)
        with pytest.raises(ValueError, match=r"weight: block_of returned "):
            net.state_dict()
    rules = Rules(all=("*", Adam8bit(min_numel=64)))
    net = fully_shard(nn.Linear(64, 33), max_padding=0.0)
    if dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="cut inside a run of 256.*block_of"):
            Optimizer(net.named_parameters(), rules)
    with pytest.raises(ValueError, match="bias in group all: Shampoo: expected a matrix"):
        Optimizer(net.named_parameters(), Rules(all=("*", Shampoo())))


def test_what_cannot_be_stepped_is_named(pool) -> None:
    pool(2).run(_refusals)


def test_owners_stay_with_a_holder_where_blocks_have_state() -> None:
    from vescale.owners import Work, deal

    work = [Work(1.0, ("w", granule), range(rank, rank + 2), True) for rank, granule in enumerate((3, 7, 11))]
    owners = deal(work, [9.0, 9.0, 9.0, 0.0])
    assert owners == {("w", 3): 0, ("w", 7): 1, ("w", 11): 3} and list(owners.values()) == sorted(owners.values())


def test_rules_are_what_their_fields_say() -> None:
    for rule in (Muon(), Adam8bit(), Shampoo(), SOAP(), AdamW()):
        assert dataclasses.is_dataclass(rule) and dataclasses.replace(rule, lr=0.5).lr == 0.5


def _operators(layers: int) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode

    from vescale import Optimizer, Rules, fully_shard

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.count += 1
            return func(*args, **(kwargs or {}))

    rules, model = Rules(all=("*", AdamW())), nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), block_of=rules.block_of)
    optimizer = Optimizer(model.named_parameters(), rules)
    for step in range(2):
        Counting.count = 0
        with Counting():
            _step(model, optimizer, step) if step == 0 else optimizer.step()
    return Counting.count


def test_a_step_launches_as_much_for_many_parameters_as_for_few(pool) -> None:
    """pytorch #134191, #173680: CPU time of 10 to 50 % of a step. One run is one pass, however many parameters."""
    few, many = (pool(1).run(_operators, layers)[0] for layers in (2, 20))
    assert many == few < 20
