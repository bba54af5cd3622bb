"""A Llama is transformers' Llama, however it was built, tied, chunked or recomputed."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig as HFConfig
from transformers import LlamaForCausalLM

from models import CausalLM, LlamaConfig, hf

TINY = LlamaConfig(
    vocab_size=83,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    loss_chunk_size=7,
)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "every head its own": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 20},
    "llama3 rope": {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}, "rms_norm_eps": 1e-5, "head_dim": 16},
}


def theirs(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A tiny random Llama of transformers, norms too."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 83,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    model = LlamaForCausalLM(HFConfig(**(sizes | changes)))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def batch(seed: int = 0, shape: tuple[int, int] = (2, 23)) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, 83, shape)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return ids, labels.masked_fill(torch.rand(shape) < 0.2, -100)


def built(config: LlamaConfig, seed: int = 0) -> CausalLM:
    model = config.build()
    torch.manual_seed(seed)
    model.init_weights()
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_loss_and_gradients_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = theirs(**changes)
    reference.save_pretrained(tmp_path)
    model = hf.load(tmp_path, loss_chunk_size=7)
    ids, labels = batch()
    want_logits = reference(ids).logits
    torch.testing.assert_close(model(ids), want_logits, rtol=1e-5, atol=1e-5)

    loss = model(ids, labels)
    want = F.cross_entropy(want_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    (loss / labels.numel()).backward()
    (want / labels.numel()).backward()
    assert gradients(model).keys() == gradients(reference).keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=1e-5, atol=1e-5)


def test_bf16_logits_are_as_near_to_fp32_as_transformers_are(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path)
    ids, _ = batch()
    exact = reference(ids).logits
    peer = reference.bfloat16()(ids).logits
    mine = hf.load(tmp_path, dtype=torch.bfloat16)(ids)
    assert mine.dtype == torch.bfloat16
    assert (mine - exact).norm() < 1.2 * (peer - exact).norm()


def test_names_and_shapes_are_transformers() -> None:
    want = {name: p.shape for name, p in theirs().named_parameters()}
    assert {name: p.shape for name, p in TINY.build().named_parameters()} == want
    assert not dict(TINY.build().named_buffers())


@pytest.mark.parametrize("tied", [False, True])
def test_meta_construction_and_init_give_the_bits_of_direct_construction(tied: bool) -> None:
    config = replace(TINY, tie_word_embeddings=tied)
    torch.manual_seed(5)
    direct = config.build()
    direct.init_weights()
    with torch.device("meta"):
        late = config.build()
    late.to_empty(device="cpu")
    torch.manual_seed(5)
    late.init_weights()
    assert late.state_dict().keys() == direct.state_dict().keys()
    assert all(torch.equal(late.state_dict()[name], tensor) for name, tensor in direct.state_dict().items())
    assert torch.equal(late(*batch()), direct(*batch()))


def test_building_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    TINY.build()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_forgotten_init_shows_in_the_first_loss() -> None:
    assert TINY.build()(*batch()).isnan()


def test_init_has_the_documented_deviations() -> None:
    model = built(replace(TINY, vocab_size=2000, hidden_size=128, intermediate_size=256))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
            continue
        std = 0.02 / math.sqrt(2 * 3) if "o_proj" in name or "down_proj" in name else 0.02
        assert parameter.std().item() == pytest.approx(std, rel=0.05)
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel())


def test_tied_weights_are_one_parameter_and_stay_one() -> None:
    model = built(replace(TINY, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert torch.equal(model.state_dict()["lm_head.weight"], model.state_dict()["model.embed_tokens.weight"])
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    with torch.device("meta"):
        late = model.config.build()
    late.to_empty(device="cpu").init_weights()
    assert late.lm_head.weight is late.model.embed_tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_recomputed_layers_give_the_same_bits(tied: bool) -> None:
    results = []
    for choice in ("none", "full"):
        model = built(replace(TINY, checkpoint=choice, tie_word_embeddings=tied))
        loss = model(*batch())
        loss.backward()
        results.append((loss, gradients(model)))
    (loss, grads), (other_loss, other_grads) = results
    assert torch.equal(loss, other_loss)
    assert grads.keys() == other_grads.keys()
    assert all(torch.equal(grad, other_grads[name]) for name, grad in grads.items())


def saved_and_called(checkpoint: Literal["none", "full"]) -> tuple[int, int, int]:
    """Elements saved for backward by a forward, and the calls of layers in forward and in forward and backward."""
    model = built(replace(TINY, checkpoint=checkpoint))
    saved: list[int] = []
    calls: list[torch.nn.Module] = []
    for layer in model.units():
        layer.register_forward_pre_hook(lambda module, _: calls.append(module))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t):
        loss = model(*batch())
    forward_calls = len(calls)
    loss.backward()
    return sum(saved), forward_calls, len(calls)


def test_full_checkpoint_keeps_little_and_calls_each_layer_again() -> None:
    saved, forward_calls, calls = saved_and_called("full")
    saved_without, forward_calls_without, calls_without = saved_and_called("none")
    assert saved < saved_without / 4
    assert forward_calls == forward_calls_without == calls_without == 3
    assert calls == 6


def test_nothing_is_recomputed_when_no_gradient_is_wanted() -> None:
    model = built(replace(TINY, checkpoint="full"))
    with torch.no_grad():
        loss = model(*batch())
    assert not loss.requires_grad
    torch.testing.assert_close(loss, built(TINY)(*batch()).detach())


class Ops(TorchDispatchMode):
    """Counts operations by name and keeps the largest tensor that one returned."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))])
        return out


