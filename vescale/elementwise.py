"""elementwise: which operators touch each element alone, so that a run of elements can answer them by itself."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

# Operators that keep the shape of their first tensor and touch each element alone, but carry no pointwise tag.
_SAME_LAYOUT = {
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.copy_.default,
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zeros_like.default, aten.ones_like.default,
    aten.empty_like.default, aten.full_like.default, aten.lift_fresh.default, aten.view_as_real.default,
    aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
}  # fmt: skip
_FUSED = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")


def is_elementwise(func: Any) -> bool:
    """Whether running ``func`` on each run is running it on the whole.

    Args:
        func: An overload of an ATen operator.
    """
    name = func._schema.name.removeprefix("aten::")
    return torch.Tag.pointwise in func.tags or func in _SAME_LAYOUT or name.startswith("_foreach_") or name in _FUSED
