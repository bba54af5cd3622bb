"""AdamW in one pass, with the copy in the forward's dtype where that buffer is resident.

Bytes per element: 28, parameter, gradient and two moments read, all but the gradient written; 30 with a 16-bit copy,
whose own pass would have been 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from optimizers.kernels.language import jit, runs_kernels, tl
from optimizers.kernels.momentum import lerp
from optimizers.kernels.operand import FLOAT32, FLOATS, RATES, expect

# Elements of a program: eight for each of four warps' threads, two 16-byte loads of float32.
BLOCK = 1024


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """Steps ``param`` and both moments in place, by arXiv 1711.05101, algorithm 2.

    Args:
        param: (n,) float32.
        grad: (n,) float32, left as it is.
        exp_avg: (n,) float32.
        exp_avg_sq: (n,) float32.
        step: () float32, the steps completed before this one; left as it is.
        lr: Learning rate, parameter units per step; a number, or () float32 or float64 on the parameter's device.
        betas: Decay of the two moments per step, each in [0, 1); numbers or 0-d tensors.
        eps: Added to the root of the second moment, in units of the gradient.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``; a number or a 0-d tensor.
        skip: None, or () float32: 1.0 writes nothing.
        low: None, or (n,) bfloat16, float16 or float32: the parameter afterwards, rounded.

    Raises:
        ValueError: If a tensor does not fit.
    """
    expect(
        "adamw_",
        param=(param, (param.numel(),), FLOAT32),
        grad=(grad, param.shape, FLOAT32),
        exp_avg=(exp_avg, param.shape, FLOAT32),
        exp_avg_sq=(exp_avg_sq, param.shape, FLOAT32),
        step=(step, (), FLOAT32),
        lr=(lr if isinstance(lr, Tensor) else None, (), RATES),
        skip=(skip, (), FLOAT32),
        low=(low, param.shape, FLOATS),
    )
    run = adamw_triton if runs_kernels(param) else adamw_torch
    run(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        skip=skip,
        low=low,
    )


def adamw_torch(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """The twin: torch's fused AdamW. On CPU its bits do not depend on cuts at multiples of eight elements or more."""
    _fused([param], [grad], [exp_avg], [exp_avg_sq], [step], lr, betas, eps, weight_decay, skip)
    if low is not None:
        low.copy_(param)


def adamw_each_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    skip: Tensor | None = None,
) -> None:
    """``adamw_`` of several runs, in one call of torch's operator where no kernel runs; takes its options but ``low``.

    Sizes and dtypes are not checked: the runs of a buffer are asked for at every step.
    """
    if not runs_kernels(params[0]):
        _fused(params, grads, exp_avgs, exp_avg_sqs, steps, lr, betas, eps, weight_decay, skip)
        return
    for each in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        adamw_triton(*each, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, skip=skip)


def _fused(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    skip: Tensor | None,
) -> None:
    """The operator under ``torch.optim.AdamW(fused=True)``, whose own way there takes longer than a small run does.

    It takes decays as numbers only: tensors are read, which costs nothing on a CPU, where this runs.
    """
    beta1, beta2 = map(float, betas)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        torch._foreach_add(steps, 1),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=float(weight_decay),
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def adamw_triton(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: Sequence[float | Tensor],
    eps: float,
    weight_decay: float | Tensor,
    skip: Tensor | None = None,
    low: Tensor | None = None,
) -> None:
    """The kernel."""
    n = param.numel()
    if n:
        _adamw[(-(-n // BLOCK),)](
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            step,
            skip,
            low,
            n,
            *rate_of(lr),
            float(eps),
            *decays_of(betas, weight_decay),
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )


def decays_of(betas: Sequence[float | Tensor], weight_decay: float | Tensor) -> tuple[float | Tensor | None, ...]:
    """What the kernels need of the decays: ``1 - beta1, beta2, 1 - beta2, log(beta1), log(beta2), weight_decay``, and
    the (6,) float32 tensor that holds them instead, or None.

    A kernel's numbers are float32, where 0.999 is off by 1.3e-5 of its distance from one. These are exact to 6e-8, if
    the tensors are float64, or numbers that float32 has.
    """
    decays = (*betas, weight_decay)
    device = next((decay.device for decay in decays if isinstance(decay, Tensor)), None)
    if device is None:
        beta1, beta2 = betas
        logs = (math.log(beta) if beta else -math.inf for beta in (beta1, beta2))
        return (1.0 - beta1, float(beta2), 1.0 - beta2, *logs, float(weight_decay), None)
    beta1, beta2, decay = (torch.as_tensor(value, dtype=torch.float64, device=device) for value in decays)
    given = torch.stack([1.0 - beta1, beta2, 1.0 - beta2, beta1.log(), beta2.log(), decay]).float()
    return (*(0.0,) * len(given), given)


def rate_of(lr: float | Tensor) -> tuple[float, Tensor | None]:
    """What the kernels need of a learning rate: the number, and the tensor that holds it instead, or None."""
    return (0.0, lr.float()) if isinstance(lr, Tensor) else (float(lr), None)


@jit
def _adamw(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step,
    skip,
    low,
    n,
    lr,
    lr_at,
    eps,
    gain1,
    beta2,
    gain2,
    log_beta1,
    log_beta2,
    weight_decay,
    given,
    BLOCK: tl.constexpr,
):
    if given is not None:
        gain1, beta2, gain2 = tl.load(given), tl.load(given + 1), tl.load(given + 2)
        log_beta1, log_beta2, weight_decay = tl.load(given + 3), tl.load(given + 4), tl.load(given + 5)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if skip is not None:
        n = tl.where(tl.load(skip) > 0, 0, n)
    inside = at < n
    p = tl.load(param + at, inside)
    m = tl.load(exp_avg + at, inside)
    v = tl.load(exp_avg_sq + at, inside)
    g = tl.load(grad + at, inside)
    new_m = lerp(m, g, gain1)
    new_v = beta2 * v + gain2 * g * g
    new_p = stepped(p, new_m, new_v, step, lr, lr_at, log_beta1, log_beta2, eps, weight_decay)
    tl.store(exp_avg + at, new_m, inside)
    tl.store(exp_avg_sq + at, new_v, inside)
    tl.store(param + at, new_p, inside)
    if low is not None:
        tl.store(low + at, new_p.to(low.dtype.element_ty), inside)


@jit
def stepped(p, m, v, step, lr, lr_at, log_beta1, log_beta2, eps, weight_decay):
    """The parameter after a step of Adam with decoupled decay, from the new moments."""
    rate = lr if lr_at is None else tl.load(lr_at)
    unbiased1, unbiased2 = unbias(step, log_beta1), unbias(step, log_beta2)
    root = tl.div_rn(tl.sqrt_rn(v), tl.sqrt_rn(unbiased2)) + eps
    return p - p * (rate * weight_decay) - tl.div_rn(rate, unbiased1) * tl.div_rn(m, root)


@jit
def unbias(step, log_beta):
    """``1 - beta^t`` in float32, t counting this step; by way of float64, since both terms are near one."""
    t = tl.load(step).to(tl.float64) + 1.0
    return (1.0 - tl.exp(t * log_beta)).to(tl.float32)
