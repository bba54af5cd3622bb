"""A job: everything that a command composes, checked, and not yet begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from vescale.data import Mixture, TextData
from vescale.mesh import ParallelismConfig
from vescale.optimizer import CLIP_POLICIES
from vescale.rule import Rules
from vescale.tracking import Tracking

POSITIVE_OR_NULL = (
    *("micro_batch", "max_grad_norm", "eval_sequences", "keep_every", "spike", "hang_timeout_s", "memory_snapshot"),
    "peak_tflops",
)

QK_CLIP = "qk_clip"  # a key of ``optimizer`` that is no group ...
ENGINE = ("share_replicas", "offload_state")  # ... nor are these, which are options of ``Optimizer``

# What ``step_in_backward`` cannot be had with: each needs every gradient before the first step.
AFTER_BACKWARD = {"max_grad_norm": None, "skip_non_finite": 0, "spike": None, "deterministic": False}


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
        """Returns the model: ``model(input_ids, labels)`` is the sum of token losses, ``units()`` its layers.

        ``finish_step(skip=flag)`` ends an optimizer step, which was left out where the flag is 1.0, and returns
        metrics; ``export(folder)``, called by all ranks, writes the weights, or with ``tensors=`` those named tensors
        in their place (vescale/export.py). ``init_weights()`` fills everything, ``init_buffers()``, where it has one,
        what no checkpoint holds. With experts, ``deal_experts(group)`` leaves this rank its part of them and
        ``expert_units()`` are those.
        """

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
        clip_policy: Which gradients are scaled: "all", "non_matrix" (those of rules without blocks) or "none".
        seed: Of the weights.
        device: "cpu", "cuda", or "auto": cuda where there is one.
        log_every: Steps between two log lines; the first step has one too.
        eval_every: Steps between two looks at the validation split; the end of the run is always one.
        eval_sequences: Validation sequences per look; None: all.
        save_every: Steps between two checkpoints; the end of the run is always one.
        keep: Newest checkpoints that stay on disk.
        keep_every: Checkpoints of steps that are multiples of this stay too; None: no others.
        skip_non_finite: Steps in a row whose loss or gradient is not finite that are left out; one more ends the run.
        spike: A step whose gradient norm exceeds this many running medians is left out; None: none is.
        step_in_backward: Step each layer's parameters, and free their gradients, as soon as these are reduced; nothing
            that waits for every gradient can be had with it, clipping and skipping steps that is. Micro-batches before
            the last keep whole gradients.
        deterministic: The bits do not depend on the number of ranks: see vescale/deterministic.py for what it costs.
        gc_every: Steps between two collections of Python's garbage, on all ranks together.
        hang_timeout_s: Seconds without a step, after the first, that end a run that hangs; None: it is not watched.
        profile: First and last step to trace; None: none.
        memory_snapshot: Step after which to write who holds the GPU's memory; None: never.
        peak_tflops: Of one device, for the utilisation; None: what ``vescale/peaks.py`` knows of it, else n/a.
        export: Folder for the weights as safetensors at the end; None: none.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    steps: int
    global_batch: int
    schedule: Schedule
    micro_batch: int | None = None
    max_grad_norm: float | None = 1.0
    clip_policy: str = "all"
    seed: int = 0
    device: str = "auto"
    log_every: int = 10
    eval_every: int = 100
    eval_sequences: int | None = None
    save_every: int = 100
    keep: int = 2
    keep_every: int | None = None
    skip_non_finite: int = 0
    spike: float | None = None
    step_in_backward: bool = False
    deterministic: bool = False
    gc_every: int = 50
    hang_timeout_s: float | None = 600.0
    profile: tuple[int, int] | None = None
    memory_snapshot: int | None = None
    peak_tflops: float | None = None
    export: str | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "global_batch", "log_every", "eval_every", "save_every", "keep", "gc_every")
        problems = [
            f"{name}: expected a number > 0, got {getattr(self, name)}" for name in counts if getattr(self, name) < 1
        ]
        optional = {name: getattr(self, name) for name in POSITIVE_OR_NULL}
        problems += [
            f"{name}: expected null or a number > 0, got {value}"
            for name, value in optional.items()
            if value is not None and not value > 0
        ]
        if self.clip_policy not in CLIP_POLICIES:
            problems.append(f"clip_policy: expected one of {', '.join(CLIP_POLICIES)}, got {self.clip_policy!r}")
        if self.deterministic and self.clip_policy != "all":
            problems.append(f"clip_policy: expected all with deterministic, got {self.clip_policy!r}")
        others = {name: getattr(self, name) for name, value in AFTER_BACKWARD.items() if getattr(self, name) != value}
        if self.step_in_backward and others:
            problems.append(f"step_in_backward: expected {_yaml(AFTER_BACKWARD)}, got {_yaml(others)}: {_WAITS}")
        if self.skip_non_finite < 0:
            problems.append(f"skip_non_finite: expected a number of steps >= 0, got {self.skip_non_finite}")
        if self.profile is not None and not 1 <= self.profile[0] <= self.profile[1] <= self.steps:
            wish = f"expected null or [first, last] with 1 <= first <= last <= {self.steps}, the steps"
            problems.append(f"profile: {wish}, got {[*self.profile]}")
        if self.memory_snapshot is not None and self.memory_snapshot > self.steps:
            problems.append(f"memory_snapshot: expected null or one of {self.steps} steps, got {self.memory_snapshot}")
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
            ``qk_clip``, where it stands among them, is no group but what clips attention logits after a step, or None;
            ``share_replicas`` and ``offload_state`` are those of ``vescale.Optimizer``.
        data: The tokens.
        parallelism: How the ranks share the model.
        trainer: How long and how often.
        tracking: Where metrics go.
        dry_run: Plan and print only.
        world_size: Ranks of a dry run; None: this job's.

    Raises:
        ValueError: If there is no group or one has other keys, logits are to be clipped with ``step_in_backward``, or
            ``world_size`` is out of range or of no dry run.
    """

    name: str
    run_dir: Path
    model: ModelConfig
    optimizer: Mapping[str, Any]
    data: TextData | Mixture
    parallelism: ParallelismConfig
    trainer: TrainerConfig
    tracking: Tracking
    dry_run: bool = False
    world_size: int | None = None

    def __post_init__(self) -> None:
        problems = [
            f"optimizer.{name}: expected pattern (one glob or several) and rule, got {group!r}"
            for name, group in self._groups.items()
            if not _is_group(group)
        ]
        if self.logit_clip is not None and not hasattr(self.logit_clip, "factors"):
            problems.append(f"optimizer.qk_clip: expected null or a clip of logits, got {self.logit_clip!r}")
        elif self.logit_clip is not None and self.trainer.step_in_backward:
            problems.append(
                f"trainer.step_in_backward: expected optimizer.qk_clip=null, got a clip of logits: {_WAITS}"
            )
        if not self._groups:
            problems.append("optimizer: expected a group at least: a name with pattern and rule")
        problems += [
            f"optimizer.{name}: expected true or false, got {value!r}"
            for name, value in self.engine.items()
            if not isinstance(value, bool)
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
        return Rules(**{name: (group["pattern"], group["rule"]) for name, group in self._groups.items()})

    @property
    def logit_clip(self) -> Any:
        """What clips attention logits after a step, such as ``optimizers.QKClip``; None: nothing does."""
        return self.optimizer.get(QK_CLIP)

    @property
    def engine(self) -> dict[str, bool]:
        """Further arguments of ``vescale.Optimizer``."""
        return {name: self.optimizer.get(name, False) for name in ENGINE}

    @property
    def _groups(self) -> dict[str, Any]:
        return {name: group for name, group in self.optimizer.items() if name not in (QK_CLIP, *ENGINE)}


_WAITS = "each waits for every gradient, when units have been stepped"


def _yaml(values: Mapping[str, Any]) -> str:
    """Values as a command line takes them."""
    return ", ".join(f"{name}={'null' if value is None else str(value).lower()}" for name, value in values.items())


def _is_group(group: Any) -> bool:
    return (
        isinstance(group, Mapping) and group.keys() == {"pattern", "rule"} and isinstance(group["pattern"], str | list)
    )
