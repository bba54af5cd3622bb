from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optimizers import COEFFICIENTS, newton_schulz

NAMES = sorted(COEFFICIENTS)
SHAPES = [(64, 64), (64, 256), (256, 64), (48, 80)]


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_singular_values(values: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``u``, ``v`` and ``u diag(values) v`` in float64."""
    rows = len(values)
    u = torch.linalg.qr(gaussian(rows, rows, seed=1).double()).Q
    v = torch.linalg.qr(gaussian(columns, columns, seed=2).double()).Q[:rows]
    return u, v, u @ values.double().diag() @ v


def polynomial(values: Tensor, name: str) -> Tensor:
    """Returns where the steps of ``name`` move singular values, in float64."""
    values = values.double()
    for a, b, c in COEFFICIENTS[name]:
        values = a * values + b * values**3 + c * values**5
    return values


def exact(x: Tensor, name: str) -> Tensor:
    """Returns the Newton-Schulz of ``x`` by its singular value decomposition in float64."""
    u, values, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ polynomial(values / values.norm(), name).diag() @ v


def test_the_table_in_the_docstring_is_what_happens() -> None:
    # The function hides the module of the same name.
    module = importlib.import_module("optimizers.newton_schulz")
    lines = [line.strip() for line in (module.__doc__ or "").splitlines() if line.startswith("    ")]
    rows = [re.split(r"  +", line) for line in lines]
    table = {label: [float(number) for number in numbers] for label, *numbers in rows}
    values = torch.tensor(table.pop("singular values of x"))
    assert (values / values.norm()).tolist() == pytest.approx(table.pop("over the Frobenius norm"), abs=5.1e-4)
    u, v, x = with_singular_values(values, columns=8)
    for label, after in table.items():
        name, steps = label.removesuffix(" steps").split(", ")
        assert len(COEFFICIENTS[name]) == int(steps)
        measured = (u.T @ newton_schulz(x, name, dtype=torch.float32).double() @ v.T).diagonal()
        assert measured.tolist() == pytest.approx(after, abs=5.1e-4)
    assert {label.split(",")[0] for label in table} == set(COEFFICIENTS)


@pytest.mark.parametrize(
    ("name", "low", "high", "of_a_thousandth"),
    [
        ("simple", 0.682, 1.134, 0.47),
        ("quintic", 0.978, 1.032, 0.475),
        ("polar_express", 0.859, 1.141, 0.847),
        ("deepseek_v4", 1.0, 1.0005, 1.0),
    ],
)
def test_singular_values_land_in_the_published_band(name: str, low: float, high: float, of_a_thousandth: float) -> None:
    grid = polynomial(torch.logspace(-2, 0, 4001), name)
    assert float(grid.min()) == pytest.approx(low, abs=6e-4)
    assert float(grid.max()) == pytest.approx(high, abs=6e-4)
    assert float(polynomial(torch.tensor(1e-3), name)) == pytest.approx(of_a_thousandth, abs=1e-3)
    values = torch.logspace(-1.5, 0, 32)
    assert float((values / values.norm()).min()) > 1e-2
    u, v, x = with_singular_values(values, columns=40)
    moved = (u.T @ newton_schulz(x, name, dtype=torch.float32).double() @ v.T).diagonal()
    assert low - 1e-3 <= float(moved.min()) and float(moved.max()) <= high + 1e-3


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_the_polynomial_in_float64(
    name: str, shape: tuple[int, int], distance: Callable[[Tensor, Tensor], float]
) -> None:
    x = gaussian(*shape)
    assert distance(newton_schulz(x, name, dtype=torch.float32), exact(x, name)) <= 1e-5


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2**-8), (torch.float32, 1e-6)])
def test_the_number_of_threads_shows_in_the_rounding_of_sums_at_most(
    dtype: torch.dtype, most: float, distance: Callable[[Tensor, Tensor], float]
) -> None:
    """Ranks of the trainer have one thread each: see ``vescale.mesh.process_group``."""
    x, found = gaussian(96, 256), []
    for threads in (1, 8):
        torch.set_num_threads(threads)
        try:
            found.append(newton_schulz(x, dtype=dtype))
        finally:
            torch.set_num_threads(1)  # as tests/conftest.py has it
    assert distance(*found) <= most


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "most"), [("simple", 0.027), ("quintic", 0.015), ("polar_express", 0.046), ("deepseek_v4", 0.018)]
)
def test_bfloat16_stays_within_its_known_noise(
    name: str, most: float, shape: tuple[int, int], distance: Callable[[Tensor, Tensor], float]
) -> None:
    x = gaussian(*shape)
    noise = distance(newton_schulz(x, name), newton_schulz(x, name, dtype=torch.float32))
    assert 1e-3 < noise < most


@pytest.mark.parametrize("able", [False, True])
def test_a_bfloat16_step_is_the_one_torch_would_take(
    able: bool, distance: Callable[[Tensor, Tensor], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor with instructions for products of bfloat16 and on one without."""
    monkeypatch.setattr(importlib.import_module("optimizers.newton_schulz"), "multiplies_bf16", lambda: able)
    a, b, c = COEFFICIENTS["simple"][0]
    x = newton_schulz(gaussian(24, 40), [(1.0, 0.0, 0.0)])
    gram = x @ x.mT
    torchs = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    # Sums taken in another order may round to the neighbour, one part in 2^8.
    assert distance(newton_schulz(gaussian(24, 40), [(a, b, c)]), torchs) < 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_zeros_give_zeros(name: str, dtype: torch.dtype) -> None:
    result = newton_schulz(torch.zeros(3, 8, 4), name, dtype=dtype)
    assert result.dtype == dtype and torch.equal(result, torch.zeros(3, 8, 4, dtype=dtype))


def test_a_rank_one_matrix_keeps_its_one_direction() -> None:
    x = torch.outer(gaussian(24, seed=1), gaussian(16, seed=2))
    u, values, _ = torch.linalg.svd(newton_schulz(x, dtype=torch.float32))
    assert 0.97 < float(values[0]) < 1.04 and float(values[1]) < 1e-3
    assert float((u[:, 0] @ x).norm() / x.norm()) == pytest.approx(1.0, abs=1e-6)
    assert 0.97 < float(torch.linalg.matrix_norm(newton_schulz(x).float(), 2)) < 1.04


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (2, 0, 4)], ids=str)
def test_empty_in_empty_out(shape: tuple[int, ...]) -> None:
    assert newton_schulz(torch.empty(shape)).shape == shape


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_shows_in_all_of_its_matrix_and_in_no_other(bad: float) -> None:
    x = gaussian(3, 6, 8)
    x[1, 2, 3] = bad
    result = newton_schulz(x)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [-60, -17, -1, 1, 13, 60])
