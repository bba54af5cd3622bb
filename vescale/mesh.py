"""The ranks of a run: the process group, the device of each rank, and the mesh they form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How the ranks share the model.

    Args:
        dp_shard: Neighbouring ranks that share one copy of the model; -1 is all of them. A divisor of the world makes
            several copies, whose gradients are all-reduced (HSDP).
        zero: ZeRO stage of ``fully_shard``.
        reshard_after_forward: Free whole parameters after forward and gather them again for backward; null is True,
            except at the root.
        param_dtype: Of compute and of the all-gather.
        reduce_dtype: Of the reduce-scatter; gradients accumulate in float32.
        max_padding: Padding that may be paid to keep optimizer blocks whole, as a fraction of the elements.
        ep: Ranks among which each stack of experts is dealt; those with the same experts shard them, so
            ``dp_shard == efsdp * ep``. 1: every rank has a shard of all experts.

    Raises:
        ValueError: If a field is out of range.
    """

    dp_shard: int = -1
    zero: int = 3
    reshard_after_forward: bool | None = None
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    max_padding: float = 0.01
    ep: int = 1

    def __post_init__(self) -> None:
        problems = []
        if self.dp_shard != -1 and self.dp_shard < 1:
            problems.append(f"dp_shard: expected -1 or a number of ranks, got {self.dp_shard}")
        if self.zero not in (0, 1, 2, 3):
            problems.append(f"zero: expected 0, 1, 2 or 3, got {self.zero}")
        if not self.max_padding >= 0:
            problems.append(f"max_padding: expected a fraction >= 0, got {self.max_padding}")
        if self.ep < 1:
            problems.append(f"ep: expected a number of ranks >= 1, got {self.ep}")
        if problems:
            raise ValueError("; ".join(problems))

    def check(self, world: int) -> None:
        """Raises if ``world`` ranks cannot form the mesh.

        Raises:
            ValueError: If ``dp_shard`` or ``ep`` does not divide the world.
            NotImplementedError: If experts are to be dealt in several copies of the model.
        """
        if world % self.ep:
            raise ValueError(f"parallelism.ep={self.ep} does not divide {world} ranks")
        if world % self.shard_ranks(world):
            raise ValueError(f"parallelism.dp_shard={self.dp_shard} does not divide {world} ranks")
        if self.ep > 1 and self.shard_ranks(world) != world:
            raise NotImplementedError(
                f"parallelism: ep={self.ep} with dp_shard={self.dp_shard} of {world} ranks: experts are dealt in one "
                "copy of the model; use dp_shard=-1"
            )

    def shard_ranks(self, world: int) -> int:
        """Returns how many of ``world`` ranks share one copy of the model."""
        return world if self.dp_shard == -1 else self.dp_shard

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes as ``fully_shard`` takes them."""
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)


def world_size() -> int:
    """Returns the number of ranks, also before there is a process group: torchrun says it in the environment.

    Raises:
        ValueError: If srun started several tasks that would each train alone.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "RANK" not in os.environ:
        raise ValueError("srun started several tasks that know nothing of each other: sbatch launch/slurm.sbatch ...")
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_job() -> int:
    """Returns this process's rank, also before there is a process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def pick_device(kind: str) -> torch.device:
    """Returns this rank's device.

    Args:
        kind: "cpu", "cuda", or "auto": cuda where there is one.

    Raises:
        ValueError: For another word, or where there are fewer GPUs than ranks on this node.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device: expected auto, cpu or cuda, got {kind!r}")
    count = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cpu" or (kind == "auto" and count == 0):
        return torch.device("cpu")
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > count:
        raise ValueError(f"{ranks} ranks on this node but {count} GPUs: one rank per GPU, or trainer.device=cpu")
    return torch.device("cuda", local)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Joins the process group (gloo on CPU, NCCL on CUDA) and leaves it at the end; one that was there already stays.

    After an exception the connections are cut, so that the other ranks fail too instead of waiting for this one.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # ranks share the cores; two threads a rank on busy cores were ten times slower
    if dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    except BaseException:
        if dist.group.WORLD is not None:
            dist.group.WORLD.abort()
        raise
    finally:
        dist.destroy_process_group()


def make_mesh(device: torch.device, *, shard_ranks: int | None = None) -> DeviceMesh:
    """Returns the mesh of all ranks: one axis "dp_shard", or with several copies two, "dp_replicate" before it.

    Args:
        device: Of this rank.
        shard_ranks: Neighbouring ranks that share one copy of the model; divides the world. None: all.
    """
    world = dist.get_world_size()
    if shard_ranks in (None, world):
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp_shard",))
    shape = (world // shard_ranks, shard_ranks)
    return init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def make_expert_mesh(device: torch.device, ep: int) -> DeviceMesh:
    """Returns the mesh of all ranks as experts see it, axes "efsdp" and "ep"::

        ep = 2, 4 ranks      ep 0    ep 1
        efsdp 0              rank 0  rank 1     a row deals the experts, and its tokens travel
        efsdp 1              rank 2  rank 3     a column has the same experts, and shards them

    Args:
        device: Of this rank.
        ep: Ranks that deal the experts, neighbours so that tokens stay on a node.

    Raises:
        ValueError: If ``ep`` does not divide the world.
    """
    world = dist.get_world_size()
    if ep < 1 or world % ep:
        raise ValueError(f"ep: expected a divisor of the number of ranks, {world}, got {ep}")
    shape = (world // ep, ep)
    return init_device_mesh(device.type, shape, mesh_dim_names=("efsdp", "ep"))
