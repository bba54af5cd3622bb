from __future__ import annotations

import importlib
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import Muon, newton_schulz

SHAPES = [(32, 32), (24, 64), (64, 24)]
WIDE: dict[str, Any] = {"ns_dtype": torch.float32, "wire_dtype": torch.float32}


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes agree; NaN equals itself and 0.0 differs from -0.0."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def torchs(params: list[Tensor], grads: list[list[Tensor]], **options: Any) -> list[list[Tensor]]:
    """Returns the parameters after each step of torch.optim.Muon through ``grads``."""
    copies = [param.clone().requires_grad_() for param in params]
    optimizer = torch.optim.Muon(copies, **options)
    history = []
    for step in grads:
        for param, grad in zip(copies, step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        history.append([param.detach().clone() for param in copies])
    return history


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("adjust_lr", "lr", "precision", "after_1", "after_10", "after_50"),
    [
        ("original", 0.02, {}, 1e-3, 5e-3, 7e-3),
        ("original", 0.02, WIDE, 5e-4, 1.7e-3, 2.7e-3),
        ("match_rms_adamw", 2e-3, {}, 2e-4, 9e-4, 3.2e-3),
        ("match_rms_adamw", 2e-3, WIDE, 2e-4, 9e-4, 3.2e-3),
    ],
)
def test_torchs_muon_agrees(
    adjust_lr: str,
    lr: float,
    precision: dict[str, Any],
    after_1: float,
    after_10: float,
    after_50: float,
    nesterov: bool,
    drive: Callable[..., Any],
    distance: Callable[[Tensor, Tensor], float],
) -> None:
    params = [gaussian(*shape) / math.sqrt(shape[1]) for shape in SHAPES]
    grads = [[gaussian(*param.shape, seed=step) for param in params] for step in range(50)]
    theirs = torchs(params, grads, lr=lr, nesterov=nesterov, adjust_lr_fn=adjust_lr)
    rule = Muon(lr=lr, nesterov=nesterov, coefficients="simple", adjust_lr=adjust_lr, **precision)
    driver = drive(rule, *params)
    furthest = {}
    for count, (step, expected) in enumerate(zip(grads, theirs, strict=True), start=1):
        driver.step(step)
        furthest[count] = max(distance(a, b) for a, b in zip(driver.params, expected, strict=True))
    assert furthest[1] <= after_1 and furthest[10] <= after_10 and furthest[50] <= after_50


def test_pytorch_optimizers_muon_agrees(drive: Callable[..., Any], distance: Callable[[Tensor, Tensor], float]) -> None:
    from pytorch_optimizer import Muon as Oracle

    params = [gaussian(*shape) / math.sqrt(shape[1]) for shape in SHAPES]
    theirs = [param.clone().requires_grad_() for param in params]
    oracle = Oracle([{"params": theirs, "use_muon": True}], lr=0.02, weight_decay=0.1)
    driver = drive(Muon(lr=0.02, coefficients="simple", adjust_lr="original", **WIDE), *params)
    for count in range(1, 51):
        grads = [gaussian(*param.shape, seed=count) for param in params]
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.clone()
        oracle.step()
        driver.step(grads)
        furthest = max(distance(a, b.detach()) for a, b in zip(driver.params, theirs, strict=True))
        assert furthest <= (5e-4 if count == 1 else 1.7e-3 if count <= 10 else 2.7e-3), count


def test_the_momentum_is_an_average(drive: Callable[..., Any]) -> None:
    for nesterov in (True, False):
        driver = drive(Muon(momentum=0.95, nesterov=nesterov), gaussian(8, 8))
        driver.step([torch.ones(8, 8)])
        assert torch.equal(driver.states[0]["momentum"], torch.full((64,), 1 - 0.95))


def test_a_zero_gradient_decays_the_parameter_and_does_nothing_else(drive: Callable[..., Any]) -> None:
    param = gaussian(8, 12)
    driver = drive(Muon(lr=0.5, weight_decay=0.25), param)
    driver.step([torch.zeros(8, 12)])
    assert torch.equal(driver.params[0], param * 0.875)
    assert torch.equal(driver.states[0]["momentum"], torch.zeros(96))


def test_decay_uses_the_learning_rate_before_it_is_adjusted() -> None:
    rule = Muon(lr=0.5, weight_decay=0.5, adjust_lr="match_rms_adamw")
    param = torch.ones(4096)
    rule.apply(param, torch.zeros(4096, dtype=torch.bfloat16), {}, skip=None)
    assert torch.equal(param, torch.full((4096,), 0.75))


