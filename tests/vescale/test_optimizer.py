"""The update does not depend on the number of ranks, each block is computed once, and only cut blocks move."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from optimizers import SOAP, Adam8bit, AdamW, BF16AdamW, BF16Muon, Muon, Muon8bit, NorMuon, Shampoo

SHAPES = {
    "a": (24, 40),
    "b": (40, 24),
    "c": (33, 17),
    "stack": (3, 8, 12),
    "bias": (41,),
    "scalar": (),
    "wide": (7, 96),
}
REST = ("*", AdamW(lr=0.01))
MATRICES = ["?", "stack", "wide"]
ODD = ["c", "wide"]  # no block divides them
WIDE: dict[str, Any] = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}
RULES: dict[str, dict[str, Any]] = {
    "adamw": {"all": ("*", AdamW(lr=0.01, weight_decay=0.1))},
    "muon": {"matrices": (MATRICES, Muon(lr=0.02)), "rest": REST},
    "muon fp32": {"matrices": (MATRICES, Muon(lr=0.02, **WIDE)), "rest": REST},
    "muon, heads": {"matrices": (["a", "b", "stack"], Muon(lr=0.02, rows=8)), "rest": REST},
    "muon, fused": {"matrices": ("a", Muon(lr=0.02, split=(12, 4, 8), cautious=True)), "rest": REST},
    "muon, tiles": {"matrices": (MATRICES, Muon(lr=0.02, tile=16)), "rest": REST},
    "muon, gram": {"matrices": (MATRICES, Muon(lr=0.02, iteration="gram")), "rest": REST},
    "muon8bit": {"matrices": (MATRICES, Muon8bit(lr=0.02)), "rest": REST},
    "normuon": {"matrices": (MATRICES, NorMuon(lr=0.02)), "rest": REST},
    "adam8bit": {"matrices": (MATRICES, Adam8bit(lr=0.01, min_numel=400)), "rest": REST},
    "adam8bit bnb": {"matrices": ("*", Adam8bit(lr=0.01, min_numel=400, compat="bnb"))},
    "bf16": {"matrices": (MATRICES, BF16Muon(lr=0.02)), "rest": ("*", BF16AdamW(lr=0.01))},
    "shampoo": {"matrices": (MATRICES, Shampoo(lr=0.01, block_size=16, refresh=2)), "rest": REST},
    "shampoo, rough wire": {
        "matrices": (ODD, Shampoo(lr=0.01, block_size=9, refresh=2, graft="none", wire_dtype=torch.bfloat16)),
        "rest": REST,
    },
    "soap": {"matrices": (MATRICES, SOAP(lr=0.01, block_size=16, refresh=2)), "rest": REST},
    "soap kl": {"matrices": (ODD, SOAP(lr=0.01, block_size=9, refresh=2, statistics="kl")), "rest": REST},
}


class Bag(nn.Module):
    """Parameters of many shapes, in two units."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.ParameterDict({k: nn.Parameter(torch.randn(s)) for k, s in SHAPES.items()})
        self.outer = nn.ParameterDict({k: nn.Parameter(torch.randn(s)) for k, s in list(SHAPES.items())[::2]})


def _grad(name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    seed = sum(map(ord, name)) * 1000 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _cast(model: nn.Module, rule: str) -> nn.Module:
    """In the dtype that the row's rules step."""
    for group in RULES[rule].values():
        model.to(getattr(group[1], "param_dtype", torch.float32))
    return model


def _build(rule: str, max_padding: float):
    from vescale import Optimizer, Rules, fully_shard

    rules, model = Rules(**RULES[rule]), _cast(Bag(), rule)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh, block_of=rules.block_of, max_padding=max_padding)
    return model, Optimizer(model.named_parameters(), rules)


def _set_grads(model: nn.Module, step: int) -> None:
    from vescale import distribute

    for name, param in model.named_parameters():
        grad = _grad(name, tuple(param.shape), step).to(param.dtype)
        sharded = hasattr(param, "device_mesh")
        param.grad = distribute(grad, param.device_mesh, param.placements) if sharded else grad


