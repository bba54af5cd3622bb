"""Forecast: the seven sections of a plan, as plain numbers; `vescale.plan` prints them.

Bytes are bytes, times seconds, work FLOPs. A section is a dictionary that JSON can hold, so that what a table shows is
what a program reads.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

from vescale import memory, traffic
from vescale.advice import Facts, Setting, advise, divisors, group_size
from vescale.blueprint import Blueprint, PlannedBucket, state_by_kind
from vescale.live import Collective
from vescale.machine import Machine, exposed
from vescale.memory import STAGES, Activations, Dtypes, LogitsKept, Moment
from vescale.optimizer_step import OptimizerStep
from vescale.pipeline import schedules
from vescale.trainer import Trainer

# (stages, micro-batches) of the pipelines that are shown.
PIPELINES = ((8, 8), (8, 64))
_IN_BACKWARD = ("parameters, backward", "gradients", traffic.OVER_COPIES)
_EXPERTS = traffic.EXPERTS
_WAYS = (("full", True), ("none", False))  # of model.checkpoint, and whether layers are computed again


class Forecast:
    """What a run needs on a machine.

    Args:
        trainer: Of the run, on the meta device; it is used up.
        num_ranks: Of the world.
        machine: That the ranks run on, one rank a device.
        memory: Bytes of a device.
        available: Bytes of it that the run may use.

    Raises:
        ValueError: If such a run would be refused.
        NotImplementedError: If the model says nothing of its activations, or the run asks for what is not built.
    """

    def __init__(self, trainer: Trainer, num_ranks: int, *, machine: Machine, memory: int, available: int) -> None:
        self.trainer, self.num_ranks, self.machine = trainer, num_ranks, machine
        self.memory, self.available = memory, available
        self.model, self.parallelism = trainer.model_config, trainer.parallelism
        self.seq_len = trainer.data_config.seq_len
        self.assumptions: list[str] = []
        if self.seq_len < 1:
            raise ValueError(f"data.seq_len: expected at least 1, got {self.seq_len}")
        self.parallelism.check(num_ranks)
        self.global_batch, self.micro_batches, self.micro_batch = self._batch()
        self.stage = self.parallelism.zero
        cut = Blueprint.of_job(trainer, num_ranks, stage=3)
        copies = num_ranks if trainer.engine["share_replicas"] else 1
        alone = cut if cut.num_ranks == 1 else cut.over(1, copies=copies)
        self._blueprints = {stage: cut if stage else alone for stage in STAGES}
        self.blueprint = self._blueprints[self.stage]
        self.shard_ranks = self.blueprint.num_ranks
        self.replicas = num_ranks // self.shard_ranks
        self.logits = LogitsKept.of(trainer, self.blueprint)
        self.dtypes = Dtypes.of(trainer)
        self._peaks: dict[Setting, int] = {}

    def _batch(self) -> tuple[int, int, int]:
        """Sequences of a step, and a rank's micro-batches and their sequences."""
        config = self.trainer.config
        if config.global_batch >= self.num_ranks:
            return config.global_batch, *config.micro_batches(self.num_ranks)
        self.assumptions.append(
            f"trainer.global_batch={config.global_batch} is less than a sequence for each of {self.num_ranks:,} ranks, "
            "which a run would refuse; planned for one sequence a rank"
        )
        return self.num_ranks, 1, 1

    def sections(self) -> dict[str, Any]:
        """Returns all sections, in the order in which they are read."""
        return {
            "model": self._model(),
            "memory": self._memory(),
            "communication": self._communication(),
            "optimizer": self.step.figures(),
            "pipeline": self._pipeline(),
            "advice": self._advice(),
            "assumptions": self._assumptions(),
        }

    # --- 1: the model ---

    def _model(self) -> dict[str, Any]:
        total = self.model.num_parameters()
        active = self.model.num_active_parameters() if hasattr(self.model, "num_active_parameters") else total
        return {
            "parameters": total,
            "active_parameters": active,
            "flops_per_token": self._flops,
            "convention": "6 per matrix parameter and token, 12 layers heads head_dim seq_len for attention as if "
            "nothing were masked (arXiv 2204.02311, appendix B); recomputation not counted",
            "units": len(self.blueprint.units),
            "ranks": self.num_ranks,
            "seq_len": self.seq_len,
            "optimizer": {
                group: {
                    "rule": type(self.blueprint.rules.groups[group].rule).__name__,
                    "parameters": len(routes),
                    "elements": sum(self._numels[route.name] for route in routes),
                }
                for group, routes in self.blueprint.routing.routes.items()
            },
            "padding": self._padding,
            "bytes_cut": sum(plan.cut_bytes for unit in self.blueprint.units for plan in unit.plans),
        }

    @cached_property
    def _flops(self) -> float:
        return self.model.flops_per_token(self.seq_len)

    @cached_property
    def _numels(self) -> dict[str, int]:
        pairs = [pair for unit in self.blueprint.units for pair in zip(unit.plans, unit.parts, strict=True)]
        return {t.name: t.numel * parts for plan, parts in pairs for t in plan.tensors}

    @property
    def _padding(self) -> float:
        """Elements that belong to nobody, as a fraction of the parameters."""
        return sum(unit.everywhere for unit in self.blueprint.units) / self.blueprint.numel - 1

    # --- 2: memory ---

    @property
    def rank(self) -> int:
        """The rank that holds the most, among those that share a copy."""
        return self.blueprint.worst_rank

    @property
    def buckets(self) -> list[PlannedBucket]:
        """Of that rank's step."""
        return self.blueprint.buckets(self.rank)

    @cached_property
    def activations(self) -> Activations:
        """Of one sequence."""
        return memory.activations_of(self.trainer, 1)

    def moments(
        self, *, stage: int = 3, micro_batch: int | None = None, micro_batches: int | None = None, **options: Any
    ) -> list[Moment]:
        """Returns the moments of a step of the rank that holds the most at this stage.

        Args:
            stage: ZeRO stage.
            micro_batch: Sequences of a micro-batch; None: the run's.
            micro_batches: Of a step; None: the run's.
            options: ``recomputed``, of ``memory.moments``.
        """
        blueprint = self._blueprints[stage]
        return memory.moments(
            self.trainer,
            blueprint,
            blueprint.worst_rank,
            micro_batch=micro_batch or self.micro_batch,
            micro_batches=micro_batches or self.micro_batches,
            stage=stage,
            **options,
        )

    def worst(self, **options: Any) -> Moment:
        """Returns the moment of ``moments`` that holds the most."""
        return max(self.moments(**options), key=lambda moment: moment.nbytes)

    def _most(self) -> dict[str, int]:
        """The most bytes of each part at any moment, at the stage of the run."""
        most: dict[str, int] = {}
        for moment in self.moments(stage=self.stage):
            for what, nbytes in moment.parts.items():
                most[what] = max(most.get(what, 0), nbytes)
        return {what: nbytes for what, nbytes in most.items() if nbytes}

    def _memory(self) -> dict[str, Any]:
        stages = {stage: self.worst(stage=stage) for stage in STAGES}
        book = memory.textbook(self.blueprint.numel, self._blueprints[3].num_ranks)
        return {
            "rank": self.rank,
            "device": self.memory,
            "available": self.available,
            "reserve": self.memory - self.available,
            "stage": self.stage,
            "stages": {
                str(stage): {
                    "textbook_states": book[stage],
                    "moment": moment.name,
                    "parts": {what: nbytes for what, nbytes in moment.parts.items() if nbytes},
                    "peak": moment.nbytes,
                    "fits": moment.nbytes <= self.available,
                    "margin": self.available - moment.nbytes,
                }
                for stage, moment in stages.items()
            },
            "most": self._most(),
            "optimizer_state": self.step.state,
            "checkpointing": {word: self.peak(Setting(self.stage, again, self.micro_batch)) for word, again in _WAYS},
            "configured": "full" if self.activations.recomputed else "none",
            "batch": self._batches(),
        }

    def _batches(self) -> dict[str, Any]:
        """The largest micro-batches that fit, with the accumulation that makes the global batch of them."""
        share = self.global_batch // self.num_ranks
        found: dict[str, Any] = {
            "global_tokens": self.global_batch * self.seq_len,
            "global_sequences": self.global_batch,
        }
        for word, again in _WAYS:
            settings = (Setting(self.stage, again, size) for size in divisors(share))
            fit = next((setting for setting in settings if self.peak(setting) <= self.available), None)
            found[word] = fit and {
                "micro_batch": fit.micro_batch,
                "accumulation": share // fit.micro_batch,
                "peak": self.peak(fit),
            }
        return found

    # --- 3: communication ---

    def calls(self, micro_batches: int, buckets: list[PlannedBucket]) -> dict[str, Any]:
        """Returns the collectives of a step by what they are for.

        Args:
            micro_batches: Of the step.
            buckets: Of the rank that is looked at.
        """
        return (
            traffic.model_collectives(
                self.blueprint,
                self.dtypes,
                micro_batches=micro_batches,
                regathers=self.parallelism.reshard_after_forward,
                stage=self.stage,
                replicas=self.replicas,
            )
            | self._tokens(micro_batches)
            | traffic.step_collectives(buckets, dealt=self.blueprint.ep > 1)
            | ({traffic.LOGITS: Counter({Collective("all_reduce", self.logits.nbytes): 1})} if self.logits else {})
        )

    def _tokens(self, micro_batches: int) -> dict[str, Any]:
        """The exchanges of tokens with dealt experts."""
        if self.blueprint.ep == 1:
            return {}
        model: Any = self.model
        rows = self.micro_batch * self.seq_len * model.num_experts_per_tok
        return traffic.token_collectives(
            len(self.blueprint.stacks),
            nbytes=rows * model.hidden_size * self.dtypes.param,
            num_experts=self.blueprint.num_experts,
            micro_batches=micro_batches,
            recomputed=self.activations.recomputed,
        )

    def _communication(self) -> dict[str, Any]:
        calls = self.calls(self.micro_batches, self.buckets)
        timed = traffic.timed(calls, self.machine, self.shard_ranks, self.replicas, ep=self.blueprint.ep)
        lines = {line.what: line for line in timed}
        exposure = self._exposure(lines)
        step = exposure.compute + exposure.exposed + self.step.seconds
        tokens = self.global_batch * self.seq_len
        return {
            "machine": self.machine.name,
            "nodes": self.machine.nodes(self.num_ranks),
            "bandwidth": self.machine.bandwidth(self.num_ranks),
            "lines": [line._asdict() for line in lines.values()],
            "seconds": exposure.communication,
            "compute_seconds": exposure.compute,
            "hidden_seconds": exposure.hidden,
            "exposed_seconds": exposure.exposed,
            "exposed": exposure.fraction,
            "exposed_without_overlap": exposed(exposure.communication, exposure.compute, overlap=0.0),
            "optimizer_seconds": self.step.seconds,
            "step_seconds": step,
            "tokens_per_second": tokens / step,
            "model_flop_utilisation": self._flops * tokens / self.num_ranks / step / self.machine.flops,
        }

    def _exposure(self, lines: dict[str, traffic.Line]) -> traffic.Exposure:
        tokens = self.micro_batches * self.micro_batch * self.seq_len
        forward = self.machine.compute_seconds(self._flops / 3 * tokens)
        backward = (3 if self.activations.recomputed else 2) * forward
        seconds = {what: line.seconds for what, line in lines.items()}
        share = self._of_layers

        def of(seconds: dict[str, float], what: str) -> tuple[float, float]:
            return share * seconds.get(what, 0.0), seconds.get(what + _EXPERTS, 0.0)

        passes = [
            (forward, sum(of(seconds, "parameters, forward"))),
            (backward, sum(sum(of(seconds, what)) for what in _IN_BACKWARD)),
        ]
        alone = sum(seconds.values()) - sum(network for _, network in passes)
        return traffic.exposure(passes, units=len(self.blueprint.layers), alone=alone)

    @property
    def _of_layers(self) -> float:
        """Share of the gathered elements, but for dealt experts', that belong to layers."""
        root = sum(plan.numel for plan in self.blueprint.root.plans)
        pairs = [pair for unit in self.blueprint.units for pair in zip(unit.plans, unit.parts, strict=True)]
        return 1 - root / sum(plan.numel for plan, parts in pairs if parts == 1)

    # --- 4: the optimizer's step ---

    @cached_property
    def step(self) -> OptimizerStep:
        """Of the run's ranks."""
        return OptimizerStep(self.blueprint, self.machine)

    # --- 5 and 6: the pipeline, the advice ---

    def _pipeline(self) -> list[dict[str, Any]]:
        return [
            {"stages": stages, "micro_batches": micro_batches, **schedule._asdict()}
            for stages, micro_batches in PIPELINES
            for schedule in schedules(stages, micro_batches)
        ]

    def _advice(self) -> dict[str, Any]:
        ranks, share = self._blueprints[3].num_ranks, self.micro_batch * self.micro_batches
        unit = max(self.blueprint.layers or self.blueprint.units, key=lambda unit: unit.whole)
        layer = max(self.activations.layers, key=lambda layer: layer.saved + layer.work)
        gather = self.machine.seconds("all_gather", unit.whole * self.dtypes.param, ranks)
        few, many = (schedules(*pipeline)[1].bubble for pipeline in PIPELINES)
        facts = Facts(
            available=self.available,
            configured=Setting(self.stage, self.activations.recomputed, self.micro_batch),
            peak=self.peak,
            micro_batches=divisors(share),
            layer=unit.whole * (2 * self.dtypes.param + self.dtypes.reduce) + layer.saved + layer.work,
            layers=len(self.blueprint.layers),
            ranks=ranks,
            replicas=self.num_ranks // ranks,
            dealt=self.blueprint.ep > 1,
            devices=self.machine.devices,
            latency=self.machine.seconds("all_gather", 0, ranks) / gather if gather else 0.0,
            copies=self._states * (ranks // group_size(ranks) - 1),
            bubble=(few, many),
        )
        conclusion, decisions = advise(facts)
        return {
            "conclusion": conclusion,
            "decisions": [advice._asdict() | {"text": str(advice)} for advice in decisions],
        }

    def peak(self, setting: Setting) -> int:
        """Returns the most bytes of the worst rank at any moment of a step with another setting."""
        if setting not in self._peaks:
            stage, recomputed, size = setting
            count = self.micro_batch * self.micro_batches // size
            worst = self.worst(stage=stage, recomputed=recomputed, micro_batch=size, micro_batches=count)
            self._peaks[setting] = worst.nbytes
        return self._peaks[setting]

    @property
    def _states(self) -> int:
        """Bytes of parameters, gradients and state of the worst rank of those that share a copy."""
        blueprint = self._blueprints[3]
        state = sum(state_by_kind(blueprint.runs(blueprint.worst_rank)).values())
        held = memory.resident(blueprint, self.dtypes, state=state, stage=3)
        return sum(held.values()) + memory.gradients(blueprint, self.dtypes, stage=3, reduced=True)

    # --- 7: the assumptions ---

    def _assumptions(self) -> list[str]:
        machine = self.machine
        return [
            *self.assumptions,
            *self._of_experts(),
            f"one rank a device, {machine.devices} devices a node, ranks of a group are neighbours",
            f"collectives are rings at the bandwidth and latency of recipes/machine/{machine.name}.yaml and keys that "
            "changed it; no congestion, no other traffic",
            f"matrix products reach {machine.utilisation:.0%} of {machine.flops / 1e12:,.0f} TFLOP/s, in forward, "
            "backward, recomputation and the optimizer alike; everything else takes no time",
            "a gather runs behind the unit before it and a reduction behind the unit after it; the root's, the "
            "optimizer's and the clipping's communication is exposed",
            "bytes are of live tensors: fragmentation and what libraries allocate for themselves come out of the "
            "reserve",
            "activations as models/activations.py counts them: flash attention, norms in one kernel",
            f"masters and gradients in {self._master_bits} bits; compute in {8 * self.dtypes.param} bits, reduction in "
            f"{8 * self.dtypes.reduce} bits; textbook figures are Adam's with bf16 gradients",
            "evaluation, checkpoints and the two sums of a scalar that the trainer makes in a step are left out",
        ]

    @property
    def _master_bits(self) -> str:
        sizes = {itemsize for unit in self.blueprint.units for itemsize in unit.itemsizes}
        return " and ".join(str(8 * itemsize) for itemsize in sorted(sizes))

    def _of_experts(self) -> list[str]:
        ep = self.blueprint.ep
        dealt = f"{ep} neighbours deal the experts, and as many tokens go to each; a layer gathers its own with itself"
        return [dealt] if ep > 1 else []