def test_a_power_of_two_changes_no_bit(power: int, dtype: torch.dtype) -> None:
    x = gaussian(24, 40)
    assert torch.equal(newton_schulz(x * 2.0**power, dtype=dtype), newton_schulz(x, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1e-3, 1e12, 1e20])
def test_gradients_of_any_scale_give_the_same_matrix(scale: float, distance: Callable[[Tensor, Tensor], float]) -> None:
    x = gaussian(24, 40)
    assert distance(newton_schulz(x * scale, dtype=torch.float32), newton_schulz(x, dtype=torch.float32)) < 1e-5


def test_a_matrix_below_eps_fades_to_zero() -> None:
    x = gaussian(24, 40)
    assert torch.equal(newton_schulz(x, eps=1.0), newton_schulz(x))
    norms = [float(newton_schulz(x, eps=eps, dtype=torch.float32).norm()) for eps in (1e5, 1e7, 1e9)]
    assert norms[0] / norms[1] == pytest.approx(100, rel=0.01) and norms[1] / norms[2] == pytest.approx(100, rel=0.01)


def test_the_callers_tensor_is_left_alone() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = gaussian(24, 16).to(dtype)
        before = x.clone()
        result = newton_schulz(x, dtype=dtype)
        result.zero_()
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_transpose_gives_the_transpose(dtype: torch.dtype) -> None:
    x = gaussian(24, 40)
    tall = newton_schulz(x.mT, dtype=dtype)
    assert tall.is_contiguous() and torch.equal(tall.mT, newton_schulz(x, dtype=dtype))
    assert torch.equal(newton_schulz(x.mT.contiguous(), dtype=dtype), tall)


def test_a_batch_is_its_matrices(distance: Callable[[Tensor, Tensor], float]) -> None:
    x = gaussian(5, 24, 16)
    alone = torch.stack([newton_schulz(matrix, dtype=torch.float32) for matrix in x])
    assert distance(newton_schulz(x, dtype=torch.float32), alone) < 1e-5


def test_gain_scales_without_rounding_once_more(distance: Callable[[Tensor, Tensor], float]) -> None:
    x = gaussian(24, 40)
    assert torch.equal(newton_schulz(x, gain=4.0), 4 * newton_schulz(x))
    plain, gained = (newton_schulz(x, gain=gain, dtype=torch.float32) for gain in (1.0, 0.3))
    assert distance(gained, 0.3 * plain) < 1e-6


def test_rows_may_be_given_instead_of_a_name() -> None:
    x = gaussian(24, 40)
    assert torch.equal(newton_schulz(x, COEFFICIENTS["simple"]), newton_schulz(x, "simple"))
    identity = newton_schulz(x, [(1.0, 0.0, 0.0)], dtype=torch.float32)
    assert torch.allclose(identity, x / x.norm(), atol=1e-7)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'deepseek_v4', 'polar_express', 'quintic', 'simple'.*got 'quintics'"):
        newton_schulz(torch.zeros(2, 2), "quintics")


@pytest.mark.parametrize("shape", [(), (4,), (2, 2, 2, 2)], ids=str)
def test_anything_but_matrices_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected shape \(m, n\) or \(B, m, n\), got"):
        newton_schulz(torch.zeros(shape))


def test_traced_by_torch_compile_it_gives_the_same_matrix() -> None:
    """Without generated code, which on a CPU takes a compiler; KellerJordan/modded-nanogpt #268 had NaN."""
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(newton_schulz, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, dtype=torch.float32), newton_schulz(x, dtype=torch.float32))
