"""Mixture of experts: each token goes through the few feed-forward layers that a router chooses for it.

Four tokens, three experts, two per token::

    chosen            (4, 2)     [[0, 2], [2, 0], [2, 1], [0, 2]]
    tokens by expert  (8, d)     0 1 3 | 2 | 0 1 2 3         sorted, nothing padded, nothing dropped
    counts            (3,)       3       1   4               with them the sorted tokens are a jagged tensor
    experts           (8, d)     one product per expert and matrix, ``torch.nn.functional.grouped_mm``
    back              (4, 2, d)  in the order of ``chosen``, weighted and summed

Experts are stacks of matrices, ``mlp.experts.{gate,up,down}_proj.weight`` (experts, out, in): on disk each is a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from models.documents import Sequences, rows
from models.layers import SwiGLU


class Choice(NamedTuple):
    """What a router decides for n tokens."""

    weights: torch.Tensor  # (n, k) float32
    chosen: torch.Tensor  # (n, k) int64
    shares: torch.Tensor  # (n, experts) float32, how much of a token each expert would get; rows sum to 1


class Select(Protocol):
    """Turns logits into a choice; the functions below, with their options bound."""

    def __call__(self, logits: torch.Tensor, k: int, correction: torch.Tensor | None) -> Choice:
        """Returns the choice; ``logits`` (n, experts) float32, ``correction`` (experts,) float32."""


def softmax_top_k(logits: torch.Tensor, k: int, correction: torch.Tensor | None, *, renormalise: bool) -> Choice:
    """Returns the k largest shares of the softmax, summing to 1 if asked (Mixtral, Qwen3)."""
    shares = logits.softmax(dim=-1)
    weights, chosen = shares.topk(k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Choice(weights, chosen, shares)


def top_k_softmax(logits: torch.Tensor, k: int, correction: torch.Tensor | None) -> Choice:
    """Returns the softmax of the k largest logits (GPT-OSS)."""
    values, chosen = logits.topk(k, dim=-1)
    return Choice(values.softmax(dim=-1), chosen, logits.softmax(dim=-1))


def grouped_sigmoid(
    logits: torch.Tensor,
    k: int,
    correction: torch.Tensor | None,
    *,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
) -> Choice:
    """Returns the k largest sigmoids among the best groups of experts (DeepSeek-V3; arXiv 2412.19437, section 2.1.2).

    A group is as good as its two best experts together. The correction counts in choosing, not in the weights.
    """
    scores = logits.sigmoid()
    ranking = scores.detach() if correction is None else scores.detach() + correction
    if groups > 1:
        by_group = ranking.unflatten(-1, (groups, -1))
        best = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(dim=-1).topk(kept_groups, dim=-1).indices
        kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        ranking = by_group.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    chosen = ranking.topk(k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # as deepseek-ai's, for the same bits
    return Choice(weights * scale, chosen, scores / (scores.sum(dim=-1, keepdim=True) + 1e-20))


def sign_of_error(counted: torch.Tensor) -> torch.Tensor:
    """Returns 1 for experts with fewer tokens than the mean, -1 for those with more (arXiv 2408.15664, algorithm 1).

    Args:
        counted: (experts,) tokens of each.
    """
    return torch.sign(counted.float().mean() - counted.float())


def relative_error(counted: torch.Tensor) -> torch.Tensor:
    """Returns how far below the mean each expert's tokens are, over the mean: 1 for none, -1 for twice the mean.

    The variant ``b += u e`` of arXiv 2408.15664, section 4.3, whose error counts tokens: over the mean, the rate does
    not depend on the batch. Quick where the load is far off and still where it is even, where a sign keeps stepping.

    Args:
        counted: (experts,) tokens of each.
    """
    mean = counted.float().mean()
    return (mean - counted.float()) / mean.clamp(min=1)


class Router(nn.Module):
    """Scores every expert for every token, in fp32, and keeps count of what it chose.

    Args:
        hidden_size: Elements of a token.
        num_experts: Experts to choose from.
        k: Experts per token.
        select: What is done with the logits.
        bias: Whether the logits have a bias that is trained.
        correction_rate: Step of the correction that balances the experts, in units of a score; 0 leaves it as it is,
            None: there is none.
        correction_step: What of the counts is multiplied by it.
        aux_coef: Weight of the balancing loss of this layer, per token.
        force_balance: Deal the tokens out evenly instead, for measuring speed.
    """

    counted: torch.Tensor | None  # (experts,) int64, tokens that chose each expert since the last step
    e_score_correction_bias: torch.Tensor | None  # (experts,) float32, Hugging Face's name

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        k: int,
        select: Select,
        bias: bool = False,
        correction_rate: float | None = None,
        correction_step: Callable[[torch.Tensor], torch.Tensor] = sign_of_error,
        aux_coef: float = 0.0,
        force_balance: bool = False,
    ) -> None:
        super().__init__()
        self.k, self.select, self.aux_coef, self.force_balance = k, select, aux_coef, force_balance
        self.correction_rate, self.correction_step, self.counted = correction_rate, correction_step, None
        self.weight = nn.Parameter(torch.full((num_experts, hidden_size), math.nan))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        correction = None if correction_rate is None else torch.zeros(num_experts)
        self.register_buffer("e_score_correction_bias", correction)

    def forward(self, x: torch.Tensor, sequences: Sequences | None = None) -> tuple[Choice, torch.Tensor, torch.Tensor]:
        """Returns the choice, the tokens of each expert, and the balancing loss.

        Args:
            x: (n, hidden) floating point.
            sequences: Of the tokens, for the balancing loss. None: all are of one.

        Returns:
            The choice; (experts,) int64; () float32, summed over the tokens.
        """
        num_experts = self.weight.shape[0]
        logits = F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        correction = self.e_score_correction_bias
        choice = self.select(logits, self.k, None if correction is None else correction.float())
        if self.force_balance:
            choice = _dealt(choice, self.k)
        flat = choice.chosen.flatten()
        # Not bincount: it reads its largest input, for which a GPU would be waited for.
        counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        # Counted once: not again where activation checkpointing computes the layer in backward, nor in evaluation.
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.counted = counts if self.counted is None else self.counted + counts
        if not (self.aux_coef and len(x)):
            return choice, counts, logits.new_zeros(())
        return choice, counts, self._imbalance(choice, sequences or rows(1, len(x), x.device))

    def _imbalance(self, choice: Choice, sequences: Sequences) -> torch.Tensor:
        """Returns the balancing loss, () float32: ``E sum_e f_e P_e`` of each sequence, times its tokens.

        As arXiv 2101.03961, equations 4-6, with f_e as k tokens' share, as transformers has it; but of a sequence, as
        arXiv 2412.19437, equations 17-20, not of a batch: so it is the same however sequences are dealt over
        micro-batches and ranks.
        """
        num_experts = choice.shares.shape[1]
        at = (sequences.of_token[:, None] * num_experts + choice.chosen).flatten()
        counts = at.new_zeros(sequences.number * num_experts).scatter_add_(0, at, torch.ones_like(at))
        counts = counts.view(-1, num_experts)
        chosen = counts * (self.k / counts.sum(dim=1, keepdim=True).clamp(min=1))  # f_e
        # Token by token, so that nothing is summed in an order that a device chooses: f_e has no gradient.
        return (chosen[sequences.of_token] * choice.shares).sum() * (num_experts * self.aux_coef)

    @torch.no_grad()
    def correct(self, counted: torch.Tensor, *, skip: torch.Tensor | None = None) -> None:
        """Makes experts with fewer tokens than the mean easier to choose.

        Args:
            counted: (experts,) of the whole optimizer step, over all ranks.
            skip: () float32 on the device: 1.0 changes nothing.
        """
        if self.correction_rate and self.e_score_correction_bias is not None:
            step = self.correction_step(counted)
            step = step if skip is None else step.masked_fill(skip > 0, 0.0)
            self.e_score_correction_bias.add_(step, alpha=self.correction_rate)


def _dealt(choice: Choice, k: int) -> Choice:
    """The tokens dealt to the experts in turn; the weights are what the router gives those."""
    n, num_experts = choice.shares.shape
    chosen = (torch.arange(n * k, device=choice.chosen.device) % num_experts).view(n, k)
    weights = choice.shares.gather(-1, chosen)
    total = weights.sum(dim=-1, keepdim=True).clamp(min=1e-20)  # shares that nobody chose may all be zero
    return Choice(weights / total, chosen, choice.shares)


class StackedLinear(nn.Module):
    """One linear layer per expert; NaN until it is initialised."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_experts, out_features, in_features), math.nan))
        self.bias = nn.Parameter(torch.full((num_experts, out_features), math.nan)) if bias else None

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns each expert's rows times its matrix; (n, out), dtype of ``x``.

        Args:
            x: (n, in) floating point, sorted by expert.
            counts: (experts,) int64, rows of each expert; they sum to n.
        """
        out = grouped_linear(x, self.weight, counts)
        if self.bias is not None:
            out = out + self.bias.repeat_interleave(counts, dim=0, output_size=len(x))
        return out


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns ``x[i] @ weight[expert of i].T``; (n, out), dtype of ``x``.

    Args:
        x: (n, in) floating point, sorted by expert.
        weight: (experts, out, in) same dtype.
        counts: (experts,) int64.
    """
    if not len(x):  # no rows, perhaps no experts; the sum keeps the weight in the graph, with a gradient of zero
        return F.linear(x, weight.sum(dim=0))
    if all(size * x.element_size() % 16 == 0 for size in weight.shape[1:]):  # what grouped_mm wants of a row
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=counts.cumsum(0, dtype=torch.int32))
    rows = x.split(counts.tolist())
    return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows, weight.unbind(0), strict=True)])


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns ``silu(gate) * up`` (arXiv 2002.05202, equation 6)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """Returns GPT-OSS's variant (openai/gpt-oss, ``swiglu`` in gpt_oss/torch/model.py): clamped, and up counts from 1.

    Args:
        gate: (n, ffn) floating point.
        up: (n, ffn) same dtype.
        alpha: Steepness of the sigmoid.
        limit: The gate is clamped from above, up on both sides.
    """
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


