"""Inverse roots against float64, over spectra that are not flat."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optimizers import matrix_root
from optimizers.matrix_root import coupled_newton, eigen_root, inverse_root, largest_eigenvalue


def spectrum(d: int, condition: float, seed: int = 0) -> Tensor:
    """A symmetric matrix whose eigenvalues fall evenly over the decades of its condition number, (d, d) float64."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0]
    return q * condition ** -torch.linspace(0, 1, d, dtype=torch.float64) @ q.mT


def exact(a: Tensor, p: int, damping: float) -> Tensor:
    values, vectors = torch.linalg.eigh(a)
    return vectors * (values + damping * values.max()) ** (-1 / p) @ vectors.mT


@pytest.mark.parametrize("method", matrix_root.ROOTS)
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(
    ("condition", "damping", "error"), [(1e3, 1e-6, 1e-4), (1e10, 1e-6, 5e-2), (1e10, 1e-5, 1e-2), (1e10, 1e-4, 1e-3)]
)
def test_the_root_of_a_damped_matrix(p: int, method: str, condition: float, damping: float, error: float) -> None:
    a = spectrum(96, condition)
    root, good = inverse_root(a.float()[None], p, damping=damping, method=method)
    expected = exact(a, p, damping)
    # The largest eigenvalue is estimated, so the damping differs by a few percent, and with it the root's largest part.
    assert bool(good) and float((root[0] - expected).norm() / expected.norm()) < error + 0.03


def test_newton_is_as_near_as_eigenvalues() -> None:
    a = spectrum(128, 1e6)[None] + 1e-6 * torch.eye(128, dtype=torch.float64)
    root, error = coupled_newton(a.float(), 4)
    expected = exact(a[0], 4, 0.0)
    assert error.item() < 1e-2 and float((root[0] - expected).norm() / expected.norm()) < 3e-3
    assert float((eigen_root(a, 4)[0] - expected).norm() / expected.norm()) < 1e-9
    assert float((eigen_root(a.float(), 4)[0] - expected).norm() / expected.norm()) < 3e-2


def test_the_least_eigenvalue_says_how_many_steps_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four products a step; by Newton's own T, 2.4 times a small eigenvalue each, it would be 20 for 1e-6."""
    powers, real = [], torch.linalg.matrix_power
    monkeypatch.setattr(torch.linalg, "matrix_power", lambda a, p: powers.append(p) or real(a, p))
    taken = {}
    for condition in (2.0, 1e3, 1e9):
        powers.clear()
        inverse_root(spectrum(64, condition).float()[None], 4, damping=1e-6)
        taken[condition] = len(powers)
    assert taken[2.0] <= 5 and taken[1e3] <= 8 and taken[1e9] <= 12, taken
    assert taken[1e9] <= matrix_root.newton_steps(64, 4, 1e-6) <= 15


def test_the_largest_directions_are_exact() -> None:
    """They are what a gradient consists of, though the root itself is largest in the smallest."""
    a = spectrum(256, 1e9)
    root = inverse_root(a.float()[None], 4, damping=1e-6)[0][0].double()
    largest = torch.linalg.eigh(a)[1][:, -16:]
    expected = exact(a, 4, 1e-6) @ largest
    assert float((root @ largest - expected).norm() / expected.norm()) < 1e-3


def test_each_matrix_of_a_batch_is_computed_as_alone() -> None:
    batch = torch.stack([spectrum(24, 10.0**k, seed=k).float() for k in range(1, 8)])
    together = inverse_root(batch, 4, damping=1e-6)[0]
    for matrix, expected in zip(batch, together, strict=True):
        torch.testing.assert_close(inverse_root(matrix[None], 4, damping=1e-6)[0][0], expected, rtol=1e-4, atol=1e-4)


def test_rank_deficient_and_zero_matrices_have_finite_roots() -> None:
    g = torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    root, good = inverse_root(torch.stack([g @ g.mT, torch.zeros(64, 64)]), 4, damping=1e-6)
    assert good.all() and torch.isfinite(root).all()
    torch.testing.assert_close(root[1], torch.eye(64))


def test_what_newton_cannot_do_eigenvalues_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_root, "STEPS", 2)
    a = spectrum(32, 1e4)
    root, good = inverse_root(a.float()[None], 4, damping=1e-6)
    expected = exact(a, 4, 1e-6)
    assert bool(good) and float((root[0] - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_trusted(bad: float) -> None:
    batch = torch.stack([torch.eye(8), torch.eye(8)])
    batch[1, 2, 3] = bad
    assert inverse_root(batch, 4, damping=1e-6)[1].tolist() == [True, False]


def test_the_largest_eigenvalue_at_any_scale() -> None:
    for scale in (1e-30, 1.0, 1e30):
        a = (spectrum(64, 1e6) * scale).float()[None]
        assert 0.9 * scale <= largest_eigenvalue(a).item() <= 1.001 * scale


def test_the_largest_eigenvalue_whatever_its_vector() -> None:
    a = torch.tensor([[[1.0, -0.9], [-0.9, 1.0]], [[1.0, 0.9], [0.9, 1.0]], [[0.0, 0.0], [0.0, 2.0]]])
    torch.testing.assert_close(largest_eigenvalue(a), torch.tensor([1.9, 1.9, 2.0]))