@pytest.mark.parametrize("shape", [(256, 64), (64, 64), (64, 256)], ids=str)
def test_a_step_has_the_size_its_adjustment_promises(shape: tuple[int, int]) -> None:
    m, n = shape
    size = {
        name: float(
            Muon(adjust_lr=name, coefficients="deepseek_v4", **WIDE)
            .block((gaussian(1, m, n),), {})
            .square()
            .mean()
            .sqrt()
        )
        for name in ("match_rms_adamw", "original", "spectral")
    }
    rms = 1 / math.sqrt(max(m, n))  # of an orthogonal matrix
    assert size["match_rms_adamw"] == pytest.approx(0.2, rel=1e-2)
    assert size["original"] == pytest.approx(rms * math.sqrt(max(1, m / n)), rel=1e-2)
    assert size["spectral"] == pytest.approx(rms * math.sqrt(m / n), rel=1e-2)


def test_each_matrix_of_a_stack_is_a_parameter_of_its_own(drive: Callable[..., Any]) -> None:
    stack, grad = gaussian(3, 16, 24), gaussian(3, 16, 24, seed=1)
    together, apart = drive(Muon(lr=0.1), stack), drive(Muon(lr=0.1), *stack)
    for _ in range(3):
        together.step([grad])
        apart.step(list(grad))
    assert same_bits(together.params[0], torch.stack(apart.params))


@pytest.mark.parametrize("precision", [{}, WIDE], ids=["bfloat16", "float32"])
def test_company_and_alignment_of_a_matrix_do_not_show(precision: dict[str, Any]) -> None:
    rule = Muon(**precision)
    payloads = gaussian(7, 33, 20).to(rule.wire_dtype)
    together = rule.block((payloads,), {})
    assert together.dtype == rule.wire_dtype and together.is_contiguous()
    for matrix, expected in zip(payloads, together, strict=True):
        room = torch.empty(33 * 20 + 1, dtype=rule.wire_dtype)
        shifted = room[1:].view(1, 33, 20).copy_(matrix)
        assert torch.equal(rule.block((shifted,), {})[0], expected)


def test_on_a_device_the_batch_is_one_call_with_the_same_shapes() -> None:
    payload = torch.empty(5, 1, 24, 16, dtype=torch.bfloat16, device="meta")
    direction = Muon().block((payload,), {})
    assert direction.shape == payload.shape and direction.dtype == torch.bfloat16 and direction.is_contiguous()