class Experts(nn.Module):
    """A stack of gated feed-forward layers.

    Args:
        num_experts: Of this rank.
        hidden_size: Elements of a token.
        intermediate_size: Elements between an expert's projections.
        activation: Of gate and up.
        bias: Whether the projections have biases.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = swiglu,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = StackedLinear(num_experts, hidden_size, intermediate_size, bias=bias)
        self.up_proj = StackedLinear(num_experts, hidden_size, intermediate_size, bias=bias)
        self.down_proj = StackedLinear(num_experts, intermediate_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Returns each expert's output for its tokens; (n, hidden), dtype of ``x``.

        Args:
            x: (n, hidden) floating point, sorted by expert.
            counts: (experts,) int64, tokens of each expert.
        """
        hidden = self.activation(self.gate_proj(x, counts), self.up_proj(x, counts))
        out: torch.Tensor = self.down_proj(hidden, counts)
        return out


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Returns the permutation that undoes one, ``x[order][inverse(order)]`` being ``x``; (n,) int64.

    Args:
        order: (n,) int64.
    """
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def run_here(x: torch.Tensor, counts: torch.Tensor, experts: nn.Module) -> torch.Tensor:
    """Returns what the experts make of their tokens, all of them being on this rank."""
    out: torch.Tensor = experts(x, counts)
    return out


class MoE(nn.Module):
    """Router, experts, and the expert that every token goes through, if there is one.

    Args:
        router: Chooses.
        experts: Compute.
        shared: Computes for every token; None: there is none.
        router_name: Hugging Face's name of the router in this family.
    """

    run: Callable[[torch.Tensor, torch.Tensor, nn.Module], torch.Tensor]  # where the experts are; see ExpertParallel

    def __init__(
        self, router: Router, experts: Experts, *, shared: SwiGLU | None = None, router_name: str = "gate"
    ) -> None:
        super().__init__()
        self.router_name, self.run = router_name, run_here
        self.add_module(router_name, router)
        self.experts = experts
        self.shared_experts = shared

    @property
    def chooser(self) -> Router:
        """The router, whatever it is called."""
        return self.get_submodule(self.router_name)  # type: ignore[return-value]

    def forward(self, x: torch.Tensor, sequences: Sequences | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer's output, (b, s, hidden) in the dtype of ``x``, and the balancing loss, () float32.

        Args:
            x: (b, s, hidden) floating point.
            sequences: Of the b s tokens, for the balancing loss. None: all are of one.
        """
        flat = x.flatten(0, -2)
        choice, counts, aux = self.chooser(flat, sequences)
        k = choice.chosen.shape[-1]
        by_expert = choice.chosen.flatten().argsort(stable=True)
        out = self.run(flat[by_expert // k], counts, self.experts)
        each = out[inverse(by_expert)].unflatten(0, (-1, k))
        mixed = torch.bmm(choice.weights.to(x.dtype)[:, None], each).view(x.shape)
        if self.shared_experts is not None:
            mixed = mixed + self.shared_experts(x)
        return mixed, aux
