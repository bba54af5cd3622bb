"""QK-clip in a run: what the next forward's logits are, and the same bits on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from models import DeepseekV3Config, GptOssConfig, LlamaConfig, Qwen3Config
from optimizers import AdamW, QKClip
from vescale import Optimizer, Rules, fully_shard, step_in_backward, train
from vescale.logit_clip import LogitClip
from vescale.tracking import read_metrics
from vescale.trainer import Trainer

SIZES: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LLAMA = LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2)
DEEPSEEK = DeepseekV3Config(
    **SIZES, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
    topk_group=1, first_k_dense_replace=2, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
    v_head_dim=8,
)  # fmt: skip
GPT_OSS = GptOssConfig(
    **SIZES, intermediate_size=16, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=5,
)  # fmt: skip


def _largest(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The largest logit of each head of each layer; and a gradient."""
    model(tokens, tokens).backward()
    watching = [module for module in model.modules() if hasattr(module, "watch_logits")]
    return torch.stack([module.max_logit.clone() for module in watching])


@pytest.mark.parametrize("config", [LLAMA, DEEPSEEK, GPT_OSS], ids=["llama", "deepseek", "gpt-oss"])
def test_after_a_step_no_logit_is_above_the_threshold(config: Any) -> None:
    """The first layer's input does not change, so its heads shrink by exactly their factor where no key is shared."""
    torch.manual_seed(0)
    model, tokens = config.build(), torch.randint(64, (2, 24))
    model.init_weights()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")):
                param.mul_(20.0) if param.ndim > 1 else param.normal_()
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW(lr=0.0))))
    clip = LogitClip(QKClip(threshold=1e9), model, optimizer)
    before = _largest(model, tokens)
    weights = {name: param.clone() for name, param in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters()), "none is above"
    clip.remove()
    threshold = float(before[0].sort().values[1:3].mean())  # two heads of the first layer are above it
    LogitClip(QKClip(threshold=threshold), model, optimizer)
    assert torch.equal(_largest(model, tokens), before)
    optimizer.step()
    after = _largest(model, tokens)[0]
    above = before[0] > threshold
    assert 0 < int(above.sum()) < 4 and bool((after <= threshold * 1.00001).all()) and bool((after <= before[0]).all())
    if config is DEEPSEEK:
        torch.testing.assert_close(after, torch.where(above, threshold, before[0]))


def test_a_step_that_is_skipped_clips_nothing_and_evaluation_is_not_looked_at() -> None:
    torch.manual_seed(0)
    model, tokens = LLAMA.build(), torch.randint(64, (2, 8))
    model.init_weights()
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW(lr=0.0))))
    LogitClip(QKClip(threshold=1e-9), model, optimizer)
    with torch.no_grad():
        model(tokens, tokens)
    assert bool((model.model.layers[0].self_attn.max_logit == -torch.inf).all())
    _largest(model, tokens)
    before = {name: param.clone() for name, param in model.named_parameters()}
    optimizer.step(skip=torch.ones(()))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())


def _sharded_and_stepped() -> None:
    model = LLAMA.build()
    model.init_weights()
    for module in (*model.units(), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    optimizer = Optimizer(model.named_parameters(), Rules(all=("*", AdamW(lr=0.1))))
    clip = LogitClip(QKClip(), model, optimizer)
    for steps in (optimizer, torch.optim.SGD):
        with pytest.raises(
            ValueError, match=r"got one with step_in_backward: .*call optimizer.step\(\) after backward"
        ):
            step_in_backward(model, steps)
    clip.remove()
    step_in_backward(model, optimizer)
    for stepped in (optimizer, torch.optim.SGD(model.parameters())):
        with pytest.raises(ValueError, match="got one with step_in_backward"):
            LogitClip(QKClip(), model, stepped)
    assert all(module.max_logit is None for module in model.modules() if hasattr(module, "watch_logits"))


def test_units_that_are_stepped_in_backward_are_refused_in_either_order(pool: Any) -> None:
    pool(1).run(_sharded_and_stepped)


def test_attention_whose_queries_are_normalised_is_refused() -> None:
    config = Qwen3Config(**SIZES, intermediate_size=32, num_key_value_heads=2, head_dim=8)
    with torch.device("meta"):
        model = config.build()
    with pytest.raises(ValueError, match="without q_norm and k_norm"):
        LogitClip(QKClip(), model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match="Linear has no attention that can watch its logits"):
        LogitClip(QKClip(), torch.nn.Linear(2, 2), torch.optim.SGD(model.parameters()))


def _run(argv: list[str]) -> None:
    assert train.main(argv) == 0


SHORT = (
    *("optimizer=muonclip", "model.hidden_size=32", "model.intermediate_size=64", "model.num_hidden_layers=2"),
    *("data.seq_len=8", "trainer.log_every=1", "trainer.eval_sequences=4", "trainer.steps=3"),
    *("trainer.global_batch=4", "trainer.device=cpu", "tracking.mode=disabled"),
)


def _left_out(argv: list[str]) -> None:
    """A run whose first loss is not finite."""
    gradient, step = Trainer._gradient, Trainer.train_step

    def watching(model: Any) -> torch.Tensor:
        return torch.stack([m.max_logit for m in model.modules() if hasattr(m, "watch_logits")])

    def lost(self: Trainer, at: int, *, max_norm: float) -> Any:
        loss, norm, tokens = gradient(self, at, max_norm=max_norm)
        assert bool(torch.isfinite(watching(self.model)).all())
        return loss * (torch.nan if at == 0 else 1.0), norm, tokens

    def stepped(self: Trainer) -> Any:
        before = [param.clone() for param in self.model.parameters()]
        found = step(self)
        same = all(torch.equal(a, b) for a, b in zip(self.model.parameters(), before, strict=True))
        assert same == (self.step == 0) and bool((watching(self.model) == -torch.inf).all())
        if self.step == 2:
            self._replay(2)
            assert bool((watching(self.model) == -torch.inf).all())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_gradient", lost)
        patch.setattr(Trainer, "train_step", stepped)
        _run(argv)


def test_logits_of_a_step_left_out_or_replayed_do_not_clip_the_next(pool: Any, tmp_path: Path) -> None:
    pool(1).run(_left_out, [*SHORT, "trainer.skip_non_finite=1", f"run_dir={tmp_path / 'run'}"])


def test_a_clipped_run_has_the_same_bits_on_one_rank_and_on_two(pool: Any, tmp_path: Path) -> None:
    argv = [*SHORT, "trainer.deterministic=true"]
    runs = {}
    for name, world, threshold in (("one", 1, 0.01), ("two", 2, 0.01), ("free", 1, 100.0)):
        pool(world).run(_run, [*argv, f"optimizer.qk_clip.threshold={threshold}", f"run_dir={tmp_path / name}"])
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        runs[name] = [row[key] for row in rows for key in ("loss", "validation_loss") if key in row]
    assert runs["one"] == runs["two"] != runs["free"]
