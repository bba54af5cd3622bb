"""Memory of one rank through a step: what lives all the time, and what lives at each moment that may be the worst.

Bytes are of live tensors, in the order in which ``fully_shard`` and ``Optimizer`` make and free them. The moments of a
step with units root, 0, 1, 2 (F = gathered, G = gradient buffer, both as long as the whole unit)::

    loss          F.root                                       everything saved, a chunk of logits
    head          F.root F.2            G.root                 everything saved, the head's gradient
    layer 2       F.root F.2 F.1        G.root G.2             saved of layers 0 to 2, work of layer 2
    layer 1       F.root F.1 F.0        G.root G.1 G.2         saved of layers 0 and 1, work of layer 1
    embedding     F.root                G.root G.0             the embedding's gradient
    step          all gradient shards, payloads and directions of whole blocks

With recomputation "saved" is the stream into each layer, and all of the one layer that is in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from vescale.blueprint import Blueprint, PlannedBucket, PlannedUnit, state_by_kind
from vescale.logit_clip import clipped_weights, watched_heads
from vescale.planner import SegmentPlan
from vescale.sharing import Sharing
from vescale.trainer import Trainer

STAGES = (0, 1, 2, 3)
# Bytes per element of a block that a rule holds while it computes one: Newton-Schulz on a wide matrix with its float32
# norm, on a processor whose products of bf16 are of float32; measured by `simulate=true`. Where products are of bf16 it
# is less, and never the peak of a model of many layers.
WORKSPACE = 16
# The same of a parameter that is rounded to bfloat16: itself and random bits in 32, and what hashing makes of these.
ROUNDING = 24


class LayerActivations(Protocol):
    """What a layer holds, in bytes; ``models.activations.LayerActivations`` is one."""

    stream: int
    saved: int
    work: int


class Activations(Protocol):
    """What a micro-batch holds, in bytes; ``models.activations.Activations`` is one."""

    layers: Sequence[Any]
    recomputed: bool
    tail: int
    loss: int
    loss_kept: int


class Moment(NamedTuple):
    """What lives at one moment of a step, bytes by what it is."""

    name: str
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


class Dtypes(NamedTuple):
    """Bytes of an element of what is computed with and gathered, and of what is reduced."""

    param: int
    reduce: int

    @classmethod
    def of(cls, trainer: Trainer) -> Dtypes:
        """Returns a run's."""
        return cls(trainer.parallelism.param_dtype.itemsize, trainer.parallelism.reduce_dtype.itemsize)


class Textbook(NamedTuple):
    """Bytes per rank in the textbook's dtypes, by ZeRO stage."""

    stage0: float
    stage1: float
    stage2: float
    stage3: float


def textbook(numel: int, ranks: int) -> Textbook:
    """Returns Adam's states per rank with bf16 weights and gradients and float32 master and moments.

    16 N; 4 N + 12 N / p; 2 N + 14 N / p; 16 N / p bytes (arXiv 1910.02054, figure 1). 7e9 parameters on 8 cards: 112 GB
    at stage 0, 14 GB at stage 3.

    Args:
        numel: Parameters.
        ranks: That share them.
    """
    n, p = numel, ranks
    return Textbook(16 * n, 4 * n + 12 * n / p, 2 * n + 14 * n / p, 16 * n / p)


def resident(blueprint: Blueprint, dtypes: Dtypes, *, state: int, stage: int) -> dict[str, int]:
    """Returns what lives through the whole of a step on one rank but gradients, bytes by what it is.

    Stages 1 and 2 keep all parameters gathered in ``dtypes.param``. At stage 0 every rank is alone with a copy, which
    is what it computes with too unless that is another dtype.

    Args:
        blueprint: Of the ranks that share a copy; at stage 0 of one rank.
        dtypes: Of compute and of reduction.
        state: Bytes of optimizer state on this rank.
        stage: ZeRO stage.
    """
    parts = {"parameters": sum(unit.master_bytes for unit in blueprint.units), "optimizer state": state}
    if stage < 3 and gathered(blueprint.units, dtypes):
        parts["parameters, gathered"] = gathered(blueprint.units, dtypes)
    return parts


def gradients(blueprint: Blueprint, dtypes: Dtypes, *, stage: int, reduced: bool) -> int:
    """Returns the bytes of all gradients of one rank between two micro-batches.

    Args:
        blueprint: Of the ranks that share a copy; at stage 0 of one rank.
        dtypes: Of compute and of reduction.
        stage: ZeRO stage.
        reduced: After the last micro-batch; before it stages 0 and 1, and 3 where each reduction is a step, accumulate
            them whole, in ``dtypes.reduce``.
    """
    if _stay_whole(blueprint, stage) and not reduced:
        return dtypes.reduce * sum(unit.trained for unit in blueprint.units)
    return sum(unit.grad_bytes for unit in blueprint.units)


