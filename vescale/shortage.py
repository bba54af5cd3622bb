"""Shortage: where the plan has a rank's memory at the worst moment of a step, for a run that had too little of it::

the plan's worst moment, backward of model.layers.3
  parameters                          0.50 GiB
  optimizer state                     1.00 GiB
  ...
  together                            3.75 GiB
"""

from __future__ import annotations

from vescale.blueprint import Blueprint, state_by_kind
from vescale.memory import Dtypes, LogitsKept, Moment, moments
from vescale.mesh import pick_device
from vescale.trainer import Trainer


def table(trainer: Trainer, *, ranks: int) -> str:
    """Returns the plan's bytes at the worst moment of a step of the fullest rank, a line for each kind.

    Args:
        trainer: Of the run's configuration, on the meta device; it is used up.
        ranks: Of the job.
    """
    worst = max(_moments(trainer, ranks), key=lambda moment: moment.nbytes)
    rows = {**{what: nbytes for what, nbytes in worst.parts.items() if nbytes}, "together": worst.nbytes}
    lines = [f"  {what:<32}{nbytes / 2**30:>8,.2f} GiB" for what, nbytes in rows.items()]
    return "\n".join([f"the plan's worst moment, {worst.name}", *lines])


def _moments(trainer: Trainer, ranks: int) -> list[Moment]:
    trainer.check_ranks(ranks)
    parallelism = trainer.parallelism
    dtypes = Dtypes(parallelism.param_dtype.itemsize, parallelism.reduce_dtype.itemsize)
    shards = parallelism.shard_ranks(ranks) if parallelism.zero else 1
    blueprint = Blueprint(trainer, shards, copies=ranks // shards if trainer.engine["share_replicas"] else 1)
    rank, model = blueprint.worst_rank, trainer.model_config
    activations = model.activations(  # type: ignore[attr-defined]
        batch=trainer.micro_size, seq_len=trainer.data_config.seq_len, itemsize=dtypes.param, fused=True
    )
    elsewhere = blueprint.offloaded and pick_device(trainer.config.device).type != "cpu"
    found = moments(
        blueprint,
        activations,
        dtypes,
        state=0 if elsewhere else sum(state_by_kind(blueprint.runs(rank)).values()),
        buckets=blueprint.buckets(rank),
        stage=parallelism.zero,
        logits=LogitsKept.of(trainer, blueprint),
        micro_batches=trainer.micro_batches,
        regathers=parallelism.reshard_after_forward is not False,
    )
    return list(found)