def _train(rule: str, max_padding: float, steps: int = 3) -> dict[str, Any]:
    model, optimizer = _build(rule, max_padding)
    kind = type(optimizer.runs[0].rule)
    calls: list[int] = []
    original = getattr(kind, "block", None)

    def counted(self: Any, payloads: tuple[torch.Tensor, ...], *args: Any, **options: Any) -> torch.Tensor:
        calls.append(payloads[0].shape[0])
        return original(self, payloads, *args, **options)  # type: ignore[misc]

    if original is not None:
        kind.block = counted
    try:
        for step in range(steps):
            _set_grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        if original is not None:
            kind.block = original
    return {
        "params": {name: _part(p) for name, p in model.named_parameters()},
        "state": {
            name: _part(value)
            for name, value in optimizer.named_state().items()
            if value.ndim or hasattr(value, "device_mesh")
        },
        "blocks": sum(calls) / steps,
        "sent": optimizer.counters.exchange_bytes / steps,
        "cut": len(optimizer.owners),
        "padding": max(abs(seg.master.local).sum() for u in model.units() for seg in u.segments),
    }


def _part(value: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """What this rank holds, end to end with what the next one does, and the shape of the whole; None: each has all."""
    if type(getattr(value, "placements", [None])[0]).__name__ == "RaggedShard":
        return value.to_local().flatten(), tuple(value.shape)  # type: ignore[attr-defined]
    return value, None


def _whole(ranks: list[dict[str, Any]], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of all ranks' results put together here: eight ranks on two cores gather a thousand slowly."""
    return {
        name: part if shape is None else torch.cat([rank[kind][name][0] for rank in ranks]).view(shape)
        for name, (part, shape) in ranks[0][kind].items()
    }


def _train_all(max_padding: float) -> dict[str, Any]:
    return {rule: _train(rule, max_padding) for rule in RULES}


@pytest.fixture(scope="module")
def on_one_rank(pool) -> dict[str, Any]:
    return pool(1).run(_train_all, 0.0)[0]


# Blocks are cut wherever the edges of any number of ranks fall; where padding keeps them whole nothing crosses an edge,
# and two numbers are enough.
@pytest.mark.parametrize(("world", "paddings"), [(2, (0,)), (3, (0, 1e9)), (4, (0,)), (5, (0,)), (8, (0, 1e9))])
def test_the_update_has_the_same_bits_for_any_number_of_ranks(
    pool, on_one_rank, world: int, paddings: tuple[float, ...]
) -> None:
    for max_padding in paddings:
        results = pool(world).run(_train_all, max_padding)
        for rule, reference in on_one_rank.items():
            for kind in ("params", "state"):
                ours, one = _whole([result[rule] for result in results], kind), _whole([reference], kind)
                assert ours.keys() == one.keys()
                different = [name for name, value in ours.items() if not torch.equal(value, one[name])]
                assert not different, f"{rule}: {kind} {different}, {world} ranks, max_padding {max_padding}"
            blocks = sum(result[rule]["blocks"] for result in results)
            assert blocks == reference["blocks"], f"{rule}: {blocks} of {reference['blocks']} blocks computed"


def test_nothing_moves_where_nothing_is_cut_and_cut_blocks_move_there_and_back(pool) -> None:
    cut, kept = (pool(4).run(_train, "muon", max_padding) for max_padding in (0.0, 1e9))
    assert all(result["cut"] == 0 and result["sent"] == 0 for result in kept)
    assert cut[0]["cut"] > 0
    moved = sum(result["sent"] for result in cut)
    assert 0 < moved <= 2 * 2 * sum(torch.Size(s).numel() for s in SHAPES.values()) * 2


def _plain(rule: str) -> dict[str, torch.Tensor]:
    from vescale import Optimizer, Rules

    model = _cast(Bag(), rule)
    optimizer = Optimizer(model.named_parameters(), Rules(**RULES[rule]))
    for step in range(3):
        _set_grads(model, step)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("rule", RULES)
def test_plain_parameters_are_stepped_alike(on_one_rank, rule: str) -> None:
    ours, reference = _plain(rule), _whole([on_one_rank[rule]], "params")
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-6, atol=1e-7)


def _skip() -> None:
    model, optimizer = _build("muon", 0.0)
    _set_grads(model, 0)
    optimizer.step()
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    state = {n: v.clone() for n, v in optimizer.named_state().items()}
    _set_grads(model, 1)
    model.inner["a"].grad.to_local().fill_(float("nan"))
    optimizer.step(skip=torch.ones(()))
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())
    assert all(torch.equal(v, state[n]) for n, v in optimizer.named_state().items())
    _set_grads(model, 1)
    optimizer.step(skip=torch.zeros(()))
    assert not any(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())


