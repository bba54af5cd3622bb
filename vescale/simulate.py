"""Simulate: one rank's step by the project's own ``fully_shard`` and ``Optimizer``, without the other ranks.

torch's fake process group answers every collective at once, and fake tensors have shapes but no memory, so that one
process runs any rank of any world. What happens is counted from outside (``vescale.live``) and compared with what the
plan says: collectives and state to the byte, the peak of live tensors within ``TOLERANCE``.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.backward_step import step_in_backward
from vescale.grad_norm import NormInParts
from vescale.live import Collective, LiveBytes
from vescale.logit_clip import LogitClip
from vescale.mesh import make_mesh
from vescale.optimizer import Optimizer
from vescale.rule import Rules
from vescale.trainer import Trainer

TOLERANCE = 0.1  # of the predicted peak
_NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


class Observed(NamedTuple):
    """What one rank did in a step.

    Args:
        parameters: Bytes of master shards.
        state: Bytes of optimizer state.
        peak: Most bytes of live tensors at a time.
        allocations: Storages made.
        collectives: Every call, with its bytes.
    """

    parameters: int
    state: int
    peak: int
    allocations: int
    collectives: Counter[Collective]


def simulate(trainer: Trainer, *, rank: int, num_ranks: int, micro_batch: int, micro_batches: int) -> Observed:
    """Returns what one rank does in a training step.

    Args:
        trainer: Of the run, on the meta device; it is used up.
        rank: The rank.
        num_ranks: Of the world.
        micro_batch: Sequences of one forward.
        micro_batches: Of the step.

    Raises:
        ValueError: If there is a process group already, or no such rank.
        NotImplementedError: For a step that depends on values, as Shampoo's roots and dealt experts do, and for experts
            in float32.
    """
    if dist.is_initialized():
        raise ValueError("simulate: this process has a process group; simulate in a process of its own")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: expected a number in [0, {num_ranks}), got {rank}")
    if trainer.parallelism.ep > 1:
        raise NotImplementedError(f"simulate: with ep={trainer.parallelism.ep} values decide how many tokens travel")
    if hasattr(trainer.model_config, "num_experts_per_tok") and trainer.parallelism.param_dtype is not torch.bfloat16:
        raise NotImplementedError("simulate: torch's made-up grouped products are of bf16; use parallelism=zero3_bf16")
    _make_tables(trainer.rules)
    with _alone(rank, num_ranks):
        shard_ranks = trainer.parallelism.shard_ranks(num_ranks)
        trainer.shard(mesh=make_mesh(torch.device("cpu"), shard_ranks=shard_ranks))
        list(trainer.model.named_parameters())  # plans, and compares the plans with the other ranks, who agree
        with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
            try:
                return observe(trainer, live, micro_batch=micro_batch, micro_batches=micro_batches)
            except (RuntimeError, *_NEED_VALUES) as problem:
                if not isinstance(problem, _NEED_VALUES) and not isinstance(problem.__cause__, _NEED_VALUES):
                    raise
                raise NotImplementedError(
                    f"simulate: made-up tensors have no values, and this run decides by some: {problem}"
                ) from None


def observe(trainer: Trainer, live: LiveBytes, *, micro_batch: int, micro_batches: int) -> Observed:
    """Returns what this rank does in a training step, on real ranks or on made-up ones.

    Args:
        trainer: Of the run; its model is sharded and on the meta device.
        live: What counts, active.
        micro_batch: Sequences of one forward.
        micro_batches: Of the step.
    """
    model = trainer.model.to_empty(device="cpu")
    model.init_weights()
    held = live.now()
    parameters = held - sum(buffer.nbytes for buffer in model.buffers())
    optimizer = Optimizer(model.named_parameters(), trainer.rules, **trainer.engine)
    state = live.now() - held
    if trainer.logit_clip is not None:
        LogitClip(trainer.logit_clip, model, optimizer)
    norm = NormInParts() if trainer.config.step_in_backward else None
    if norm is not None:
        step_in_backward(model, optimizer, norm=norm)
    for run in optimizer.runs:
        if isinstance(run.steps, FakeTensor) and len(run.params) == 1:  # the host reads the step of one parameter
            run.steps = torch.tensor([0.0])  # made-up constants have a value
            run.all_state["step"] = run.steps[0]
    tokens = torch.zeros(micro_batch, trainer.data_config.seq_len, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, tokens)  # later forwards prefetch in the order of the first
        for parameter in model.parameters():
            parameter.mul_(1)  # as a step does: below stage 3 it is why parameters are gathered again
    live.restart()
    for left in reversed(range(micro_batches)):
        each = norm is None and trainer.parallelism.zero >= 2
        model.set_requires_gradient_sync(left == 0 or each)  # as the trainer does
        model(tokens, tokens).backward()
    if norm is None:
        optimizer.clip_grad_norm_(trainer.config.max_grad_norm or math.inf, policy=trainer.config.clip_policy)
    else:
        norm.take()
    optimizer.step()
    optimizer.zero_grad()
    return Observed(parameters, state, live.peak, live.allocations, live.collectives)


def _make_tables(rules: Rules) -> None:
    """Lets rules that round to codes make their tables of real numbers, before tensors are made up."""
    for rule in (group.rule for group in rules.groups.values()):
        if hasattr(rule, "chunk_state"):
            zeros = torch.zeros(rule.finest)
            state = {name: zeros.to(dtype) for name, dtype in rule.element_state().items()}
            state |= {name: torch.zeros(1, dtype=dtype) for name, dtype in rule.chunk_state().items()}
            rule.prepare(zeros, zeros.clone(), state | {"step": torch.zeros(())}, skip=None)


@contextmanager
def _alone(rank: int, num_ranks: int) -> Iterator[None]:
    """A process group whose other ranks are made up."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with warnings.catch_warnings():
            # data_ptr of a fake tensor is 0 for all: views look as if they lay where they should, which they do.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        dist.destroy_process_group()
