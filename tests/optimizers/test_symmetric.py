"""A symmetric result from half of its product is the whole product's."""

from __future__ import annotations

import pytest
import torch

from optimizers.symmetric import PANEL, symmetric_


@pytest.mark.parametrize("size", [1, PANEL, 2 * PANEL, 3 * PANEL + 5])
def test_half_of_the_product_is_all_of_it(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(2, size, 40, generator=generator)
    for rows in (g, torch.randn(2, 40, size, generator=generator).mT):  # also what lies in memory the other way round
        old = torch.eye(size).expand(2, size, size)
        out = symmetric_(old.clone(), rows, rows.mT, beta=0.5, alpha=2.0)
        expected = 0.5 * old.double() + 2 * rows.double() @ rows.double().mT
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        assert size < 2 * PANEL or torch.equal(out, out.mT)  # the mirror image, to the bit


def test_what_was_there_does_not_count_with_a_beta_of_zero() -> None:
    a = torch.randn(1, 256, 256)
    a = a + a.mT
    out = symmetric_(torch.full_like(a, torch.nan), a, a)
    torch.testing.assert_close(out, a @ a, rtol=1e-4, atol=1e-3)
