"""Folders go to transformers and back; a folder that does not fit changes nothing and says everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaForCausalLM
from transformers import LlamaConfig as HFConfig
from unprivileged import as_modes_say

from models import CausalLM, LlamaConfig, hf
from vescale.live import LiveBytes

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
CONFIG = LlamaConfig(**SIZES)


def built(**changes: Any) -> CausalLM:
    model = LlamaConfig(**(SIZES | changes)).build()
    torch.manual_seed(0)
    model.init_weights()
    return model


def saved(folder: Path, **changes: Any) -> Path:
    hf.save(built(**changes), folder)
    return folder


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("shard_bytes", [10**9, 8000])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "rms_norm_eps": 1e-5, "initializer_range": 0.1},
    ],
    ids=["plain", "tied", "llama3"],
)
def test_what_is_saved_opens_in_transformers_with_equal_weights_and_logits(
    tmp_path: Path, changes: dict[str, Any], shard_bytes: int
) -> None:
    model = built(**changes)
    hf.save(model, tmp_path / "out", shard_bytes=shard_bytes)
    files = sorted(path.name for path in tmp_path.rglob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes == 10**9)
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same_state(theirs, model)
    ids = torch.randint(0, 50, (2, 40))
    torch.testing.assert_close(theirs(ids).logits, model(ids), rtol=1e-5, atol=1e-5)
    assert same_state(hf.load(tmp_path / "out"), model)
    assert hf.load_config(tmp_path / "out") == model.config


def test_an_index_lists_every_tensor_and_their_total_size(tmp_path: Path) -> None:
    model = built()
    hf.save(model, tmp_path / "out", shard_bytes=8000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dict(model.named_parameters()).keys()
    assert index["metadata"]["total_size"] == 4 * model.config.num_parameters()
    for file in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "out" / file)
        assert sum(t.nbytes for t in tensors.values()) <= 8000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file for name in tensors)
        with safe_open(tmp_path / "out" / file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["default", "llama3"])
def test_configs_of_transformers_4_and_5_are_read_alike(tmp_path: Path, version: int, scaling: Any) -> None:
    want = LlamaConfig(**SIZES, rope_theta=500000.0, rope_scaling=scaling)
    if version == 5:
        rope = {"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})}
        HFConfig(**SIZES, rope_parameters=rope, dtype="bfloat16").save_pretrained(tmp_path)
        assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    else:
        four = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
        (tmp_path / "config.json").write_text(json.dumps(SIZES | four))
    assert hf.load_config(tmp_path) == want


def test_a_config_json_that_leaves_sizes_out_means_transformers_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    mine, theirs = hf.load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    for name in SIZES:
        assert getattr(mine, name) == getattr(theirs, name)
    assert mine.rope_theta == theirs.rope_parameters["rope_theta"]
    assert mine.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize("said", [{}, {"rope_scaling": None}, {"rope_parameters": None}])
def test_a_rope_that_is_not_said_is_the_familys(tmp_path: Path, said: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "rope_theta": 7.0, **said}))
    mine, theirs = hf.load_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert {"rope_theta": mine.rope_theta, **(mine.rope_scaling or {})} == theirs.rope_parameters


def test_the_written_config_says_the_same_to_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out", rope_theta=500000.0, rope_scaling=LLAMA3)
    theirs = AutoConfig.from_pretrained(folder)
    assert {name: getattr(theirs, name) for name in SIZES} == SIZES
    assert theirs.rope_parameters == {"rope_theta": 500000.0, **LLAMA3}
    assert theirs.dtype == torch.float32
    assert theirs.architectures == ["LlamaForCausalLM"]


def test_choices_that_config_json_does_not_make_are_given_to_load(tmp_path: Path) -> None:
    config = hf.load(saved(tmp_path / "out"), checkpoint="full", loss_chunk_size=3).config
    assert (config.checkpoint, config.loss_chunk_size) == ("full", 3)


def test_weights_are_converted_to_the_parameters_dtype(tmp_path: Path) -> None:
    model = built()
    hf.save(model, tmp_path / "half", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    wide = hf.load(tmp_path / "half")
    assert all(p.dtype == torch.float32 for p in wide.parameters())
    assert same_state(wide, model.bfloat16().float())
    assert same_state(hf.load(tmp_path / "half", dtype=torch.bfloat16), model.bfloat16())


def test_weights_are_loaded_in_place(tmp_path: Path) -> None:
    saved(tmp_path / "out", initializer_range=0.5)
    model = built()
    before = {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()}
    hf.load_weights(model, tmp_path / "out")
    assert {name: (id(p), p.data_ptr()) for name, p in model.named_parameters()} == before
    assert same_state(model, built(initializer_range=0.5))


def test_tensors_may_be_gathered_one_by_one_while_they_are_written(tmp_path: Path) -> None:
    model = built()
    asked: list[str] = []

    def gather() -> Any:
        for name, parameter in model.named_parameters():
            asked.append(name)
            yield name, parameter.detach().clone()

    hf.write(tmp_path / "out", model.config, gather(), shard_bytes=8000)
    assert asked == list(dict(model.named_parameters()))
    assert same_state(hf.load(tmp_path / "out"), model)


def test_memory_stays_at_one_file_while_writing_and_at_one_tensor_while_reading(tmp_path: Path) -> None:
    """Bytes of live tensors, beside the model's own."""
    model = built()
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    largest, total = (of(4 * shape.numel() for shape in shapes.values()) for of in (max, sum))
    with LiveBytes() as live:
        hf.write(tmp_path / "out", CONFIG, ((n, torch.ones(shape)) for n, shape in shapes.items()), shard_bytes=8000)
    assert live.peak <= 8000 + 2 * largest < total  # what is asked for, and its copy
    del model
    with LiveBytes() as live:
        hf.load(tmp_path / "out")
    assert live.peak <= total + largest


