"""How each family's weights lie in a Hugging Face folder: stacks of experts are one matrix per expert there.

==============  ==========================================  ==================================================
in memory       mlp.experts.gate_proj.weight (E, ffn, d)    mlp.gate.weight
qwen3_moe       mlp.experts.{e}.gate_proj.weight            mlp.gate.weight
deepseek_v3     likewise                                    likewise, and mlp.gate.e_score_correction_bias
mixtral         block_sparse_moe.experts.{e}.w1.weight      block_sparse_moe.gate.weight
gpt_oss         mlp.experts.gate_up_proj (E, d, 2 ffn),     mlp.router.weight (in memory too)
                gate in even and up in odd columns
fused           mlp.experts.gate_up_proj (E, 2 ffn, d),     as in memory
                gate above up
==============  ==========================================  ==================================================

"fused" is what transformers 5 has in memory of qwen3_moe, deepseek_v3 and mixtral, and writes when asked not to keep
the original format (``save_pretrained(save_original_format=False)``); it is read, never written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

_STACK = re.compile(r"(?P<at>.*\.mlp\.experts)\.(?P<which>gate|up|down)_proj\.(?P<kind>weight|bias)")
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


class Source(NamedTuple):
    """Where a stretch of a parameter is stored; the sources of a parameter, in order, are its flattened elements."""

    name: str  # of the stored tensor
    shape: tuple[int, ...]  # of the stored tensor
    entry: int | None  # the entry of its dim 0 that is meant; None: the tensor
    pick: Callable[[torch.Tensor], torch.Tensor]  # what of that belongs to the parameter


def layout_of(model_type: str, names: Iterable[str]) -> str:
    """Returns which row of the table above a folder is of, by the names of its tensors."""
    fused = model_type != "gpt_oss" and any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    return "fused" if fused else model_type


def sources_of(layout: str, name: str, shape: tuple[int, ...], *, experts: range, total: int) -> list[Source]:
    """Returns where a parameter is stored.

    Args:
        layout: From ``layout_of``.
        name: Of the parameter.
        shape: Of the parameter.
        experts: Those that the parameter holds, if it is a stack.
        total: Experts of the whole stack.
    """
    stack = _STACK.fullmatch(name)
    if stack is None:
        return [Source(_renamed(layout, name), shape, None, _same)]
    if layout in ("gpt_oss", "fused"):
        together = _gpt_oss if layout == "gpt_oss" else _fused
        stored_name, stored_shape, pick = together(stack, (total, *shape[1:]))
        return [Source(stored_name, stored_shape, expert, pick) for expert in experts]
    return [Source(_one_expert(layout, stack, expert), shape[1:], None, _same) for expert in experts]


def stored(model_type: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields what is stored of whole parameters, as they come; GPT-OSS's gate waits for its up.

    Args:
        model_type: Hugging Face's word for the family.
        tensors: Names and whole tensors of the model's parameters and buffers, in its order.
    """
    gates: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        stack = _STACK.fullmatch(name)
        if stack is None:
            yield _renamed(model_type, name), tensor
        elif model_type != "gpt_oss":
            for expert, matrix in enumerate(tensor.unbind(0)):
                yield _one_expert(model_type, stack, expert), matrix
        else:
            target, _, _ = _gpt_oss(stack, tuple(tensor.shape))
            turned = tensor.mT if stack["kind"] == "weight" else tensor
            if stack["which"] == "gate":
                gates[target] = turned
            elif stack["which"] == "up":
                yield target, torch.stack((gates.pop(target), turned), dim=-1).flatten(-2)
            else:
                yield target, turned


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _renamed(model_type: str, name: str) -> str:
    return name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name


def _one_expert(model_type: str, stack: re.Match[str], expert: int) -> str:
    at, which = stack["at"], stack["which"]
    if model_type == "mixtral":
        return f"{_renamed(model_type, at)}.{expert}.{_MIXTRAL[which]}.{stack['kind']}"
    return f"{at}.{expert}.{which}_proj.{stack['kind']}"


def _fused(
    stack: re.Match[str], shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """The stored name and shape, and what of one expert's entry is the parameter's."""
    total, rows, columns = shape
    if stack["which"] == "down":
        return f"{stack['at']}.down_proj", shape, _same
    half = slice(0, rows) if stack["which"] == "gate" else slice(rows, 2 * rows)
    return f"{stack['at']}.gate_up_proj", (total, 2 * rows, columns), lambda stored_entry: stored_entry[half]


def _gpt_oss(
    stack: re.Match[str], shape: tuple[int, ...]
) -> tuple[str, tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
    """As ``_fused``."""
    which, suffix = stack["which"], "_bias" if stack["kind"] == "bias" else ""
    columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[which]
    total, out, *inner = shape
    wide = out if which == "down" else 2 * out
    name = f"{stack['at']}.{'down' if which == 'down' else 'gate_up'}_proj{suffix}"
    if suffix:
        return name, (total, wide), lambda stored_entry: stored_entry[columns]
    return name, (total, *inner, wide), lambda stored_entry: stored_entry[:, columns].mT
