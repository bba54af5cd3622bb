"""Rotary positions: how fast each plane of a head turns, and how that is stretched for contexts longer than trained on.

A head's vector is rotated in planes (i, i + head_dim / 2), not (2i, 2i + 1) as in Meta's own files, so Hugging Face's
weights are used as they lie, without a permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from models.fields import is_positive


class Scaling(NamedTuple):
    """The keys of one ``rope_type``."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()


SCALINGS = {
    "default": Scaling(()),
    "llama3": Scaling(("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")),
    "yarn": Scaling(
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` turned by each position's angles; (b, s, heads, head_dim), dtype of ``x``.

    Rolling by half a head swaps its halves, and ``sin`` carries the sign: ``(x1 cos - x2 sin, x2 cos + x1 sin)``
    without negating or concatenating anything of the size of ``x``.

    Args:
        x: (b, s, heads, head_dim) floating point.
        cos: (s, 1, head_dim) same dtype.
        sin: (s, 1, head_dim) same dtype, first half negated.
    """
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rotary_table(
    positions: torch.Tensor,
    head_dim: int,
    *,
    theta: float,
    scaling: Mapping[str, Any] | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and signed sines of ``positions``; each (s, 1, head_dim) ``dtype``.

    Angles are fp32. Computed at each forward rather than kept in a buffer: it costs a dozen kernels on few numbers, and
    there is nothing that a ``.to(bfloat16)`` could round or a ``to_empty`` leave unset.

    Args:
        positions: (s,) integers, of each token in its document.
        head_dim: Elements that rotate, even.
        theta: Base of the wavelengths, in ``2 pi theta**(2 i / head_dim)`` positions.
        scaling: Hugging Face's ``rope_scaling``, or None.
        dtype: Of the result.
    """
    frequencies = inverse_frequencies(head_dim, theta=theta, scaling=scaling, device=positions.device)
    angles = torch.outer(positions.float(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat((cos, cos, -sin, sin), dim=-1)
    factor = attention_factor(scaling)
    if factor != 1.0:
        table = table * factor
    table = table.to(dtype)[:, None]
    return table[..., :head_dim], table[..., head_dim:]


def inverse_frequencies(
    head_dim: int, *, theta: float, scaling: Mapping[str, Any] | None, device: torch.device
) -> torch.Tensor:
    """Returns the angle per position of each plane of a head, in radians; (head_dim / 2,) float32.

    ``theta**(-2 i / head_dim)`` (arXiv 2104.09864, section 3.2.2), scaled as ``rope_type`` says. In the order of
    huggingface/transformers modeling_rope_utils.py, for the same bits.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    wavelengths = theta**exponents
    if scaling is None or scaling["rope_type"] == "default":
        return 1.0 / wavelengths
    if scaling["rope_type"] == "llama3":
        return _llama3(1.0 / wavelengths, scaling)
    return _yarn(wavelengths, scaling, theta)


def _llama3(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Slows planes that turn fewer than ``low_freq_factor`` times within ``original_max_position_embeddings`` by
    ``factor``, leaves those that turn more than ``high_freq_factor`` times, and interpolates between.

    meta-llama/llama-models, ``apply_scaling`` in models/llama3/model.py.
    """
    factor, low, high, original = (scaling[key] for key in SCALINGS["llama3"].required)
    turns = original / (2 * math.pi / frequencies)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def _yarn(wavelengths: torch.Tensor, scaling: Mapping[str, Any], theta: float) -> torch.Tensor:
    """Slows planes that turn fewer than ``beta_slow`` times within ``original_max_position_embeddings`` by ``factor``,
    leaves those that turn more than ``beta_fast`` times, and interpolates between, linearly in the plane's index.

    arXiv 2309.00071, section 3.2; betas of 32 and 1 as there, ``truncate`` rounds the two indices outwards.
    """
    planes, dim = len(wavelengths), 2 * len(wavelengths)
    original = scaling["original_max_position_embeddings"]

    def plane(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = plane(scaling.get("beta_fast") or 32), plane(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers: no division by zero
    indices = torch.arange(planes, dtype=torch.float32, device=wavelengths.device)
    kept = 1 - ((indices - low) / (high - low)).clamp(0.0, 1.0)
    slowed = 1.0 / (scaling["factor"] * wavelengths)
    return slowed * (1 - kept) + 1.0 / wavelengths * kept


def attention_factor(scaling: Mapping[str, Any] | None) -> float:
    """Returns what cosines and sines are multiplied by: YaRN's temperature (arXiv 2309.00071, equation 22), else 1.

    With ``mscale`` and ``mscale_all_dim`` (deepseek-ai/DeepSeek-V3, inference/model.py) it is their quotient, and the
    scores are scaled instead; see ``score_factor``.
    """
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _temperature(factor, mscale) / _temperature(factor, all_dim)
    return _temperature(factor, 1.0)


def score_factor(scaling: Mapping[str, Any] | None) -> float:
    """Returns what the scores of latent attention are multiplied by, beside ``1 / sqrt(d)``; 1 without YaRN."""
    if scaling is None or not scaling.get("mscale_all_dim"):
        return 1.0
    return _temperature(scaling["factor"], scaling["mscale_all_dim"]) ** 2


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_problems(scaling: object) -> Iterator[str]:
    """Yields what is wrong with a ``rope_scaling``, one line each; nothing when ``rotary_table`` will take it."""
    if scaling is None:
        return
    if not isinstance(scaling, Mapping):
        yield f"rope_scaling: expected None or a mapping with rope_type, got {scaling!r}"
        return
    rope_type = scaling.get("rope_type")
    if not isinstance(rope_type, str) or rope_type not in SCALINGS:
        yield f"rope_scaling.rope_type: expected one of {', '.join(SCALINGS)}, got {rope_type!r}"
        return
    wanted, optional = SCALINGS[rope_type]
    for key in sorted(scaling.keys() - {"rope_type", *wanted, *optional}):
        takes = ", ".join(wanted + optional) or "none"
        yield f"rope_scaling.{key}: not a key of rope_type {rope_type!r}, which takes {takes}"
    numbers = [*wanted, *(key for key in optional if key in scaling and key != "truncate")]
    bad = [key for key in numbers if not is_positive(scaling.get(key))]
    for key in bad:
        yield f"rope_scaling.{key}: expected a number > 0, got {scaling.get(key)!r}"
    if not isinstance(scaling.get("truncate", True), bool):
        yield f"rope_scaling.truncate: expected true or false, got {scaling['truncate']!r}"
    if rope_type == "llama3" and not bad and not scaling["low_freq_factor"] < scaling["high_freq_factor"]:
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        yield f"rope_scaling.low_freq_factor: expected less than high_freq_factor = {high}, got {low}"
