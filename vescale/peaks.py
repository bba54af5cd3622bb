"""Peaks: what a device can do at best, the other side of a model's FLOP utilisation."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


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


def known_peak(device: torch.device) -> float | None:
    """Returns the bf16 peak of this machine's device in FLOP/s, or None."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
