"""Which of a model's tensors a Hugging Face folder has, and all that is wrong with it, by the files' headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from models.decoder import CausalLM, CausalLMConfig
from models.expert_parallel import held
from models.files import Stored, no_weights, read_headers
from models.hf_config import model_type_of
from models.stored import Source, layout_of, sources_of

# Safetensors' names of the dtypes that a weight may be stored in.
_FLOATS = ("F64", "F32", "F16", "BF16")

# How names end where weights are quantised: deepseek-ai's fp8, openai's MXFP4, compressed-tensors, GPTQ and AWQ,
# bitsandbytes.
_SCALES = ("_scale_inv", "_blocks", ".weight_scale", ".weight_packed", ".qweight", ".absmax")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

# Problems that differ in their numbers alone and are still listed one by one.
_FEW = 8


class Inventory(NamedTuple):
    """The stored tensors that a model is made of."""

    layout: str  # of the folder, see models.stored
    tensors: Mapping[str, Stored]  # by the name that ``sources`` asks for


def find_weights(config: CausalLMConfig, folder: Path, *, undone: str) -> Inventory:
    """Returns where in ``folder`` the tensors of a model of ``config`` are.

    Args:
        config: Of the model.
        folder: With model.safetensors, or an index and its shards.
        undone: What the message says was not done.

    Raises:
        ValueError: If files are missing or damaged, or tensors are missing, unexpected, of another shape or not
            floating point; all in one message.
    """
    if (nothing := no_weights(folder)) is not None:
        raise ValueError(_message(folder, [nothing], undone))
    tensors, lost, problems = read_headers(folder)
    tensors = _without_prediction(tensors)
    layout = layout_of(model_type_of(config), tensors)
    if (scale := next((name for name in tensors if name.endswith(_SCALES)), None)) is not None:
        problems.append(f"{scale}: expected weights that are not quantised; transformers can dequantise and save them")
    elif tensors or lost or not problems:  # where nothing at all could be read, that is the problem
        shapes = _shapes(config, layout)
        tied = config.tie_word_embeddings and HEAD in tensors
        if tied:  # stored under either name, or both
            shapes[HEAD] = shapes[EMBEDDING]
            tensors.setdefault(EMBEDDING, tensors[HEAD])
        problems += _mismatches(shapes, tensors, lost)
        if tied and not problems and not _equal(tensors[HEAD], tensors[EMBEDDING]):
            problems.append(f"{HEAD}: differs from {EMBEDDING}, but config.json says tie_word_embeddings")
    if problems:
        raise ValueError(_message(folder, problems, undone))
    return Inventory(layout, tensors)


def sources(model: CausalLM, name: str, tensor: torch.Tensor, layout: str) -> list[Source]:
    """Returns where what this rank has of a parameter or buffer is stored: of a stack of experts, those that it has."""
    part = held(tensor)
    total = len(tensor) if part is None else part.total
    experts = range(len(tensor)) if part is None else range(part.first, part.stop)
    return sources_of(layout, name, tuple(tensor.shape), experts=experts, total=total)


def named_tensors(model: CausalLM) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and the buffers that are saved with them; tied ones once."""
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _shapes(config: CausalLMConfig, layout: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is to be stored."""
    with torch.device("meta"):
        model = config.build()
    pairs = [pair for pair in named_tensors(model) if pair[1].ndim]
    return {source.name: source.shape for pair in pairs for source in sources(model, *pair, layout)}


def _without_prediction(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Leaves out layers that predict tokens after the next (arXiv 2412.19437, section 2.2), as transformers does."""
    joint = ".eh_proj.weight"  # what joins the stream to the next token's embedding: no other layer has it
    layers = tuple(f"{name.removesuffix(joint)}." for name in tensors if name.endswith(joint))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(layers)}


def _mismatches(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Stored], lost: set[str]) -> Iterator[str]:
    """Yields each name that is missing, unexpected, of another shape or of a dtype that is not floating point.

    Args:
        shapes: What is to be stored.
        tensors: What is.
        lost: Names that are said to be missing already, with their file.
    """
    for name, shape in shapes.items():
        if name not in tensors and name not in lost:
            yield f"missing: {name} {shape}"
    for name, tensor in tensors.items():
        shape_wanted = shapes.get(name)
        if shape_wanted is None:
            if not name.endswith("rotary_emb.inv_freq"):  # a constant that old transformers stored and new ones skip
                yield f"unexpected: {name} {tensor.shape}"
        elif tensor.shape != shape_wanted:
            yield f"shape: {name}: expected {shape_wanted}, got {tensor.shape}"
        elif tensor.dtype not in _FLOATS:
            yield f"dtype: {name}: expected one of {', '.join(_FLOATS)}, got {tensor.dtype}"


def _equal(one: Stored, other: Stored) -> bool:
    pair = []
    for tensor in (one, other):
        with safe_open(tensor.path, framework="pt") as file:
            pair.append(file.get_tensor(tensor.name))
    return bool((pair[0] == pair[1]).all())  # of any two dtypes


def _message(folder: Path, problems: list[str], undone: str) -> str:
    head = f"{folder}: {len(problems)} problem(s), nothing was {undone}:"
    return "\n  ".join([head, *_in_kinds(problems)])


def _in_kinds(problems: Iterable[str]) -> Iterator[str]:
    """Yields the problems; of many that differ in the numbers of layers and experts alone, the first and how many."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"\.\d+\.", ".*.", problem), []).append(problem)
    for kind, of in kinds.items():
        if len(of) <= _FEW:
            yield from of
        else:
            yield f"{kind}: {len(of)} of them, the first {of[0]}"