def test_a_skipped_step_leaves_every_bit(pool) -> None:
    pool(3).run(_skip)


def _missing_gradients() -> None:
    model, optimizer = _build("muon", 0.0)
    _set_grads(model, 0)
    model.inner["b"].grad = model.inner["bias"].grad = None
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    optimizer.step()
    after = {n: p.full_tensor() for n, p in model.named_parameters()}
    assert {n for n in after if torch.equal(after[n], before[n])} == {"inner.b", "inner.bias"}
    assert optimizer.state[model.inner["b"]]["step"] == 0 and optimizer.state[model.inner["a"]]["step"] == 1
    _set_grads(model, 1)
    optimizer.step()  # parameters of unequal age

    single, reference = _build_plain("muon")
    for step in range(2):
        _set_grads(single, step)
        if step == 0:
            single.inner["b"].grad = single.inner["bias"].grad = None
        reference.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(), dict(single.named_parameters())[name].data, rtol=1e-6, atol=1e-7
        )


def _build_plain(rule: str):
    from vescale import Optimizer, Rules

    model = Bag()
    return model, Optimizer(model.named_parameters(), Rules(**RULES[rule]))


def _skip_then_partial() -> None:
    """A skipped step that a parameter took part in and one that it did not are different pasts."""
    model, optimizer = _build("adamw", 0.0)
    single, reference = _build_plain("adamw")
    for net, stepper in ((model, optimizer), (single, reference)):
        for step in range(4):
            _set_grads(net, step)
            if step < 2:
                net.inner["b" if step == 0 else "a"].grad = None
            stepper.step(skip=torch.tensor(float(step == 0)))
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(), dict(single.named_parameters())[name].data, rtol=1e-6, atol=1e-7
        )


def test_skipped_and_missing_steps_are_told_apart(pool) -> None:
    pool(2).run(_skip_then_partial)


def test_a_parameter_without_gradient_is_left_and_does_not_age(pool) -> None:
    pool(2).run(_missing_gradients)


def _changed_numbers() -> None:
    model, optimizer = _build("muon", 0.0)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if group["name"] == "matrices" else 0.0
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    _set_grads(model, 0)
    optimizer.step()
    assert all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())


def test_learning_rates_change_between_steps_and_may_be_tensors(pool) -> None:
    pool(2).run(_changed_numbers)


