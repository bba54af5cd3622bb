"""Health: whether a step may be taken, judged on the device before the optimizer, the same on every rank.

The loss and the gradient's norm are sums over all ranks, so every rank comes to the same judgement without asking. A
step that may not be taken writes nothing: neither parameters nor state. On a CPU the host knows at once; on a GPU the
flag goes to the optimizer as it is, and the host reads it one step later, so that no step waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vescale.checkpoint import gather
from vescale.stop import Stopped

WINDOW, ENOUGH = 128, 16  # norms that a spike is compared with; fewer than ENOUGH say nothing
MOST = torch.finfo(torch.float32).max


class Judged(NamedTuple):
    """A step whose flags the host has not read yet."""

    step: int
    bad: Tensor  # () bool: not finite
    skip: Tensor  # () bool: not finite, or a spike
    loss: Tensor
    norm: Tensor


class Health:
    """Judges steps.

    Args:
        skips: Steps in a row with a loss or gradient that is not finite that are left out before the run ends; 0: it
            ends at the first.
        spike: A step whose norm exceeds this many running medians is left out; None: none is.
        device: Of the losses.
    """

    skipped: int  # steps left out so far, as far as the host knows

    def __init__(self, *, skips: int, spike: float | None, device: torch.device) -> None:
        self.skips, self.spike = skips, spike
        self.norms = torch.full((WINDOW,), math.nan, device=device)  # of steps that were taken
        self.skipped, self._in_a_row = 0, 0
        self._unread: Judged | None = None

    def judge(self, step: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns the flag for ``Optimizer.step``: () float32, 1.0 to leave the step out. Reads nothing.

        Args:
            step: Being taken, 1-based.
            loss: () float32 of all ranks.
            norm: () float32 of all ranks, before clipping.
        """
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        skip = bad
        if self.spike is not None:
            seen = torch.isfinite(self.norms)
            high = norm > self.spike * self.norms.nanmedian()
            skip = bad | (high & (seen.sum() >= ENOUGH))
            at = step % WINDOW
            self.norms[at] = torch.where(skip, self.norms[at], norm)
        self._unread = Judged(step, bad, skip, loss, norm)
        return skip.float()

    def settle(self, replay: Callable[[int], str]) -> bool:
        """Reads the flags of the last judged step, which waits for the device; returns whether it was left out.

        Args:
            replay: Says which tensor of a step was bad first; called while the weights are as they were.

        Raises:
            Stopped: On every rank, if too many steps in a row were not finite.
        """
        judged, self._unread = self._unread, None
        if judged is None:
            return False
        bad, skipped = bool(judged.bad), bool(judged.skip)
        self.skipped += skipped
        self._in_a_row = self._in_a_row + 1 if bad else 0
        if self._in_a_row > self.skips:
            words = f"got {float(judged.loss)} and {float(judged.norm)}"
            raise Stopped(
                f"step {judged.step}: expected finite loss and gradient norm, {words}; {replay(judged.step)}; not saved"
            )
        return skipped

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint must remember, in JSON's types."""
        norms = [None if math.isnan(value) else value for value in self.norms.tolist()] if self.spike else []
        return {"norms": norms, "skipped": self.skipped, "in_a_row": self._in_a_row}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from ``state``."""
        self.skipped, self._in_a_row = state.get("skipped", 0), state.get("in_a_row", 0)
        for at, value in enumerate(state.get("norms", [])):
            self.norms[at] = math.nan if value is None else float(value)


def problems(state: dict[str, Any]) -> list[str]:
    """Returns what keeps ``Health.load`` from taking ``state``, which a file may have changed; nothing if it can."""
    norms, found = state.get("norms", []), []
    if not (isinstance(norms, list) and len(norms) in (0, WINDOW) and all(map(_is_norm, norms))):
        found.append(f"norms: expected none, or a norm or null of each of {WINDOW} steps")
    for name in ("skipped", "in_a_row"):
        steps = state.get(name, 0)
        if type(steps) is not int or steps < 0:
            found.append(f"{name}: expected a number of steps >= 0, got {steps!r}")
    return found


def _is_norm(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 <= value <= MOST)


def first_bad(model: nn.Module, forward_backward: Callable[[], Any]) -> str:
    """Runs a step again and says where it stops being finite; every rank gets the same answer.

    A gradient is the sum of all ranks': where one rank's weights or outputs are bad before that, it is that rank's.

    Args:
        model: With the weights of that step.
        forward_backward: Runs it, and leaves gradients.
    """
    found = [f"{name} holds what is not finite" for name, p in model.named_parameters() if not _finite(p)]
    with _watched(model, found):
        forward_backward()
    late = not found
    grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    found += [
        f"the gradient of {name} is the first that is not finite" for name, g in reversed(grads) if not _finite(g)
    ]
    said = gather((late, found[0] if found else ""))
    first = sorted((late, rank, line) for rank, (late, line) in enumerate(said) if line)
    return next((f"{line} (rank {rank})" for _, rank, line in first), "the replay was finite")


@contextmanager
def _watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Adds to ``found`` the modules whose output is not finite, innermost and first first."""

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point() and not _finite(output):
                found.append(f"the output of {name or 'the model'} is the first that is not finite")

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(value: Tensor) -> bool:
    local = getattr(value, "_local_tensor", value)
    return bool(torch.isfinite(local).all())
