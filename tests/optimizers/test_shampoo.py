"""Shampoo: pytorch_optimizer's numbers, and the paper's formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizers import Shampoo, matrix_root


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


PLAIN: dict[str, Any] = dict(betas=(0.0, 0.0), factor_beta=1.0, graft="none", refresh=1, weight_decay=0.0)


def test_pytorch_optimizers_shampoo_agrees(over: Callable[..., Any], distance: Callable[..., float]) -> None:
    from pytorch_optimizer import Shampoo as Oracle

    start = gaussian(24, 24)
    theirs = torch.nn.Parameter(start.clone())
    oracle = Oracle([theirs], lr=0.05)
    ours = over(Shampoo(lr=0.05, **PLAIN), start)
    for step in range(10):
        grad = gaussian(24, 24, seed=step)
        theirs.grad = grad.clone()
        oracle.step()
        ours.step([grad])
        assert distance(ours.params[0].detach() - start, theirs.detach() - start) <= 1e-3


def test_the_direction_is_between_fourth_roots(over: Callable[..., Any], distance: Callable[..., float]) -> None:
    """Rectangular, with spectra that are not flat: a wrong power would show."""
    grads = [gaussian(20, 28, seed=step) * torch.logspace(0, -2, 28) for step in range(4)]
    ours = over(Shampoo(lr=1.0, **PLAIN), torch.zeros(20, 28))
    left, right = torch.zeros(20, 20, dtype=torch.float64), torch.zeros(28, 28, dtype=torch.float64)
    for grad in grads:
        before = ours.params[0].detach().clone()
        ours.step([grad])
        left, right = left + grad.double() @ grad.double().mT, right + grad.double().mT @ grad.double()
        roots = []
        for factor in (left, right):
            values, vectors = torch.linalg.eigh(factor)
            roots.append(vectors * (values + 1e-6 * values.max()) ** -0.25 @ vectors.mT)
        expected = roots[0] @ grad.double() @ roots[1]
        assert distance(before - ours.params[0].detach(), expected) < 2e-2


def test_eigenvalues_give_the_path_of_newton(
    over: Callable[..., Any], distance: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To 1e-3 in float64; in float32 they are less exact, here where factors have no full rank."""

    def path(root: str) -> Tensor:
        ours = over(Shampoo(lr=0.1, refresh=2, root=root), torch.zeros(24, 16))
        for step in range(6):
            ours.step([gaussian(24, 16, seed=step)])
        return ours.params[0].detach()

    newton, eigen = path("newton"), path("eigen")
    real = matrix_root.eigen_root
    monkeypatch.setattr(matrix_root, "eigen_root", lambda a, p, **damping: real(a.double(), p, **damping).to(a.dtype))
    assert distance(path("eigen"), newton) <= 1e-3 and distance(eigen, newton) <= 1e-2


def test_grafting_gives_each_block_the_size_of_adams_step(over: Callable[..., Any]) -> None:
    from optimizers import AdamW

    options: dict[str, Any] = dict(lr=1.0, weight_decay=0.0, betas=(0.9, 0.95))
    ours, adam = (
        over(Shampoo(block_size=16, **options), torch.zeros(16, 32)),
        over(AdamW(**options), torch.zeros(16, 32)),
    )
    grad = gaussian(16, 32) * torch.tensor([1.0, 1e-3]).repeat_interleave(16)
    ours.step([grad])
    adam.step([grad])
    for half in (slice(0, 16), slice(16, 32)):
        sizes = [float(one.params[0].detach()[:, half].norm()) for one in (ours, adam)]
        assert abs(sizes[0] / sizes[1] - 1) < 1e-3
