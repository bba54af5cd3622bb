"""Muon8bit: Muon whose momentum is bytes, in blocks of 256 elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from optimizers.fields import exact, weight
from optimizers.muon import Muon
from optimizers.quantize import BLOCK, dequantize, quantize


@dataclass(frozen=True, kw_only=True)
class Muon8bit(Muon):
    """Muon with 1.02 bytes of state per element instead of 4.

    The momentum is read from bytes before and written to bytes after each step (see ``quantize``); what is
    orthogonalised is the momentum before it is rounded. Its fields are Muon's.
    """

    finest: ClassVar[int] = BLOCK

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns the codes of the momentum, of the parameter's shape."""
        return {"momentum": torch.uint8}

    def chunk_state(self) -> dict[str, torch.dtype]:
        """Returns the scales of the momentum, one for each 256 elements."""
        return {"momentum_scale": torch.float32}

    def loaded(self, state: dict[str, Tensor]) -> None:
        """Makes a momentum that was loaded an average, whatever convention it was written in."""
        state["momentum_scale"].div_(state["settles_at"])
        state["settles_at"].fill_(1.0)

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Updates the momentum in place; returns what is to be orthogonalised, (n,) in ``wire_dtype``, as a new tensor.

        Args:
            param: (n,) float32, a run that begins at a multiple of 256 elements of its parameter; not read.
            grad: (n,) float32, left as it is.
            state: ``momentum``, (n,) uint8, and ``momentum_scale``, (ceil(n / 256),) float32.
            skip: None, or () float32: 1.0 writes nothing.
        """
        codes, scale, decay = state["momentum"], state["momentum_scale"], exact(self.momentum)
        room = -len(codes) % BLOCK  # the tensor's last block is filled up with zeros
        momentum = dequantize(pad(codes, (0, room)), scale, signed=True)[: len(codes)]
        momentum.lerp_(grad, weight(1 - decay, grad))
        fresh = quantize(pad(momentum, (0, room)), signed=True)
        for target, value in ((codes, fresh[0][: len(codes)]), (scale, fresh[1])):
            target.copy_(value if skip is None else torch.where(skip > 0, target, value))
        return ((grad.lerp(momentum, weight(decay, grad)) if self.nesterov else momentum).to(self.wire_dtype),)
