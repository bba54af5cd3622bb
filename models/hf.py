"""Hugging Face folders: config.json and safetensors, read into a model and written from one.

Reading looks at every header first and lists all that does not fit in one ValueError, before any parameter is changed.
Writing goes to a folder beside the final one, which it becomes by a rename, so a folder with the final name is always
complete. Both work on sharded parameters: each rank reads what it holds; whole tensors are gathered one by one and
written by rank 0. `python -m models.hf` is models.recipe.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from models.decoder import CausalLM, CausalLMConfig
from models.expert_parallel import Held, held
from models.files import read_json, write_json, write_weights
from models.fresh import fresh_folder
from models.hf_config import CONFIG, config_json, load_config, model_type_of
from models.inventory import find_weights, named_tensors, sources
from models.stored import Source, stored

__all__ = ["load", "load_config", "load_weights", "named_tensors", "save", "whole", "write"]

# What a folder holds beside the weights, for those who generate from it.
_COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip


def load(
    folder: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", **choices: Any
) -> CausalLM:
    """Returns the model in ``folder``, its weights converted to ``dtype``.

    Args:
        folder: With config.json and safetensors.
        dtype: Of the parameters; fp32 to train them.
        device: Of the parameters.
        **choices: Fields of the config to set or override, such as ``checkpoint``.

    Raises:
        ValueError: As ``load_config`` and ``load_weights``.
    """
    config = load_config(folder, **choices)
    with torch.device("meta"):
        model = config.build()
    for parameter in model.parameters():  # not buffers: a router's correction moves by less than bfloat16 can tell
        parameter.data = parameter.data.to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    load_weights(model, folder)
    return model


def load_weights(model: CausalLM, folder: str | Path) -> None:
    """Overwrites every parameter and buffer of ``model`` in place with what ``folder`` has of it.

    Tensors are converted to the parameter's dtype and device. Files are mapped and read tensor by tensor; of a sharded
    parameter, each rank reads the stored tensors that its run touches.

    Args:
        model: With the shapes that ``load_config`` of the folder gives.
        folder: With model.safetensors, or an index and its shards.

    Raises:
        ValueError: If files are missing or damaged, or tensors are missing, unexpected, of another shape or not
            floating point. All are listed in one message, and the model is as it was.
    """
    layout, files = find_weights(model.config, Path(folder), undone="loaded")
    pieces: dict[Path, list[tuple[str, Source, torch.Tensor, slice]]] = {}
    for name, tensor in named_tensors(model):
        local, start = _local_run(tensor)
        found = sources(model, name, tensor, layout)
        size = tensor.numel() // max(len(found), 1)
        for i, source in enumerate(found):
            low, high = max(i * size, start), min((i + 1) * size, start + len(local))
            if low < high:
                file, target = files[source.name], local[low - start : high - start]
                run = slice(low - i * size, high - i * size)
                pieces.setdefault(file.path, []).append((file.name, source, target, run))
    with torch.no_grad():
        for path, some in pieces.items():
            with safe_open(path, framework="pt") as file:
                for name, source, target, run in some:
                    target.copy_(_read(file, name, source).reshape(-1)[run])


def save(
    model: CausalLM,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    like: str | Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes ``model`` to a new folder that transformers opens.

    Args:
        model: Plain or sharded; if sharded, every rank of the process group calls this, and rank 0 writes.
        folder: Absent or empty.
        dtype: Of the stored parameters; None: as they are. Buffers stay as they are.
        like: A folder whose tokenizer, generation config and ids of special tokens are taken over.
        shard_bytes: Most bytes of weights in one file; the default is transformers'.

    Raises:
        ValueError: If ``folder`` holds anything, ``like`` has no config.json or ``dtype`` is not floating point; before
            anything is written, on every rank.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating point dtype, got {dtype}")
    buffers = {name for name, _ in model.named_buffers()}
    parameters = ((name, whole(tensor)) for name, tensor in named_tensors(model))
    tensors = ((n, t if dtype is None or n in buffers else t.to(dtype)) for n, t in parameters)
    if not any(hasattr(p, "full_tensor") or held(p) for p in model.parameters()):
        write(folder, model.config, tensors, like=like, shard_bytes=shard_bytes)
        return
    failed: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            write(folder, model.config, tensors, like=like, shard_bytes=shard_bytes)
        except Exception as error:  # whatever it is, the other ranks are gathering and must not wait for this one
            failed = [error]
    for _ in tensors:  # what is left to gather
        pass
    dist.broadcast_object_list(failed, src=0)
    if failed[0] is not None:
        raise failed[0]


def write(
    folder: str | Path,
    config: CausalLMConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    like: str | Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes a config and its tensors to a new folder that transformers opens, holding one file's worth at a time.

    Args:
        folder: Absent or empty.
        config: What the tensors belong to.
        tensors: Names and whole tensors of the model's parameters and persistent buffers, any device; taken one by one,
            so they may be gathered as they are asked for.
        like: As in ``save``.
        shard_bytes: As in ``save``.

    Raises:
        ValueError: As ``save``.
    """
    other_keys = {} if like is None else read_json(Path(like) / CONFIG)
    with fresh_folder(Path(folder)) as partial:
        dtype = write_weights(partial, stored(model_type_of(config), tensors), shard_bytes=shard_bytes)
        write_json(partial / CONFIG, config_json(config, dtype, other_keys))
        for source in [] if like is None else [Path(like) / name for name in _COMPANIONS]:
            if source.is_file():
                shutil.copyfile(source, partial / source.name)


# --- what ranks hold ---


def _local_run(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Returns the elements that this rank holds, as a flat view, and where they begin in the flattened tensor."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().view(-1), 0
    return tensor.detach().to_local(), tensor.run[0]  # type: ignore[attr-defined]


def whole(tensor: torch.Tensor, part: Held | None = None) -> torch.Tensor:
    """Returns a tensor gathered from the ranks that share it: first its shards, then the experts that others hold.

    Args:
        tensor: A parameter or buffer, plain or sharded; every rank that shares it calls this.
        part: Of the parameter that ``tensor`` is like, if it is not one itself; its gradient, for example.
    """
    part = part or held(tensor)
    local = tensor.detach()
    if hasattr(local, "full_tensor"):
        local = local.full_tensor()
    if part is None:
        return local
    stacks = []
    for rank, (first, stop) in enumerate(zip(part.bounds, part.bounds[1:], strict=False)):
        mine = rank == dist.get_rank(part.group)
        stack = local.contiguous() if mine else local.new_empty((stop - first, *local.shape[1:]))
        dist.broadcast(stack, group=part.group, group_src=rank)
        stacks.append(stack)
    return torch.cat(stacks)


def _read(file: Any, name: str, source: Source) -> torch.Tensor:
    """Reads from a stored tensor what of it is a parameter's, on the CPU, in the dtype it is stored in."""
    if source.entry is None:
        return source.pick(file.get_tensor(name))
    return source.pick(file.get_slice(name)[source.entry])


if __name__ == "__main__":
    from models.recipe import main

    main()
