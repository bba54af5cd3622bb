"""Times of collectives: the textbook's figures, a ring counted by hand, and profiles whose every value has a source."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from composing import composed

import recipes
from vescale.machine import Machine, exposed, moved, parse_bytes
from vescale.peaks import peak_flops
from vescale.train import resolve

FOLDER = Path(recipes.__file__).parent / "machine"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
NODE = Machine(
    name="two by four",
    devices=4,
    memory=1e9,
    flops=1e12,
    utilisation=0.5,
    memory_bandwidth=1e12,
    bandwidth_inside=100e9,
    bandwidth_between=10e9,
    latency_inside=1e-6,
    latency_between=10e-6,
    latency_start=5e-6,
)


def _machine(name: str) -> Machine:
    return resolve(composed(f"machine={name}", command="plan")["machine"])


def test_seven_billion_gradients_in_bf16_over_400_gb_per_second() -> None:
    nbytes = moved("all_reduce", 2 * 7e9, math.inf)
    assert nbytes == 28e9
    h100 = _machine("h100")
    assert h100.bandwidth(1024) == 400e9  # eight ports of 400 Gb/s: less than NVLink
    seconds = nbytes / h100.bandwidth(1024)
    assert seconds == pytest.approx(0.070)
    assert exposed(seconds, 0.200, overlap=0.0) == pytest.approx(0.26, abs=0.002)
    assert exposed(seconds, 0.200, overlap=1.0) == 0.0
    assert exposed(0.3, 0.2, overlap=1.0) == pytest.approx(0.1 / 0.3)  # no more hides than there is compute


def test_a_ring_inside_a_node_and_between_nodes() -> None:
    # 4 ranks of one node: 3 steps, 3/4 of the bytes at 100 GB/s.
    assert NODE.seconds("all_gather", 1e9, 4) == pytest.approx(5e-6 + 3e-6 + 0.75e9 / 100e9)
    # 8 ranks of two nodes: 7 steps, one of them between nodes; four ports make 40 GB/s.
    assert NODE.seconds("reduce_scatter", 1e9, 8) == pytest.approx(5e-6 + 6e-6 + 10e-6 + 0.875e9 / 40e9)
    assert NODE.seconds("all_reduce", 1e9, 8) == pytest.approx(5e-6 + 2 * (6e-6 + 10e-6 + 0.875e9 / 40e9))
    # What leaves a rank in an all-to-all over 8: 4 of its 7 peers are on the other node, behind its own port.
    assert NODE.seconds("all_to_all", 7e8, 8) == pytest.approx(5e-6 + 10e-6 + 4e8 / 10e9)
    assert NODE.seconds("all_to_all", 7e8, 4) == pytest.approx(5e-6 + 1e-6 + 7e8 / 100e9)
    assert NODE.seconds("all_gather", 1e9, 1) == NODE.seconds("all_to_all", 1e9, 1) == 0.0
    assert NODE.compute_seconds(1e12) == 2.0


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_has_every_field_and_a_source_beside_each_value(name: str) -> None:
    machine = _machine(name)
    assert machine.name == name and {f.name for f in dataclasses.fields(machine)} == {*vars(machine)}
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    values = [line for line in lines if ":" in line and not line.startswith(("#", "_target_", "name", "defaults"))]
    assert values and all(" # " in line for line in values)


def test_peaks_are_those_that_utilisation_is_measured_against() -> None:
    devices = {
        "a100": "NVIDIA A100-SXM4-80GB",
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "b200": "NVIDIA B200",
    }
    assert {*devices, "ethernet"} == {*NAMES}
    for name, device in devices.items():
        assert _machine(name).flops == peak_flops(device)


def test_a_profile_is_changed_by_keys() -> None:
    config = composed("machine=a100", "machine.bandwidth_between=1e9", "machine.devices=4", command="plan")
    machine = resolve(config["machine"])
    assert (machine.devices, machine.bandwidth_between, machine.bandwidth(8)) == (4, 1e9, 4e9)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GB", 80e9), ("80GiB", 80 * 2**30), ("1.5e3 kb", 1.5e6), (80e9, 80e9), ("141 gb", 141e9)]
)
def test_sizes(text: str, nbytes: float) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "80", "80XB", "-80GB", "0GB", "1.2.3GB", "80 G B", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 80GB"):
        parse_bytes(text)


def test_numbers_out_of_range_are_named_together() -> None:
    with pytest.raises(ValueError, match=r"devices: expected a number > 0, got 0; utilisation: .*got 2; latency_start"):
        dataclasses.replace(NODE, devices=0, utilisation=2, latency_start=-1)
    with pytest.raises(ValueError, match="expected one of all_gather, reduce_scatter, all_reduce, got 'broadcast'"):
        NODE.seconds("broadcast", 1, 8)
