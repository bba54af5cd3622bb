"""What may be recorded of a few steps: a profiler's trace, and who holds the device's memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Profile:
    """Records the steps that were asked for, on every rank.

    Args:
        folder: Of the run.
        rank: Of this process.
        steps: First and last step to trace, 1-based, both traced; None: none. Into ``trace/rank_0.json.gz``, for
            Perfetto or chrome://tracing.
        memory_step: Step after which to write who holds memory and where it was allocated, into
            ``memory/rank_0.pickle``, for pytorch.org/memory_viz; None: never. Allocations are recorded from the
            beginning, which costs a few percent.
        device: Of the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        steps: tuple[int, int] | None,
        memory_step: int | None,
        device: torch.device,
    ) -> None:
        self.folder, self.rank, self.steps, self.memory_step = folder, rank, steps, memory_step
        self._profiler: Any = None
        self.device = device
        if memory_step is not None:
            torch.cuda.memory._record_memory_history()

    def begin(self, step: int) -> None:
        """Begins tracing if ``step`` is the first one asked for."""
        if self.steps is not None and step == self.steps[0]:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._profiler.start()

    def end(self, step: int, say: Callable[[str], None]) -> None:
        """Writes what is complete after ``step``, and says where it is."""
        if self._profiler is not None and self.steps is not None and step == self.steps[1]:
            self._profiler.stop()
            path = self._path("trace", "json.gz")
            self._profiler.export_chrome_trace(str(path))
            self._profiler = None
            say(f"trace of steps {self.steps[0]} to {self.steps[1]}: {path.parent} (https://ui.perfetto.dev)")
        if step == self.memory_step:
            path = self._path("memory", "pickle")
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            say(f"memory after step {step}: {path.parent} (https://pytorch.org/memory_viz)")

    def _path(self, kind: str, ending: str) -> Path:
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank_{self.rank}.{ending}"
