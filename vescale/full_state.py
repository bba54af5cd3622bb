"""Full state: whole tensors of a sharded model, out and in, with one segment's worth of memory on the way.

::

    out   every segment:   shards --all-gather--> (m * S,) --copy--> CPU tensors of rank 0 (or of all)
    in    every segment:   rank 0 packs (m * S,) --scatter--> master shards

``model.state_dict()`` needs neither: it is the shards, without communication. Names are the plain names of an unsharded
model; a tied parameter appears under each of its names, as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from vescale import collectives
from vescale.member import Segment, home_of


def full_state_dict(model: nn.Module, *, on_every_rank: bool = False) -> dict[str, torch.Tensor]:
    """Returns the whole state as CPU tensors of the stored dtypes, on rank 0; every rank must call.

    Args:
        model: Has sharded modules in it.
        on_every_rank: Return it on all ranks; else the others get an empty dict and hold one segment at a time.

    Returns:
        The same keys in the same order as the unsharded model's ``state_dict()``.
    """
    wanted = on_every_rank or dist.get_rank() == 0
    found: dict[str, torch.Tensor] = {}
    seen: dict[int, torch.Tensor] = {}  # of tied names: one tensor, as in torch
    for name, tensor, key in _stream(model):
        if wanted:
            found[name] = seen[key] = seen[key] if key in seen else tensor.to("cpu", copy=True)
    return {name: found[name] for name in model.state_dict()} if wanted else {}


def iter_full_state(owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields names and whole tensors; every rank must run it to its end, in step with the others.

    Of a model, segment by segment: a tensor is a view of one segment's gathered buffer, to be copied or written before
    going on. Of an optimizer, tensor by tensor, so that its whole state never lies anywhere at once.

    Args:
        owner: A module that has sharded modules in it, or a ``vescale.Optimizer``.
    """
    if isinstance(owner, nn.Module):
        return ((name, tensor) for name, tensor, _ in _stream(owner))
    return ((name, t.full_tensor() if isinstance(t, DTensor) else t) for name, t in owner.named_state().items())


def load_full(model: nn.Module, state: Mapping[str, torch.Tensor] | None, *, strict: bool = True) -> None:
    """Fills a sharded model from the whole tensors that rank 0 has; every rank must call.

    Where every rank has the whole state, ``model.load_state_dict(state)`` does it without communication.

    Args:
        model: Has sharded modules in it, and has memory (``to_empty`` after meta-device init).
        state: On rank 0, by name; a mapping that reads a tensor when it is asked for it keeps the memory at one
            segment. Elsewhere it is not looked at. One name of a tied parameter suffices.
        strict: Refuse missing and unexpected names.

    Raises:
        ValueError: On every rank, if names or shapes do not fit, or the model is on the meta device. Nothing has been
            changed then; only a mapping that is no dict is read late, and can fail on the way.
    """
    entries = model.state_dict(keep_vars=True)
    state = state if dist.get_rank() == 0 else None  # {} elsewhere, as full_state_dict returns, says the same
    problem = _problems(entries, state, strict) if dist.get_rank() == 0 else None
    _raise_everywhere(problem)
    present = set(collectives.broadcast_object(set(state) & set(entries) if state is not None else None))
    for segment, names in _by_segment(entries):
        chosen = {at: name for name, at in names if name in present}
        if segment is not None and chosen:
            _scatter(segment, chosen, state)
    for name, tensor in _plain(entries):
        if name in present:
            value = tensor.detach().clone()
            if state is not None:
                value.copy_(state[name])
            collectives.broadcast(value)
            with torch.no_grad():
                tensor.copy_(value)


def _stream(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Names, whole tensors, and a number that tied names share."""
    entries = model.state_dict(keep_vars=True)
    for segment, names in _by_segment(entries):
        with torch.no_grad():
            gathered, _ = segment.master.all_gather()
        for name, at in names:
            yield name, gathered.view(at), id(segment.sharded[at])
        del gathered
    for name, tensor in _plain(entries):
        whole = tensor.detach()
        yield name, whole.full_tensor() if isinstance(whole, DTensor) else whole, id(tensor)


def _by_segment(entries: Mapping[str, Any]) -> list[tuple[Segment, list[tuple[str, int]]]]:
    """The segments, each with the names and indices of its entries; the same order on every rank."""
    found: dict[int, tuple[Segment, list[tuple[str, int]]]] = {}
    for name, value in entries.items():
        home = home_of(value) if isinstance(value, torch.Tensor) else None
        if home is not None:
            found.setdefault(id(home.segment), (home.segment, []))[1].append((name, home.at))
    return list(found.values())


def _plain(entries: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Buffers and parameters that lie in no unit."""
    return [(n, v) for n, v in entries.items() if isinstance(v, torch.Tensor) and home_of(v) is None]


def _problems(entries: Mapping[str, Any], state: Mapping[str, torch.Tensor] | None, strict: bool) -> str | None:
    if state is None:
        return "rank 0 must have the state, got None"
    names = set(state)  # a mapping may read a tensor to say whether it has it
    problems = [f"{name} is on the meta device; call to_empty() first" for name, v in entries.items() if v.is_meta]
    if strict:
        given = {id(value) for name, value in entries.items() if name in names}
        missing = [name for name, value in entries.items() if id(value) not in given]
        unexpected = [name for name in sorted(names) if name not in entries]
        problems += [f"missing {', '.join(missing[:4])} ({len(missing)})"] if missing else []
        problems += [f"unexpected {', '.join(unexpected[:4])} ({len(unexpected)})"] if unexpected else []
    if isinstance(state, dict):
        problems += [
            f"{name}: expected shape {tuple(value.shape)}, got {tuple(state[name].shape)}"
            for name, value in entries.items()
            if name in names and state[name].shape != value.shape
        ]
    return "; ".join(problems[:8]) or None


def _scatter(segment: Segment, chosen: Mapping[int, str], state: Mapping[str, torch.Tensor] | None) -> None:
    """Rank 0 packs the segment; each rank gets the shard of its place in the cut, replicas the same one."""
    master, size = segment.master, segment.plan.shard_size
    places, shards, problem = collectives.gather_objects(master.rank), None, None
    if state is not None:
        whole = master.sibling(Replicate(), master.local.new_zeros(segment.plan.numel))
        problem = _pack(whole, chosen, state)
        shards = [whole.local[place * size : (place + 1) * size] for place in places]
    _raise_everywhere(problem)
    fresh = torch.empty_like(master.local)
    collectives.scatter(fresh, shards)
    for at in chosen:
        start, stop = master.layout.spans[at]
        master.local[start:stop].copy_(fresh[start:stop])


def _pack(whole: Any, chosen: Mapping[int, str], state: Mapping[str, torch.Tensor]) -> str | None:
    for at, name in chosen.items():
        value, view = state[name], whole.view(at)
        if value.shape != view.shape:
            return f"{name}: expected shape {tuple(view.shape)}, got {tuple(value.shape)}"
        view.copy_(value)
    return None


def _raise_everywhere(problem: str | None) -> None:
    problem = collectives.broadcast_object(problem)
    if problem is not None:
        raise ValueError(f"load_full: {problem}")
