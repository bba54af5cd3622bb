"""The peak that a utilisation is measured against, by the driver's name of the device."""

from __future__ import annotations

import pytest

from vescale.peaks import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_devices_peak_is_found_by_the_drivers_name(name: str, tera: float) -> None:
    assert peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name", ["", "cpu", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "AMD Instinct MI300A"]
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


def test_every_peak_says_where_it_is_from() -> None:
    assert all(peak.source and peak.flops > 1e14 for peak in PEAKS)
