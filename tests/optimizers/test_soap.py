"""SOAP: pytorch_optimizer's numbers, and what must not change them: blocks, bases, batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import SOAP, NorMuon, Shampoo, matrix_root
from optimizers import soap as module


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_pytorch_optimizers_soap_agrees(over: Callable[..., Any]) -> None:
    from pytorch_optimizer import SOAP as Oracle

    start = gaussian(24, 24) / 5
    theirs = torch.nn.Parameter(start.clone())
    oracle = Oracle([theirs], lr=3e-3, weight_decay=0.0, precondition_frequency=10)
    ours = over(SOAP(lr=3e-3, weight_decay=0.0, first_step="skip"), start)
    for step in range(60):
        grad = gaussian(24, 24, seed=step) + gaussian(24, 1, seed=7) @ gaussian(1, 24, seed=8)
        theirs.grad = grad.clone()
        oracle.step()
        ours.step([grad])
        if step == 0:
            assert torch.equal(ours.params[0], start) and torch.equal(theirs, start)
        if step == 1:
            assert (ours.params[0] - theirs).abs().max() <= 3.6e-6
    assert (ours.params[0] - theirs).abs().max() <= 3e-5


@pytest.mark.parametrize(
    "rule", [SOAP(block_size=16, refresh=50), Shampoo(block_size=16, refresh=50)], ids=["soap", "shampoo"]
)
def test_each_block_is_a_parameter_of_its_own(rule: Any, over: Callable[..., Any]) -> None:
    """Also the short ones at the edges; only the steps in which a block refreshes follow its place."""
    whole, grads = gaussian(40, 24), [gaussian(40, 24, seed=step) for step in range(1, 3)]
    cuts = [(slice(i, i + 16), slice(j, j + 16)) for i in (0, 16, 32) for j in (0, 16)]
    together, apart = over(rule, whole), over(rule, *(whole[cut] for cut in cuts))
    for grad in grads:
        together.step([grad])
        apart.step([grad[cut] for cut in cuts])
    for cut, block in zip(cuts, apart.params, strict=True):
        torch.testing.assert_close(together.params[0][cut], block, rtol=0, atol=0)


@pytest.mark.parametrize("rule", [SOAP(block_size=16), Shampoo(block_size=16)], ids=["soap", "shampoo"])
def test_experts_do_not_mix(rule: Any, over: Callable[..., Any]) -> None:
    stack, grad = gaussian(3, 24, 20), gaussian(3, 24, 20, seed=1)
    assert rule.block_shape((3, 24, 20)) == (1, 12, 16) and rule.block_shape((3, 23, 20)) == (1, 1, 10)
    together = over(rule, stack)
    together.step([grad])
    grad[1] = 0.0
    other = over(rule, stack)
    other.step([grad])
    assert torch.equal(together.params[0][::2], other.params[0][::2])
    assert not torch.equal(together.params[0][1], other.params[0][1])


def test_signs_and_order_of_the_basis_do_not_show(over: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []
    for flip in (1.0, -1.0):
        eigenvectors = module.eigenvectors

        def other(a: Tensor, flip: float = flip, real: Any = eigenvectors) -> tuple[Tensor, Tensor]:
            vectors, good = real(a)
            return (vectors * flip).flip(-1) if flip < 0 else vectors, good

        with monkeypatch.context() as patch:
            patch.setattr(module, "eigenvectors", other)
            ours = over(SOAP(lr=0.01, refresh=2), gaussian(24, 24))
            for step in range(9):
                ours.step([gaussian(24, 24, seed=step)])
        paths.append(ours.params[0].detach())
    torch.testing.assert_close(*paths, rtol=1e-3, atol=1e-4)


def test_moments_move_with_the_basis(over: Callable[..., Any]) -> None:
    """Refreshed often or not, the moments in the parameter's own coordinates are the averages of what came."""
    ours = over(SOAP(refresh=2, betas=(0.9, 0.95)), gaussian(12, 20))
    mean = torch.zeros(12, 20)
    for step in range(7):
        grad = gaussian(12, 20, seed=step)
        mean.lerp_(grad, 0.1)
        ours.step([grad])
    state = ours.state()
    left, right = state["left_basis"][0], state["right_basis"][0]
    torch.testing.assert_close(left @ state["exp_avg"][0] @ right.mT, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(left.mT @ left, torch.eye(12), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "rule", [SOAP(refresh=1), SOAP(refresh=1, statistics="kl"), Shampoo(refresh=1)], ids=["soap", "kl", "shampoo"]
)
@pytest.mark.parametrize("kind", ["zero", "rank one", "tiny", "huge"])
def test_any_gradient_gives_a_finite_step(rule: Any, kind: str, over: Callable[..., Any]) -> None:
    outer = gaussian(24, 1) @ gaussian(1, 16)
    grad = {"zero": torch.zeros(24, 16), "rank one": outer, "tiny": outer * 1e-18, "huge": outer * 1e15}[kind]
    ours = over(rule, gaussian(24, 16))
    for _ in range(4):
        ours.step([grad])
    assert torch.isfinite(ours.params[0]).all() and ours.state()["failures"].sum() == 0
    if kind == "zero":
        assert (
            torch.equal(ours.params[0], gaussian(24, 16) * torch.tensor(1 - rule.lr * rule.weight_decay).pow(4))
            or (ours.params[0] - gaussian(24, 16)).abs().max() < 1e-3
        )


def test_a_basis_that_fails_is_counted_and_the_old_one_stays(over: Callable[..., Any]) -> None:
    for rule in (SOAP(refresh=1), Shampoo(refresh=1)):
        ours = over(rule, gaussian(12, 12))
        ours.step([gaussian(12, 12, seed=1)])
        name = "left_basis" if isinstance(rule, SOAP) else "left_root"
        kept = ours.state()[name].clone()
        ours.step([torch.full((12, 12), torch.nan)])
        assert ours.state()["failures"].item() == 2 and torch.equal(ours.state()[name], kept)


def test_blocks_refresh_in_different_steps(over: Callable[..., Any]) -> None:
    ours = over(SOAP(block_size=8, refresh=4), gaussian(8, 32))
    moved = []
    before = None
    for step in range(8):
        ours.step([gaussian(8, 32, seed=step)])
        basis = ours.state()["left_basis"].clone()
        if before is not None:
            moved.append([i for i in range(4) if not torch.equal(basis[i], before[i])])
        before = basis
    assert moved == [[3], [2], [1], [0], [3], [2], [1]]


def test_the_step_has_adams_size(over: Callable[..., Any]) -> None:
    for rule in (SOAP(lr=1.0, weight_decay=0.0), Shampoo(lr=1.0, weight_decay=0.0)):
        ours = over(rule, torch.zeros(32, 32))
        ours.step([gaussian(32, 32, seed=1)])
        assert 0.5 < float(ours.params[0].detach().square().mean().sqrt()) < 2


def test_vectors_are_refused_and_all_bad_fields_named() -> None:
    for kind in (SOAP, Shampoo):
        with pytest.raises(ValueError, match=r"expected a matrix .* got shape \(7,\)"):
            kind().block_shape((7,))
        bad: dict[str, Any] = dict(lr=-1, betas=(1.0, 0.5), eps=math.nan, block_size=0, refresh=0, damping=0.0)
        with pytest.raises(ValueError) as error:
            kind(**bad, wire_dtype=torch.float16)
        assert all(f"{name}: expected " in str(error.value) for name in (*bad, "wire_dtype"))


@pytest.mark.parametrize("refresh", ["first", "again", None])
@pytest.mark.parametrize(
    "rule",
    [SOAP(), SOAP(statistics="kl"), Shampoo(), Shampoo(root="eigen", graft="none"), NorMuon(wire_dtype=torch.float32)],
    ids=["soap", "kl", "shampoo", "eigen", "normuon"],
)
def test_a_block_writes_neither_its_gradient_nor_state_that_nobody_guards(rule: Any, refresh: str | None) -> None:
    """What a step that fails or is skipped would have to take back (google-research/google-research #1711)."""
    state = {name: value[None] + 0.1 * torch.rand(1, *value.shape) for name, value in rule.block_state((12, 8)).items()}
    inputs = {"payload": gaussian(1, 12, 8), "step": torch.tensor(3.0), **state}
    before = {name: value.clone() for name, value in inputs.items()}
    rule.block((inputs["payload"],), {k: v for k, v in inputs.items() if k != "payload"}, refresh=refresh)
    written = {name for name, value in inputs.items() if not torch.equal(value, before[name])}
    assert written <= set(getattr(rule, "state_in_place", ()))


def test_eigenvectors_that_float32_does_not_find_are_those_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """facebookresearch/optimizers #13, pytorch #94772: eigh does not converge."""
    real, asked = torch.linalg.eigh, []

    def fails(a: Tensor) -> Any:
        asked.append(a.dtype)
        if a.dtype is torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return real(a)

    factor = gaussian(1, 12, 12) @ gaussian(1, 12, 12).mT
    expected = matrix_root.inverse_root(factor, 4, damping=1e-3, method="eigen")[0]
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    vectors, good = module.eigenvectors(factor)
    assert bool(good) and asked == [torch.float32, torch.float64]
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(12)[None], rtol=0, atol=1e-5)
    root, good = matrix_root.inverse_root(factor, 4, damping=1e-3, method="eigen")
    assert bool(good) and asked[2:] == [torch.float32, torch.float64]
    torch.testing.assert_close(root, expected, rtol=1e-3, atol=1e-4)