@pytest.mark.parametrize("options", [{}, {"split": (8, 16)}, {"iteration": "gram"}, WIDE], ids=str)
@pytest.mark.parametrize("together", [2**27, 1])
def test_matrices_of_any_shapes_in_place_are_those_one_by_one(
    options: dict[str, Any], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a run has them on a GPU, a gap between two, in one launch or in several."""
    module, calls = importlib.import_module("optimizers.muon"), []
    grouped = module.grouped_newton_schulz

    def counted(flat: Tensor, out: Tensor, matrices: Any, **numbers: Any) -> None:
        calls.append(len(matrices))
        grouped(flat, out, matrices, **numbers)

    monkeypatch.setattr(module, "grouped_newton_schulz", counted)
    monkeypatch.setattr(module, "TOGETHER", together)
    rule = Muon(**options)
    places = ((0, (24, 16)), (400, (24, 40)), (1360, (1, 24, 80)))
    flat = gaussian(1360 + 24 * 80).to(rule.wire_dtype)
    out = torch.full_like(flat, 7.0)
    rule.blocks_in_place((flat,), places, out)
    for start, shape in places:
        where = slice(start, start + math.prod(shape))
        assert torch.equal(out[where].view(shape), rule.block((flat[where].view(-1, *shape[-2:]),), {}).view(shape))
    assert bool((out[24 * 16 : 400] == 7).all())
    assert max(calls) == 1 if together == 1 else len(calls) == 1


@pytest.mark.parametrize("power", [-40, -1, 3, 40])
def test_gradients_times_a_power_of_two_give_equal_bits(power: int, drive: Callable[..., Any]) -> None:
    drivers = [drive(Muon(lr=0.1), gaussian(24, 40)) for _ in range(2)]
    for step in range(5):
        grad = gaussian(24, 40, seed=step)
        drivers[0].step([grad])
        drivers[1].step([grad * 2.0**power])
    assert same_bits(drivers[0].params[0], drivers[1].params[0])


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
@pytest.mark.parametrize(("precision", "most"), [(WIDE, 1e-3), ({}, 2e-2)], ids=["float32", "bfloat16"])
def test_gradients_of_any_scale_give_the_same_update(
    precision: dict[str, Any],
    most: float,
    scale: float,
    drive: Callable[..., Any],
    distance: Callable[[Tensor, Tensor], float],
) -> None:
    # On a 16-bit wire another scale rounds other digits away; what is left of that is the noise of the wire.
    drivers = [drive(Muon(lr=0.1, weight_decay=0.0, **precision), torch.zeros(24, 40)) for _ in range(2)]
    for step in range(5):
        grad = gaussian(24, 40, seed=step)
        drivers[0].step([grad])
        drivers[1].step([grad * scale])
    assert distance(drivers[1].params[0], drivers[0].params[0]) < most


def test_a_tensor_as_learning_rate_is_the_float(drive: Callable[..., Any]) -> None:
    results = []
    for lr in (0.0625, torch.tensor(0.0625)):
        driver = drive(Muon(lr=lr), gaussian(24, 40))
        for step in range(3):
            driver.step([gaussian(24, 40, seed=step)])
        results.append(driver.params[0])
    assert same_bits(*results)


def test_a_field_may_change_from_step_to_step(drive: Callable[..., Any]) -> None:
    driver = drive(Muon(lr=0.5, weight_decay=0.0), gaussian(8, 8))
    driver.rule = replace(driver.rule, lr=0.0)
    driver.step([gaussian(8, 8, seed=1)])
    assert torch.equal(driver.params[0], gaussian(8, 8))


@pytest.mark.parametrize("precision", [{}, WIDE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_the_callers_tensors_are_left_alone(nesterov: bool, precision: dict[str, Any]) -> None:
    rule = Muon(nesterov=nesterov, **precision)
    param, grad, momentum = gaussian(96), gaussian(96, seed=1), torch.zeros(96)
    (payload,) = rule.prepare(param, grad, {"momentum": momentum}, skip=None)
    assert torch.equal(param, gaussian(96)) and torch.equal(grad, gaussian(96, seed=1))
    held, sent = momentum.clone(), payload.clone()
    direction = rule.block((payload.view(1, 8, 12),), {})
    assert torch.equal(payload, sent)
    rule.apply(param, direction.view(-1), {"momentum": momentum}, skip=None)
    payload.zero_()
    assert torch.equal(momentum, held)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_skipped_step_changes_no_bit_even_with_nan_gradients(nesterov: bool, drive: Callable[..., Any]) -> None:
    param = gaussian(24, 40)
    param[0, :4] = torch.tensor([0.0, -0.0, 1e-40, torch.inf])
    driver = drive(Muon(lr=0.1, nesterov=nesterov), param)
    driver.step([gaussian(24, 40, seed=1)])
    before = [driver.params[0].clone(), *(value.clone() for value in driver.states[0].values())]
    driver.step([torch.full((24, 40), torch.nan)], skip=torch.tensor(1.0))
    after = [driver.params[0], *driver.states[0].values()]
    assert all(same_bits(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_a_flag_that_is_down_is_no_flag(lr: float | Tensor, drive: Callable[..., Any]) -> None:
    results = []
    for skip in (None, torch.tensor(0.0)):
        driver = drive(Muon(lr=lr), gaussian(24, 40))
        for step in range(3):
            driver.step([gaussian(24, 40, seed=step)], skip=skip)
        results.append((driver.params[0], *driver.states[0].values()))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.02)}, {"nesterov": False, **WIDE}], ids=str)
@pytest.mark.parametrize("pieces", range(2, 9))
def test_where_a_run_is_cut_does_not_show(pieces: int, options: dict[str, Any], drive: Callable[..., Any]) -> None:
    edges = sorted(32 * edge for edge in random.Random(pieces).sample(range(1, 60), pieces - 1))
    drivers = [drive(Muon(**options), gaussian(40, 48), edges=cut) for cut in ((), edges)]
    for step in range(3):
        for driver in drivers:
            driver.step([gaussian(40, 48, seed=step)])
    whole, cut = drivers
    assert same_bits(cut.params[0], whole.params[0])
    assert same_bits(cut.states[0]["momentum"], whole.states[0]["momentum"])


def test_the_block_of_a_matrix_is_all_of_it_and_of_a_stack_one_member() -> None:
    assert Muon().block_shape((6, 4)) == (6, 4)
    assert Muon().block_shape((8, 6, 4)) == (1, 6, 4)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4, 5)], ids=str)
def test_a_parameter_that_is_no_matrix_is_refused_by_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        Muon().block_shape(shape)
    assert f"got shape {shape}" in str(error.value)


@pytest.mark.parametrize("precision", [{}, WIDE], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(6, 8), (40, 24)], ids=str)
def test_the_direction_is_newton_schulz_of_each_matrix_by_itself(
    shape: tuple[int, int], precision: dict[str, Any]
) -> None:
    rule = Muon(**precision)
    payloads = gaussian(7, *shape).to(rule.wire_dtype)
    gain = 0.2 * math.sqrt(max(shape))
    alone = [newton_schulz(matrix, "quintic", gain=gain, dtype=rule.ns_dtype) for matrix in payloads]
    assert torch.equal(rule.block((payloads,), {}), torch.stack(alone))


def test_all_bad_fields_are_named_at_once() -> None:
    bad: dict[str, Any] = {
        "lr": torch.zeros(2),
        "momentum": 1.0,
        "nesterov": 1,
        "weight_decay": -0.1,
        "coefficients": "quartic",
        "adjust_lr": None,
        "ns_dtype": torch.float16,
        "eps": 0.0,
        "wire_dtype": "bfloat16",
    }
    with pytest.raises(ValueError) as error:
        Muon(**bad)
    message = str(error.value)
    assert message.startswith("Muon: ")
    assert all(f"{name}: expected " in message and f"got {value!r}" in message for name, value in bad.items())