def test_tokenizer_files_and_token_ids_are_taken_over(tmp_path: Path) -> None:
    source = saved(tmp_path / "source")
    # Of another family and quantised, perhaps: nothing but the ids can be trusted to be true of what is saved.
    other = {
        "rope_parameters": {"a": 1},
        "quantization_config": {"bits": 4},
        "layer_types": ["x"],
        "auto_map": {"a": 1},
    }
    edit(source / "config.json", lambda c: c.update(bos_token_id=17, eos_token_id=[18, 19], **other))
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": [18, 19]}')
    (source / "notes.txt").write_text("stays")
    hf.save(built(rope_theta=77.0), tmp_path / "out", like=source)
    theirs = AutoConfig.from_pretrained(tmp_path / "out")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (17, [18, 19])
    assert theirs.rope_parameters["rope_theta"] == 77.0
    assert not other.keys() & json.loads((tmp_path / "out" / "config.json").read_text()).keys()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "generation_config.json",
    }  # fmt: skip


def test_a_folder_with_contents_is_not_saved_over(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="expected a new or empty folder to save to"):
        hf.save(built(initializer_range=0.5), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_are_not_saved_as_integers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype: expected a floating point dtype, got torch.int8"):
        hf.save(built(), tmp_path / "out", dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    model = built()

    def gather() -> Any:
        yield from list(model.named_parameters())[:3]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        hf.write(tmp_path / "out", model.config, gather(), shard_bytes=1)
    assert not list(tmp_path.iterdir())


def refused(model: CausalLM, folder: Path) -> str:
    """The message with which ``folder`` is refused, after checking that the model is as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        hf.load_weights(model, folder)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return str(caught.value)


def test_missing_misnamed_misshaped_and_integer_tensors_are_listed_together(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out", initializer_range=0.5)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop("model.layers.0.mlp.gate_proj.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:49].clone()
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(32, 24, dtype=torch.int8)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)  # in old files; not a problem
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(built(), folder)
    assert "5 problem(s), nothing was loaded" in message
    for piece in (
        "missing: model.norm.weight (24,)",
        "missing: model.layers.0.mlp.gate_proj.weight (40, 24)",
        "unexpected: model.layers.0.mlp.gate.weight (40, 24)",
        "shape: lm_head.weight: expected (50, 24), got (49, 24)",
        "dtype: model.layers.1.self_attn.q_proj.weight: expected one of F64, F32, F16, BF16, got I8",
    ):
        assert piece in message


def test_a_damaged_file_an_absent_shard_and_a_false_index_are_listed_together(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    hf.save(built(initializer_range=0.5), folder, shard_bytes=8000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) >= 3
    lost = list(load_file(shards[0]))
    shards[0].unlink()
    shards[1].write_bytes(shards[1].read_bytes()[:-7])
    false = {"model.layers.9.mlp.up_proj.weight": shards[2].name}
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].update(false))
    message = refused(built(), folder)
    assert f"{shards[0].name}: cannot be read, No such file or directory; it would hold {lost[0]}" in message
    assert f"{shards[1].name}: cannot be read" in message
    assert f"{shards[2].name}: lacks model.layers.9.mlp.up_proj.weight" in message
    assert "3 problem(s)" in message  # what a file would hold is not missing a second time


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    hf.save(built(), folder, shard_bytes=8000)
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(second) | {name: 2 * t for name, t in load_file(first).items()}
    save_file(tensors, second, metadata={"format": "pt"})
    assert f"model.embed_tokens.weight is in {first.name} too" in refused(built(), folder)


@pytest.mark.parametrize("index", ["[]", "{", '{"metadata": {}}', '{"weight_map": []}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: expected a weight_map of names to files" in refused(built(), tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "cannot be read, "),
        (b"\xff" * 64, "cannot be read, "),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "cannot be read, a pointer of Git LFS"),
    ],
    ids=["empty", "no header", "pointer"],
)
def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    message = refused(built(), tmp_path)
    assert f"model.safetensors: {said}" in message and "1 problem(s)" in message


def test_a_file_that_cannot_be_opened_is_refused_for_its_reason(tmp_path: Path) -> None:
    model, path = built(), saved(tmp_path / "out") / "model.safetensors"
    path.chmod(0)
    assert "cannot be read, Permission denied" in as_modes_say(refused, model, path.parent)
    path.unlink()
    path.symlink_to("../../blobs/1f2e")  # as in a cache of the hub that was cleaned
    assert "cannot be read, a link to ../../blobs/1f2e, where there is nothing" in refused(model, path.parent)
    path.unlink()
    path.mkdir()
    assert "cannot be read, Is a directory" in refused(model, path.parent)


def test_quantised_weights_are_one_problem(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refused(built(), folder)
    assert "1 problem(s)" in message and "weight_scale_inv: expected weights that are not quantised" in message


def test_a_config_of_fewer_layers_than_there_are_weights_of_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(ValueError, match="9 problem") as caught:
        hf.load(folder)
    assert "unexpected: model.layers.1.mlp.down_proj.weight (24, 40)" in str(caught.value)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    tensors = load_file(folder / "model.safetensors")
    extra = {f"model.layers.{layer}.{name}.weight": torch.ones(2) for layer in (2, 3) for name in ("eh_proj", "enorm")}
    save_file(tensors | extra, folder / "model.safetensors", metadata={"format": "pt"})
    assert same_state(hf.load(folder), built())


def test_many_problems_of_a_kind_are_a_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=12))
    with pytest.raises(ValueError, match=r"90 problem\(s\)") as caught:
        hf.load(folder)
    lines = str(caught.value).splitlines()
    first = "missing: model.layers.2.mlp.up_proj.weight (40, 24)"
    assert len(lines) == 1 + 9
    assert f"  missing: model.layers.*.mlp.up_proj.weight (40, 24): 10 of them, the first {first}" in lines


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    message = refused(built(), tmp_path)
    assert "model.safetensors: not in the folder, and no model.safetensors.index.json either" in message


def test_a_tied_model_takes_a_stored_head_only_if_it_is_the_embedding(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = hf.load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tensors["lm_head.weight"][3, 3] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight: differs from model.embed_tokens.weight" in refused(model, folder)
    want = tensors.pop("lm_head.weight")
    tensors["lm_head.weight"] = want[:49].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "shape: lm_head.weight: expected (50, 24), got (49, 24)" in refused(model, folder)
    del tensors["model.embed_tokens.weight"]  # under the other name alone, as transformers takes it
    save_file(tensors | {"lm_head.weight": want}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(hf.load(folder).model.embed_tokens.weight, want)


def test_a_config_of_another_model_is_refused_with_all_its_differences(tmp_path: Path) -> None:
    folder = saved(tmp_path / "out")
    edit(
        folder / "config.json",
        lambda c: c.update(
            hidden_act="gelu", attention_bias=True, quantization_config={"bits": 4},
            rope_scaling={"type": "linear", "factor": 2.0}, num_key_value_heads=3,
        ),
    )  # fmt: skip
    with pytest.raises(ValueError) as caught:
        hf.load_config(folder)
    for piece in (
        "hidden_act: expected 'silu', got 'gelu'",
        "attention_bias: expected False, got True",
        "quantization_config: expected weights that are not quantised",
        "rope_scaling.rope_type: expected one of default, llama3, yarn, got 'linear'",
        "num_key_value_heads: expected a divisor of num_attention_heads = 4, got 3",
    ):
        assert piece in str(caught.value)


def test_a_family_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    with pytest.raises(ValueError, match="model_type: expected one of llama, qwen3, .*, got 'gemma'"):
        hf.load_config(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_config_json_that_is_none_is_refused_by_its_path(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json: expected a JSON"):
        hf.load_config(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope_scaling", [1], r"rope_scaling: expected a JSON object, got \[1\]"),
        ("rope_parameters", 7, "rope_parameters: expected a JSON object, got 7"),
        ("rope_scaling", {"rope_type": ["yarn"]}, r"rope_scaling.rope_type: expected one of .*, got \['yarn'\]"),
        ("model_type", ["llama"], r"model_type: expected one of llama, .*, got \['llama'\]"),
        ("layer_types", 5, "layer_types: expected full_attention in turn, got 5"),
        ("layer_types", ["full_attention"], "layer_types: expected as many as num_hidden_layers, 2, got 1"),
        ("partial_rotary_factor", 0.5, "rope_scaling.partial_rotary_factor: not a key of rope_type 'default'"),
        ("num_experts", 7, "num_experts: expected num_local_experts, of which it is another name, 9, got 7"),
        ("first_k_dense_replace", [3], r"first_k_dense_replace: expected 0 to 2, got \[3\]"),
        ("sliding_window", "128", "sliding_window: expected None or an integer >= 1, got '128'"),
    ],
)
def test_a_value_of_another_kind_in_config_json_is_refused_by_its_key(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    families = {"first_k_dense_replace": "deepseek_v3", "sliding_window": "gpt_oss", "num_experts": "mixtral"}
    rest = {"model_type": families.get(key, "llama"), "num_hidden_layers": 2, "num_local_experts": 9}
    (tmp_path / "config.json").write_text(json.dumps({**rest, key: value}))
    with pytest.raises(ValueError, match=said):
        hf.load_config(tmp_path)
