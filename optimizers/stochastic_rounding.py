"""Stochastic rounding: bfloat16 parameters without a float32 copy, whose small steps are taken now and then, not lost.

A bfloat16 number has 8 bits, so a step below 1/512 of a parameter would never be taken. It is rounded up with the
probability of what is cut off, and is right in the mean (arXiv 2010.06192, section 3)::

    1.0 + 0.001     lies between 1.0 and 1.0078125     1.0 in 87 %, 1.0078125 in 13 % of the steps: 1.001 in the mean

The random bits of an element are a hash of the rule's seed, the step, the parameter's name and the element's index in
the whole parameter. So they are the same on any number of ranks, after a restart too, and no generator is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from optimizers.adamw import AdamW
from optimizers.fields import check, is_count
from optimizers.muon import Muon

# Steps of the hash "lowbias32" (github.com/skeeto/hash-prospector): shifts and odd factors of little bias.
SHIFTS, FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
CUT = 16  # bits of a float32 that a bfloat16 does not have


def stochastic_round_(param: Tensor, wide: Tensor, *, seed: int, step: Tensor, stream: int, first: int) -> None:
    """Fills ``param`` with ``wide``, each number rounded to one of its two neighbours, right in the mean.

    What bfloat16 has is kept, NaN and infinity too.

    Args:
        param: (n,) bfloat16.
        wide: (n,) float32.
        seed: Of the random bits, an integer >= 0.
        step: () float32, steps completed before this one.
        stream: An integer >= 0 that no other parameter has.
        first: Index of the first element in the whole parameter.
    """
    key = _hash(step.to(torch.int32) ^ _signed(_hash_of(_hash_of(seed) ^ stream)))
    index = torch.arange(param.numel(), dtype=torch.int32, device=param.device).add_(_signed(first))
    noise = _hash(_hash(index).bitwise_xor_(key)).bitwise_and_(2**CUT - 1)
    rounded = (wide.view(torch.int32) + noise).bitwise_and_(-(2**CUT)).view(torch.float32)
    param.copy_(torch.where(torch.isfinite(wide), rounded, wide))


def _hash(x: Tensor) -> Tensor:
    """Mixes the bits of int32 numbers; their products wrap around."""
    for shift, factor in zip(SHIFTS, (*FACTORS, None), strict=True):
        x = x ^ ((x >> shift) & (2 ** (32 - shift) - 1))  # a shift without its sign
        x = x if factor is None else x * _signed(factor)
    return x


def _hash_of(x: int) -> int:
    """The same of one number, of its last 32 bits."""
    x %= 2**32
    for shift, factor in zip(SHIFTS, (*FACTORS, 1), strict=True):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


def _signed(x: int) -> int:
    """The int32 with the last 32 bits of a number."""
    return (x + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, kw_only=True)
class _Rounded:
    """What rules of bfloat16 parameters share; before the float32 rule among the bases."""

    seed: int = 0

    param_dtype: ClassVar[torch.dtype] = torch.bfloat16
    places: ClassVar[bool] = True
    finest: ClassVar[int] = 32  # above 1: a run is of one parameter, and its elements count from the first

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        check(self, seed=(is_count(self.seed, 0), "an integer >= 0"))

    def _round_(self, param: Tensor, wide: Tensor, state: Mapping[str, Tensor]) -> None:
        place = {"stream": int(state["stream"]), "first": int(state["first"])}
        stochastic_round_(param, wide, seed=self.seed, step=state["step"], **place)


@dataclass(frozen=True, kw_only=True)
class BF16AdamW(_Rounded, AdamW):
    """AdamW of bfloat16 parameters: 10 bytes an element with its moments instead of 12; float32 inside.

    Args:
        seed: Of the rounding, an integer >= 0.

    Raises:
        ValueError: If a field is out of range.
    """

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Steps ``param``, (n,) bfloat16, and both moments in place; returns no payload.

        Args:
            param: (n,) bfloat16, a run of one parameter.
            grad: (n,) floating point, left as it is.
            state: As ``AdamW.prepare``, and ``stream`` and ``first``, integers: which parameter, and the index of the
                run's first element in it.
            skip: None, or () float32: 1.0 writes nothing.
        """
        wide = param.float()
        super().prepare(wide, grad.float(), state, skip=skip)
        self._round_(param, wide, state)
        return ()


@dataclass(frozen=True, kw_only=True)
class BF16Muon(_Rounded, Muon):
    """Muon of bfloat16 parameters; momentum and sums in float32.

    Args:
        seed: Of the rounding, an integer >= 0.

    Raises:
        ValueError: If a field is out of range.
    """

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """As ``Muon.prepare``, of a gradient of any dtype."""
        return super().prepare(param, grad.float(), state, skip=skip)

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        """As ``Muon.apply``, of a bfloat16 ``param``; ``state`` has ``stream`` and ``first``."""
        wide = param.float()
        super().apply(wide, direction, state, skip=skip)
        self._round_(param, wide, state)
