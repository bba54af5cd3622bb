"""What a token costs in matrix products, and what a device can do at best: the two sides of a model's FLOP utilisation.

A product of (m, k) by (k, n) is ``2 m k n`` FLOPs, forward; backward is two such products. Element-wise work, norms,
softmax and the embedding's look-up are not counted, nor is anything that is computed again (activation checkpointing):
these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

import re
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


class Peak(NamedTuple):
    """A device's best bf16 matrix throughput: dense, with fp32 accumulation, in FLOP/s."""

    name: str  # a regular expression searched in what the driver calls the device
    flops: float
    source: str


# The first that matches counts. Vendors print twice these for 2:4 sparsity; a line marked "half" was halved for that.
PEAKS = (
    Peak(r"\bGB300\b", 2500e12, "NVIDIA GB300 NVL72 product page, 360 PFLOPS for 72, half"),
    Peak(r"\bB300\b", 2250e12, "NVIDIA HGX B300 product page, 36 PFLOPS for 8, half"),
    Peak(r"\bGB200\b", 2500e12, "NVIDIA GB200 NVL72 product page, 360 PFLOPS for 72, half"),
    Peak(r"\bB200\b", 2250e12, "NVIDIA HGX B200 product page, 36 PFLOPS for 8, half"),
    Peak(r"\bH200 NVL\b", 835.5e12, "NVIDIA H200 datasheet, 1671 TFLOPS, half"),
    Peak(r"\bG?H200\b", 989.5e12, "NVIDIA H200 datasheet, 1979 TFLOPS, half; GH200 datasheet, the same"),
    Peak(r"\bH100 NVL\b", 835.5e12, "NVIDIA H100 datasheet, 1671 TFLOPS, half"),
    Peak(r"\bH[18]00 PCIe\b", 756.5e12, "NVIDIA H100 datasheet, 1513 TFLOPS, half; H800: other fp64 and NVLink only"),
    Peak(r"\bH[18]00\b", 989.5e12, "NVIDIA H100 datasheet, SXM, 1979 TFLOPS, half; H800: other fp64 and NVLink only"),
    Peak(r"\bH20\b", 148e12, "feifeibear/LLMRoofline hardware_dict.py; NVIDIA publishes no datasheet"),
    Peak(r"\bA[18]00\b", 312e12, "NVIDIA A100 datasheet; A800: other NVLink only"),
    Peak(r"\bL40S\b", 362.05e12, "NVIDIA L40S datasheet"),
    Peak(r"\bMI355X\b", 2516.6e12, "AMD CDNA 4: 256 compute units x 4096 FLOP x 2.4 GHz"),
    Peak(r"\bMI3(00|25)X\b", 1307.4e12, "AMD Instinct MI300X and MI325X data sheets"),
    Peak(r"\bMI250X\b", 191.5e12, "AMD Instinct MI250X data sheet, 383 TFLOPS for its two devices"),
)


def peak_flops(device_name: str) -> float | None:
    """Returns the bf16 peak of a device in FLOP/s, or None when it is not known: a wrong peak is worse than none.

    Args:
        device_name: What the driver calls it, such as ``torch.cuda.get_device_name()``: "NVIDIA H100 80GB HBM3". A
            slice of a device ("MIG" in its name) is not known.
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peak.flops for peak in PEAKS if re.search(peak.name, device_name)), None)
