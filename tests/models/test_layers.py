"""The chunked loss is the plain one, in its value, in its gradients and not in its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.layers import Head, RMSNorm, linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 37, 16, 211


class Shapes(TorchDispatchMode):
    """Collects the shape of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)}
        return out


def inputs(dtype: torch.dtype = torch.float32, ignored: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN) / 2).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,)).masked_fill(torch.rand(TOKENS) < ignored, -100)
    return hidden, weight, labels


def plain(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")


def relative(got: torch.Tensor | None, want: torch.Tensor | None) -> float:
    assert got is not None and want is not None
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("chunk_size", [1, 5, 12, TOKENS, 1000])
def test_loss_and_gradients_equal_cross_entropy_for_every_chunk_size(chunk_size: int) -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
    got = torch.autograd.grad(loss / 7, (hidden, weight))
    want_loss = plain(hidden, weight, labels)
    want = torch.autograd.grad(want_loss / 7, (hidden, weight))
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss, want_loss)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size), want_loss)


@pytest.mark.parametrize("chunk_size", [5, TOKENS])
def test_bf16_gradients_are_as_near_to_the_truth_as_cross_entropys(chunk_size: int) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    # 1/3 has no bf16: a scale rounded to bf16 would show as a common error.
    truth = torch.autograd.grad(F.cross_entropy(F.linear(*exact), labels, reduction="sum") / 3, exact)
    got = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size) / 3, (hidden, weight))
    peer = torch.autograd.grad(plain(hidden, weight, labels) / 3, (hidden, weight))
    for mine, torchs, true in zip(got, peer, truth, strict=True):
        assert mine.dtype == torch.bfloat16
        # One rounding for the products, one for the scale; each further chunk of the 8 adds one to the weight's.
        assert relative(mine, true) < 2 * relative(torchs, true)


def test_the_scale_of_backward_is_not_rounded_to_bf16() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    scale = 1 + 3 * 2**-10  # rounds to 1 in bf16
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=8)
    (whole,) = torch.autograd.grad(loss, weight)
    (scaled,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_size=8) * scale, weight)
    assert torch.equal(scaled, (whole.float() * scale).bfloat16())
    assert not torch.equal(scaled, whole)


def test_ignored_tokens_add_nothing_even_if_they_are_not_finite() -> None:
    hidden, weight, labels = inputs()
    poisoned = hidden.detach().clone()
    poisoned[labels == -100] = torch.nan
    poisoned.requires_grad_()
    loss = linear_cross_entropy(poisoned, weight, labels, chunk_size=8)
    got = torch.autograd.grad(loss, (poisoned, weight))
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, chunk_size=8), (hidden, weight))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_a_batch_of_ignored_tokens_has_no_loss_and_no_gradient() -> None:
    hidden, weight, labels = inputs(ignored=1.0)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=8)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_wanted_gradients_are_computed(frozen: str) -> None:
    hidden, weight, labels = inputs()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with Shapes() as shapes:
        linear_cross_entropy(hidden, weight, labels, chunk_size=8).backward()
    free, stuck = (weight, hidden) if frozen == "hidden" else (hidden, weight)
    want = torch.autograd.grad(plain(hidden, weight, labels), free)
    assert stuck.grad is None and free.grad is not None
    torch.testing.assert_close(free.grad, want[0], rtol=1e-5, atol=1e-6)
    assert (VOCAB, HIDDEN) in shapes.seen or frozen == "weight"
    assert (TOKENS, HIDDEN) in shapes.seen or frozen == "hidden"


@pytest.mark.parametrize("wanted", [True, False])
def test_logits_never_exist_for_more_tokens_than_a_chunk(wanted: bool) -> None:
    hidden, weight, labels = inputs()
    chunk_size = 12
    with Shapes() as shapes, torch.set_grad_enabled(wanted):
        loss = linear_cross_entropy(hidden, weight, labels, chunk_size=chunk_size)
        if wanted:
            loss.backward()
    rows = {shape[0] for shape in shapes.seen if len(shape) == 2 and shape[1] == VOCAB and shape[0] != HIDDEN}
    assert rows == {chunk_size, TOKENS % chunk_size}
    assert max(torch.Size(shape).numel() for shape in shapes.seen) < TOKENS * VOCAB


def test_backward_does_not_read_the_weight() -> None:
    hidden, weight, labels = inputs()
    want = torch.autograd.grad(plain(hidden, weight, labels), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=8)
    weight.data.fill_(torch.nan)  # as if its storage had been freed for another unit's
    got = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_weights_gradient_is_handed_over_without_a_copy() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=TOKENS)
    with Shapes() as shapes:
        loss.backward()
        assert weight.grad is not None
    # ones_like and its view, and detach, which is how autograd takes a gradient over; mul_ in place.
    assert shapes.seen == {(), (1, 1), (TOKENS, HIDDEN), (VOCAB, HIDDEN)}
    assert weight.grad.untyped_storage().nbytes() == weight.nbytes


def test_a_second_backward_raises_rather_than_scaling_twice() -> None:
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_size=8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_label_outside_the_vocabulary_fails() -> None:
    hidden, weight, labels = inputs()
    labels[3] = -1
    with pytest.raises((IndexError, RuntimeError)):
        linear_cross_entropy(hidden, weight, labels, chunk_size=8)


def test_head_gives_logits_without_labels_and_their_loss_with() -> None:
    torch.manual_seed(0)
    head = Head(HIDDEN, VOCAB, chunk_size=5)
    torch.nn.init.normal_(head.weight)
    hidden, labels = torch.randn(2, 9, HIDDEN), torch.randint(0, VOCAB, (2, 9))
    logits = head(hidden)
    assert logits.shape == (2, 9, VOCAB)
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(head(hidden, labels), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rmsnorm_computes_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = RMSNorm(HIDDEN, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = (100 * torch.randn(7, HIDDEN)).to(dtype)
    wide = x.float()
    want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    torch.testing.assert_close(norm(x), want.to(dtype), rtol=1e-6 if dtype == torch.float32 else 2**-8, atol=0)
