"""Full reductions of ragged tensors: complete, a plain tensor, equal on every rank.

Each rank reduces its run and the results are combined over every mesh axis that is cut; an empty run contributes what
changes nothing. The functions see a tensor by ``_local_tensor``, ``groups``, ``ndim`` and ``numel()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale import collectives

aten = torch.ops.aten


def _reduced(value: torch.Tensor, like: Any, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    for group in like.groups:
        collectives.all_reduce(value, op=op, group=group)
    return value


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which partial results are added up: a sum of squares of float16 overflows from a norm of 256 on."""
    return torch.promote_types(dtype, torch.float32)


def _power_sum(local: torch.Tensor, p: float, wide: torch.dtype) -> torch.Tensor:
    """Sum of |x|**p of one run; for p = 0 the number of non-zeros."""
    if p == 0:
        return (local != 0).sum(dtype=wide.to_real())
    return torch.linalg.vector_norm(local, p, dtype=wide) ** p


def _vector_norms(tensors: Sequence[Any], p: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Complete norms of several tensors in one collective, (len(tensors),)."""
    if math.isinf(p):
        empty = 0.0 if p > 0 else math.inf
        parts = [
            torch.linalg.vector_norm(t._local_tensor, p, dtype=dtype)
            if t._local_tensor.numel()
            else t._local_tensor.new_full((), empty)
            for t in tensors
        ]
        return _reduced(torch.stack(parts), tensors[0], dist.ReduceOp.MAX if p > 0 else dist.ReduceOp.MIN)
    dtype = dtype or tensors[0].dtype
    total = _reduced(torch.stack([_power_sum(t._local_tensor, p, _wide(dtype)) for t in tensors]), tensors[0])
    return (total if p in (0, 1) else total ** (1 / p)).to(dtype.to_real())


def _norm(
    x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    _check_all_dims("norm", x, dim)
    value = _vector_norms([x], float(p), dtype)[0]
    return value.reshape([1] * x.ndim) if keepdim else value


def _check_all_dims(what: str, x: Any, dim: Any) -> None:
    if dim not in (None, []) and sorted(d % x.ndim for d in dim) != list(range(x.ndim)):
        raise NotImplementedError(f"{what} of a RaggedTensor over dims {dim}; only over all of them")


def _foreach_norm(tensors: Sequence[Any], p: Any = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    by_group: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        by_group.setdefault((tensor.groups, tensor.dtype), []).append(i)
    out: list[Any] = [None] * len(tensors)
    for members in by_group.values():
        for i, value in zip(
            members, _vector_norms([tensors[i] for i in members], float(p), dtype).unbind(), strict=True
        ):
            out[i] = value
    return out


def _total(x: Any, dtype: torch.dtype) -> torch.Tensor:
    return _reduced(x._local_tensor.sum(dtype=_wide(dtype) if dtype.is_floating_point else dtype), x)


def _sum(x: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    whole = torch.int64 if not (x.dtype.is_floating_point or x.dtype.is_complex) else x.dtype  # as torch's sum
    return _total(x, dtype or whole).to(dtype or whole)


def _mean(x: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return (_total(x, dtype or x.dtype) / x.numel()).to(dtype or x.dtype)


def _extreme(
    reduce: Callable[[torch.Tensor], torch.Tensor], op: Any, lowest: Callable[[torch.dtype], Any]
) -> Callable[..., torch.Tensor]:
    """A max, min, any or all; an empty run contributes the value that changes nothing."""

    def run(x: Any) -> torch.Tensor:
        local = x._local_tensor
        value = (
            reduce(local)
            if local.numel()
            else torch.full((), lowest(local.dtype), dtype=local.dtype, device=local.device)
        )
        if value.dtype is torch.bool:
            return _reduced(value.to(torch.uint8), x, op).to(torch.bool)
        return _reduced(value, x, op)

    return run


def _over_dims(what: str, extreme: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An amax or amin, which name dims; all of them, or none, which means all."""

    def run(x: Any, dim: Any = None, keepdim: bool = False) -> torch.Tensor:
        _check_all_dims(what, x, dim)
        return extreme(x).reshape([1] * x.ndim) if keepdim else extreme(x)

    return run


def _lowest(dtype: torch.dtype) -> Any:
    return False if dtype is torch.bool else -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    return True if dtype is torch.bool else math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b) or a.placements != b.placements or a.shape != b.shape:
        raise ValueError("torch.equal of RaggedTensors needs two of equal shape and placement")
    same = torch.tensor(int(torch.equal(a._local_tensor, b._local_tensor)), device=a._local_tensor.device)
    return bool(_reduced(same, a, dist.ReduceOp.MIN))


def _unscale(tensors: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """GradScaler's unscaling; an overflow in one rank's run is seen by all."""
    locals_ = [tensor._local_tensor for tensor in tensors if tensor._local_tensor.numel()]
    if locals_:
        torch._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, inv_scale)
    for group in dict.fromkeys(group for tensor in tensors for group in tensor.groups):
        collectives.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)


_max = _extreme(torch.max, dist.ReduceOp.MAX, _lowest)
_min = _extreme(torch.min, dist.ReduceOp.MIN, _highest)

REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.max.default: _max,
    aten.min.default: _min,
    aten.amax.default: _over_dims("amax", _max),
    aten.amin.default: _over_dims("amin", _min),
    aten.any.default: _extreme(torch.any, dist.ReduceOp.MAX, lambda dtype: False),
    aten.all.default: _extreme(torch.all, dist.ReduceOp.MIN, lambda dtype: True),
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
