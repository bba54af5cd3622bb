"""Routers choose, count once, and balance; experts are products, whatever the numbers of tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from models import DeepseekV3Config, MixtralConfig
from models.moe import (
    Experts,
    MoE,
    Router,
    grouped_linear,
    grouped_sigmoid,
    relative_error,
    sign_of_error,
    softmax_top_k,
    top_k_softmax,
)

MIXTRAL = MixtralConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=16, num_local_experts=4, initializer_range=0.2, router_aux_loss_coef=0.3,
    max_position_embeddings=32,
)  # fmt: skip
DEEPSEEK = DeepseekV3Config(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
    moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, n_group=1,
    topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    initializer_range=0.2, max_position_embeddings=32, router_bias_rate=0.25,
)  # fmt: skip


def built(config: Any) -> Any:
    model = config.build()
    torch.manual_seed(0)
    model.init_weights()
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 61, (2, 17))
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("sizes", [(16, 8), (15, 8), (16, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 9, 0), (0, 0, 0, 0), ()])
def test_grouped_products_are_products(sizes: tuple[int, int], dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(sum(counts), sizes[1]).to(dtype).requires_grad_()
    weight = torch.randn(len(counts), *sizes).to(dtype).requires_grad_()
    got = grouped_linear(x, weight, torch.tensor(counts, dtype=torch.int64))
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    want = torch.einsum("ni,noi->no", x, weight[experts])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    torch.testing.assert_close(got, want, **close)
    pull = torch.randn(got.shape).to(dtype)
    grads = torch.autograd.grad(got, (x, weight), pull)
    torch.testing.assert_close(grads, torch.autograd.grad(want, (x, weight), pull), **close)


SELECTS: dict[str, Any] = {
    "softmax": partial(softmax_top_k, renormalise=True),
    "top-k softmax": top_k_softmax,
    "sigmoid": partial(grouped_sigmoid, groups=1, kept_groups=1, renormalise=True, scale=1.0),
}


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (3, 3), (5, 2), (5, 1)])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_a_mixture_is_the_weighted_sum_of_its_experts(tokens: int, experts: int, k: int, select: str) -> None:
    """One expert, every expert, one token and none included: each expert computed for each token, and weighted."""
    torch.manual_seed(0)
    router = Router(16, experts, k=k, select=SELECTS[select], aux_coef=1.0)
    moe = MoE(router, Experts(experts, 16, 8))
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, tokens, 16, requires_grad=True)
    out, aux = moe(x)
    scores = F.linear(x[0], router.weight)
    scores = scores.sigmoid() if select == "sigmoid" else scores.exp()
    cut = scores.topk(k, dim=1).values[:, -1:] if tokens else scores
    weights = scores.where(scores >= cut, 0.0)
    weights = weights / weights.sum(dim=1, keepdim=True)
    gate, up, down = (getattr(moe.experts, f"{name}_proj").weight for name in ("gate", "up", "down"))
    hidden = F.silu(torch.einsum("ni,eoi->neo", x[0], gate)) * torch.einsum("ni,eoi->neo", x[0], up)
    want = torch.einsum("neo,edo,ne->nd", hidden, down, weights)[None]
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(aux) and router.counted.sum() == tokens * k
    pull, inputs = torch.randn(out.shape), (x, *moe.parameters())
    got = torch.autograd.grad(out, inputs, pull, allow_unused=not tokens)
    torch.testing.assert_close(got, torch.autograd.grad(want, inputs, pull), rtol=1e-5, atol=1e-5)


def test_a_dense_model_has_no_experts_to_deal() -> None:
    model = built(replace(DEEPSEEK, first_k_dense_replace=3))
    with pytest.raises(ValueError, match="DeepseekV3Config has no experts to deal over 2 ranks: use ep=1"):
        model.deal_experts(SimpleNamespace(size=lambda: 2))


def test_the_balancing_loss_is_transformers_in_the_gradient_and_not_in_the_value() -> None:
    model = built(MIXTRAL)
    ids, labels = batch()
    loss = model(ids, labels)
    logits: list[torch.Tensor] = []
    router = model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, args, _: logits.append(F.linear(args[0], module.weight)))
    plain = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, plain)
    # A mean per token there, and of the batch; this loss is a sum over tokens, of each sequence.
    rows = logits[0].view(*ids.shape, -1)
    aux = sum(load_balancing_loss_func((row,), 4, 2) for row in rows) * ids.shape[1]
    want = torch.autograd.grad(plain + 0.3 * aux, list(model.parameters()))
    got = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_tokens_are_counted_once_per_step_and_not_in_evaluation(checkpoint: Any) -> None:
    model = built(replace(DEEPSEEK, checkpoint=checkpoint))
    ids, labels = batch()
    assert model.finish_step() == {}
    for _ in range(2):  # micro-batches
        model(ids, labels).backward()
    with torch.no_grad():
        model(ids, labels)
    routers = [layer.mlp.gate for layer in model.model.layers[1:]]
    counted = [router.counted for router in routers]
    assert [int(count.sum()) for count in counted] == [2 * 2 * ids.numel()] * 2
    loads = model.finish_step()
    assert loads.keys() == {"expert_load/model.layers.1.mlp", "expert_load/model.layers.2.mlp"}
    for router, count, load in zip(routers, counted, loads.values(), strict=True):
        mean = count.float().mean()
        torch.testing.assert_close(load, count.max() / mean)
        torch.testing.assert_close(router.e_score_correction_bias, 0.25 * torch.sign(mean - count))
    assert model.finish_step() == {}


def test_a_step_that_was_left_out_moves_no_correction() -> None:
    model = built(DEEPSEEK)
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.copy_(torch.randn(8))
    before = router.e_score_correction_bias.clone()
    model(*batch()).backward()
    assert model.finish_step(skip=torch.tensor(1.0)) and model.finish_step() == {}
    assert torch.equal(router.e_score_correction_bias, before)
    model(*batch()).backward()
    model.finish_step(skip=torch.tensor(0.0))
    assert not torch.equal(router.e_score_correction_bias, before)


def test_correction_changes_the_choice_and_not_the_weights() -> None:
    model = built(DEEPSEEK)
    router = model.model.layers[1].mlp.gate
    x = torch.randn(20, 32)
    before, _, _ = router(x)
    router.e_score_correction_bias[5] = 10.0
    after, counts, _ = router(x)
    assert (before.chosen != 5).any(dim=1).any() and counts[5] == 20
    scores = F.linear(x, router.weight).sigmoid().gather(1, after.chosen)
    torch.testing.assert_close(after.weights, 2.5 * scores / scores.sum(dim=1, keepdim=True))


def test_errors_are_signs_or_relative_to_the_mean() -> None:
    counted = torch.tensor([0, 4, 8, 4])
    assert sign_of_error(counted).tolist() == [1, 0, -1, 0] and relative_error(counted).tolist() == [1, 0, -1, 0]
    counted = torch.tensor([3, 4, 16, 1])
    assert sign_of_error(counted).tolist() == [1, 1, -1, 1]
    torch.testing.assert_close(relative_error(counted), torch.tensor([0.5, 1 / 3, -10 / 6, 5 / 6]))
    assert relative_error(torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]
    steps = {
        replace(DEEPSEEK, router_bias_step=kind).feed_forward(1).gate.correction_step for kind in ("sign", "error")
    }
    assert steps == {sign_of_error, relative_error}
    with pytest.raises(ValueError, match="router_bias_step: expected 'sign' or 'error', got 'both'"):
        replace(DEEPSEEK, router_bias_step="both")


@pytest.mark.parametrize(("step", "rate", "most"), [(sign_of_error, 0.01, 1.5), (relative_error, 0.05, 1.1)])
def test_correction_balances_a_router_that_prefers_one_expert(step: Any, rate: float, most: float) -> None:
    torch.manual_seed(0)
    select = built(DEEPSEEK).model.layers[1].mlp.gate.select
    router = Router(16, 8, k=2, select=select, correction_rate=rate, correction_step=step)
    with torch.no_grad():
        router.weight.normal_(std=0.3)
        router.weight[3] += 0.5
    x = torch.randn(400, 16) + 0.5
    loads = []
    for _ in range(60):
        _, counts, _ = router(x)
        router.correct(counts)
        loads.append(float(counts.max() / counts.float().mean()))
    assert loads[0] > 3 and max(loads[-10:]) < most


def test_an_error_follows_a_router_that_moves_where_a_sign_overshoots() -> None:
    """Training moves a router by a like step each time; the load of the busiest expert over the mean, once settled."""
    worst = {}
    for step, rate in ((relative_error, 0.02), (sign_of_error, 0.05)):
        torch.manual_seed(0)
        select = partial(grouped_sigmoid, groups=1, kept_groups=1, renormalise=True, scale=1.0)
        router = Router(16, 16, k=2, select=select, correction_rate=rate, correction_step=step)
        torch.nn.init.normal_(router.weight, std=0.1)
        x, motion, loads = torch.randn(512, 16) + 0.5, torch.zeros(16, 16), []
        for _ in range(120):
            motion = 0.9 * motion + 0.1 * torch.randn(16, 16)
            with torch.no_grad():
                router.weight += 0.03 * motion / motion.abs().mean()
            _, counts, _ = router(x)
            router.correct(counts)
            loads.append(float(counts.max() / counts.float().mean()))
        worst[step] = max(loads[60:])
    assert worst[relative_error] < 1.6 and worst[sign_of_error] > 1.9


def test_forced_balance_deals_tokens_evenly() -> None:
    select = partial(softmax_top_k, renormalise=True)
    router = Router(16, 8, k=3, select=select, force_balance=True)
    torch.nn.init.normal_(router.weight)
    choice, counts, _ = router(torch.randn(16, 16))
    assert counts.tolist() == [6] * 8
    assert all(len(set(row)) == 3 for row in choice.chosen.tolist())
    torch.testing.assert_close(choice.weights.sum(dim=1), torch.ones(16))
    torch.nn.init.zeros_(router.weight).detach()[:2] = 1e4  # all of a token for two experts, nothing for the others
    choice, _, _ = router(torch.ones(8, 16))
    assert torch.isfinite(choice.weights).all()


def test_a_router_computes_in_fp32_whatever_the_tokens_are() -> None:
    router = built(MIXTRAL).model.layers[0].mlp.gate.bfloat16()
    x = torch.randn(9, 32).bfloat16()
    choice, _, _ = router(x)
    want = F.linear(x.float(), router.weight.float()).softmax(-1).topk(2).values
    assert choice.weights.dtype == torch.float32
    torch.testing.assert_close(choice.weights, want / want.sum(dim=1, keepdim=True), rtol=1e-6, atol=1e-7)
