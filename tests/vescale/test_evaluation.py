"""What the loss of a look is when a set has nothing to count, or no share in the mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from vescale import evaluation
from vescale.data import Batch, Samples
from vescale.evaluation import Evaluation


class One:
    """Reads all of a set as one batch, as the feed of a single rank does."""

    def validation(self, samples: Samples, most: int | None) -> list[Batch]:
        return [samples.read(0, samples.num_samples)]


def _samples(*ids: int) -> Samples:
    return Samples(tokens=np.array(ids, np.uint16), seq_len=2, seed=0, ignored=7)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Evaluation:
    """Of a model whose loss of a token is its id."""

    def model(input_ids: Any, labels: Any) -> torch.Tensor:
        return labels.clamp(min=0).sum().float()

    monkeypatch.setattr(evaluation, "sum_over_ranks", lambda value, device: value)
    options: dict[str, Any] = {"device": torch.device("cpu"), "sequences": None, "in_order": False}
    return Evaluation(model, One(), **options)  # type: ignore[arg-type]


def test_the_mean_is_of_the_sets_that_have_a_share(looks: Evaluation) -> None:
    some, others, nothing = _samples(1, 2, 4), _samples(1, 5, 5), _samples(7, 7, 7)
    found = looks.losses({"": (some, 0.75), "b": (others, 0.25), "c": (nothing, 0.0)})
    assert math.isnan(found.pop("validation_loss/c"))
    assert found == {"validation_loss": 0.75 * 3 + 0.25 * 5, "validation_loss/b": 5.0}
