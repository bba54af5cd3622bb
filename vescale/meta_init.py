"""materialize: memory for a model that was built on the meta device, and the first values in it."""

from __future__ import annotations

import torch
from torch import nn


def materialize(model: nn.Module, device: torch.device | str) -> list[str]:
    """Gives every tensor memory and calls ``reset_parameters`` of every module that has one.

    The whole tensors that initialisers draw have the same bits on any number of ranks, if these are seeded alike.

    Args:
        model: Built under ``torch.device("meta")``, sharded or not.
        device: Where it shall be.

    Returns:
        Names of the parameters and persistent buffers that nothing filled: load them.

    Raises:
        ValueError: Before anything changes, if a buffer that no checkpoint has (``persistent=False``) lies in a module
            without ``reset_parameters``: nobody could fill it. Rotary frequencies are the usual case.
    """
    stored = model.state_dict(keep_vars=True)
    orphans: list[str] = []
    lost: list[str] = []
    inits: list[nn.Module] = []
    for path, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        bare = [f"{path}.{name}" if path else name for name, t in own.items() if t is not None and t.is_meta]
        if bare and callable(getattr(module, "reset_parameters", None)):
            inits.append(module)
        else:
            orphans += [name for name in bare if name in stored]
            lost += [name for name in bare if name not in stored]
    if lost:
        raise ValueError(
            f"materialize: {', '.join(lost[:4])} ({len(lost)}) are in no checkpoint, and their modules have no "
            "reset_parameters() to compute them; give them one, or make the buffers persistent"
        )
    model.to_empty(device=device)
    with torch.no_grad():
        for module in inits:
            module.reset_parameters()  # type: ignore[operator]
    return orphans