def _resume() -> None:
    model, optimizer = _build("muon", 0.0)
    for step in range(4):
        if step == 2:
            saved_model = {k: v.clone() for k, v in model.state_dict().items()}
            saved = optimizer.state_dict()
            saved = {**saved, "state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}}
        _set_grads(model, step)
        optimizer.step()
    again, resumed = _build("muon", 0.0)
    again.load_state_dict(saved_model)
    resumed.load_state_dict(saved)
    for step in (2, 3):
        _set_grads(again, step)
        resumed.step()
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_resume_equals_the_uninterrupted_run(pool) -> None:
    pool(3).run(_resume)


def _refusals() -> None:
    from vescale import Optimizer, Rules, fully_shard

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Runs256(AdamW):
        finest = 256

        def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return (256,)

    model = fully_shard(nn.Linear(64, 33), max_padding=0.0)
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    optimizer.step()  # no gradient anywhere: nothing to do
    with pytest.raises(NotImplementedError, match="make a new Optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="cut inside a run of 256.*block_of"):
        Optimizer(model.named_parameters(), Rules(all=("*", Runs256())))
    with pytest.raises(ValueError, match=r"no pattern matches parameter bias.*'gone' of group x matches no parameter"):
        Optimizer(model.named_parameters(), Rules(w=("weight", AdamW()), x=("gone", AdamW())))


def test_rules_that_do_not_fit_are_named(pool) -> None:
    pool(2).run(_refusals)


def test_owners_are_balanced() -> None:
    from vescale.owners import Work, deal

    work = [Work(1.0, (f"w{i:02}", 0), range(i % 7, i % 7 + 2)) for i in range(56)]
    owners = deal(work, [0.0] * 8)
    loads = [sum(1 for owner in owners.values() if owner == rank) for rank in range(8)]
    assert max(loads) <= 1.2 * sum(loads) / len(loads)
    assert owners == deal(list(reversed(work)), [0.0] * 8)


def _not_steppable() -> None:
    from vescale import Optimizer, Rules, fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    with pytest.raises(ValueError, match=r"0\.weight and 1 more are not planned yet.*root module"):
        Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))
    fully_shard(model)
    Optimizer(model.named_parameters(), Rules(all=("*", AdamW())))

    with pytest.raises(ValueError, match=r"expected float32 parameters, got weight .torch.bfloat16."):
        Optimizer(nn.Linear(4, 4, dtype=torch.bfloat16).named_parameters(), Rules(all=("*", AdamW())))
    with pytest.raises(ValueError, match="on the meta device"):
        Optimizer(nn.Linear(4, 4, device="meta").named_parameters(), Rules(all=("*", AdamW())))
    turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    with pytest.raises(ValueError, match=r"w: expected contiguous .*got shape \(4, 3\) with strides \(1, 4\)"):
        Optimizer([("w", turned)], Rules(all=("*", AdamW())))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing is trainable: .*all 2 parameters have requires_grad=False"):
        Optimizer(frozen.named_parameters(), Rules(all=("*", AdamW())))
    with pytest.raises(ValueError, match="nothing is trainable: .*named_parameters is empty"):
        Optimizer([], Rules(all=("*", AdamW())))


def test_parameters_that_cannot_be_stepped_are_refused(pool) -> None:
    pool(1).run(_not_steppable)


def _draws(max_padding: float) -> list[dict[str, torch.Tensor]]:
    return [_draw(random.Random(seed), max_padding) for seed in range(10)]


def _draw(rng: random.Random, max_padding: float) -> dict[str, torch.Tensor]:
    """Two steps of parameters of random shapes, zero sizes among them."""
    from vescale import Optimizer, Rules, distribute, fully_shard

    sizes = (0, 1, 2, 3, 5, 7, 16, 31, 33, 64, 97)
    shapes = {
        f"p{i}": [rng.choice(sizes) for _ in range(rng.choice((0, 1, 2, 2, 2, 3)))] for i in range(rng.randint(1, 9))
    }
    torch.manual_seed(1)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()})
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    rules = Rules(**({"matrices": (matrices, Muon(lr=0.02))} if matrices else {}), rest=("*", AdamW(lr=0.01)))
    fully_shard(model, block_of=rules.block_of, max_padding=max_padding)
    optimizer = Optimizer(model.named_parameters(), rules)
    for step in range(2):
        for name, p in model.named_parameters():
            p.grad = distribute(_grad(name, tuple(p.shape), step), p.device_mesh, p.placements)
        optimizer.step()
    return {name: p.full_tensor() for name, p in model.named_parameters()}


def test_parameters_of_any_shape_have_the_same_bits_for_any_number_of_ranks(pool) -> None:
    reference = pool(1).run(_draws, 0.0)[0]
    for world, max_padding in ((3, 0.0), (3, 1e9), (5, 0.3)):
        for ours, one in zip(pool(world).run(_draws, max_padding)[0], reference, strict=True):
            for name, value in one.items():
                assert torch.equal(ours[name], value), f"{name} {tuple(value.shape)}, {world} ranks, {max_padding}"
