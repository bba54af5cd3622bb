"""What is held beside the sharded state does not grow: not with the model's depth, not with the number of steps."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from waiting import wait_for

from vescale import train
from vescale.live import LiveBytes

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _model(depth: int, sizes: tuple[int, ...] = (2,), reduce: torch.dtype = torch.float32) -> nn.Module:
    from vescale import fully_shard

    model, mesh = nn.Sequential(*(Layer() for _ in range(depth)), nn.Linear(WIDTH, 1)), init_device_mesh("cpu", sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    for unit in (*list(model)[:-1], model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    return model


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3)


def _above(
    depth: int, in_backward: bool, sizes: tuple[int, ...], *, reduce: torch.dtype = torch.float32, enough: int = 0
) -> int:
    """Peak of live bytes above masters and, where the step comes after backward, gradients.

    The least of twelve steps, or of so many that every rank has seen one of ``enough`` bytes: gloo's threads may let go
    of a tensor late, and then one more is alive than need be.
    """
    from vescale import step_in_backward

    model = _model(depth, sizes, reduce)
    state = sum(segment.master.nbytes for unit in model.units() for segment in unit.segments)
    if in_backward:
        step_in_backward(model, _sgd)
    model(torch.ones(1, WIDTH)).sum().backward()  # records the order
    least = 2**63 - 1
    for _ in range(12):
        model.zero_grad()
        with LiveBytes() as live:
            model(torch.ones(1, WIDTH)).sum().backward()
        least = min(least, live.peak - (1 if in_backward else 2) * state)
        most = torch.tensor(least)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if most <= enough:
            break
    return least


def test_transient_memory_does_not_depend_on_depth(pool) -> None:
    """With copies too, whose gradients are all-reduced in fp32 (T-M2, pytorch#179128)."""
    layer = 2 * 4 * WIDTH * WIDTH * 4  # bytes of one layer's gradient buffer
    for in_backward, sizes in ((False, (2,)), (True, (2,)), (False, (2, 2))):
        ranks, activations = pool(math.prod(sizes)), 12 * 1024  # of a batch of one, what 12 more layers keep
        shallow = max(ranks.run(_above, 4, in_backward, sizes))
        deep = max(ranks.run(_above, 16, in_backward, sizes, enough=shallow + activations))
        assert shallow <= deep <= shallow + activations < shallow + layer
        assert (
            deep < 5 * layer
        )  # two gathered layers (bf16, half each), two gradient buffers (fp32), a shard, activations


def test_a_narrow_reduction_is_widened_when_nothing_else_lives(pool) -> None:
    """Reduced in bf16 on two ranks, S elements a shard, a gathered layer and a gradient buffer are 4 S bytes.

    In backward what has arrived takes 2 S bytes a layer, where gradients take 4 S. Stepped in backward, there are two
    gathered layers, two gradient buffers, in one of which the sum lies until the step, and a gradient to be copied.
    """
    narrow, grad = 2 * (8 * WIDTH * WIDTH + 5 * WIDTH) // 2, 2 * 4 * WIDTH * WIDTH  # 2 S, padding aside
    small = 12 * 1024  # activations of a batch of one, the last layer, padding
    for depth, in_backward, most in ((12, False, narrow + small), (4, True, 4 * 2 * narrow + grad + small)):
        found = pool(2).run(_above, depth, in_backward, (2,), reduce=torch.bfloat16, enough=most)
        assert max(found) <= most


def _resident() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def _steps() -> list[tuple[int, float]]:
    """Number of tensors and MiB resident after 100 and after 500 steps.

    gloo's threads let go of a tensor a moment after its collective: the second count waits for them.
    """
    model = _model(1)
    optimizer, x, seen = _sgd(model.parameters()), torch.ones(2, WIDTH), []
    for steps in (100, 400):
        for _ in range(steps):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.1)
        if seen:
            wait_for(lambda: _tensors() <= seen[0][0])
        seen.append((_tensors(), _resident()))
    return seen


def _tensors() -> int:
    """Tensors of this process."""
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_hundreds_of_steps_leave_memory_flat(pool) -> None:
    for (tensors, resident), (later, grown) in pool(2).run(_steps):
        assert later <= tensors  # other tests of this worker may have left some to be collected
        assert grown <= resident + 1


ARGV = [
    *("model.hidden_size=16", "model.intermediate_size=16", "model.num_hidden_layers=1", "data.seq_len=8"),
    *("trainer.global_batch=2", "trainer.log_every=10", "trainer.eval_every=50", "trainer.eval_sequences=2"),
    *(
        "trainer.save_every=50",
        "trainer.steps=1001",
        "optimizer=adamw",
        "trainer.device=cpu",
        "tracking.mode=disabled",
    ),
]


def _trained(argv: list[str]) -> list[dict[str, float]]:
    """What the process holds after 101 and after 1001 steps of a run that logs, evaluates and saves."""
    from vescale.trainer import Trainer

    seen: list[dict[str, float]] = []
    step = Trainer.train_step

    def counted(trainer: Trainer) -> Any:
        found = step(trainer)
        if trainer.step in (100, 1000):
            trainer.saver.join(timeout_s=60)
            time.sleep(0.1)
            if seen:
                wait_for(lambda: _tensors() <= seen[0]["tensors"])
            held = {"tensors": _tensors(), "MiB": _resident(), "threads": threading.active_count()}
            seen.append({**held, "files": len(os.listdir("/proc/self/fd"))})
        return found

    Trainer.train_step = counted  # type: ignore[method-assign]
    try:
        assert train.main(argv) == 0
    finally:
        Trainer.train_step = step  # type: ignore[method-assign]
    return seen


def test_a_run_of_a_thousand_steps_leaves_memory_and_open_files_flat(pool, tmp_path: Path) -> None:
    for early, late in pool(2).run(_trained, [*ARGV, f"run_dir={tmp_path}"]):
        assert late["MiB"] <= early["MiB"] + 12, (early, late)  # a copy of the weights a step would be 45
        assert all(late[what] <= early[what] for what in ("tensors", "threads", "files")), (early, late)
