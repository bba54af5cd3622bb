"""Every family is transformers': logits, gradients, names, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_transformers import FAMILIES, batch, gathered, theirs
from transformers import AutoConfig, AutoModelForCausalLM

from models import hf


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_gradients_equal_transformers_and_the_way_back_is_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    reference = theirs(name)
    reference.save_pretrained(tmp_path / "in")
    sparse = hasattr(reference.config, "num_experts_per_tok")
    model = hf.load(tmp_path / "in", loss_chunk_size=7, **({"router_aux_loss_coef": 0.0} if sparse else {}))
    ids, labels = batch()
    want_logits = reference(ids).logits
    torch.testing.assert_close(model(ids), want_logits, rtol=1e-5, atol=1e-5)

    loss = model(ids, labels)
    want = F.cross_entropy(want_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    (loss / labels.numel()).backward()
    (want / labels.numel()).backward()
    grads = {key: p.grad for key, p in model.named_parameters()}
    want_grads = {key: p.grad for key, p in reference.named_parameters() if p.grad is not None}
    mine = gathered(grads, reference.config.model_type)  # type: ignore[arg-type]
    assert mine.keys() == want_grads.keys()
    torch.testing.assert_close(mine, want_grads, rtol=1e-5, atol=1e-5)

    if sparse:  # the experts as transformers 5 has them in memory
        reference.save_pretrained(tmp_path / "fused", save_original_format=False)
        fused = hf.load(tmp_path / "fused").state_dict()
        assert [key for key, tensor in model.state_dict().items() if not torch.equal(fused[key], tensor)] == []
    hf.save(model, tmp_path / "out", shard_bytes=20_000)
    assert_opens_equal(tmp_path / "out", reference)
    hf.save(model, tmp_path / "half", dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(tmp_path / "rounded")
    half, want_half = opened(tmp_path / "half", "auto"), opened(tmp_path / "rounded", torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert [
        key for key, tensor in want_half.state_dict().items() if not torch.equal(half.state_dict()[key], tensor)
    ] == []
    assert torch.equal(half(ids).logits, want_half(ids).logits)


def opened(folder: Path, dtype: str | torch.dtype) -> torch.nn.Module:
    """What transformers makes of a folder, computed with plain operators."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **plain)


def assert_opens_equal(folder: Path, reference: torch.nn.Module) -> None:
    opened, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, experts_implementation="eager"
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    got, want = opened.state_dict(), reference.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    torch.testing.assert_close(opened(batch()[0]).logits, reference(batch()[0]).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_written_config_says_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    kind, sizes = FAMILIES[name]
    getattr(transformers, f"{kind}Config")(**sizes).save_pretrained(tmp_path / "in")
    config = hf.load_config(tmp_path / "in")
    with torch.device("meta"):
        model = config.build()
    hf.save(model.to_empty(device="cpu"), tmp_path / "out")
    assert hf.load_config(tmp_path / "out") == config
    before, after = (AutoConfig.from_pretrained(tmp_path / side).to_dict() for side in ("in", "out"))
    told = {"_name_or_path", "architectures", "dtype", "head_dim", "moe_layer_freq", "scoring_func", "topk_method"}
    told |= {"num_mtp_layers", "num_nextn_predict_layers"}
    same = before.keys() - told
    assert {key: after[key] for key in same} == {key: before[key] for key in same}
    four = json.loads((tmp_path / "out" / "config.json").read_text())
    assert four.keys() >= {"rope_theta", "rope_scaling", "torch_dtype"} and "rope_parameters" not in four