def _stay_whole(blueprint: Blueprint, stage: int) -> bool:
    """Whether micro-batches before the last leave gradients whole."""
    return stage < 2 or (stage == 3 and blueprint.in_backward)


def copies(plan: SegmentPlan, dtypes: Dtypes, itemsize: int) -> bool:
    """Whether gathered parameters are other bytes than the masters, of ``itemsize`` bytes an element: not on one rank
    that computes with these."""
    return plan.num_ranks > 1 or dtypes.param != itemsize


def gathered(units: Iterable[PlannedUnit], dtypes: Dtypes) -> int:
    """Returns the bytes of units whose parameters are gathered."""
    pairs = (pair for unit in units for pair in zip(unit.plans, unit.itemsizes, strict=True))
    return dtypes.param * sum(plan.numel for plan, itemsize in pairs if copies(plan, dtypes, itemsize))


def activations_of(trainer: Trainer, micro_batch: int, *, fused: bool = True) -> Activations:
    """Returns what a micro-batch holds on one rank.

    Args:
        trainer: Of the run.
        micro_batch: Its sequences.
        fused: Norms are in kernels, as on CUDA.

    Raises:
        NotImplementedError: If the model says nothing of it.
    """
    model: Any = trainer.model_config
    if not hasattr(model, "activations"):
        raise NotImplementedError(f"{type(model).__name__} does not say what its activations hold")
    itemsize = trainer.parallelism.param_dtype.itemsize
    return model.activations(batch=micro_batch, seq_len=trainer.data_config.seq_len, itemsize=itemsize, fused=fused)


def moments(
    trainer: Trainer,
    blueprint: Blueprint,
    rank: int,
    *,
    micro_batch: int,
    micro_batches: int,
    stage: int | None = None,
    recomputed: bool | None = None,
    device: str = "cuda",
) -> list[Moment]:
    """Returns the moments of a step that may be the worst of one rank.

    Args:
        trainer: Of the run.
        blueprint: Of its ranks that share a copy; at stage 0 of one rank.
        rank: Among these.
        micro_batch: Sequences of one forward.
        micro_batches: In a step; from the second on gradients are there before backward begins.
        stage: ZeRO stage; None: the run's.
        recomputed: Whether layers are computed again in backward; None: as the model says.
        device: Type of what it runs on. On a "cpu" norms are in several operators, and state that is offloaded stays.

    Raises:
        NotImplementedError: If the model says nothing of its activations, or of another number of layers than units.
    """
    activations = activations_of(trainer, micro_batch, fused=device != "cpu")
    if len(activations.layers) != len(blueprint.layers):
        raise NotImplementedError(
            f"activations of {len(activations.layers)} layers for a model of {len(blueprint.layers)} units beside the "
            "root"
        )
    offloaded = blueprint.offloaded and device != "cpu"
    step = _Step(
        blueprint,
        activations,
        Dtypes.of(trainer),
        stage=trainer.parallelism.zero if stage is None else stage,
        accumulating=micro_batches > 1,
        regathers=trainer.parallelism.reshard_after_forward is not False,
        recomputed=activations.recomputed if recomputed is None else recomputed,
        state=0 if offloaded else sum(state_by_kind(blueprint.runs(rank)).values()),
        blocks={name: step_bytes(buckets) for name, buckets in blueprint.steps(rank).items()},
    )
    return list(step.moments(LogitsKept.of(trainer, blueprint)))


