"""Hugging Face folders: config.json and safetensors, read into a Llama and written from one.

    config.json                            sizes; keys of transformers 4 or 5 are read, of 4 written (5 reads them too)
    model.safetensors                      one file of weights; or
    model-00001-of-00002.safetensors ...   several, and
    model.safetensors.index.json           which of them holds each tensor

Reading looks at every header first and lists all that does not fit in one ValueError, before any parameter is changed.
Writing goes to a folder beside the final one, which it becomes by a rename, so a folder with the final name is always
complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from models.llama import Llama, LlamaConfig

_CONFIG, _SINGLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

# Fields that LlamaConfig shares with config.json, name and meaning.
_SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range",
)  # fmt: skip

# Keys that would change the arithmetic, and the one value of each that this model computes; written so, and refused
# otherwise.
_FIXED: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
}

# Safetensors' names of the dtypes that a weight may be stored in.
_FLOATS = ("F64", "F32", "F16", "BF16")

# What a folder holds beside the weights, for those who generate from it.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


class Stored(NamedTuple):
    """A tensor in a file, known from the file's header."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, "BF16"


def load(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", **choices: Any
) -> Llama:
    """Returns the Llama in ``folder``, its weights converted to ``dtype``.

    Args:
        folder: With config.json and safetensors.
        dtype: Of the parameters; fp32 to train them.
        device: Of the parameters.
        **choices: Fields of ``LlamaConfig`` to set or override, such as ``checkpoint``.

    Raises:
        ValueError: As ``load_config`` and ``load_weights``.
    """
    config = load_config(folder, **choices)
    with torch.device("meta"):
        model = Llama(config)
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    load_weights(model, folder)
    return model


def load_config(folder: str | Path, **choices: Any) -> LlamaConfig:
    """Returns the config of the model in ``folder``.

    Args:
        folder: With a config.json.
        **choices: Fields of ``LlamaConfig`` to set or override; config.json says nothing of ``checkpoint`` and
            ``loss_chunk_size``.

    Raises:
        ValueError: If config.json is missing, is no JSON object, or describes a model that this Llama does not compute;
            all in one message.
    """
    path = Path(folder) / _CONFIG
    raw = _read_json(path)
    unlike = {key: fixed for key, fixed in _FIXED.items() if raw.get(key) not in (None, fixed)}
    problems = [f"{key}: expected {fixed!r}, got {raw[key]!r}" for key, fixed in unlike.items()]
    if raw.get("quantization_config") is not None:
        problems.append("quantization_config: expected weights that are not quantised")
    fields = {name: raw[name] for name in _SHARED if name in raw} | _rope_fields(raw) | choices
    try:
        config = LlamaConfig(**fields)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n  ".join([f"{path} is not a Llama that can be loaded:", *problems]))
    return config


def load_weights(model: Llama, folder: str | Path) -> None:
    """Overwrites every parameter of ``model`` in place with its namesake in ``folder``.

    Tensors are converted to the parameter's dtype and device. Files are mapped, not read whole: a parameter whose
    ``copy_`` takes only its own part of the tensor reads only that part.

    Args:
        model: With the shapes that ``load_config`` of the folder gives.
        folder: With model.safetensors, or an index and its shards.

    Raises:
        ValueError: If files are missing or damaged, or tensors are missing, unexpected, of another shape or not
            floating point. All are listed in one message, and the model is as it was.
    """
    folder = Path(folder)
    stored, problems = _read_headers(folder)
    parameters = dict(model.named_parameters())
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    problems += _mismatches({name: tuple(p.shape) for name, p in parameters.items()}, stored, aliases)
    if not problems:  # only then can they be compared
        problems += _false_aliases(stored, aliases)
    if problems:
        raise ValueError("\n  ".join([f"{folder}: {len(problems)} problem(s), nothing was loaded:", *problems]))
    with torch.no_grad():
        for name, tensor in _read({name: stored[name] for name in parameters}):
            parameters[name].copy_(tensor)


