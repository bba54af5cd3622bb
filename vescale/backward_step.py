"""step_in_backward: each unit is stepped as soon as its gradients are reduced, while earlier units still compute.

::

    backward    b.3      b.2      b.1      b.0
    reduces              r.3      r.2      r.1      r.0
    steps                         s.3      s.2      s.1  s.0

Gradient shards of one or two units exist at a time instead of those of the whole model, and the optimizer's time hides
communication. What needs all gradients before any step cannot be had together with it: clipping by the global norm,
skipping a step that is not finite, and clipping logits, which scales all layers' weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from vescale.fsdp_module import FSDPModule
from vescale.grad_norm import NormInParts
from vescale.logit_clip import IN_BACKWARD, looks_at_logits
from vescale.member import home_of
from vescale.optimizer import Optimizer
from vescale.unit import Unit


def step_in_backward(
    model: nn.Module,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
    non_finite: str = "raise",
    norm: NormInParts | None = None,
) -> list[torch.optim.Optimizer]:
    """Gives each unit of ``model`` an optimizer that steps, and frees the gradients, as soon as they are reduced.

    A backward without gradient synchronisation steps nothing, so micro-batches add up as usual. Every backward with it
    is a step.

    Args:
        model: The outermost module that ``fully_shard`` was called on, after its weights have a device.
        optimizer: A ``vescale.Optimizer`` of all trainable parameters, whose own ``step`` has nothing left to do then.
            Or what makes an optimizer of a unit's trainable parameters, e.g. ``lambda params: AdamW(params)``.
        max_norm: Must be None: clipping waits for every gradient.
        non_finite: Must be "raise": skipping a step waits for every gradient too.
        norm: Shown each unit's gradients before they are stepped; its ``take()`` after backward is the norm of all,
            which says whether what was stepped was finite.

    Returns:
        The ``vescale.Optimizer``, or one optimizer per unit that has trainable parameters, in definition order; for
        schedulers and checkpoints.

    Raises:
        ValueError: With clipping or skipping; if the model is not sharded, has trainable parameters outside every unit
            or that the optimizer does not have, has a ``LogitClip``, or steps in backward already.
    """
    if max_norm is not None or non_finite != "raise":
        raise ValueError(
            f"step_in_backward: expected max_norm=None and non_finite='raise', got {max_norm} and {non_finite!r}: both "
            "need every gradient before the first step; call optimizer.step() after backward instead"
        )
    if not isinstance(model, FSDPModule):
        raise ValueError(f"step_in_backward: expected a module that fully_shard was called on, got {type(model)}")
    outside = [name for name, p in model.named_parameters() if p.requires_grad and home_of(p) is None]
    units = list(model.units())
    if outside or any(unit.after_reduce is not None for unit in units):
        what = f"{outside[0]} is in no unit" if outside else "the model steps in backward already"
        raise ValueError(f"step_in_backward: {what}")
    if looks_at_logits(model):
        raise ValueError(IN_BACKWARD)
    params_of = {unit: [p for s in unit.segments for p in s.sharded if p.requires_grad] for unit in units}
    if isinstance(optimizer, Optimizer):
        _take_over(optimizer, params_of, norm)
        return [optimizer]
    optimizers = []
    for unit, params in params_of.items():
        if params:
            optimizers.append(optimizer(params))
            unit.after_reduce = _when_synchronized(functools.partial(_step_all, optimizers[-1], params, norm))
    return optimizers


def _take_over(optimizer: Optimizer, params_of: dict[Unit, list[nn.Parameter]], norm: NormInParts | None) -> None:
    """Lets each unit step its parameters of one optimizer."""
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    ours = {id(param) for params in params_of.values() for param in params}
    if held != ours:
        raise ValueError(
            f"step_in_backward: expected an Optimizer of the model's {len(ours)} trainable parameters, got one of "
            f"{len(held)}, {len(held & ours)} of them the model's"
        )
    optimizer.in_backward = True
    for unit, params in params_of.items():
        if params:
            unit.after_reduce = _when_synchronized(functools.partial(_step_unit, optimizer, params, norm))


def _step_unit(optimizer: Optimizer, params: list[nn.Parameter], norm: NormInParts | None, unit: Unit) -> None:
    if norm is not None:
        norm.add(params)
    optimizer.step(unit=unit)
    for param in params:
        param.grad = None
    unit.forget_grads()


def _step_all(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], norm: NormInParts | None, unit: Unit
) -> None:
    unit.realias()
    if norm is not None:
        norm.add(params)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    unit.forget_grads()


def _when_synchronized(step: Callable[[Unit], None]) -> Callable[[Unit], None]:
    """ZeRO 2 reduces at every micro-batch; only the last one's is a step."""

    def after_reduce(unit: Unit) -> None:
        if unit.controls.requires_gradient_sync:
            step(unit)

    return after_reduce