class _Step(NamedTuple):
    """What comes and goes in forward and backward."""

    blueprint: Blueprint
    activations: Activations
    dtypes: Dtypes
    stage: int
    accumulating: bool  # gradients of earlier micro-batches
    regathers: bool  # layers free their parameters after forward
    recomputed: bool
    state: int  # bytes of the optimizer's
    blocks: dict[str, int]  # what a call of the optimizer's step takes: each unit's, or all in the root's

    def moments(self, logits: LogitsKept | None) -> Iterator[Moment]:
        blueprint, layers = self.blueprint, self.blueprint.layers
        always = resident(blueprint, self.dtypes, state=self.state, stage=self.stage)
        always |= {} if logits is None else {"largest logits": logits.nbytes}
        earlier, last = (gradients(blueprint, self.dtypes, stage=self.stage, reduced=done) for done in (False, True))
        base = always | ({"gradients": earlier} if self.accumulating else {})
        yield Moment("loss", base | self.loss())
        yield Moment("backward of the head", base | self.head())
        for index in reversed(range(len(layers))):
            yield Moment(f"backward of {layers[index].name}", base | self.layer(index))
            if index + 1 < len(layers):
                yield from self._steps_of(index + 1, base)
        yield Moment("backward of the embedding", base | self.embedding())
        yield from self._steps_of(0, base) if layers else ()
        left = {"gradients": blueprint.root.grad_bytes if blueprint.in_backward else last}
        yield Moment("optimizer step", always | left | self._stepping(blueprint.root))
        if logits is not None:
            yield Moment("clip of logits", always | left | {"factors of rows": logits.factors})

    def _steps_of(self, index: int, base: dict[str, int]) -> Iterator[Moment]:
        if self.blueprint.in_backward:
            for parts in self.stepped(index):
                yield Moment(f"step of {self.blueprint.layers[index].name}", base | parts)

    def loss(self) -> dict[str, int]:
        kept = [] if self.regathers else self.blueprint.layers
        return self._parts(self._saved(len(self._layers)), whole=kept, logits=self.activations.loss)

    def head(self) -> dict[str, int]:
        return self._parts(
            self._saved(len(self._layers)),
            whole=self._gathered(len(self._layers) - 1, 1),
            written=[self.blueprint.root],
            logits=self.activations.loss_kept,
        )

    def layer(self, index: int) -> dict[str, int]:
        layer, unit = self._layers[index], self.blueprint.layers[index]
        work = layer.work + (layer.saved if self.recomputed else 0)
        after = self.blueprint.layers[index + 1 : index + 2]
        return self._parts(
            self._saved(index + 1, tail=False) + work,
            whole=self._gathered(index, 2),
            written=[self.blueprint.root, unit, *after],
            done=self._left(index + 2),
            one=unit.largest,
        )

    def stepped(self, index: int) -> Iterator[dict[str, int]]:
        """A layer's gradients are reduced behind the backward of what is before it: they have landed, then are gone."""
        landed, before = self.blueprint.layers[index], max(index - 1, 0)
        flying = [self.blueprint.root, *self.blueprint.layers[before:index]]
        kept: dict[str, Any] = {"whole": self._gathered(index - 2, 1) if index > 1 else [], "done": [landed]}
        activations = self._saved(before, tail=False) + self._layers[before].stream
        if self.blueprint.num_ranks > 1 or {self.dtypes.reduce} != {*landed.itemsizes}:  # else it is the gradient
            yield self._parts(activations, written=[*flying, landed], **kept)
        yield self._parts(activations, written=flying, **kept) | self._stepping(landed)

    def _stepping(self, unit: PlannedUnit) -> dict[str, int]:
        return {"blocks of the optimizer": self.blocks.get(unit.name, 0)}

    def embedding(self) -> dict[str, int]:
        stream = self._layers[0].stream if self._layers else 0
        return self._parts(
            stream,
            whole=[],
            written=[self.blueprint.root, *self.blueprint.layers[:1]],
            done=self._left(1),
            one=self.blueprint.root.largest,
        )

    @property
    def _layers(self) -> Sequence[Any]:
        return self.activations.layers

    def _saved(self, count: int, tail: bool = True) -> int:
        """Of the first ``count`` layers, and of what follows the last."""
        saved = sum(layer.stream + (0 if self.recomputed else layer.saved) for layer in self._layers[:count])
        return saved + (self.activations.tail if tail else 0)

    def _left(self, first: int) -> list[PlannedUnit]:
        """Layers from ``first`` on, whose gradients are there: none where they are stepped when they come."""
        return [] if self.blueprint.in_backward else self.blueprint.layers[first:]

    def _gathered(self, index: int, count: int) -> list[PlannedUnit]:
        """Layers whose parameters are whole in backward: this one and the one before it, or all that never left."""
        first = max(index + 1 - count, 0) if self.regathers else 0
        return self.blueprint.layers[first : index + 1]

    def _parts(
        self,
        activations: int,
        *,
        whole: Sequence[PlannedUnit],
        written: Sequence[PlannedUnit] = (),
        done: Sequence[PlannedUnit] = (),
        logits: int = 0,
        one: int = 0,
    ) -> dict[str, int]:
        parts = {
            "activations": activations,
            "logits and loss": logits,
            "a parameter's gradient": self.dtypes.param * one,
        }
        if self.stage == 3:
            parts["gathered units"] = gathered((self.blueprint.root, *whole), self.dtypes)
        if not (self.accumulating and _stay_whole(self.blueprint, self.stage)):  # else all are there, from before
            parts["gradients in flight"] = self.dtypes.reduce * sum(unit.trained for unit in written)
        if not self.accumulating:
            parts["gradients"] = sum(map(self._shards, done))
        return parts

    def _shards(self, unit: PlannedUnit) -> int:
        """Bytes of the gradient shards of a unit that is done: narrower ones are widened by its step, or at the end."""
        most = math.inf if self.blueprint.in_backward else self.dtypes.reduce
        each = zip(unit.plans, unit.trainable, unit.itemsizes, strict=True)
        return sum(plan.shard_size * int(min(size, most)) for plan, trains, size in each if trains)


