"""A step that is not finite, or a spike, is judged on the device and left out; too many end the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vescale import health
from vescale.health import ENOUGH, Health
from vescale.stop import Stopped

CPU = torch.device("cpu")


def _steps(health: Health, norms: list[float], *, first: int = 1) -> list[bool]:
    """Whether each step was left out."""
    found = []
    for step, norm in enumerate(norms, first):
        flag = health.judge(step, torch.tensor(2.0), torch.tensor(norm))
        found.append(health.settle(lambda step: f"step {step} was bad"))
        assert bool(flag) == found[-1]
    return found


def test_the_first_bad_step_ends_a_run_and_names_the_tensor() -> None:
    health = Health(skips=0, spike=None, device=CPU)
    assert _steps(health, [1.0, 1.0]) == [False, False]
    with pytest.raises(Stopped, match="step 3: expected finite loss .*, got 2.0 and nan; step 3 was bad; not saved"):
        _steps(health, [math.nan], first=3)


def test_so_many_in_a_row_may_be_left_out() -> None:
    health = Health(skips=2, spike=None, device=CPU)
    assert _steps(health, [1, math.inf, math.nan, 1, math.nan, math.nan]) == [False, True, True, False, True, True]
    assert health.skipped == 4
    with pytest.raises(Stopped):
        _steps(health, [math.nan], first=7)


def test_a_spike_is_compared_with_the_median_of_steps_that_were_taken() -> None:
    health = Health(skips=0, spike=3.0, device=CPU)
    assert _steps(health, [50.0] + [1.0] * (ENOUGH - 1)) == [False] * ENOUGH  # too few to say
    assert _steps(health, [2.9, 3.1, 100.0, 1.0], first=ENOUGH + 1) == [False, True, True, False]


def test_a_resumed_run_judges_alike() -> None:
    norms = [1.0 + 0.1 * (i % 7) for i in range(40)]
    whole, first = Health(skips=0, spike=2.0, device=CPU), Health(skips=0, spike=2.0, device=CPU)
    _steps(whole, norms)
    _steps(first, norms[:25])
    resumed = Health(skips=0, spike=2.0, device=CPU)
    state: dict[str, Any] = first.state()
    resumed.load(state)
    _steps(resumed, norms[25:], first=26)
    assert torch.equal(torch.nan_to_num(resumed.norms), torch.nan_to_num(whole.norms))


def test_a_run_that_is_resumed_amid_bad_steps_goes_on_counting() -> None:
    first, resumed = (Health(skips=3, spike=None, device=CPU) for _ in range(2))
    assert _steps(first, [1, math.nan, math.nan]) == [False, True, True]
    resumed.load(first.state())
    assert _steps(resumed, [math.nan], first=4) == [True] and resumed.skipped == 3
    with pytest.raises(Stopped, match="step 5: expected finite"):
        _steps(resumed, [math.nan], first=5)


def test_a_rank_whose_output_is_bad_is_named_before_one_that_got_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    received = (True, "the gradient of 1.bias is the first that is not finite")
    monkeypatch.setattr(health, "gather", lambda said: [received, said])
    named = health.first_bad(model, lambda: model(torch.full((1, 2), math.nan)))
    assert named == "the output of 0 is the first that is not finite (rank 1)"
    assert health.first_bad(model, lambda: model(torch.ones(1, 2))).endswith(
        "1.bias is the first that is not finite (rank 0)"
    )
