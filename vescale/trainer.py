"""The trainer: one readable loop from a meta-device model to a checkpoint. Start at ``Trainer.run``.

Every rank runs the same code; what rank 0 alone does (printing, metrics, the run's configuration) is behind
``self.lead``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale import checkpoint
from vescale.collectives import same_on_every_rank
from vescale.commit import preview
from vescale.data import IGNORED, Batch, Dataset, TextData
from vescale.fsdp import fully_shard
from vescale.grad_norm import clip_grad_norm_
from vescale.mesh import ParallelismConfig, make_mesh, pick_device, process_group, rank_of_job
from vescale.optimizer import Optimizer
from vescale.planner import SegmentPlan
from vescale.rule import Rules
from vescale.tracking import Tracker, Tracking


@runtime_checkable
class Schedule(Protocol):
    """What multiplies every group's own learning rate."""

    def scale(self, step: int) -> float:
        """Returns the multiplier at the 0-based ``step``."""


@runtime_checkable
class ModelConfig(Protocol):
    """What the trainer needs to know of a model; ``models.LlamaConfig`` is one."""

    vocab_size: int
    max_position_embeddings: int

    def build(self) -> nn.Module:
        """Returns the model: ``model(input_ids, labels)`` is the sum of token losses, ``units()`` its layers."""

    def num_parameters(self) -> int:
        """Returns the number of parameters."""

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the FLOPs of forward and backward per token."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """How long, in which batches, and how often to look.

    Args:
        steps: Optimizer steps of the run.
        global_batch: Sequences in one step, over all ranks.
        schedule: Multiplier of every group's learning rate at each step.
        micro_batch: Sequences one rank takes through the model at once; None: its whole share of the global batch.
        max_grad_norm: The gradient's norm is clipped to it, in units of the loss per parameter unit; None: not clipped.
        seed: Of the weights.
        device: "cpu", "cuda", or "auto": cuda where there is one.
        log_every: Steps between two log lines.
        eval_every: Steps between two looks at the validation split; the end of the run is always one.
        eval_sequences: Validation sequences per look; None: all.
        save_every: Steps between two checkpoints; the end of the run is always one.
        keep: Checkpoints that stay on disk.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    steps: int
    global_batch: int
    schedule: Schedule
    micro_batch: int | None = None
    max_grad_norm: float | None = 1.0
    seed: int = 0
    device: str = "auto"
    log_every: int = 10
    eval_every: int = 100
    eval_sequences: int | None = None
    save_every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch", "log_every", "eval_every", "save_every", "keep")
        problems = [
            f"{name}: expected a number > 0, got {getattr(self, name)}" for name in counts if getattr(self, name) < 1
        ]
        optional = {name: getattr(self, name) for name in ("micro_batch", "max_grad_norm", "eval_sequences")}
        problems += [
            f"{name}: expected null or a number > 0, got {value}"
            for name, value in optional.items()
            if value is not None and not value > 0
        ]
        if not 0 <= self.seed < 2**63:
            problems.append(f"seed: expected a number in [0, 2**63), got {self.seed}")
        if not hasattr(self.schedule, "scale"):
            problems.append(f"schedule: expected a _target_ with scale(step), got {self.schedule!r}")
        if problems:
            raise ValueError("; ".join(problems))

    def micro_batches(self, world: int) -> tuple[int, int]:
        """Returns how many micro-batches a rank takes per step, and how many sequences each has.

        Raises:
            ValueError: If the global batch cannot be shared out evenly.
        """
        if self.global_batch % world:
            raise ValueError(f"trainer.global_batch={self.global_batch} does not divide over {world} ranks")
        share = self.global_batch // world
        size = self.micro_batch or share
        if share % size:
            raise ValueError(
                f"trainer.micro_batch={size} does not divide the {share} sequences of a rank "
                f"(global_batch={self.global_batch}, {world} ranks)"
            )
        return share // size, size


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a command composes: a field for each key of ``recipes/train.yaml``.

    Args:
        name: Of the run.
        run_dir: The run's folder; a checkpoint in it is continued.
        model: The model.
        optimizer: ``{group: {"pattern": one glob or several, "rule": a rule}}``; the first match takes a parameter.
        data: The tokens.
        parallelism: How the ranks share the model.
        trainer: How long and how often.
        tracking: Where metrics go.
        dry_run: Plan and print only.
        world_size: Ranks of a dry run; None: this job's.

    Raises:
        ValueError: If a group has other keys, or ``world_size`` is out of range or of no dry run.
    """

    name: str
    run_dir: Path
    model: ModelConfig
    optimizer: Mapping[str, Any]
    data: TextData
    parallelism: ParallelismConfig
    trainer: TrainerConfig
    tracking: Tracking
    dry_run: bool = False
    world_size: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"optimizer.{name}: expected pattern (one glob or several) and rule, got {group!r}"
            for name, group in self.optimizer.items()
            if not _is_group(group)
        ]
        if self.world_size is not None and not self.dry_run:
            problems.append("world_size: only dry_run=true takes it; torchrun says how many ranks a run has")
        if self.world_size is not None and self.world_size < 1:
            problems.append(f"world_size: expected null or a number > 0, got {self.world_size}")
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def rules(self) -> Rules:
        """Which parameter is stepped by which rule.

        Raises:
            ValueError: If a group's rule is none.
        """
        return Rules(**{name: (group["pattern"], group["rule"]) for name, group in self.optimizer.items()})


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, Mapping) and group.keys() == {"pattern", "rule"} and isinstance(group["pattern"], str | list)
    )


class Trainer:
    """A run, from its checked configuration to its last checkpoint.

    Making one allocates no weights and starts nothing, ``check`` looks at ranks and files, ``run`` does the rest.

    Args:
        run: The configuration.
        settings: The same as plain values, to keep beside the run.

    Raises:
        ValueError: For input that cannot work, in one line.
    """

    config: TrainerConfig
    model: Any  # an nn.Module; on the meta device until ``_start``, sharded from then on
    data: Dataset  # and the next three: set by ``check``
    device: torch.device
    micro_batches: int  # a rank's share of a step ...
    micro_size: int  # ... in sequences each
    optimizer: Optimizer
    peaks: list[float]  # learning rate of each group as its rule states it; the groups hold scaled ones
    step: int  # optimizer steps completed
    tracker: Tracker | None  # on rank 0

    def __init__(self, run: RunConfig, *, settings: dict[str, Any]) -> None:
        self.config, self.parallelism, self.tracking, self.rules = run.trainer, run.parallelism, run.tracking, run.rules
        self.model_config, self.data_config, self.run_dir, self.settings = run.model, run.data, run.run_dir, settings
        self.step, self.tracker, self.lead = 0, None, rank_of_job() == 0
        with torch.device("meta"):
            self.model = self.model_config.build()
        self.routing = self.rules.route(self.model.named_parameters())
        longest = self.model_config.max_position_embeddings
        if self.data_config.seq_len > longest:
            raise ValueError(f"data.seq_len={self.data_config.seq_len} exceeds model.max_position_embeddings={longest}")

    @property
    def checkpoints(self) -> Path:
        """The folder of this run's checkpoints."""
        return self.run_dir / "checkpoints"

    def check(self, world: int) -> None:
        """Opens the data and raises for whatever would stop the run later: ranks, device, data, a damaged checkpoint.

        Args:
            world: Number of ranks.

        Raises:
            ValueError: In one line.
        """
        self.check_ranks(world)
        self.device = pick_device(self.config.device)
        self._check_folder()
        self.data = self.data_config.open()
        self._check_data()
        path = checkpoint.newest(self.checkpoints)
        if path is not None:
            extra = checkpoint.verify(path, rank=rank_of_job(), world=world)
            missing = sorted({"step", "tokens", "data"} - extra.keys())
            if missing:
                raise ValueError(f"checkpoint {path} was not written by a trainer: it lacks {', '.join(missing)}")
            self.data.check(extra["data"])

    def check_ranks(self, world: int) -> None:
        """Raises for a number of ranks that cannot share the batch or the model.

        Raises:
            ValueError: In one line.
        """
        self.micro_batches, self.micro_size = self.config.micro_batches(world)
        self.parallelism.check(world)

    def _check_folder(self) -> None:
        folder = self.run_dir.absolute()
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise ValueError(f"run_dir: {self.run_dir} cannot be made: {there} is no folder that can be written")

    def _check_data(self) -> None:
        problems, model = [], self.model_config
        if self.data.vocab_size is not None and self.data.vocab_size > model.vocab_size:
            problems.append(f"model.vocab_size={model.vocab_size}, but the data have {self.data.vocab_size} ids")
        if self.data.validation is None:
            problems.append("data.val_fraction=0 leaves nothing to validate on")
        if problems:
            raise ValueError("; ".join(problems))

    # --- the run ---

    def run(self) -> float:
        """Trains from the newest checkpoint, or from the start, to the last step.

        Returns:
            The validation loss, in nats per token.

        Raises:
            RuntimeError: On every rank, if a loss or a gradient is not finite; the checkpoints are of steps before.
        """
        with self._tracked(), process_group(self.device):
            self._start()
            self._resume()
            with self._progress() as advance:
                while self.step < self.config.steps:
                    loss, norm = self.train_step()
                    self.step += 1
                    advance()
                    self._look(loss, norm)
            return self._finish()

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Takes one optimizer step.

        Returns:
            The loss per token of the global batch, and the norm of its gradient, both () float32.
        """
        self._schedule()
        batches = list(self._micro_batches())
        tokens = self._sum(sum((labels != IGNORED).sum() for _, labels in batches))
        total = torch.zeros((), device=self.device)
        for input_ids, labels in batches:  # gradients leave each rank after every micro-batch: no whole ones are kept
            loss = self.model(input_ids, labels) / tokens
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._counted += tokens
        return self._sum(total), norm

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the loss per token of the validation sequences, in nats.

        The same sequences for any number of ranks.
        """
        both = torch.zeros(2, dtype=torch.float64)
        for input_ids, labels in self._validation_batches():
            loss = self.model(input_ids, labels)
            both += torch.stack([loss.double(), (labels != IGNORED).sum().double()]).cpu()
        loss, tokens = self._sum(both.to(self.device)).tolist()
        return loss / tokens

    # --- beginning and end ---

    def _start(self) -> None:
        """Shards the model over the ranks, and fills it with the seed's weights."""
        mesh = make_mesh(self.device)
        digest = hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()
        same_on_every_rank(digest, what="the configuration", group=mesh.get_group())
        self.shard(mesh=mesh)
        self.model.to_empty(device=self.device)
        torch.manual_seed(self.config.seed)
        self.model.init_weights()
        self.model.set_gradient_divide_factor(1.0, recurse=True)  # the loss is divided by the tokens of all ranks
        self.optimizer = Optimizer(self.model.named_parameters(), self.rules)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._counted = torch.zeros((), dtype=torch.int64, device=self.device)

    def _resume(self) -> None:
        """Continues the newest whole checkpoint, if there is one."""
        path, extra = checkpoint.newest(self.checkpoints), {"step": 0, "tokens": 0}
        if path is not None:
            extra = checkpoint.load(path, model=self.model, optimizer=self.optimizer, verified=True)
        self.step = extra["step"]
        self._counted += extra["tokens"]
        if self.lead:
            self._open(path, extra)
        self._since, self._tokens_then = time.perf_counter(), extra["tokens"]

    def _open(self, path: Path | None, extra: dict[str, Any]) -> None:
        """Opens the metrics after what the checkpoint at ``path`` knows of, and says what begins."""
        self._write_settings()
        first = self.step + 1 if path is not None else 0
        identity = extra.get("tracking_id")
        self.tracker = self.tracking.open(self.run_dir, config=self.settings, first_step=first, id=identity)
        size, world = self.model_config.num_parameters(), dist.get_world_size()
        print(f"{self.routing}\n{size:,} parameters, {world} ranks, run in {self.run_dir}")
        print(f"metrics: {self.tracker.path}; {self.tracker.where}", flush=True)
        if path is not None:
            done = self.step >= self.config.steps
            print(f"complete: {path}; train again under another name=..." if done else f"continuing {path}", flush=True)

    def _write_settings(self) -> None:
        """Keeps the configuration beside the run; a kill leaves the old file or the new one."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        fresh = self.run_dir / "config.json.new"
        fresh.write_text(json.dumps(self.settings, indent=1))
        fresh.replace(self.run_dir / "config.json")

    def _finish(self) -> float:
        """Evaluates, saves what is not saved yet, and says where things are."""
        saved = checkpoint.newest(self.checkpoints) == self.checkpoints / self._name()
        loss = self.evaluate() if saved else self._validate()
        if not saved:
            self._require_finite(torch.tensor(loss))
            self._save()
        if self.lead:
            print(f"validation loss {loss:.4f} nats per token after {self.step} steps; run folder {self.run_dir}")
        return loss

    def _save(self) -> None:
        extra = {"step": self.step, "tokens": int(self._counted), "data": self.data.describe()}
        extra["tracking_id"] = self.tracker.id if self.tracker is not None else None
        folder = self.checkpoints / self._name()
        checkpoint.save(folder, model=self.model, optimizer=self.optimizer, extra=extra, keep=self.config.keep)

    def _name(self) -> str:
        return f"step_{self.step:08}"

    # --- looking ---

    def _look(self, loss: Tensor, norm: Tensor) -> None:
        """Logs, evaluates and saves when it is time to; after the last step, ``_finish`` evaluates and saves."""
        if self._due(self.config.log_every):
            self._log(loss, norm)
        evaluates, saves = self._due(self.config.eval_every), self._due(self.config.save_every)
        if self.step == self.config.steps or not (evaluates or saves):
            return
        self._require_finite(loss, norm)  # also waits for the device: the steps end here
        began = time.perf_counter()
        if evaluates:
            self._validate()
        if saves:
            self._save()
        self._since += time.perf_counter() - began  # tokens/s are of the steps alone

    def _due(self, every: int) -> bool:
        return self.step % every == 0

    def _require_finite(self, *numbers: Tensor) -> None:
        """Stops a run that is lost before its weights are saved."""
        if not all(math.isfinite(number) for number in numbers):
            words = " and ".join(f"{float(number)}" for number in numbers)
            raise RuntimeError(f"step {self.step}: expected finite loss and gradient norm, got {words}; not saved")

    def _log(self, loss: Tensor, norm: Tensor) -> None:
        """Reads the device, once per interval: prints a line and records it."""
        counted, now = int(self._counted), time.perf_counter()
        speed, memory = (counted - self._tokens_then) / (now - self._since), _peak_memory(self.device) / 2**30
        self._since, self._tokens_then = now, counted
        row = {"loss": loss.item(), "grad_norm": norm.item(), "tokens_per_second": speed, "memory_gib": memory}
        rates = {f"lr/{group['name']}": float(group["lr"]) for group in self.optimizer.param_groups}
        lr = "/".join(f"{rate:.2g}" for rate in dict.fromkeys(rates.values()))
        self._record(
            row | rates,
            f"loss {row['loss']:.4f}  grad norm {row['grad_norm']:.3f}  lr {lr}  "
            f"{speed:,.0f} tokens/s  memory {memory:.2f} GiB",
        )
        self._require_finite(loss, norm)

    def _validate(self) -> float:
        loss = self.evaluate()
        self._record({"validation_loss": loss}, f"validation loss {loss:.4f}")
        return loss

    def _record(self, metrics: dict[str, float], line: str) -> None:
        """On rank 0, keeps a row and prints a line."""
        if self.tracker is not None:
            self.tracker.log(metrics, step=self.step, tokens=int(self._counted))
            print(f"step {self.step}/{self.config.steps}  {line}", flush=True)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Ends the tracker, if one is opened within, when the run ends: as failed after an exception."""
        failed = 1
        try:
            yield
            failed = 0
        finally:
            if self.tracker is not None:
                self.tracker.finish(exit_code=failed)

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        """Yields what to call after each step; a progress bar where rank 0 has a terminal."""
        if not (self.lead and sys.stdout.isatty()):
            yield lambda: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("training", total=self.config.steps, completed=self.step)
            yield lambda: bar.advance(task)

    # --- numbers ---

    def _schedule(self) -> None:
        scale = self.config.schedule.scale(self.step)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * scale

    def _micro_batches(self) -> Iterator[Batch]:
        """This rank's part of the step: of the samples [s * global_batch, ...), an equal stretch per rank."""
        share = self.micro_batches * self.micro_size
        first = self.step * self.config.global_batch + dist.get_rank() * share
        for start in range(first, first + share, self.micro_size):
            yield self._to_device(self.data.train.read(start, self.micro_size))

    def _validation_batches(self) -> Iterator[Batch]:
        """As many batches on every rank, since each forward gathers parameters; what is past the end counts nothing."""
        samples = self.data.validation
        assert samples is not None  # _check_data refused the other case
        count = min(self.config.eval_sequences or samples.num_samples, samples.num_samples)
        stride = self.micro_size * dist.get_world_size()
        for begin in range(0, count, stride):
            start = begin + dist.get_rank() * self.micro_size
            batch = samples.read(start, self.micro_size)
            batch.labels[max(count - start, 0) :] = IGNORED
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        return Batch(*(tensor.to(self.device, non_blocking=True) for tensor in batch))

    def _sum(self, value: Any) -> Tensor:
        total = torch.as_tensor(value, device=self.device).clone()
        dist.all_reduce(total)
        return total

    # --- before the run ---

    def shard(self, **options: Any) -> None:
        """Declares every unit to ``fully_shard``; ``options`` are further arguments of it."""
        for module in (*self.model.units(), self.model):
            fully_shard(
                module,
                mp_policy=self.parallelism.mp_policy,
                reshard_after_forward=self.parallelism.reshard_after_forward,
                block_of=self.rules.block_of,
                max_padding=self.parallelism.max_padding,
                zero=self.parallelism.zero,
                **options,
            )

    def preview(self, world: int) -> list[tuple[str, tuple[SegmentPlan, ...]]]:
        """Returns the plan of every unit that ``shard`` declared on ``world`` ranks; no process, no memory for weights.

        Raises:
            ValueError: If the ranks do not fit the parallelism.
        """
        self.parallelism.check(world)
        return preview(self.model, world)


def _peak_memory(device: torch.device) -> int:
    """Bytes: of CUDA's allocator on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
