"""Feed: which samples of a step, and of a validation, this rank reads; together the same for any number of ranks.

::

    global batch 8, step 0        rank 0                   rank 1
    micro-batches of 2            0 1 | 2 3                4 5 | 6 7
    interleaved                   0 | 2 | 4 | 6            1 | 3 | 5 | 7      neighbours run at the same time
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist

from vescale.data import Batch, MixedSamples, Samples


class Feed:
    """Reads this rank's batches, into host memory.

    Args:
        train: The training samples.
        global_batch: Sequences of a step, over all ranks.
        micro_batches: A rank's share of a step ...
        micro_size: ... in sequences each.
        interleaved: Sample ``i`` goes to rank ``i mod W``, one at a time; else each rank has an equal stretch.
    """

    def __init__(
        self,
        train: Samples | MixedSamples,
        *,
        global_batch: int,
        micro_batches: int,
        micro_size: int,
        interleaved: bool = False,
    ) -> None:
        self.train, self.global_batch, self.size = train, global_batch, micro_size
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        share = micro_batches * micro_size
        if interleaved:
            self.starts = range(self.rank, self.rank + share * self.world, self.world)
        else:
            self.starts = range(self.rank * share, (self.rank + 1) * share, micro_size)

    def step(self, step: int) -> list[Batch]:
        """Returns the micro-batches of a 0-based step."""
        return [self.train.read(step * self.global_batch + start, self.size) for start in self.starts]

    def validation(self, samples: Samples, most: int | None) -> Iterator[Batch]:
        """Yields as many batches on every rank, since each forward gathers parameters; what is past the end is ignored.

        Args:
            samples: Of one validation set.
            most: Sequences to read; None: all.
        """
        count = min(most or samples.num_samples, samples.num_samples)
        for begin in range(0, count, self.size * self.world):
            start = begin + self.rank * self.size
            yield samples.read(start, self.size, counted=count - start)