def save(
    model: Llama,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes ``model`` to a new folder that transformers opens.

    Args:
        model: Its parameters must be plain tensors; sharded ones are gathered by the caller and given to ``write``.
        folder: Absent or empty.
        dtype: Of the stored weights; None: as they are.
        like: A folder whose tokenizer, generation config and other keys of config.json (such as the ids of special
            tokens) are taken over.
        shard_bytes: Most bytes of weights in one file; the default is transformers'.

    Raises:
        ValueError: If ``folder`` holds anything, or ``like`` has no config.json; before anything is written.
    """
    tensors = ((name, p.detach() if dtype is None else p.detach().to(dtype)) for name, p in model.named_parameters())
    write(folder, model.config, tensors, like=like, shard_bytes=shard_bytes)


def write(
    folder: str | Path,
    config: LlamaConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    like: str | Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a config and its tensors to a new folder that transformers opens, holding one file's worth at a time.

    Args:
        folder: Absent or empty.
        config: What the tensors belong to.
        tensors: Names and whole tensors of ``Llama.named_parameters``, any device; taken one by one, so they may be
            gathered as they are asked for.
        like: As in ``save``.
        shard_bytes: As in ``save``.

    Raises:
        ValueError: As ``save``.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder: expected a new or empty folder to save to, got {folder}, which exists")
    other_keys = {} if like is None else _read_json(Path(like) / _CONFIG)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        dtype = _write_weights(partial, tensors, shard_bytes=shard_bytes)
        _write_json(partial / _CONFIG, _config_json(config, dtype, other_keys))
        for source in [] if like is None else [Path(like) / name for name in _COMPANIONS]:
            if source.is_file():
                shutil.copyfile(source, partial / source.name)
        for path in [*partial.iterdir(), partial]:
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _rope_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rope_theta and rope_scaling of a config.json.

    transformers 4 has ``rope_theta`` beside ``rope_scaling`` (older files say "type" for "rope_type"); 5 has both in
    ``rope_parameters``.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type", "type")}
    fields = {"rope_theta": theta} if (theta := rope.get("rope_theta", raw.get("rope_theta"))) is not None else {}
    if rope_type == "llama3":  # transformers' own default
        scaling.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings"))
    if scaling.get("partial_rotary_factor") == 1.0:
        del scaling["partial_rotary_factor"]
    plain = rope_type == "default" and not scaling
    return fields | {"rope_scaling": None if plain else {"rope_type": rope_type, **scaling}}


def _config_json(config: LlamaConfig, dtype: torch.dtype, other_keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of ``config`` and, of ``other_keys``, those that it does not set itself."""
    # transformers 5 says in these two what the keys of 4 below say.
    kept = {key: value for key, value in other_keys.items() if key not in ("rope_parameters", "dtype")}
    return kept | {
        "architectures": ["LlamaForCausalLM"],
        **_FIXED,
        **{name: getattr(config, name) for name in _SHARED},
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _read_headers(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """Returns every tensor in the folder's files of weights, and what is wrong with the files."""
    names_of, problems = _files(folder)
    stored: dict[str, Stored] = {}
    for path, names in names_of.items():
        try:
            with safe_open(path, framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  a handle, not a mapping
        except (OSError, SafetensorError) as error:
            problems.append(f"{path.name}: cannot be read, {error}")
            problems += [f"{path.name}: would hold {name}" for name in names]
            continue
        problems += [f"{path.name}: lacks {name}, which {_INDEX} says it holds" for name in names if name not in slices]
        problems += [f"{path.name}: {name} is in {stored[name].path.name} too" for name in slices if name in stored]
        stored |= {name: Stored(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    return stored, problems


def _files(folder: Path) -> tuple[dict[Path, list[str]], list[str]]:
    """Returns each file of weights with the names that an index says it holds, and what is wrong with the index."""
    if (folder / _SINGLE).exists():
        return {folder / _SINGLE: []}, []
    if not (folder / _INDEX).exists():
        return {}, [f"{_SINGLE}: not in the folder, and no {_INDEX} either"]
    try:
        names_of: dict[Path, list[str]] = {}
        for name, file in _read_json(folder / _INDEX)["weight_map"].items():
            names_of.setdefault(folder / file, []).append(name)
        return names_of, []
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return {}, [f"{_INDEX}: expected a weight_map of names to files, {type(error).__name__}: {error}"]


def _mismatches(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], aliases: Mapping[str, str]
) -> Iterator[str]:
    """Yields each name that is missing, unexpected, of another shape or of a dtype that is not floating point."""
    for name, shape in shapes.items():
        if name not in stored:
            yield f"missing: {name} {shape}"
    for name, tensor in stored.items():
        shape_wanted = shapes.get(aliases.get(name, name))
        if shape_wanted is None:
            if not name.endswith("rotary_emb.inv_freq"):  # a constant that old transformers stored and new ones skip
                yield f"unexpected: {name} {tensor.shape}"
        elif tensor.shape != shape_wanted:
            yield f"shape: {name}: expected {shape_wanted}, got {tensor.shape}"
        elif tensor.dtype not in _FLOATS:
            yield f"dtype: {name}: expected one of {', '.join(_FLOATS)}, got {tensor.dtype}"


def _false_aliases(stored: Mapping[str, Stored], aliases: Mapping[str, str]) -> Iterator[str]:
    """Yields each stored alias whose numbers are not those of the tensor that the config says it is."""
    for name, original in aliases.items():
        if name in stored:
            pair = dict(_read({name: stored[name], original: stored[original]}))
            if not torch.equal(pair[name], pair[original]):
                yield f"{name}: differs from {original}, but config.json says tie_word_embeddings"


def _read(wanted: Mapping[str, Stored]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor, file by file; on the CPU, in the dtype it is stored in."""
    for path in dict.fromkeys(tensor.path for tensor in wanted.values()):
        with safe_open(path, framework="pt") as file:
            for name in [name for name, tensor in wanted.items() if tensor.path == path]:
                yield name, file.get_tensor(name)


def _write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int) -> torch.dtype:
    """Writes the tensors to one file, or to several and their index; returns the dtype of the first."""
    files: list[dict[str, int]] = []  # of each file, the bytes of each tensor
    pending: dict[str, torch.Tensor] = {}
    dtype: torch.dtype | None = None
    for name, tensor in tensors:
        dtype = dtype or tensor.dtype
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > shard_bytes:
            files.append(_write_file(folder / f"{len(files)}.partial", pending))
            pending = {}
        pending[name] = tensor.cpu().contiguous()
    if dtype is None:
        raise ValueError("tensors: expected at least one, got none")
    files.append(_write_file(folder / f"{len(files)}.partial", pending))
    _name_files(folder, files)
    return dtype


def _write_file(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Writes one file; returns the bytes of each of its tensors."""
    save_file(tensors, path, metadata={"format": "pt"})  # transformers 4 refuses a file without it
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _name_files(folder: Path, files: list[dict[str, int]]) -> None:
    """Gives the files their final names, which contain their number, and writes the index if there are several."""
    if len(files) == 1:
        (folder / "0.partial").rename(folder / _SINGLE)
        return
    weight_map: dict[str, str] = {}
    for i, sizes in enumerate(files):
        final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{i}.partial").rename(folder / final)
        weight_map |= dict.fromkeys(sizes, final)
    total = sum(sum(sizes.values()) for sizes in files)
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; ValueError if it is not there or is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected a JSON file, {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Waits until a file's or a folder's contents are on the disk, so that the rename cannot overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