class LogitsKept(NamedTuple):
    """What clipping attention logits takes on one rank, in bytes."""

    nbytes: int  # the largest logit of each head of every layer, and of an all-reduce of them
    factors: int  # of the rows of a projection, one for each element here

    @classmethod
    def of(cls, trainer: Trainer, blueprint: Blueprint) -> LogitsKept | None:
        """Returns what it takes in a run; None where nothing is clipped."""
        clip = trainer.logit_clip
        if clip is None:
            return None
        scaled = [projection.weight for _, of in clipped_weights(clip, trainer.model) for projection, _, _ in of]
        shards = [plan.shard_size for unit in blueprint.units for plan in unit.plans]
        factors = 4 * min(max(weight.numel() for weight in scaled), max(shards))
        return cls(nbytes=4 * watched_heads(clip, trainer.model), factors=factors)


def step_bytes(buckets: Sequence[PlannedBucket]) -> int:
    """Returns the most bytes that the optimizer's step holds at a time beyond parameters, gradients and state.

    While a bucket is computed the next one's payloads travel and the directions of the one before come back.

    Args:
        buckets: Of one rank, in order.
    """
    most = 0
    sizes = [_bucket_bytes(bucket) for bucket in buckets]
    for i, now in enumerate(sizes):
        before, after = (sizes[i - 1] if i else _NOTHING), (sizes[i + 1] if i + 1 < len(sizes) else _NOTHING)
        waiting = before.payload + before.outgoing + before.owned + before.kept + before.shared
        preparing = now.payload + now.outgoing + now.incoming + now.kept + after.payload + after.prepared + after.kept
        travelling = after.payload + after.outgoing + after.incoming + after.kept
        computing = 2 * now.payload + now.incoming + 2 * now.owned + now.kept
        computing += max(now.workspace, now.shared)  # directions go to copies when all blocks are computed
        most = max(most, waiting + preparing, waiting + travelling + computing)
    return most


class _BucketBytes(NamedTuple):
    """Of one bucket on one rank."""

    payload: int  # of the runs here, in the wire dtype; directions are as long
    prepared: int  # what `prepare` makes before it rounds: one run in float32
    outgoing: int  # parts sent to owners
    incoming: int  # parts received as an owner
    owned: int  # cut granules assembled here
    kept: int  # state as it was, and block state as it will be, until the bucket is applied
    shared: int  # directions sent to other copies, and received from them
    workspace: int  # of the rule while it computes its largest block, or rounds its largest run


_NOTHING = _BucketBytes(0, 0, 0, 0, 0, 0, 0, 0)


def _bucket_bytes(bucket: PlannedBucket) -> _BucketBytes:
    lengths = [run.stop - run.start for run in bucket.runs]
    before = sum(value.nbytes for run in bucket.runs for value in run.state.values())
    rounding = ROUNDING * max(lengths) if getattr(bucket.rule, "param_dtype", torch.float32) is torch.bfloat16 else 0
    if not bucket.largest:
        return _NOTHING._replace(kept=before if bucket.offloaded else 0, workspace=rounding)
    wire, exchange = bucket.rule.wire_dtype.itemsize, bucket.exchange
    owned = [exchange.crossings[i] for i in exchange.mine] if exchange else []
    after = sum(rows.nbytes for run in bucket.runs for of in run.blocks for rows in of.rows.values())
    return _BucketBytes(
        payload=wire * sum(lengths),
        prepared=4 * max(lengths, default=0),
        outgoing=wire * sum(move.stop - move.start for move in exchange.outgoing) if exchange else 0,
        incoming=wire * sum(move.stop - move.start for move in exchange.incoming) if exchange else 0,
        owned=wire * sum(c.stop - c.start for c in owned),
        kept=before + after,
        shared=wire * _shared(bucket.sharing) if bucket.sharing else 0,
        workspace=max(WORKSPACE * bucket.largest, rounding),
    )


def _shared(sharing: Sharing) -> int:
    """Elements that go to other copies, once packed and once for each, and that come from them."""
    mine = sharing.sizes[sharing.replica]
    return mine * (len(sharing.sizes) - 1) + sum(sharing.sizes) - mine
