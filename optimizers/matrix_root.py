"""Matrix root: ``(A + damping)^(-1/p)`` of symmetric positive matrices by products; by eigenvalues where that fails.

The coupled Newton iteration (Guo and Higham 2006; arXiv 2002.09018, appendix) keeps ``M = X^p A`` and moves it to the
identity, and X with it to the root. Its T is the one of most use where M has eigenvalues in [l, 1]::

    M = A / |A|                X = |A|^(-1/p) I                             |A| no less than the largest eigenvalue
    T = s (I - r M)            X <- X T     M <- T^p M                      until max |M - I| <= 1e-6
    r = (1 - l^(1/p)) / (1 - l^(1 + 1/p)), at most 1/2                      l and 1 go to the same, none above 1
    s = ((1 + p) r)^(1/p) (1 + p) / p

Once l is near 1, r is 1/(1 + p) and T that of Newton, ``((1 + p) I - M) / p``, which lets a small eigenvalue grow 2.4
times a step for p = 4; r = 1/2 lets it grow 6.1 times, and takes none below 0.38 that was above.

In float32 it is more accurate than eigenvalues in float32, and a batch is one product. Damping is relative to the
largest eigenvalue: 1e-12, say, lies below float32's noise, and the root would be of that noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TOLERANCE = 1e-6  # google-research/scalable_shampoo and facebookresearch/optimizers: error of M at which to stop
STEPS = 40  # at a damping of 1e-6 and 256 rows it is 15 at most
STEEPEST = 0.5  # of r: a larger one takes eigenvalues near 1 down to where float32 has fewer digits of them
NEAR = 1e-2  # of M from the identity, and of l from 1: from there Newton's own steps
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
    if method == "newton":
        root, error = coupled_newton(_damped(safe, damping), p, least=damping)
        good = error <= SAFE
    else:
        root = eigen_root(safe, p, damping=damping)
        good = is_finite(root)
    if not bool(good.all()):
        again = ~good
        root[again] = eigen_root(safe[again].double(), p, damping=damping).to(a.dtype)
    return root, finite & is_finite(root)


def is_finite(a: Tensor) -> Tensor:
    """Returns which matrices of a batch (B, m, n) have neither NaN nor infinity, (B,) bool."""
    return a.abs().flatten(1).amax(1) < torch.inf  # of NaN, false too; a tenth of the time of torch.isfinite


def coupled_newton(a: Tensor, p: int, *, least: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Returns ``a^(-1/p)``, (B, d, d), and how far each M is from the identity, (B,); NaN where it broke down.

    Args:
        a: (B, d, d) float32, symmetric, positive definite.
        p: Order of the root.
        least: What fraction of the largest eigenvalue the least one is, or less; a smaller one takes longer. On a CPU
            it is looked at, and the iteration stops when all have arrived; elsewhere that would wait for the device.
    """
    on_cpu, bound = a.device.type == "cpu", _bound(a)
    m, x = a / bound[:, None, None], torch.diag_embed((bound ** (-1 / p))[:, None].expand(a.shape[:-1]))
    fraction = torch.full_like(bound, least / math.sqrt(a.shape[-1]))
    if on_cpu:
        fraction = torch.maximum(fraction, _fraction(m))
    error = _from_identity(m)
    # T^p M - I = -(1 + p) / (2 p) (M - I)^2 and smaller; elements of a square of random signs grow by its size's root.
    quadratic = (1 + p) / (2 * p) * math.sqrt(a.shape[-1])
    for _ in range(STEPS if on_cpu else newton_steps(a.shape[-1], p, least)):
        # A matrix that has arrived, or grows no better, stays: what its neighbours in the batch need must not show.
        going, near = error > TOLERANCE, error < NEAR
        if on_cpu and not bool(going.any()):
            break
        r, s, fraction = _shape(torch.where(near, 1.0, fraction), p)
        t = m * (-r * s)[:, None, None]
        t.diagonal(dim1=-2, dim2=-1).add_(s[:, None])
        next_error = torch.where(near, quadratic * error.square(), torch.inf)
        if on_cpu and bool((next_error <= TOLERANCE).all()):  # X arrives with this step: three products less
            return torch.where(going[:, None, None], x @ t, x), torch.where(going, next_error, error)
        # Whole products, though they are symmetric: where half of one stands for the other, what rounding adds to the
        # largest directions grows with the smallest, a hundred times (test_the_largest_directions_are_exact).
        next_m = torch.linalg.matrix_power(t, p) @ m
        next_error = _from_identity(next_m)
        # facebookresearch/optimizers, matrix_functions.py: else it diverges, or is NaN. Before, errors are at most 1.
        going &= next_error <= 1.2 * torch.where(near, error, error.clamp(min=1))
        if on_cpu and not bool(going.any()):
            break
        next_x = x @ t
        if on_cpu and bool(going.all()):
            x, m, error = next_x, next_m, next_error
            continue
        keep = going[:, None, None]
        x, m, error = torch.where(keep, next_x, x), torch.where(keep, next_m, m), torch.where(going, next_error, error)
    return x, error


