"""Keys of a configuration: which ones change numbers, and which only watch a run or spread it over ranks.

A run is named by the keys that change its numbers, resumes while they are equal, and is compared with another by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

# Keys that watch a run without changing a number in it: they name no run, and may differ on resume.
WATCHING: tuple[str, ...] = (
    "name",
    "run_dir",
    "dry_run",
    "world_size",
    "tracking",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.eval_sequences",
    "trainer.save_every",
    "trainer.keep",
    "trainer.keep_every",
    "trainer.gc_every",
    "trainer.hang_timeout_s",
    "trainer.profile",
    "trainer.memory_snapshot",
    "trainer.peak_tflops",
    "trainer.export",
)
# Keys that may differ on resume too: how far to go, where the data lie (what they are, a checkpoint knows itself), and
# how the same sums are spread over ranks (equal to rounding, not bit for bit).
SPREADING: tuple[str, ...] = (
    "trainer.steps",
    "data.path",
    "data.parts.*.data.path",
    "trainer.micro_batch",
    "trainer.step_in_backward",
    "optimizer.share_replicas",
    "optimizer.offload_state",
    "parallelism.dp_shard",
    "parallelism.ep",
    "parallelism.zero",
    "parallelism.reshard_after_forward",
    "parallelism.max_padding",
)


def among(key: str, keys: Iterable[str]) -> bool:
    """Returns whether a dotted key is one of ``keys``, in which a * is any part, or lies below one."""
    return any(fnmatchcase(key, k) or key.startswith(k + ".") for k in keys)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested settings as one dictionary with dotted keys."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out
