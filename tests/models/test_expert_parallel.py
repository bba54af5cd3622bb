"""Experts dealt over ranks are the experts of one process, wherever the tokens want to go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from models import DeepseekV3Config, Qwen3MoeConfig, hf
from models.decoder import CausalLM, CausalLMConfig
from models.expert_parallel import ExpertParallel, held
from optimizers import SOAP, Adam8bit, AdamW, Muon
from vescale import Optimizer, Rules, checkpoint, clip_grad_norm_, collectives, fully_shard
from vescale.mesh import make_expert_mesh
from vescale.saver import Saver

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
QWEN = Qwen3MoeConfig(
    **SIZES, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16,
    router_aux_loss_coef=0.5,
)  # fmt: skip
DEEPSEEK = DeepseekV3Config(
    **SIZES, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
    first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
    qk_rope_head_dim=4, v_head_dim=8, router_aux_loss_coef=0.5, checkpoint="full",
)  # fmt: skip
RULES = Rules(
    matrices=("*_proj.weight", Muon(lr=0.02, ns_dtype=torch.float32, wire_dtype=torch.float32)),
    rest=("*", AdamW(lr=0.01)),
)
MATRICES = Rules(matrices=("*_proj.weight", RULES.groups["matrices"].rule))
TOKENS = 12  # sequences of 5: rows that nothing divides


# What the routers' weights are filled with: every token to the same experts, or as they like.
CASES: dict[str, tuple[CausalLMConfig, float | None]] = {
    "spread": (QWEN, None),
    "all to two experts": (QWEN, 0.0),
    "one each, three experts": (replace(QWEN, num_experts=3, num_experts_per_tok=1), None),
    "all to one expert": (replace(QWEN, num_experts=5, num_experts_per_tok=1), 0.0),
    "latent, balanced, recomputed": (DEEPSEEK, None),
}


def fill(model: CausalLM, router: float | None) -> None:
    torch.manual_seed(3)
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if router is not None and name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.fill_(router)


def data(rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(7)
    rows = torch.randint(0, 61, (TOKENS, 6))
    share = TOKENS // world
    return rows[rank * share : (rank + 1) * share]


def steps(model: CausalLM, optimizer: Optimizer, ids: torch.Tensor) -> dict[str, Any]:
    """Two optimizer steps; what came of them, whole and under plain names."""
    out: dict[str, Any] = {"logits": model(ids[:, :-1]).detach()}
    for _ in range(2):
        loss = model(ids[:, :-1], ids[:, 1:]) / (5 * TOKENS)
        loss.backward()
        out["grads"] = {name: hf.whole(p.grad, held(p)).clone() for name, p in model.named_parameters()}
        out["norm"] = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        out["loads"] = model.finish_step()
    out["loss"] = loss.detach()
    out["weights"] = {name: hf.whole(tensor) for name, tensor in hf.named_tensors(model)}
    return out


def one_process(config: CausalLMConfig, router: float | None) -> dict[str, Any]:
    model = config.build()
    fill(model, router)
    return steps(model, Optimizer(model.named_parameters(), RULES), data(0, 1))


def built(config: CausalLMConfig, ep: int, rules: Rules = RULES) -> tuple[CausalLM, Optimizer]:
    """A model on all ranks, its experts dealt over ``ep`` of them, and its optimizer."""
    world = dist.get_world_size()
    mesh, experts = init_device_mesh("cpu", (world,)), make_expert_mesh(torch.device("cpu"), ep)
    with torch.device("meta"):
        model = config.build()
    model.deal_experts(experts["ep"].get_group())
    for module in model.expert_units():
        fully_shard(module, mesh=experts["efsdp"], block_of=rules.block_of)
    for module in (*model.units(), model):
        fully_shard(module, mesh=mesh, block_of=rules.block_of)
    model.to_empty(device="cpu")
    fill(model, None)
    model.set_gradient_divide_factor(1.0, recurse=True)
    return model, Optimizer(model.named_parameters(), rules)


def dealt(config: CausalLMConfig, router: float | None, ep: int) -> dict[str, Any]:
    model, optimizer = built(config, ep)
    fill(model, router)
    return steps(model, optimizer, data(dist.get_rank(), dist.get_world_size()))


RANKS = [(name, world, ep) for world, ep in ((2, 2), (4, 2), (4, 4)) for name in CASES]


@pytest.mark.parametrize(("name", "world", "ep"), [*RANKS, ("spread", 3, 3)])
def test_outputs_gradients_and_updates_are_those_of_one_process(name: str, world: int, ep: int, pool: Any) -> None:
    config, router = CASES[name]
    want = one_process(config, router)
    results = pool(world).run(dealt, config, router, ep)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(torch.cat([result["logits"] for result in results]), want["logits"], **close)
    torch.testing.assert_close(sum(result["loss"] for result in results), want["loss"], **close)
    for result in results:
        for key in ("grads", "norm", "weights", "loads"):
            torch.testing.assert_close(result[key], want[key], **close)


def layer_with_rows(rows: tuple[int, ...], ep: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and summed gradients of one layer whose ranks have so many tokens each; whole, or its experts dealt."""
    moe = QWEN.feed_forward(0)
    torch.manual_seed(0)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, pull = torch.randn(2, 1, sum(rows), 32)
    if ep:
        parallel = ExpertParallel(dist.group.WORLD, QWEN.num_experts)
        parallel.keep(moe.experts)
        moe.run = parallel
        x, pull = (tensor.split(rows, dim=1)[dist.get_rank()] for tensor in (x, pull))
    out, _ = moe(x)
    out.backward(pull)
    grads = {name: hf.whole(p.grad, held(p)) for name, p in moe.named_parameters()}
    if ep:
        dist.all_reduce(grads["gate.weight"])
    return out.detach(), grads


