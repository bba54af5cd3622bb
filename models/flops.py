"""What a token costs in matrix products.

A product of (m, k) by (k, n) is ``2 m k n`` FLOPs, forward; backward is two such products. Element-wise work, norms,
softmax and the embedding's look-up are not counted, nor is anything that is computed again (activation checkpointing):
these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Scores(NamedTuple):
    """The attention of one layer."""

    num_heads: int  # query heads; sharing keys and values saves no product
    query_dim: int  # elements of a head's query and key
    value_dim: int  # elements of a head's value
    window: int | None = None  # keys that a query sees, itself included; None: all


def flops_per_token(
    *, matrix_parameters: int, attention: Iterable[Scores], seq_len: int, causal: bool = False
) -> float:
    """Returns the FLOPs of the matrix products of forward and backward, averaged over the tokens of a sequence.

    ``6 matrix_parameters + 6 (query_dim + value_dim) num_heads seq_len`` per layer (arXiv 2204.02311, appendix B).
    PaLM and torchtitan count attention as if every token attended to all ``seq_len``, and published utilisations are
    mostly of that kind; it is the default. Half of these scores are masked: ``causal`` counts only the
    ``(seq_len + 1) / 2`` that are not. Megatron-LM halves too. Name the convention with the number. A window counts as
    a shorter sequence.

    Args:
        matrix_parameters: Parameters that each token is multiplied by: no norms, no embedding look-up, of a mixture of
            experts those of the experts it goes to, but the head even if it is tied.
        attention: Of every layer.
        seq_len: Tokens of a sequence.
        causal: Count only the scores that the causal mask keeps.
    """
    flops = 6.0 * matrix_parameters
    for heads, query_dim, value_dim, window in attention:
        # Forward: scores and weighted values, 2 * attended * dim each. Backward twice that.
        flops += 6.0 * heads * (query_dim + value_dim) * _attended(seq_len, window, causal)
    return flops


def _attended(seq_len: int, window: int | None, causal: bool) -> float:
    """Mean number of keys that a token is counted to see."""
    seen = min(window or seq_len, seq_len)
    # The first `seen` tokens see 1, 2, ..., seen; the rest see `seen` each.
    return (seen * (seen + 1) / 2 + (seq_len - seen) * seen) / seq_len if causal else float(seen)
