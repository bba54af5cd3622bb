"""Muon: momentum, orthogonalised. Its block is the matrix; an expert of a stack is a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from optimizers.descent import descend
from optimizers.fields import check, exact, is_beta, is_count, is_rate, within
from optimizers.gram_newton_schulz import SAFE, gram_newton_schulz, pays
from optimizers.kernels.grouped_newton_schulz import Matrix, grouped_newton_schulz
from optimizers.kernels.momentum import momentum_
from optimizers.kronecker import kronecker_block
from optimizers.newton_schulz import COEFFICIENTS, newton_schulz

# Factor on the step of a logical matrix of m rows (outputs) and n columns (inputs).
ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    # An orthogonal matrix has an RMS of 1 / sqrt(max(m, n)). This makes it 0.2, about AdamW's, so that one learning
    # rate serves both: arXiv 2502.16982, section 2.2.
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    # kellerjordan.github.io/posts/muon, torch.optim.Muon.
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    # Outputs change alike at every width: arXiv 2310.17813, condition 1; "spectral_norm" of microsoft/dion.
    "spectral": lambda m, n: math.sqrt(m / n),
}


# Elements of the matrices of one launch: it holds two copies of them, and more of them make no GPU busier.
TOGETHER = 2**27


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Steps along the orthogonalised momentum of each matrix, with decoupled weight decay.

    ::

        prepare    M <- momentum M + (1 - momentum) G
                   U  = momentum M + (1 - momentum) G          with nesterov, else U = M
        block      O  = adjust_lr(m, n) newton_schulz(U)
        apply      W <- W (1 - lr weight_decay) - lr O

    The momentum is an average, as in torch.optim.Muon, not a sum, as in Moonlight and microsoft/dion: the direction is
    the same, the buffer ``1 / (1 - momentum)`` times smaller. Which of the two a checkpoint holds stands beside it:
    ``settles_at``, where a gradient of ones brings the momentum in the end, 1 for an average and
    ``1 / (1 - momentum)`` for a sum, which is converted when it is loaded. The direction has no scale, so nothing
    corrects a bias.

    A parameter may be several matrices. The members of a stack (E, m, n) always are. ``rows=128`` makes each 128 rows
    one: heads of a projection. ``split=(4096, 1024, 1024)`` makes one matrix of each of these numbers of rows: queries,
    keys and values, or gate and up, in one parameter. ``tile=512`` makes each 512 x 512 one, shorter at the edges
    (arXiv 2606.27216): another update, of which few bytes travel. Step sizes are of the matrices, not of the parameter.

    Args:
        lr: Learning rate, parameter units per step; a number, or a 0-d float32 tensor on the parameter's device.
        momentum: Decay of the momentum per step, in [0, 1); a number or a 0-d tensor.
        nesterov: Whether the gradient counts once more in what is orthogonalised.
        weight_decay: Fraction of the parameter removed per step and per unit of ``lr``, un-adjusted; a number or a 0-d
            tensor.
        coefficients: A key of ``newton_schulz.COEFFICIENTS``.
        adjust_lr: A key of ``ADJUST_LR``.
        ns_dtype: Dtype of the Newton-Schulz products, bfloat16 or float32.
        eps: A matrix whose ``U`` has no element above this counts as noise and fades to zero, in units of the gradient.
        wire_dtype: Payload and direction of every block are rounded to it, whether they travel or not: where a block
            lies must not show. bfloat16 or float32.
        rows: Rows of one matrix, a divisor of the parameter's; None: all.
        split: Rows of each matrix that lies in a parameter, from its first row to its last; None: one matrix.
        iteration: "standard", or "gram" to orthogonalise matrices that are more than twice as long as wide with small
            products in float16; see ``gram_newton_schulz``.
        tile: Rows and columns of one matrix at most; None: all.
        cautious: Decay only what the step makes smaller; see ``descend``.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    # lr, momentum, nesterov and weight_decay as in torch.optim.Muon.
    lr: float | Tensor = 1e-3
    momentum: float | Tensor = 0.95
    nesterov: bool = True
    weight_decay: float | Tensor = 0.1
    coefficients: str = "quintic"
    adjust_lr: str = "match_rms_adamw"
    ns_dtype: torch.dtype = torch.bfloat16
    eps: float = 1e-30
    wire_dtype: torch.dtype = torch.bfloat16
    rows: int | None = None
    split: Sequence[int] | None = None
    tile: int | None = None
    iteration: str = "standard"
    cautious: bool = False

    finest: ClassVar[int] = 1

    def __post_init__(self) -> None:
        dtypes = (torch.bfloat16, torch.float32)
        check(
            self,
            lr=(is_rate(self.lr), "a number >= 0 or a 0-d tensor"),
            momentum=(is_beta(self.momentum), "a number in [0, 1) or a 0-d tensor"),
            nesterov=(isinstance(self.nesterov, bool), "a bool"),
            weight_decay=(is_rate(self.weight_decay), "a number >= 0 or a 0-d tensor"),
            coefficients=(self.coefficients in COEFFICIENTS, f"one of {sorted(COEFFICIENTS)}"),
            adjust_lr=(self.adjust_lr in ADJUST_LR, f"one of {sorted(ADJUST_LR)}"),
            ns_dtype=(self.ns_dtype in dtypes, "torch.bfloat16 or torch.float32"),
            eps=(within(self.eps, math.ulp(0.0), math.inf), "a number > 0"),
            wire_dtype=(self.wire_dtype in dtypes, "torch.bfloat16 or torch.float32"),
            rows=(self.rows is None or is_count(self.rows, 1), "None or an integer >= 1"),
            split=(
                self.split is None or (self.rows is None and all(is_count(size, 1) for size in self.split)),
                "None, or integers >= 1 and no rows",
            ),
            tile=(
                self.tile is None or (self.rows is self.split is None and is_count(self.tile, 1)),
                "None, or an integer >= 1 and neither rows nor split",
            ),
            iteration=(
                self.iteration == "standard" or (self.iteration == "gram" and self.coefficients in SAFE),
                f"standard, or gram with coefficients of {SAFE}",
            ),
            cautious=(isinstance(self.cautious, bool), "a bool"),
        )

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what is orthogonalised together: a 2-D parameter or one member of a 3-D stack, all of it
        or ``rows`` of it.

        Args:
            shape: Of the whole parameter.

        Raises:
            ValueError: If the parameter is neither a matrix nor a stack of matrices, or its rows are others than those
                of ``rows`` or ``split``.
        """
        if len(shape) not in (2, 3):
            raise ValueError(f"Muon: expected a matrix (m, n) or a stack of them (E, m, n), got shape {tuple(shape)}")
        if self.rows is not None and shape[-2] % self.rows:
            raise ValueError(f"Muon: rows={self.rows} does not divide the {shape[-2]} rows of shape {tuple(shape)}")
        if self.split is not None and sum(self.split) != shape[-2]:
            raise ValueError(f"Muon: split={tuple(self.split)} is not the {shape[-2]} rows of shape {tuple(shape)}")
        if self.tile is not None:
            return kronecker_block(self, shape, self.tile)
        return (*(1 for _ in shape[:-2]), self.rows or shape[-2], shape[-1])

    def cost(self, block: tuple[int, ...]) -> float:
        """Returns the FLOPs of a block: a step is three products, two of them s x s x l and one s x s x s."""
        n, steps = block[-1], len(COEFFICIENTS[self.coefficients])
        total = 0.0
        for m in self.split or (block[-2],):
            s, l = min(m, n), max(m, n)  # noqa: E741
            total += steps * (4 * s * s * l + 2 * s**3)
        return total

    def parameter_state(self) -> dict[str, float]:
        """Returns the convention of the momentum, as where a gradient of ones brings it in the end."""
        return {"settles_at": 1.0}

    def loaded(self, state: dict[str, Tensor]) -> None:
        """Makes a momentum that was loaded an average, whatever convention it was written in."""
        state["momentum"].div_(state["settles_at"])
        state["settles_at"].fill_(1.0)

    def element_state(self) -> dict[str, torch.dtype]:
        """Returns the momentum, of the parameter's shape."""
        return {"momentum": torch.float32}

    def prepare(
        self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Updates the momentum in place; returns what is to be orthogonalised, (n,) in ``wire_dtype``, as a new tensor.

        Args:
            param: (n,) float32, a flat run; not read.
            grad: (n,) float32, left as it is.
            state: ``momentum``, (n,) float32.
            skip: None, or () float32: 1.0 writes nothing. The payload, and what comes of it, then means nothing.
        """
        out = torch.empty(grad.shape, dtype=self.wire_dtype, device=grad.device)
        momentum_(state["momentum"], grad, out, decay=exact(self.momentum), nesterov=self.nesterov, skip=skip)
        return (out,)

    def block(self, payloads: tuple[Tensor, ...], state: Mapping[str, Tensor]) -> Tensor:
        """Returns the directions, like the payload in shape and dtype; the step is ``lr`` times them.

        Args:
            payloads: One tensor, (B, m, n) or (B, 1, m, n) in ``wire_dtype`` with B >= 1; never written.
            state: Not read: Muon keeps nothing per block.
        """
        (payload,) = payloads
        matrices = payload.reshape(-1, *payload.shape[-2:])
        parts = matrices.split(list(self.split or matrices.shape[-2:-1]), dim=-2)
        found = [self._orthogonal(part) for part in parts]
        directions = torch.cat(found, dim=-2) if len(found) > 1 else found[0]
        return directions.to(self.wire_dtype).view(payload.shape)

    def blocks_in_place(
        self, payloads: tuple[Tensor, ...], places: tuple[tuple[int, tuple[int, ...]], ...], out: Tensor
    ) -> None:
        """Writes the directions of matrices of any shapes into ``out``, each where its payload lies; see ``block``.

        One launch for all of them up to ``TOGETHER`` elements, but for those that ``gram_newton_schulz`` takes, one by
        one.

        Args:
            payloads: One flat tensor, (n,) in ``wire_dtype``; never written.
            places: First element and shape, (m, n) or (1, m, n), of each block.
            out: (n,) in ``wire_dtype``, other memory; what is in no block is left as it is.
        """
        (flat,) = payloads
        together = []
        for start, (*_, m, n) in places:
            for rows in self.split or (m,):
                if self.iteration == "gram" and pays((rows, n)):
                    where = slice(start, start + rows * n)
                    out[where] = self._orthogonal(flat[where].view(1, rows, n)).view(-1)
                else:
                    together.append(Matrix(start, rows, n, ADJUST_LR[self.adjust_lr](rows, n)))
                start += rows * n
        options: dict[str, Any] = {"coefficients": self.coefficients, "dtype": self.ns_dtype, "eps": self.eps}
        for some in _portions(together):
            grouped_newton_schulz(flat, out, some, **options)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        """Directions of (B, m, n) matrices, in ``ns_dtype``."""
        gain = ADJUST_LR[self.adjust_lr](*matrices.shape[-2:])

        def orthogonal(x: Tensor) -> Tensor:
            if self.iteration == "gram" and pays(tuple(x.shape)):
                return gram_newton_schulz(x, self.coefficients, eps=self.eps, gain=gain)
            return newton_schulz(x, self.coefficients, dtype=self.ns_dtype, eps=self.eps, gain=gain)

        if matrices.device.type == "cpu":
            # One at a time: CPU libraries choose the kernel, hence the bits, by the size of the batch; no time is lost.
            found = [orthogonal(matrix) for matrix in matrices]
            return torch.stack(found) if len(found) > 1 else found[0][None]
        return orthogonal(matrices)

    def apply(self, param: Tensor, direction: Tensor, state: Mapping[str, Tensor], *, skip: Tensor | None) -> None:
        """Decays ``param`` and steps it along ``direction``, in place.

        Args:
            param: (n,) float32, a flat run.
            direction: (n,) in ``wire_dtype``.
            state: Not read.
            skip: None, or () float32: 1.0 writes nothing.
        """
        descend(param, direction, lr=self.lr, weight_decay=self.weight_decay, skip=skip, cautious=self.cautious)


def _portions(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, ...]]:
    """Cuts a list of matrices into stretches of at most ``TOGETHER`` elements, or of one matrix."""
    some: list[Matrix] = []
    size = 0
    for matrix in matrices:
        numel = matrix.rows * matrix.cols
        if some and size + numel > TOGETHER:
            yield tuple(some)
            some, size = [], 0
        some.append(matrix)
        size += numel
    if some:
        yield tuple(some)