@pytest.mark.parametrize("rows", [(7, 0), (0, 1)])
def test_a_rank_may_have_no_tokens(rows: tuple[int, ...], pool: Any) -> None:
    want, want_grads = layer_with_rows(rows, False)
    results = pool(2).run(layer_with_rows, rows, True)
    torch.testing.assert_close(torch.cat([out for out, _ in results], dim=1), want, rtol=1e-5, atol=1e-5)
    for _, grads in results:
        torch.testing.assert_close(grads, want_grads, rtol=1e-5, atol=1e-5)


def refused_mesh(ep: int) -> str:
    with pytest.raises(ValueError) as refused:
        make_expert_mesh(torch.device("cpu"), ep)
    return str(refused.value)


def test_experts_are_dealt_over_a_divisor_of_the_ranks(pool: Any) -> None:
    assert pool(3).run(refused_mesh, 2) == ["ep: expected a divisor of the number of ranks, 3, got 2"] * 3


def joined(state: torch.Tensor, part: Any) -> torch.Tensor:
    """State of any number of rows, from the shards of it and then from those who have the other experts."""
    local = state.full_tensor() if hasattr(state, "full_tensor") else state
    if part is None:
        return local
    parts: list[Any] = [None] * dist.get_world_size(part.group)
    dist.all_gather_object(parts, local, group=part.group)
    return torch.cat(parts)


