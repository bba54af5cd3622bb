from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


class Driver:
    """Drives a rule over whole parameters in one process; ``edges`` cuts the element-wise parts at those elements."""

    def __init__(self, rule: Any, *params: Tensor, edges: Sequence[int] = ()) -> None:
        self.rule, self.edges = rule, edges
        self.params = [param.clone() for param in params]
        self.states = [
            {"step": torch.tensor(0.0)}
            | {name: torch.zeros(param.numel(), dtype=dtype) for name, dtype in rule.element_state().items()}
            for param in params
        ]

    def step(self, grads: Sequence[Tensor], *, skip: Tensor | None = None) -> None:
        for param, grad, state in zip(self.params, grads, self.states, strict=True):
            cuts = [slice(a, b) for a, b in zip((0, *self.edges), (*self.edges, param.numel()), strict=True)]
            flat, flat_grad = param.view(-1), grad.reshape(-1)
            runs = [{name: value[cut] if value.ndim else value for name, value in state.items()} for cut in cuts]
            payloads = [
                self.rule.prepare(flat[cut], flat_grad[cut], run, skip=skip)
                for cut, run in zip(cuts, runs, strict=True)
            ]
            if block := self.rule.block_shape(tuple(param.shape)):
                blocks = tuple(torch.cat(pieces).view(-1, *block) for pieces in zip(*payloads, strict=True))
                direction = self.rule.block(blocks, {}).view(-1)
                for cut, run in zip(cuts, runs, strict=True):
                    self.rule.apply(flat[cut], direction[cut], run, skip=skip)
            state["step"] += 1 if skip is None else 1 - skip


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """``drive(rule, *params)`` copies the parameters; ``.step(grads)`` steps ``.params`` and ``.states``."""
    return Driver


@pytest.fixture
def distance() -> Callable[[Tensor, Tensor], float]:
    """``distance(a, b)`` is the norm of ``a - b`` over the norm of ``b``."""
    return lambda a, b: float((a.double() - b.double()).norm() / b.double().norm())


class Stepped:
    """A rule over plain parameters in one process; ``step`` takes their gradients."""

    def __init__(self, rule: Any, *params: Tensor) -> None:
        from vescale import Optimizer, Rules

        self.params = [torch.nn.Parameter(param.clone()) for param in params]
        named = [(f"p{i}", param) for i, param in enumerate(self.params)]
        self.optimizer = Optimizer(named, Rules(all=("*", rule)))

    def step(self, grads: Sequence[Tensor], *, skip: Tensor | None = None) -> None:
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad.clone()
        self.optimizer.step(skip=skip)

    def state(self, index: int = 0) -> dict[str, Tensor]:
        return self.optimizer.state[self.params[index]]


@pytest.fixture
def over() -> Callable[..., Stepped]:
    """``over(rule, *params)`` copies the parameters; ``.step(grads)`` steps them, ``.state(i)`` is their state."""
    return Stepped