def test_a_training_step_never_holds_tokens_by_vocabulary() -> None:
    config = replace(TINY, vocab_size=1009, loss_chunk_size=8)
    model, (ids, labels) = built(config), batch(shape=(2, 40))
    with Ops() as ops:
        model(ids, labels).backward()
    # The head's gradient is the largest tensor; the logits of 80 tokens would be two and a half times that.
    assert ops.largest == config.vocab_size * config.hidden_size < ids.numel() * config.vocab_size


def test_rotary_tables_are_computed_once_and_bf16_forward_casts_nothing_in_the_layers() -> None:
    model = built(TINY).bfloat16()
    ids, _ = batch()
    counts = []
    for layers in (1, 3):
        model.model.layers = model.model.layers[:layers] if layers == 1 else built(TINY).bfloat16().model.layers
        with torch.no_grad(), Ops() as ops:
            model(ids)
        counts.append(ops.counts)
    one, three = counts
    assert one["aten.cos.default"] == three["aten.cos.default"] == 1
    assert one["aten.sin.default"] == three["aten.sin.default"] == 1
    # rms_norm is one operation on CUDA; on CPU it widens its input and rounds its output, two norms a layer.
    casts = [count["aten._to_copy.default"] for count in counts]
    assert casts[1] - casts[0] == 2 * 2 * 2
    # o_proj's input is a view: attention gives back the layout that it took.
    assert one.get("aten.clone.default", 0) == three.get("aten.clone.default", 0) == 0


def test_units_are_the_decoder_layers_in_order_of_forward() -> None:
    model = built(TINY)
    order: list[torch.nn.Module] = []
    for unit in model.units():
        unit.register_forward_hook(lambda module, *_: order.append(module))
    model(*batch())
    assert order == model.units() == list(model.model.layers)
    inside = {id(p) for unit in model.units() for p in unit.parameters()}
    rest = [name for name, p in model.named_parameters() if id(p) not in inside]
    assert rest == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]


LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8}
PUBLISHED = {
    "Llama-2-7B": (LlamaConfig(), 6.738),
    "Llama-3.1-8B": (LlamaConfig(intermediate_size=14336, **LLAMA_3), 8.030),
    "Llama-3.1-70B": (
        LlamaConfig(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **LLAMA_3),
        70.554,
    ),
    "Llama-3.1-405B": (
        LlamaConfig(
            hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, **LLAMA_3
        ),
        405.853,
    ),
    "Llama-3.2-1B": (
        LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True, **LLAMA_3
        ),
        1.236,
    ),
    "Llama-3.2-3B": (
        LlamaConfig(
            hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
            tie_word_embeddings=True, **LLAMA_3,
        ),
        3.213,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "billions"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_models_have_their_published_number_of_parameters(config: LlamaConfig, billions: float) -> None:
    assert round(config.num_parameters() / 1e9, 3) == billions
    with torch.device("meta"):
        model = config.build()
    assert config.num_parameters() == sum(p.numel() for p in model.parameters())


def test_every_problem_of_a_config_is_in_one_message() -> None:
    with pytest.raises(ValueError) as caught:
        LlamaConfig(
            vocab_size=0,
            hidden_size=2.5,  # type: ignore[arg-type]
            rope_theta="5e5",  # type: ignore[arg-type]  # what YAML 1.1 makes of 5e5
            tie_word_embeddings="no",  # type: ignore[arg-type]
            checkpoint="some",  # type: ignore[arg-type]
            loss_chunk_size=True,
            rope_scaling={"rope_type": "ntk"},
        )
    message = str(caught.value)
    assert "7 problem(s)" in message
    for piece in (
        "vocab_size: expected an integer >= 1, got 0",
        "hidden_size: expected an integer >= 1, got 2.5",
        "rope_theta: expected a number > 0, got '5e5'",
        "tie_word_embeddings: expected true or false, got 'no'",
        "checkpoint: expected 'none' or 'full', got 'some'",
        "loss_chunk_size: expected an integer >= 1, got True",
        "rope_scaling.rope_type: expected one of default, llama3, yarn, got 'ntk'",
    ):
        assert piece in message


def test_sizes_that_do_not_divide_are_named_together() -> None:
    with pytest.raises(ValueError) as caught:
        LlamaConfig(hidden_size=90, num_attention_heads=4, num_key_value_heads=3, head_dim=5)
    message = str(caught.value)
    assert "hidden_size: expected a multiple of num_attention_heads = 4, got 90" in message
    assert "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 3" in message
    assert "head_dim: expected an even number" in message


def test_wrong_inputs_are_refused_by_their_shapes() -> None:
    model = built(TINY)
    ids, labels = batch()
    with pytest.raises(ValueError, match=r"labels: expected the shape of input_ids, \(2, 23\), got \(2, 22\)"):
        model(ids, labels[:, 1:])
    with pytest.raises(ValueError, match="at most max_position_embeddings = 64 tokens, got 65"):
        model(torch.zeros(1, 65, dtype=torch.long))
    with pytest.raises(ValueError, match=r"expected \(batch, sequence\) with at least one token, got \(23,\)"):
        model(ids[0])
