"""QKClip: a head whose largest attention logit is above a threshold has its query and key weights made smaller.

MuonClip's second half (arXiv 2507.20534, section 2.1 and algorithm 1). After the optimizer's step, for each head::

    factor = min(1, threshold / largest logit of the step)
    W_q <- W_q sqrt(factor)      W_k <- W_k sqrt(factor)                    so that its logits shrink by the factor

It changes weights, never gradients or activations, and a head that stays below the threshold not at all. The attention
says which rows of which projection belong to a head and what power of the factor each takes (its ``logit_weights``):
one half where both sides of a product are scaled, one where the other side is shared by all heads (the rotating part of
a latent query), none where a row takes no part in a logit (values that lie beside keys). Heads that share a key have
its rows scaled by the smallest of their factors; then no logit of theirs is above the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizers.fields import check, within


@dataclass(frozen=True, kw_only=True)
class QKClip:
    """Keeps attention logits near or below a threshold by scaling weights after a step.

    Args:
        threshold: Largest logit that is left as it is, in units of what the softmax sees, > 0.

    Raises:
        ValueError: If ``threshold`` is no number above zero.
    """

    threshold: float = 100.0  # arXiv 2507.20534, section 2.1

    def __post_init__(self) -> None:
        check(self, threshold=(within(self.threshold, math.ulp(0.0), math.inf), "a number > 0"))

    def factors(self, max_logit: Tensor) -> Tensor:
        """Returns what each head's logits are to shrink by, in (0, 1]; 1 where a logit is not finite, or none was seen.

        Args:
            max_logit: (..., heads) float32, the largest logit of each head; -inf for none.
        """
        above = (max_logit > self.threshold) & torch.isfinite(max_logit)
        return torch.where(above, self.threshold / torch.where(above, max_logit, 1.0), 1.0)

    def rows(self, factors: Tensor, *, shared: int, pieces: Sequence[tuple[int, float]]) -> Tensor:
        """Returns the factor of each row of a projection.

        Args:
            factors: (heads,) float32.
            shared: Neighbouring heads that share their rows of it; 4 heads, two of which share a key: 2.
            pieces: Rows of each head, or of heads that share them, from the first to the last: how many, and the power
                of the factor that they take.

        Returns:
            (heads / shared * rows of a head,) float32.
        """
        each = factors.view(-1, shared).amin(1, keepdim=True)
        # Square roots and copies rather than pow, whose vector loop and tail round differently.
        powers = {0.0: torch.ones_like(each), 0.5: each.sqrt(), 1.0: each}
        return torch.cat([powers[power].expand(-1, count) for count, power in pieces], dim=1).flatten()