def newton_steps(size: int, p: int, least: float) -> int:
    """Returns how many steps bring every matrix of ``size`` rows to its root; see ``coupled_newton``.

    Once near 1, errors square: four more.
    """
    fraction, steps = torch.tensor(least / math.sqrt(size), dtype=torch.float64), 4
    while steps < STEPS and float(fraction) < 1 - NEAR:
        fraction, steps = _shape(fraction, p)[2], steps + 1
    return min(STEPS, steps)


def _shape(fraction: Tensor, p: int) -> tuple[Tensor, Tensor, Tensor]:
    """What T is for eigenvalues of M in [fraction, 1]: r and s, and the least eigenvalue after it."""
    newton = fraction > 1 - NEAR
    least = torch.where(newton, 0.5, fraction)  # anything: no 0 / 0
    r = ((1 - least ** (1 / p)) / (1 - least ** (1 + 1 / p))).clamp(1 / (1 + p), max(STEEPEST, 1 / (1 + p)))
    r = torch.where(newton, 1 / (1 + p), r)
    power = (1 + p) * r * ((1 + p) / p) ** p  # s^p
    after = power * torch.minimum(least * (1 - r * least) ** p, (1 - r) ** p)
    return r, power ** (1 / p), torch.where(newton, 1.0, after)


def _fraction(m: Tensor) -> Tensor:
    """A number below the least eigenvalue of each matrix, (B,); 0 where float32 does not find it positive."""
    factor, info = torch.linalg.cholesky_ex(m)
    bound = 1 / torch.linalg.matrix_norm(torch.cholesky_inverse(factor))
    return torch.where((info == 0) & (bound < 1), bound, 0.0)  # of NaN too


def _bound(a: Tensor) -> Tensor:
    """No less than the largest eigenvalue of each matrix, (B,): its Frobenius norm or its largest sum of a row.

    Where no direction stands out the latter is the closer by far, four times for a 256 x 256 average of random factors.
    """
    frobenius = torch.linalg.matrix_norm(a)  # 0 where squares are below float32
    return torch.where(frobenius > 0, frobenius, torch.inf).minimum(torch.linalg.matrix_norm(a, torch.inf))


def _from_identity(m: Tensor) -> Tensor:
    """The largest distance of an element from the identity's, (B,); ``m`` is as before afterwards."""
    diagonal = m.diagonal(dim1=-2, dim2=-1)
    kept = diagonal.clone()
    diagonal.sub_(1)
    error = m.abs().flatten(1).amax(1)  # a tenth of the time of a norm of infinite order
    diagonal.copy_(kept)
    return error


def eigen_root(a: Tensor, p: int, *, damping: float = 0.0) -> Tensor:
    """Returns ``(a + damping lambda_max I)^(-1/p)`` from eigenvalues, (B, d, d) of ``a``'s dtype; NaN where they fail.

    Args:
        a: (B, d, d), symmetric; eigenvalues below zero, which are noise, count as the least positive float32.
        p: Order of the root.
        damping: A fraction of the largest eigenvalue; if that is zero, 1 is added.
    """
    try:
        values, vectors = torch.linalg.eigh(a)
    except RuntimeError:  # torch.linalg.LinAlgError among them
        return torch.full_like(a, torch.nan)
    top = values[:, -1:]
    damped = values + torch.where(top == 0, 1.0, damping * top)
    powers = damped.clamp(min=torch.finfo(torch.float32).tiny) ** (-1 / p)
    return (vectors * powers[:, None, :]) @ vectors.mT


def largest_eigenvalue(a: Tensor) -> Tensor:
    """Returns the largest eigenvalue of each positive semi-definite matrix, (B,), from below, to a few percent.

    Args:
        a: (B, d, d) float32.
    """
    top = a.abs().flatten(1).amax(1)[:, None, None]
    unit = a / torch.where(top == 0, 1.0, top)  # squares of what is left are float32 numbers
    # The longest row, which is A e_i: what it has of the largest eigenvector is seldom little. The rows' lengths, say,
    # have nothing of it for [[1, -0.9], [-0.9, 1]].
    longest = unit.norm(dim=-1).argmax(-1)
    vector = torch.take_along_dim(unit, longest[:, None, None], dim=-2).mT
    for _ in range(POWER_STEPS):
        vector = unit @ (vector / vector.norm(dim=-2, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny))
    return (vector.norm(dim=-2, keepdim=True) * top).flatten()


def _damped(a: Tensor, damping: float) -> Tensor:
    top = largest_eigenvalue(a)
    shift = torch.where(top == 0, 1.0, damping * top)  # of zeros: the identity
    damped = a.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(shift[:, None])
    return damped