def everything(model: CausalLM, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Parameters, buffers and state, whole."""
    parameters = dict(model.named_parameters())
    of = {name: held(parameters[name.rpartition(".")[0]]) for name in optimizer.named_state()}
    state = {name: joined(value, of[name]) for name, value in optimizer.named_state().items() if value.ndim}
    return state | {name: hf.whole(tensor) for name, tensor in hf.named_tensors(model)}


def saved(folder: str, config: CausalLMConfig, ep: int, rule: Any) -> dict[str, torch.Tensor]:
    """Steps with experts dealt, and saves."""
    model, optimizer = built(config, ep, stepped_by(rule))
    ids = data(dist.get_rank(), dist.get_world_size())
    (model(ids[:, :-1], ids[:, 1:]) / (5 * TOKENS)).backward()
    optimizer.step()
    saver = Saver(Path(folder), keep=1)
    saver.save(1, tensors=checkpoint.tensors(model, optimizer), extra={})
    saver.wait()
    dist.barrier()
    return everything(model, optimizer)


def loaded(folder: str, config: CausalLMConfig, ep: int, rule: Any) -> dict[str, torch.Tensor]:
    model, optimizer = built(config, ep, stepped_by(rule))
    checkpoint.load(Path(folder) / "step_00000001", model=model, optimizer=optimizer)
    return everything(model, optimizer)


def stepped_by(rule: Any) -> Rules:
    return Rules(matrices=("*_proj.weight", rule), rest=("*", AdamW(lr=0.01)))


SOME = replace(QWEN, num_experts=3)  # rank 0 of four has none
# Ranks and ep that save, and that load. Adam8bit takes stacks of 1536 elements, of which a rank may have 0 or 512.
SAVED: dict[str, tuple[CausalLMConfig, Any, tuple[int, int], tuple[int, int]]] = {
    "muon, dealt": (QWEN, RULES.groups["matrices"].rule, (2, 2), (2, 1)),
    "muon, whole": (QWEN, RULES.groups["matrices"].rule, (2, 1), (2, 2)),
    "soap, a rank without experts": (SOME, SOAP(lr=0.01, block_size=8), (4, 4), (2, 1)),
    "soap, loaded by a rank without experts": (SOME, SOAP(lr=0.01, block_size=8), (2, 1), (4, 4)),
    "adam8bit, a rank without experts": (SOME, Adam8bit(lr=0.01, min_numel=1500), (4, 4), (2, 2)),
}


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_does_not_depend_on_how_experts_are_dealt(name: str, tmp_path: Path, pool: Any) -> None:
    config, rule, (world, ep), (other, its) = SAVED[name]
    (before, *_) = pool(world).run(saved, str(tmp_path), config, ep, rule)
    for after in pool(other).run(loaded, str(tmp_path), config, its, rule):
        assert before.keys() == after.keys()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []


def bytes_of_a_step(config: CausalLMConfig, ep: int) -> tuple[int, int]:
    """What this rank sends in the optimizer's step of the experts, and what the plan's cut granules make it send."""
    model, _ = built(config, ep)
    optimizer = Optimizer([pair for pair in model.named_parameters() if ".experts." in pair[0]], MATRICES)
    ids = data(dist.get_rank(), dist.get_world_size())
    model(ids[:, :-1], ids[:, 1:]).backward()
    sent: list[int] = []
    plain = collectives.all_to_all

    def counted(out: torch.Tensor, send: torch.Tensor, **options: Any) -> Any:
        splits = options["send_splits"]
        here = splits[dist.get_rank(options["group"])]
        sent.append((sum(splits) - here) * send.element_size())
        return plain(out, send, **options)

    collectives.all_to_all = counted
    try:
        optimizer.step()
    finally:
        collectives.all_to_all = plain
    return sum(sent), sum(_cut_bytes(run, optimizer.owners) for run in optimizer.runs)


def _cut_bytes(run: Any, owners: dict[tuple[str, int], int]) -> int:
    """Bytes of fp32 that this rank sends for the cut granules of a run: its part to the owner, or the others' back."""
    total = 0
    for index, name in enumerate(run.names):
        for granule in run.boundary(index):
            start, stop = (run.offsets[index] + at for at in run.lattice(index).granule(granule))
            low, high = run.rank * run.shard_size, (run.rank + 1) * run.shard_size
            own = max(min(stop, high) - max(start, low), 0)
            total += 4 * (stop - start - own if owners[name, granule] == run.rank else own)
    return total


@pytest.mark.parametrize(("experts", "ep", "none"), [(8, 2, True), (4, 2, True), (8, 4, True), (6, 2, False)])
def test_whole_experts_are_stepped_where_they_are(experts: int, ep: int, none: bool, pool: Any) -> None:
    """Where each rank that shards them holds as many whole experts as another; else the plan's cut matrices move."""
    results = pool(4).run(bytes_of_a_step, replace(QWEN, num_experts=experts), ep)
    assert all(sent == planned for sent, planned in results)
    assert (sum(sent for sent, _ in results) == 0) == none
