"""Matrix root: ``(A + damping)^(-1/p)`` of symmetric positive matrices by products; by eigenvalues where that fails.

The coupled Newton iteration (Guo and Higham 2006; arXiv 2002.09018, appendix) keeps ``M = X^p A`` and moves it to the
identity, and X with it to the root::

    z = (1 + p) / (2 |A|)      M = z A      X = z^(1/p) I
    T = ((1 + p) I - M) / p    X <- X T     M <- T^p M          until max |M - I| <= 1e-6

In float32 it is more accurate than eigenvalues in float32, and a batch is one product. Damping is relative to the
largest eigenvalue: 1e-12, say, lies below float32's noise, and the root would be of that noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = 1e-6  # google-research/scalable_shampoo and facebookresearch/optimizers: error of M at which to stop
STEPS = 40  # at a damping of 1e-6 no spectrum took more than 22
POWER_STEPS = 10  # of the largest eigenvalue; it scales the damping alone, so a few percent do not matter
SAFE = 1e-2  # of M at the end: a root with a larger error is not used


ROOTS = ("newton", "eigen")


def inverse_root(a: Tensor, p: int, *, damping: float, method: str = "newton") -> tuple[Tensor, Tensor]:
    """Returns ``(A + damping lambda_max I)^(-1/p)`` of each matrix, and which of them are to be trusted.

    "newton" is the iteration: the faster on a GPU, where a batch is one product. "eigen" takes eigenvalues in float32:
    the faster on a CPU (8 against 17 ms for 256 x 256 on one core) and three times less exact at a damping of 1e-6.
    What fails is computed again from eigenvalues in float64; reading whether there is such a matrix waits for the
    device. What has NaN or infinity, or fails there too, is not to be trusted.

    Args:
        a: (B, d, d) float32, symmetric.
        p: Order of the root, an integer > 0.
        damping: Added to the diagonal, as a fraction of the largest eigenvalue, > 0. Zeros give the identity.
        method: One of ``ROOTS``.

    Returns:
        (B, d, d) float32, and (B,) bool.
    """
    finite = is_finite(a)
    safe = torch.where(finite[:, None, None], a, 0.0)
    damped = _damped(safe, damping)
    if method == "newton":
        root, error = coupled_newton(damped, p, steps=newton_steps(a.shape[-1], p, damping))
        good = error <= SAFE
    else:
        root = eigen_root(damped, p)
        good = is_finite(root)
    if not bool(good.all()):
        again = ~good
        root[again] = eigen_root(damped[again].double(), p).to(a.dtype)
    return root, finite & is_finite(root)


def is_finite(a: Tensor) -> Tensor:
    """Returns which matrices of a batch (B, m, n) have neither NaN nor infinity, (B,) bool."""
    return a.abs().flatten(1).amax(1) < torch.inf  # of NaN, false too; a tenth of the time of torch.isfinite


def newton_steps(size: int, p: int, damping: float) -> int:
    """Returns how many steps bring every damped matrix of ``size`` rows to its root.

    An eigenvalue of M that is far below 1 grows by ``((1 + p) / p)^p`` a step; the least one begins at
    ``(1 + p) / 2 * damping / sqrt(size)``. Once near 1, errors square: five more.
    """
    least = (1 + p) / 2 * damping / math.sqrt(size)
    return min(STEPS, math.ceil(-math.log(least) / (p * math.log1p(1 / p))) + 5)


def coupled_newton(a: Tensor, p: int, *, steps: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns ``a^(-1/p)``, (B, d, d), and how far each M is from the identity, (B,); NaN where it broke down.

    Args:
        a: (B, d, d) float32, symmetric, positive definite.
        p: Order of the root.
        steps: At most, as ``newton_steps``; None: ``STEPS``. On a CPU it stops when all have arrived; to look would
            read a device.
    """
    steps = STEPS if steps is None else steps
    on_cpu = a.device.type == "cpu"
    z = (1 + p) / (2 * torch.linalg.matrix_norm(a))[:, None, None]
    m, x = z * a, torch.diag_embed((z ** (1 / p))[:, :, 0].expand(a.shape[:-1]))
    error = _from_identity(m)
    for _ in range(steps):
        # A matrix that has arrived, or grows no better, stays: what its neighbours in the batch need must not show.
        going = error > TOLERANCE
        if on_cpu and not bool(going.any()):
            break
        t = (m / -p).add_(((1 + p) / p) * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))
        next_m = torch.linalg.matrix_power(t, p) @ m
        next_error = _from_identity(next_m)
        # facebookresearch/optimizers, matrix_functions.py: else it diverges, or is NaN
        going &= next_error <= 1.2 * error
        if on_cpu and not bool(going.any()):
            break
        next_x = x @ t
        if on_cpu and bool(going.all()):
            x, m, error = next_x, next_m, next_error
            continue
        keep = going[:, None, None]
        x, m, error = torch.where(keep, next_x, x), torch.where(keep, next_m, m), torch.where(going, next_error, error)
    return x, error


def _from_identity(m: Tensor) -> Tensor:
    """The largest distance of an element from the identity's, (B,)."""
    away = m.clone()
    away.diagonal(dim1=-2, dim2=-1).sub_(1)
    return away.abs_().flatten(1).amax(1)


def eigen_root(a: Tensor, p: int) -> Tensor:
    """Returns ``a^(-1/p)`` from eigenvalues, (B, d, d) of ``a``'s dtype; NaN where they fail.

    Args:
        a: (B, d, d), symmetric; eigenvalues below zero, which are noise, count as the least positive float32.
        p: Order of the root.
    """
    try:
        values, vectors = torch.linalg.eigh(a)
    except RuntimeError:  # torch.linalg.LinAlgError among them
        return torch.full_like(a, torch.nan)
    powers = values.clamp(min=torch.finfo(torch.float32).tiny) ** (-1 / p)
    return (vectors * powers[:, None, :]) @ vectors.mT


def largest_eigenvalue(a: Tensor) -> Tensor:
    """Returns the largest eigenvalue of each positive semi-definite matrix, (B,), from below, to a few percent.

    Args:
        a: (B, d, d) float32.
    """
    top = a.abs().flatten(1).amax(1)[:, None, None]
    unit = a / torch.where(top == 0, 1.0, top)  # squares of what is left are float32 numbers
    vector = unit.norm(dim=-1, keepdim=True)  # has something of every row that is not zero
    for _ in range(POWER_STEPS):
        vector = unit @ (vector / vector.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny))
    return (vector.norm(dim=-2, keepdim=True) * top).flatten()


def _damped(a: Tensor, damping: float) -> Tensor:
    top = largest_eigenvalue(a)
    shift = torch.where(top == 0, 1.0, damping * top)  # of zeros: the identity
    return a + shift[:, None, None] * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
