"""What may be recorded of a few steps: a profiler's trace, and who holds the device's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Profile:
    """Records the steps that were asked for, on every rank; what cannot be written costs the recording, not the run.

    Args:
        folder: Of the run.
        rank: Of this process.
        steps: First and last step to trace, 1-based, both traced; None: none. Into ``trace/rank_0.json.gz``, for
            Perfetto or chrome://tracing.
        memory_step: Step after which to write who holds memory and where it was allocated, into
            ``memory/rank_0.pickle``, for pytorch.org/memory_viz; None: never. Allocations are recorded from the
            beginning, which costs a few percent.
        device: Of the run.
        say: Takes a line for the terminal.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        steps: tuple[int, int] | None,
        memory_step: int | None,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.rank, self.steps, self.memory_step = folder, rank, steps, memory_step
        self._profiler: Any = None
        self.device, self.say = device, say
        if memory_step is not None:
            torch.cuda.memory._record_memory_history()

    def begin(self, step: int) -> None:
        """Begins tracing at the first step asked for, or at the first of them that a resumed run takes."""
        if self._profiler is None and self.steps is not None and self.steps[0] <= step <= self.steps[1]:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self._profiler = torch.profiler.profile(activities=kinds, record_shapes=True)
            self._profiler.start()

    def end(self, step: int) -> None:
        """Writes what is complete after ``step``, and says where it is."""
        if self._profiler is not None and self.steps is not None and step == self.steps[1]:
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            what = f"trace up to step {step}"
            self._write(profiler.export_chrome_trace, self._path("trace", "json.gz"), what, "ui.perfetto.dev")
        if step == self.memory_step:
            dump, path = torch.cuda.memory._dump_snapshot, self._path("memory", "pickle")
            self._write(dump, path, f"memory after step {step}", "pytorch.org/memory_viz")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _path(self, kind: str, ending: str) -> Path:
        return self.folder / kind / f"rank_{self.rank}.{ending}"

    def _write(self, write: Callable[[str], Any], path: Path, what: str, viewer: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
            self.say(f"{what}: {path.parent} (https://{viewer})")
        except (OSError, RuntimeError) as problem:  # torch's own words for a file that cannot be opened
            with contextlib.suppress(OSError):
                path.unlink()
            self.say(f"warning: {what} was not written: {' '.join(str(problem).split())}; training goes on")
