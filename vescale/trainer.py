"""The trainer: one readable loop from a meta-device model to a checkpoint. Start at ``Trainer.run``.

Every rank runs the same code; what rank 0 alone does (printing, metrics, the run's configuration) is behind
``self.lead``.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale import capacity, checkpoint, deterministic, position, preflight, record
from vescale.backward_step import step_in_backward
from vescale.collectives import same_on_every_rank
from vescale.data import Batch, Prefetch, num_labels
from vescale.evaluation import Evaluation, sum_over_ranks, to_device
from vescale.feed import Feed
from vescale.fsdp import fully_shard
from vescale.garbage import Garbage
from vescale.grad_norm import NormInParts
from vescale.health import Health, first_bad
from vescale.job import RunConfig, TrainerConfig
from vescale.journal import Journal
from vescale.logit_clip import LogitClip, clipped_weights
from vescale.mesh import make_expert_mesh, make_mesh, pick_device, process_group, rank_of_job
from vescale.optimizer import Optimizer
from vescale.peaks import known_peak
from vescale.profile import Profile
from vescale.run_lock import alone
from vescale.saver import Saver
from vescale.steppable import check_sharing
from vescale.stop import REQUEUE, Stopped, StopSignals
from vescale.watchdog import Watchdog, record_collectives


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
    data: Any  # an opened data set; and the next three: set by ``check``
    device: torch.device
    micro_batches: int  # a rank's share of a step ...
    micro_size: int  # ... in sequences each
    optimizer: Optimizer
    norm_in_backward: NormInParts | None  # of gradients that are stepped before backward ends; None: after it
    peaks: list[float]  # learning rate of each group as its rule states it; the groups hold scaled ones
    complete: bool  # whether nothing is left to do, as far as sizes of files tell; set by ``check``
    step: int  # optimizer steps completed
    journal: Journal | None  # on rank 0
    loads: dict[str, Tensor]  # what the last step said of its experts
    _kept: int | None  # step of the newest checkpoint that is whole or being written
    _position: position.Position  # that ``_start`` found and ``_resume`` loads

    def __init__(self, run: RunConfig, *, settings: dict[str, Any]) -> None:
        self.config, self.parallelism, self.tracking, self.rules = run.trainer, run.parallelism, run.tracking, run.rules
        self.logit_clip, self.engine = run.logit_clip, run.engine
        self.model_config, self.data_config, self.run_dir, self.settings = run.model, run.data, run.run_dir, settings
        self.step, self.journal, self.loads, self.lead = 0, None, {}, rank_of_job() == 0
        with torch.device("meta"):
            self.model = self.model_config.build()
        self.routing = self.rules.route(self.model.named_parameters())
        for name, param in self.model.named_parameters():
            rule = self.rules.rule_of(name, tuple(param.shape))
            param.data = param.data.to(getattr(rule, "param_dtype", param.dtype))
        if self.logit_clip is not None:
            clipped_weights(self.logit_clip, self.model)  # refuses what cannot be clipped
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
        held = {
            "gradients": not self.config.step_in_backward,
            "state": self.device.type == "cpu" or not self.engine["offload_state"],
        }
        named = self.model.named_parameters()
        self.needed = capacity.check(named, self.rules, ranks=world, device=self.device, **held)
        if self.config.memory_snapshot is not None and self.device.type != "cuda":
            raise ValueError(f"trainer.memory_snapshot: expected null on a {self.device.type}: CUDA alone records it")
        self.data = self.data_config.open(vocab_size=self.model_config.vocab_size)
        preflight.check_data(self.data, vocab_size=self.model_config.vocab_size)
        at = position.newest(self.checkpoints, decides=self.lead)  # checksums are compared when the ranks are there
        if at.path is not None:
            self.data.check(at.extra["data"])
        else:
            preflight.check_weights(self.model_config)
        target, done = self.config.export, at.extra["step"] >= self.config.steps
        if target is not None and not done:
            preflight.check_export(Path(target))
        self.complete = done and (target is None or preflight.occupied(Path(target)))
        if not self.complete:
            preflight.check_folder(self.run_dir)

    def check_ranks(self, world: int) -> None:
        """Raises for a number of ranks that cannot share the batch or the model.

        Raises:
            ValueError: In one line.
        """
        self.micro_batches, self.micro_size = self.config.micro_batches(world)
        if self.config.deterministic:
            batch = self.config.global_batch
            shared = self.parallelism.shard_ranks(world) == world and self.parallelism.zero == 3
            deterministic.check(
                rules=self.rules, world=world, global_batch=batch, model=self.model, everything_cut=shared
            )
            self.micro_batches, self.micro_size = batch // world, 1
        self.parallelism.check(world)
        if self.engine["share_replicas"]:
            copies = world // self.parallelism.shard_ranks(world) if self.parallelism.zero else world
            routes = [(group, route.rule) for group, of in self.routing.routes.items() for route in of]
            check_sharing([(group, rule, copies) for group, rule in routes if hasattr(rule, "block")])

    # --- the run ---

    def run(self) -> float:
        """Trains from the newest good checkpoint, or from the start, to the last step.

        Returns:
            The validation loss, in nats per token.

        Raises:
            Stopped: On every rank, if the run ends before its last step: a loss that is not finite, a signal, a disk
                that the last checkpoint does not fit on; or if another run is in its folder. Its message is one line.
        """
        record_collectives()
        with self._tracked(), process_group(self.device):
            loss = self._loss_of_complete()
            return self._run() if loss is None else loss

    def _run(self) -> float:
        told = capacity.told(needed=self.needed, device=self.device)
        with told, alone(self.run_dir), StopSignals() as self.signals, Garbage() as self.garbage:
            self._start()
            self._resume()
            with self._watched() as beat, self._progress() as advance, self._written():
                while self.step < self.config.steps:
                    asked, agreed = self._ask()
                    self.profile.begin(self.step + 1)
                    loss, norm = self.train_step()
                    self.step += 1
                    self._look(loss, norm)
                    self.profile.end(self.step)
                    advance()
                    beat()
                    agreed.wait()
                    self._heed(asked)
            return self._finish()

    def _loss_of_complete(self) -> float | None:
        """Says that the run is complete, if it is, and returns its validation loss; nothing is opened or written."""
        if not checkpoint.from_rank_0(self.complete):
            return None
        at = position.agreed(self.checkpoints)
        if at.path is None or at.extra["step"] < self.config.steps:
            return None  # the newest is damaged: the one before goes on
        metrics = checkpoint.together(partial(record.read, at.path)).get("metrics", {})
        loss = float(metrics.get("validation_loss", math.nan))
        said = f"validation loss {loss:.4f} nats per token after {at.extra['step']} steps"
        self._say(f"complete: {at.path}; {said}; train again under another name=...")
        return loss

    def train_step(self) -> tuple[Tensor, Tensor]:
        """Takes one optimizer step, or leaves it out where the loss or the gradient is not finite.

        Returns:
            The loss per token of the global batch, and the norm of its gradient, both () float32.
        """
        self._schedule()
        loss, norm, tokens = self._gradient(self.step, max_norm=self.config.max_grad_norm or math.inf)
        self.loads = self.model.finish_step(skip=self._take(loss, norm))
        self.optimizer.zero_grad()
        self._counted += tokens
        return loss, norm

    def _gradient(self, step: int, *, max_norm: float) -> tuple[Tensor, Tensor, Tensor]:
        """Leaves the clipped gradient of a step's samples in the parameters; returns loss, norm and tokens.

        With ``step_in_backward`` the parameters are stepped instead.
        """
        batches = [to_device(batch, self.device) for batch in self.batches.take(step)]
        tokens = sum_over_ranks(sum(num_labels(labels) for _, labels in batches), self.device)
        if self.exact is not None:
            return *self._gradient_in_order(self.exact, batches, tokens, max_norm=max_norm), tokens
        total = torch.zeros((), device=self.device)
        for left, (input_ids, labels) in zip(reversed(range(len(batches))), batches, strict=True):
            # From stage 2 on gradients leave each rank after every micro-batch: no whole ones are kept, unless each
            # time they leave is a step.
            apart = self.parallelism.zero >= 2 and self.norm_in_backward is None
            self.model.set_requires_gradient_sync(left == 0 or apart)
            loss = self.model(input_ids, labels) / tokens
            loss.backward()
            total += loss.detach()
        if self.norm_in_backward is not None:
            return sum_over_ranks(total, self.device), self.norm_in_backward.take(), tokens
        norm = self.optimizer.clip_grad_norm_(max_norm, policy=self.config.clip_policy)
        return sum_over_ranks(total, self.device), norm, tokens

    def _gradient_in_order(
        self, exact: deterministic.Gradient, batches: Sequence[Batch], tokens: Tensor, *, max_norm: float
    ) -> tuple[Tensor, Tensor]:
        """As ``_gradient``, with sums that are the same on any number of ranks."""
        losses = []
        for input_ids, labels in batches:
            loss = self.model(input_ids, labels) / tokens
            loss.backward()
            exact.take()
            losses.append(loss.detach())
        exact.put()
        places = range(dist.get_rank(), self.config.global_batch, dist.get_world_size())
        total = deterministic.in_order(losses, places, count=self.config.global_batch)
        return total.to(self.device), exact.clip_(max_norm)

    def _take(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Steps the optimizer unless the step is bad: the host knows at once on a CPU, the device alone on a GPU.

        Returns:
            () float32, 1.0 where the step was left out.
        """
        if self.device.type != "cpu":
            self.health.settle(self._replay)
            skip = self.health.judge(self.step + 1, loss, norm)
            if self.norm_in_backward is None:
                self.optimizer.step(skip=skip)
            return skip
        skip = self.health.judge(self.step + 1, loss, norm)
        if not self.health.settle(self._replay):
            self.optimizer.step()  # finds nothing left to do where units were stepped in backward
        elif self.clipping is not None:
            self.clipping.reset()  # the next step is not scaled by this one's logits
        return skip

    def _replay(self, step: int) -> str:
        """Returns which tensor of a step that was not taken is the first that is not finite."""
        if self.norm_in_backward is not None:
            return "weights were stepped in backward: only trainer.step_in_backward=false can name the first bad tensor"
        self.optimizer.zero_grad()
        found = first_bad(self.model, partial(self._gradient, step - 1, max_norm=math.inf))
        if self.clipping is not None:
            self.clipping.reset()
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns the loss per token of each set of validation sequences, in nats; their mean is ``validation_loss``.

        The same sequences for any number of ranks.
        """
        return self.evaluation.losses(self.data.validations)

    # --- beginning and end ---

    def _start(self) -> None:
        """Shards the model over the ranks, and fills it with the weights that a run begins with."""
        mesh = make_mesh(self.device, shard_ranks=self.parallelism.shard_ranks(dist.get_world_size()))
        self._require_same("the configuration", self.settings)
        self._require_same(f"what lies at {self.data_config.path}", self.data.describe())
        self._position = position.agreed(self.checkpoints)
        self._deal_experts()
        self.shard(mesh=mesh)
        self.model.to_empty(device=self.device)
        torch.manual_seed(self.config.seed)
        goes_on = self._position.path is not None  # weights come from the checkpoint, whatever became of their source
        getattr(self.model, "init_buffers" if goes_on else "init_weights", self.model.init_weights)()
        self.model.set_gradient_divide_factor(1.0, recurse=True)  # the loss is divided by the tokens of all ranks
        self.optimizer = Optimizer(self.model.named_parameters(), self.rules, **self.engine)
        self.norm_in_backward = NormInParts() if self.config.step_in_backward else None
        if self.norm_in_backward is not None:
            step_in_backward(self.model, self.optimizer, norm=self.norm_in_backward)
        self.clipping = None if self.logit_clip is None else LogitClip(self.logit_clip, self.model, self.optimizer)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self._counted = torch.zeros((), dtype=torch.int64, device=self.device)
        self.exact = deterministic.Gradient(self.model) if self.config.deterministic else None
        config = self.config
        share: dict[str, int] = {"micro_batches": self.micro_batches, "micro_size": self.micro_size}
        self.feed = Feed(self.data.train, global_batch=config.global_batch, interleaved=config.deterministic, **share)
        self.batches = Prefetch(self.feed.step, last=config.steps)
        looks: dict[str, Any] = {"sequences": config.eval_sequences, "in_order": config.deterministic}
        self.evaluation = Evaluation(self.model, self.feed, device=self.device, **looks)
        self.health = Health(skips=config.skip_non_finite, spike=config.spike, device=self.device)
        self.saver = Saver(self.checkpoints, keep=config.keep, keep_every=config.keep_every)
        options: dict[str, Any] = {"steps": config.profile, "memory_step": config.memory_snapshot, "say": self._say}
        self.profile = Profile(self.run_dir, rank=dist.get_rank(), device=self.device, **options)

    def _require_same(self, what: str, value: dict[str, Any]) -> None:
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        try:
            same_on_every_rank(digest, what=what, group=dist.group.WORLD)  # type: ignore[arg-type]
        except RuntimeError as problem:
            raise Stopped(str(problem), code=2) from None

    def _deal_experts(self) -> None:
        """Deals the experts over the ep axis, and shards each part over the ranks that have the same."""
        if self.parallelism.ep > 1:
            mesh = make_expert_mesh(self.device, self.parallelism.ep)
            self.model.deal_experts(mesh["ep"].get_group())
            self.shard(self.model.expert_units(), mesh=mesh["efsdp"])

    def shard(self, modules: Sequence[nn.Module] | None = None, **options: Any) -> None:
        """Declares units to ``fully_shard``, all of the model's when none are given.

        Args:
            modules: One unit each.
            options: Further arguments of ``fully_shard``.
        """
        for module in (*self.model.units(), self.model) if modules is None else modules:
            fully_shard(
                module,
                mp_policy=self.parallelism.mp_policy,
                reshard_after_forward=self.parallelism.reshard_after_forward,
                block_of=self.rules.block_of,
                max_padding=self.parallelism.max_padding,
                zero=self.parallelism.zero,
                **options,
            )

    def _resume(self) -> None:
        """Continues the newest good checkpoint, if there is one."""
        path, extra, wrong = self._position
        if path is not None:
            checkpoint.load(path, model=self.model, optimizer=self.optimizer, verified=True)
            self.health.load(extra.get("health", {}))
        self.step, self._kept = extra["step"], None if path is None else extra["step"]
        self._counted += extra["tokens"]
        for line in wrong:
            self._say(f"passed over: {line}")
        try:
            checkpoint.together(lambda: self._open(path, extra) if self.lead else None)
        except OSError as problem:
            raise Stopped(f"run_dir: {self.run_dir} cannot be written: {problem}") from None

    def _open(self, path: Path | None, extra: dict[str, Any]) -> None:
        """Opens the metrics after what the checkpoint at ``path`` knows of, and says what begins."""
        checkpoint.write_json(self.run_dir / "config.json", self.settings)
        drawn = record.drawing(self.model)
        checkpoint.write_json(self.run_dir / "plan.json", drawn)
        first = self.step + 1 if path is not None else 0
        world, identity = dist.get_world_size(), extra.get("tracking_id")
        self.facts = record.facts(self.settings, data=self.data.describe(), world=world, device=self.device)
        shown = {**self.settings, "record": {key: value for key, value in self.facts.items() if key != "config"}}
        shown["plan"] = {"optimizer": self.optimizer.report().splitlines(), "segments": record.segments(drawn)}
        tracker = self.tracking.open(self.run_dir, config=shown, first_step=first, id=identity)
        self.journal = Journal(
            tracker,
            steps=self.config.steps,
            flops_per_token=self.model_config.flops_per_token(self.data_config.seq_len),
            peak_flops=self.config.peak_tflops * 1e12 if self.config.peak_tflops else known_peak(self.device),
            ranks=world,
            step=self.step,
            tokens=extra["tokens"],
        )
        size = self.model_config.num_parameters()
        print(f"{self.optimizer.report()}\n{size:,} parameters, {world} rank{'s' * (world > 1)}, run in {self.run_dir}")
        print(f"metrics: {tracker.path}; {tracker.where}", flush=True)
        if self.exact is not None:
            print(deterministic.costs(self.exact, global_batch=self.config.global_batch))
        if path is not None:
            print(f"continuing {path}", flush=True)

    def _finish(self) -> float:
        """Evaluates, saves what is not saved yet, and says where things are."""
        self._settle()
        self._wait_for_save(goes_on=True)
        saved = self._kept == self.step
        loss = (self.evaluate() if saved else self._validate())["validation_loss"]
        if not saved:
            self._require_finite(loss)
            self._save()
            self._wait_for_save(goes_on=False)
        if self.config.export is not None:
            self._export(Path(self.config.export))
        self._say(f"validation loss {loss:.4f} nats per token after {self.step} steps; run folder {self.run_dir}")
        return loss

    def _export(self, folder: Path) -> None:
        """Writes the weights as safetensors, once: a run that is complete already has them there."""
        if not preflight.occupied(folder):
            self.model.export(folder)
            self._say(f"exported: {folder}")

    # --- saving ---

    def _save(self) -> None:
        extra = {"step": self.step, "tokens": int(self._counted), "data": self.data.describe()}
        extra |= {"health": self.health.state(), "schedule": repr(self.config.schedule)}
        facts: dict[str, Any] = {}
        if self.journal is not None:
            extra["tracking_id"] = self.journal.tracker.id
            facts = {**self.facts, "step": self.step, "tokens": extra["tokens"], "metrics": dict(self.journal.last)}
        tensors = checkpoint.tensors(self.model, self.optimizer) | checkpoint.random_state()
        self._wait_for_save(goes_on=True)
        self.saver.save(self.step, tensors=tensors, extra=extra, record=facts)
        self._kept = self.step

    def _wait_for_save(self, *, goes_on: bool) -> None:
        """Waits for the checkpoint being written; one that could not be written stops no run that has steps to go."""
        try:
            self.saver.wait()
        except OSError as problem:
            if not goes_on:
                raise Stopped(str(problem)) from None
            self._kept = None
            self._say(f"warning: {problem}; training goes on")

    def _ask(self) -> tuple[Tensor, dist.Work]:
        """Begins to ask all ranks whether one got a signal, or could not write its part of a checkpoint."""
        flags = torch.tensor([self.signals.received, int(self.saver.failed)])
        return flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, async_op=True)

    def _heed(self, asked: Tensor) -> None:
        """Does what the ranks agreed on.

        Raises:
            Stopped: After a signal, when the state is saved.
        """
        number, failed = asked.tolist()
        if failed:
            self._wait_for_save(goes_on=True)
        if number and self.step < self.config.steps:
            self._settle()
            self._wait_for_save(goes_on=True)
            if self._kept != self.step:
                self._save()
                self._wait_for_save(goes_on=False)
            line = f"{signal.Signals(number).name} after step {self.step}: saved; the same command goes on from there"
            raise Stopped(line, code=REQUEUE)

    # --- looking ---

    def _look(self, loss: Tensor, norm: Tensor) -> None:
        """Logs, evaluates and saves when it is time to; after the last step, ``_finish`` evaluates and saves."""
        if self._due(self.config.gc_every):
            self.garbage.collect()
        if self.step == 1 or self._due(self.config.log_every):
            self._settle()
            self._log(loss, norm)
        evaluates, saves = self._due(self.config.eval_every), self._due(self.config.save_every)
        if self.step == self.config.steps or not (evaluates or saves):
            return
        self._settle()  # also waits for the device: the steps end here
        began = time.perf_counter()
        if evaluates:
            self._validate()
        if saves:
            self._save()
        self.garbage.collect(everything=True)
        if self.journal is not None:
            self.journal.pause(time.perf_counter() - began)  # tokens/s are of the steps alone

    def _due(self, every: int) -> bool:
        return self.step % every == 0

    def _settle(self) -> None:
        """Stops a run that is lost before its weights are saved."""
        self.health.settle(self._replay)

    def _require_finite(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise Stopped(f"step {self.step}: expected a finite validation loss, got {loss}; not saved")

    def _log(self, loss: Tensor, norm: Tensor) -> None:
        """Reads the device, once per interval: prints a line and records it."""
        if self.journal is None:
            return
        self.journal.steps_row(
            loss=loss.item(),
            norm=norm.item(),
            rates={f"lr/{group['name']}": float(group["lr"]) for group in self.optimizer.param_groups},
            waited_s=self.batches.waited_s,
            step=self.step,
            tokens=int(self._counted),
            device=self.device,
            more=self._more(),
        )

    def _more(self) -> dict[str, float]:
        """What only some runs have: loads of experts, steps left out."""
        skipped = {"skipped": self.health.skipped} if self.config.skip_non_finite or self.config.spike else {}
        return skipped | {name: value.item() for name, value in self.loads.items()}

    def _validate(self) -> dict[str, float]:
        losses = self.evaluate()
        if self.journal is not None:
            tokens = int(self._counted)
            line = "  ".join(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in losses.items())
            self.journal.row(losses, step=self.step, tokens=tokens, line=line)
        return losses

    def _say(self, line: str) -> None:
        if self.lead:
            print(line, flush=True)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        """Ends the tracker, if one is opened within, when the run ends: as failed after an exception."""
        failed = 1
        try:
            yield
            failed = 0
        finally:
            if self.journal is not None:
                self.journal.tracker.finish(exit_code=failed)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """A run that stops early leaves the checkpoint that it was writing whole."""
        try:
            yield
        except (Stopped, MemoryError, torch.OutOfMemoryError, ValueError, OSError):  # not a rank's that is gone
            self.saver.join(timeout_s=60)  # seconds; alone, since not every stop is one of all ranks
            raise

    @contextmanager
    def _watched(self) -> Iterator[Callable[[], None]]:
        timeout, rank, world = self.config.hang_timeout_s, dist.get_rank(), dist.get_world_size()
        with Watchdog(self.run_dir, rank=rank, world=world, timeout_s=timeout) as watchdog:
            yield watchdog.beat

    @contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        if self.journal is None:
            yield lambda: None
            return
        with self.journal.progress(self.step) as advance:
            yield advance

    # --- numbers ---

    def _schedule(self) -> None:
        scale = self.config.schedule.scale(self.step)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * scale
