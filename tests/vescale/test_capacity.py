"""What a run needs at least is the sum that can be done by hand, and it is compared with what there is."""

from __future__ import annotations

import torch
from torch import nn

from optimizers import AdamW, Muon
from vescale import Rules
from vescale.capacity import available_bytes, exhausted, least_bytes, refusal


def test_the_least_is_masters_gradients_and_state() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(100, 30), nn.Linear(30, 7))
    rules = Rules(matrices=("*weight", Muon()), rest=("*", AdamW()))
    by_hand = (3000 + 210) * (4 + 4 + 4) + 37 * (4 + 4 + 8)
    assert least_bytes(model.named_parameters(), rules, ranks=1) == by_hand
    assert least_bytes(model.named_parameters(), rules, ranks=4) == by_hand // 4


def test_the_lines_name_both_numbers() -> None:
    cpu = torch.device("cpu")
    assert 2**20 < available_bytes(cpu) < 2**50
    assert "at least 3.0 GiB on each of 8 ranks" in refusal(3 * 2**30, 2**30, ranks=8)
    line = exhausted(MemoryError("cannot\nallocate"), needed=2**30, device=cpu)
    assert line.startswith("out of memory (cannot); between steps the plan holds 1.0 GiB a rank") and "\n" not in line
