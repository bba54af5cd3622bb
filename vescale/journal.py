"""Journal: what rank 0 says and keeps of a run: lines on the terminal, a progress bar, rows for the tracker.

::

    step 120/250  loss 2.3184  norm 0.812  lr 0.0085  41,203 tok/s  61.5 TFLOP/s  MFU 6.2%  0.62 GiB  data 0.4%

TFLOP/s and MFU are of one device. Utilisation is shown where the device's peak is known, never guessed.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from vescale.tracking import Tracker


class Journal:
    """Prints and keeps what happens; only rank 0 has one.

    Args:
        tracker: Takes the rows.
        steps: Of the run.
        flops_per_token: Of the model, forward and backward.
        peak_flops: Of one device, FLOP/s; None: not known.
        ranks: That share the work.
        step: Completed before this run.
        tokens: Trained on before this run.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        steps: int,
        flops_per_token: float,
        peak_flops: float | None,
        ranks: int,
        step: int,
        tokens: int,
    ) -> None:
        self.tracker, self.steps, self.ranks = tracker, steps, ranks
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.last: dict[str, float] = {}  # latest value of every metric
        self._since, self._tokens, self._step, self._waited = time.perf_counter(), tokens, step, 0.0

    def row(self, metrics: Mapping[str, float], *, step: int, tokens: int, line: str) -> None:
        """Keeps a row and prints its line."""
        self.tracker.log(metrics, step=step, tokens=tokens)
        self.last |= metrics
        width = len(str(self.steps))
        print(f"step {step:>{width}}/{self.steps}  {line}", flush=True)

    def steps_row(
        self,
        *,
        loss: float,
        norm: float,
        rates: Mapping[str, float],
        waited_s: float,
        step: int,
        tokens: int,
        device: torch.device,
        more: Mapping[str, float],
    ) -> None:
        """Keeps and prints the numbers of a step, and speeds since the last such row.

        Args:
            loss: Per token, nats.
            norm: Of the gradient.
            rates: Learning rate of each group.
            waited_s: Seconds that steps have waited for data, in all.
            step: Completed.
            tokens: Trained on.
            device: Whose memory to show.
            more: Other metrics for the row alone.
        """
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        speed, taken = (tokens - self._tokens) / seconds, max(step - self._step, 1)
        flops, memory = speed * self.flops_per_token / self.ranks, peak_memory(device) / 2**30
        share = (waited_s - self._waited) / seconds
        self._since, self._tokens, self._step, self._waited = now, tokens, step, waited_s
        row = {"loss": loss, "grad_norm": norm, "tokens_per_second": speed, "memory_gib": memory}
        row |= {"tflops_per_device": flops / 1e12, "step_seconds": seconds / taken, "data_wait": share}
        used = "n/a"
        if self.peak_flops:
            row["mfu"] = flops / self.peak_flops
            used = f"{row['mfu']:.1%}"
        lr = "/".join(f"{rate:.2g}" for rate in dict.fromkeys(rates.values()))
        line = f"loss {loss:.4f}  norm {norm:.3f}  lr {lr}  {speed:,.0f} tok/s  {flops / 1e12:.3g} TFLOP/s  MFU {used}"
        line += f"  {memory:.2f} GiB  data {share:.1%}"
        self.row(row | dict(rates) | dict(more), step=step, tokens=tokens, line=line)

    def pause(self, seconds: float) -> None:
        """Leaves ``seconds`` out of the speeds: evaluations and saves are no steps."""
        self._since += seconds

    @contextmanager
    def progress(self, step: int) -> Iterator[Callable[[], None]]:
        """Yields what to call after each step; a progress bar with the time left where there is a terminal."""
        if not sys.stdout.isatty():
            yield lambda: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("training", total=self.steps, completed=step)
            yield lambda: bar.advance(task)


def peak_memory(device: torch.device) -> int:
    """Returns bytes: of CUDA's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
