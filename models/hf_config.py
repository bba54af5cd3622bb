"""config.json of a Hugging Face folder: keys of transformers 4 or 5 are read, of 4 written (5 reads them too)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from models.decoder import CausalLMConfig
from models.deepseek_v3 import DeepseekV3Config
from models.files import read_json
from models.gpt_oss import GptOssConfig
from models.llama import LlamaConfig
from models.mixtral import MixtralConfig
from models.qwen3 import Qwen3Config, Qwen3MoeConfig

CONFIG = "config.json"

# Fields that config.json says nothing of.
OURS = ("checkpoint", "loss_chunk_size", "weights", "force_balance", "router_bias_rate", "router_bias_step")

# Where transformers 4 and 5 describe the rotary positions.
_ROPE_KEYS = ("rope_scaling", "rope_parameters")


class Family(NamedTuple):
    """What config.json says of a family beside the fields of its config."""

    config: type[CausalLMConfig]
    architecture: str
    # Keys that would change the arithmetic, and the one value of each that is computed; written so, refused otherwise.
    fixed: dict[str, Any]
    synonyms: dict[str, str] = {}  # a key that some versions write for a field


_DENSE = {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False}
_QWEN3 = {**_DENSE, "use_sliding_window": False}

FAMILIES = {
    "llama": Family(LlamaConfig, "LlamaForCausalLM", {**_DENSE, "mlp_bias": False}),
    "qwen3": Family(Qwen3Config, "Qwen3ForCausalLM", _QWEN3),
    "qwen3_moe": Family(
        Qwen3MoeConfig,
        "Qwen3MoeForCausalLM",
        {**_QWEN3, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"num_local_experts": "num_experts"},
    ),
    "mixtral": Family(
        MixtralConfig,
        "MixtralForCausalLM",
        {"hidden_act": "silu", "attention_dropout": 0.0, "sliding_window": None, "router_jitter_noise": 0.0},
        {"num_experts": "num_local_experts"},
    ),
    "gpt_oss": Family(
        GptOssConfig,
        "GptOssForCausalLM",
        {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": True},
        {"num_experts": "num_local_experts"},
    ),
    "deepseek_v3": Family(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        {**_DENSE, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        {"num_local_experts": "n_routed_experts"},
    ),
}


def model_type_of(config: CausalLMConfig) -> str:
    """Returns Hugging Face's word for the family of a config."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def load_config(folder: str | Path, **choices: Any) -> CausalLMConfig:
    """Returns the config of the model in ``folder``.

    Args:
        folder: With a config.json.
        **choices: Fields to set or override; config.json says nothing of those in ``OURS``.

    Raises:
        ValueError: If config.json is missing, is no JSON object, or describes a model that is not computed here; all in
            one message.
    """
    path = Path(folder) / CONFIG
    raw = read_json(path)
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{path}: model_type: expected one of {', '.join(FAMILIES)}, got {model_type!r}")
    family = FAMILIES[model_type]
    problems = list(_unlike(model_type, family, raw))
    raw = {family.synonyms.get(key, key): value for key, value in raw.items()}
    names = {field.name for field in dataclasses.fields(family.config)} - {"rope_theta", "rope_scaling", *OURS}
    fields = {name: raw[name] for name in names if name in raw} | _rope_fields(raw, family.config)
    if "sliding_window" in names and _sees_everything(raw.get("layer_types")):
        fields["sliding_window"] = None
    fields |= choices
    try:
        config = family.config(**fields)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n  ".join([f"{path} is not a model that can be loaded:", *problems]))
    return config


def config_json(config: CausalLMConfig, dtype: torch.dtype, other_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of ``config``, with the ids of special tokens from another.

    Args:
        config: Of the model.
        dtype: Of the stored weights.
        other_keys: The other config.json, perhaps of another family or quantised: the rest of it may not be true here.
    """
    model_type = model_type_of(config)
    family = FAMILIES[model_type]
    kept = {key: value for key, value in other_keys.items() if key.endswith("_token_id")}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in OURS}
    if config.rope_scaling is None and family.config().rope_scaling is not None:  # null would mean the family's own
        fields["rope_scaling"] = {"rope_type": "default"}
    extra = {}
    if model_type == "deepseek_v3":  # transformers' defaults are those of the published model
        extra = {"num_key_value_heads": config.num_attention_heads, "num_nextn_predict_layers": 0}
    if isinstance(config, GptOssConfig) and config.sliding_window is None:  # transformers wants a number all the same
        fields["sliding_window"] = config.max_position_embeddings
        fields["layer_types"] = ["full_attention"] * config.num_hidden_layers
    return kept | {
        "architectures": [family.architecture],
        "model_type": model_type,
        **family.fixed,
        **extra,
        **fields,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _unlike(model_type: str, family: Family, raw: Mapping[str, Any]) -> Iterator[str]:
    """Yields each key that asks for arithmetic that is not computed here."""
    for key, fixed in family.fixed.items():
        if raw.get(key) not in (None, fixed):
            yield f"{key}: expected {fixed!r}, got {raw[key]!r}"
    if raw.get("quantization_config") is not None:
        yield "quantization_config: expected weights that are not quantised; transformers can dequantise and save them"
    for key, field in family.synonyms.items():
        if None not in (raw.get(key), raw.get(field)) and raw[key] != raw[field]:
            yield f"{key}: expected {field}, of which it is another name, {raw[field]!r}, got {raw[key]!r}"
    for key in _ROPE_KEYS:
        if not isinstance(raw.get(key), Mapping | None):
            yield f"{key}: expected a JSON object, got {raw[key]!r}"
    layers = raw.get("layer_types")
    if layers is not None and not _sees_everything(layers):
        kinds = ("sliding_attention", "full_attention") if model_type == "gpt_oss" else ("full_attention",)
        if not isinstance(layers, list) or layers != [kinds[i % len(kinds)] for i in range(len(layers))]:
            yield f"layer_types: expected {' and '.join(kinds)} in turn, got {layers!r}"
    number = raw.get("num_hidden_layers", len(layers) if isinstance(layers, list) else None)
    if isinstance(layers, list) and len(layers) != number:
        yield f"layer_types: expected as many as num_hidden_layers, {number!r}, got {len(layers)}"


def _sees_everything(layers: Any) -> bool:
    return isinstance(layers, list) and bool(layers) and layers == ["full_attention"] * len(layers)


def _rope_fields(raw: Mapping[str, Any], family: type[CausalLMConfig]) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling of a config.json; empty if it leaves them to the family.

    transformers 4 has ``rope_theta`` beside ``rope_scaling`` (older files say "type" for "rope_type"); 5 has both in
    ``rope_parameters``.
    """
    rope: Mapping[str, Any] = next(
        (raw[key] for key in _ROPE_KEYS if raw.get(key) and isinstance(raw[key], Mapping)), {}
    )
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    fields = {} if theta is None else {"rope_theta": theta}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    apart = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    scaling = {key: value for key, value in rope.items() if key not in apart and value is not None}
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):  # not computed, so not to be passed over
        scaling["partial_rotary_factor"] = partial
    if rope_type in ("llama3", "yarn"):  # whichever transformers takes
        original = "original_max_position_embeddings"
        scaling.setdefault(original, raw.get("max_position_embeddings", family.max_position_embeddings))
        scaling |= {original: raw[original]} if raw.get(original) is not None else {}
    if not rope and not scaling:  # also null, which for GPT-OSS is its own YaRN in transformers 5 and was none in 4
        return fields
    plain = rope_type == "default" and not scaling
    return fields | {"rope_scaling": None if plain else {"rope_type": rope_type, **scaling}}
