"""Shortage: where the plan has a rank's memory at the worst moment of a step, for a run that had too little of it::

the plan's worst moment, backward of model.layers.3
  parameters                          0.50 GiB
  optimizer state                     1.00 GiB
  ...
  together                            3.75 GiB
"""

from __future__ import annotations

from vescale.blueprint import Blueprint
from vescale.memory import moments
from vescale.mesh import pick_device
from vescale.trainer import Trainer


def table(trainer: Trainer, *, ranks: int) -> str:
    """Returns the plan's bytes at the worst moment of a step of the fullest rank, a line for each kind.

    Args:
        trainer: Of the run's configuration, on the meta device; it is used up.
        ranks: Of the job.
    """
    trainer.check_ranks(ranks)
    blueprint = Blueprint.of_job(trainer, ranks)
    found = moments(
        trainer,
        blueprint,
        blueprint.worst_rank,
        micro_batch=trainer.micro_size,
        micro_batches=trainer.micro_batches,
        device=pick_device(trainer.config.device).type,
    )
    worst = max(found, key=lambda moment: moment.nbytes)
    rows = {**{what: nbytes for what, nbytes in worst.parts.items() if nbytes}, "together": worst.nbytes}
    lines = [f"  {what:<32}{nbytes / 2**30:>8,.2f} GiB" for what, nbytes in rows.items()]
    return "\n".join([f"the plan's worst moment, {worst.name}", *lines])
