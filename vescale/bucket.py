"""Bucket: runs of one rule that travel together, and where each is in the step.

::

    prepare    element-wise on each run; payloads of cut granules leave
    compute    kept blocks first, then what arrived; their directions leave, and new block state waits
    apply      directions that came back; element-wise on each run; block state that waits is written

Block state that a rule writes in place, where it lies here and no device flag may skip the step, is copied before, so
that a block that fails takes the step back: half the traffic of writing it anew and then copying it.

Blocks of b x b lie interleaved in a matrix, so each is copied out and its direction back; where a block is all of its
granule (a matrix, an expert, a head) it is a view. On the CPU each block is computed by itself, since libraries choose
kernels, hence bits, by the size of a batch; elsewhere equal blocks are one batch, and a rule that takes unequal ones
where they lie is given all of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vescale.counting import Counters
from vescale.exchange import Crossing, Exchange
from vescale.owners import Deal, Key, window_shape
from vescale.rule import rule_for, whole_shape
from vescale.run import Run
from vescale.sharing import sharing_of

# Payload bytes of one all-to-all: large enough that its latency does not show, small enough that a few in flight are no
# memory to speak of.
BUCKET_BYTES = 64 * 2**20


class Job(NamedTuple):
    """One block to compute here.

    Args:
        run: Index of its run in the bucket.
        member: Index of its parameter in the run.
        block: Of the block in the parameter.
        start: First element of its granule in the tensor it is read from.
        box: Shape of the granule.
        window: The block in it.
        lead: Dims of one before them.
    """

    run: int
    member: int
    block: int
    start: int
    box: tuple[int, ...]
    window: tuple[slice, ...]
    lead: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The block as a view of the tensor that holds its granule."""
        return flat[self.start : self.start + math.prod(self.box)].view(self.box)[self.window]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the block, as long as the parameter's."""
        return (1,) * self.lead + window_shape(self.window)

    @property
    def is_a_run(self) -> bool:
        """Whether the block lies in one piece: it is all of its granule."""
        return window_shape(self.window) == tuple(self.box)


class Write(NamedTuple):
    """Block state that waits for the step to succeed."""

    row: torch.Tensor
    value: torch.Tensor


class Bucket:
    """Runs of one rule that travel together, and where each is in the step."""

    def __init__(self, runs: Sequence[Run], dealt: Deal, counters: Counters) -> None:
        self.runs, self.group, self.rule = list(runs), runs[0].group, runs[0].rule
        self.has_blocks = hasattr(self.rule, "block")
        self.has_state = hasattr(self.rule, "block_state")
        self.kept: list[Job] = []
        self.arriving: dict[int, list[Job]] = {}  # of each crossing owned here
        if self.has_blocks:
            self.kept = [job for at, run in enumerate(runs) for job in _kept(at, run, dealt.replicas)]
        self.exchange = exchange_of(runs, dealt.owners, replicas=dealt.replicas, counters=counters)
        self.sharing = sharing_of(runs, dealt.replicas, counters)
        # Of any copy: all ranks that hold a shard begin to share a bucket at the same place of the step.
        self.is_cut = self.has_blocks and any(run.boundary(i) for run in runs for i in range(len(run.params)))
        if self.exchange:
            for i in self.exchange.mine:
                cut = self.exchange.crossings[i]
                self.arriving[i] = _jobs(cut.run, runs[cut.run], cut.member, cut.granule, 0)
        self.jobs = [*self.kept, *(job for of in self.arriving.values() for job in of)]
        self.in_place = self._batched and hasattr(self.rule, "blocks_in_place") and all(j.is_a_run for j in self.jobs)
        self.guarded: tuple[str, ...] = getattr(self.rule, "state_in_place", ())
        self._shapes: dict[tuple[int, ...], dict[str, torch.Size]] = {}  # of state, by the shape of its block
        self.may_skip = False  # a device flag says whether this step is taken
        self.payloads: list[tuple[torch.Tensor, ...]] = []
        self.directions: list[torch.Tensor] = []
        self.writes: list[Write] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []  # state that is written at once, and what it was
        self.aside: Iterator[torch.Tensor] = iter(())  # where it is copied to
        self._sizes: list[int] | None = None  # of those copies

    def prepare(self, rule: Any, skip: torch.Tensor | None) -> None:
        """Runs the rule's element-wise part and sends the payloads of cut blocks on their way."""
        self.may_skip = skip is not None
        for run in self.runs:
            run.fetch()
        if not self.has_blocks and hasattr(rule, "prepare_runs"):
            runs = self.runs
            rule.prepare_runs(
                [r.param() for r in runs], [r.grad() for r in runs], [r.all_state for r in runs], skip=skip
            )
            return
        self.payloads = []
        for run in self.runs:
            if self.has_blocks and not run.offloaded:  # so that an exception in a block can be taken back
                self.before += [(value, value.clone()) for value in run.state.values()]
            of = rule_for(rule, whole_shape(run.params[0]))
            payloads = of.prepare(run.param(), run.grad(), run.all_state, skip=skip)
            if skip is not None and self.has_state:  # eigh and qr of NaN raise, and what comes of it is not written
                payloads = tuple(torch.where(skip > 0, torch.zeros_like(flat), flat) for flat in payloads)
            self.payloads.append(payloads)
        if self.exchange:
            self.exchange.send(
                [[(run.start, flat) for flat in flats] for run, flats in zip(self.runs, self.payloads, strict=True)]
            )

    def compute(self, rule: Any) -> None:
        """Computes the kept blocks, then the cut ones that have arrived here, and sends their directions back."""
        if not self.has_blocks:
            return
        self.directions = [torch.empty_like(flats[0]) for flats in self.payloads]
        self.aside = self._room_aside()
        for jobs in self._batches(self.kept):
            at = jobs[0].run
            self._compute(rule, jobs, self.payloads[at], self.directions[at])
        if self.exchange:
            for crossing, flats, direction in self.exchange.arrived():
                for jobs in self._batches(self.arriving[crossing]):
                    self._compute(rule, jobs, flats, direction)
            self.exchange.reply()
        if self.sharing and not self.is_cut:
            self.sharing.start(self.directions)
        self.payloads, self.aside = [], iter(())

    def apply(self, rule: Any, skip: torch.Tensor | None) -> None:
        """Steps the parameters along the directions and writes block state."""
        if self.exchange:
            self.exchange.collect([(run.start, flat) for run, flat in zip(self.runs, self.directions, strict=True)])
        if self.sharing:
            if self.is_cut:
                self.sharing.start(self.directions)
            self.sharing.finish(self.directions)
        for row, value in self.writes:
            row.copy_(value if skip is None else torch.where(skip > 0, row.to(value.device), value), non_blocking=True)
        for run, direction in zip(self.runs, self.directions, strict=False):
            _zero_gaps(run, direction)
            rule.apply(run.param(), direction, run.all_state, skip=skip)
        torch._foreach_add_([run.steps for run in self.runs], 1 if skip is None else 1 - skip)
        for run in self.runs:
            run.put_back()
            run.advance(skip)
        self.directions, self.writes, self.before = [], [], []

    def undo(self) -> None:
        """Takes back what ``prepare`` wrote, after an exception."""
        for value, before in self.before:
            value.copy_(before)
        for run in self.runs:
            run.put_back(failed=True)
        self.payloads, self.directions, self.writes, self.before, self.aside = [], [], [], [], iter(())

    # --- blocks ---

    @property
    def _batched(self) -> bool:
        return self.runs[0].steps.device.type != "cpu"

    def _batches(self, jobs: Sequence[Job]) -> Iterable[list[Job]]:
        """Blocks of one run and shape that do the same, or all of a run; on the CPU each alone."""
        if not self._batched:
            return [[job] for job in jobs]
        found: dict[Any, list[Job]] = {}
        for job in jobs:
            found.setdefault((job.run,) if self.in_place else (job.run, job.shape, self._due(job)), []).append(job)
        return found.values()

    def _due(self, job: Job) -> str | None:
        """Whether it is this block's turn to refresh what it keeps: "first", "again" or None."""
        if not self.has_state:
            return None
        taken = self.runs[job.run].taken_by(job.member)
        if taken == 0:
            return "first"
        return "again" if (taken + job.block) % getattr(self.rule, "refresh", 1) == 0 else None

    def _compute(self, rule: Any, jobs: Sequence[Job], flats: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Computes blocks of equal shape, or in place: directions into ``out``, new block state into ``writes``."""
        run, shape = self.runs[jobs[0].run], jobs[0].shape
        try:
            if self.in_place:
                rule.blocks_in_place(flats, tuple((job.start, job.shape) for job in jobs), out)
            else:
                payloads = tuple(_gather([job.view(flat) for job in jobs], shape) for flat in flats)
                for job, part in zip(jobs, self._call(rule, run, jobs, payloads), strict=True):
                    target = job.view(out)
                    target.copy_(part.view(target.shape))
        except Exception as problem:
            names = ", ".join(dict.fromkeys(run.names[job.member] for job in jobs))
            blocks = f"block {jobs[0].block}" if len(jobs) == 1 else f"{len(jobs)} blocks"
            raise RuntimeError(
                f"{names}: {type(rule).__name__}.block failed on {blocks} {shape}: {problem}"
            ) from problem

    def _call(self, rule: Any, run: Run, jobs: Sequence[Job], payloads: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if not self.has_state:
            return rule.block(payloads, {})
        rows = self._rows(run, jobs)
        state = {name: self._at_hand(of, run.steps.device) for name, of in rows.items()}
        copies = self._guard(rows, state)
        state["step"] = run.steps[0]
        direction, changed = rule.block(payloads, state, refresh=self._due(jobs[0]))
        for name, values in ({name: state[name] for name in copies} | changed).items():
            self.writes += [Write(row, value) for row, value in zip(rows[name], values, strict=True)]
        return direction

    def _at_hand(self, rows: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """State as the rule is given it, (B, *state): where it lies, or together and on the device."""
        return torch.stack(list(rows)).to(device, non_blocking=True) if self._batched else rows[0][None]

    def _guard(self, rows: Mapping[str, list[torch.Tensor]], state: dict[str, torch.Tensor]) -> list[str]:
        """Keeps what the rule is about to write in place, or has it write copies; returns the names of the copies."""
        names = [name for name in self.guarded if name in rows]
        if self._batched or not names:
            return names
        if self.may_skip:
            state |= {name: state[name].clone() for name in names}
            return names
        were = [state[name].view(-1) for name in names]
        copies = [next(self.aside) for _ in were]
        torch._foreach_copy_(copies, were)
        self.before += zip(were, copies, strict=True)
        return []

    def _room_aside(self) -> Iterator[torch.Tensor]:
        """Memory for the copies of all blocks; taken one by one, they would lie where blocks compute, in the cache."""
        if not self.guarded or self.may_skip or self._batched:
            return iter(())
        if self._sizes is None:
            shapes = map(self._shapes_of, self.jobs)
            self._sizes = [of[name].numel() for of in shapes for name in self.guarded if name in of]
        return iter(torch.empty(sum(self._sizes)).split(self._sizes))

    def _shapes_of(self, job: Job) -> dict[str, torch.Size]:
        """Of the state of a block."""
        if job.shape not in self._shapes:
            first = self.rule.block_state(job.shape)
            self._shapes[job.shape] = {name: value.shape for name, value in first.items()}
        return self._shapes[job.shape]

    def _rows(self, run: Run, jobs: Sequence[Job]) -> dict[str, list[torch.Tensor]]:
        """Where the state of each block is held."""
        return {
            name: [run.blocks[job.member].row(name, job.block, shape) for job in jobs]
            for name, shape in self._shapes_of(jobs[0]).items()
        }


def _gather(views: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """The views one after another, (B, *shape), contiguous; a view itself where there is one and it is."""
    if len(views) == 1:
        return views[0].contiguous().view(1, *shape)
    return torch.stack([view.reshape(tuple(shape)) for view in views])


def _zero_gaps(run: Run, direction: torch.Tensor) -> None:
    """Padding between parameters takes no step: it stays zero in the master shard."""
    ends = [offset + param.numel() for offset, param in zip(run.offsets, run.params, strict=True)]
    for start, stop in zip(ends, [*run.offsets[1:], run.stop], strict=True):
        low, high = max(start, run.start) - run.start, min(stop, run.stop) - run.start
        if high > low:
            direction[low:high].zero_()


def pack(runs: Sequence[Run], dealt: Deal, counters: Counters) -> list[Bucket]:
    """Returns the buckets of a step, in order."""
    return [Bucket(bucket, dealt, counters) for bucket in together(runs)]


def exchange_of(
    runs: Sequence[Run],
    owners: Mapping[Key, int],
    *,
    replicas: Mapping[Key, int] | None = None,
    counters: Counters | None = None,
) -> Exchange | None:
    """Returns the all-to-all of runs that travel together; None where no edge cuts a block of theirs.

    Args:
        runs: Of one rule.
        owners: Of each cut granule.
        replicas: Which copy computes each granule; None or empty: every copy all of them.
        counters: Told what is sent.
    """
    first, group = runs[0], runs[0].process_group
    if group is None or not hasattr(first.rule, "block"):
        return None
    cut = [crossing for at, run in enumerate(runs) for crossing in _crossings(at, run, owners, replicas or {})]
    return Exchange(cut, first.rank, first.num_ranks, group, counters) if cut else None


def together(runs: Sequence[Run]) -> list[list[Run]]:
    """Packs runs of one rule and one mesh, in order, until their payload reaches BUCKET_BYTES.

    Rules with blocks come first: if one of their blocks raises, nothing else was stepped.
    """
    packed: list[list[Run]] = []
    size = 0
    for run in sorted(runs, key=lambda run: not hasattr(run.rule, "block")):
        same = (
            packed
            and packed[-1][0].group == run.group
            and type(packed[-1][0].rule) is type(run.rule)
            and packed[-1][0].process_group is run.process_group
            and run.home is not None
        )
        itemsize = getattr(run.rule, "wire_dtype", torch.float32).itemsize
        if not same or size + run.shard_size * itemsize > BUCKET_BYTES:
            packed.append([])
            size = 0
        packed[-1].append(run)
        size += run.shard_size * itemsize
    return packed


def _jobs(at: int, run: Run, index: int, granule: int, start: int) -> list[Job]:
    """The blocks of one granule that begins at element ``start`` of where it will be read."""
    lattice = run.lattice(index)
    box, first = lattice.box(granule), granule * lattice.blocks_per_granule
    lead = len(lattice.block) - len(box)
    return [Job(at, index, first + i, start, box, window, lead) for i, window in enumerate(lattice.windows(granule))]


def _is_ours(run: Run, key: Key, replicas: Mapping[Key, int]) -> bool:
    """Whether the ranks of this copy compute a granule."""
    return not replicas or run.replicas is None or replicas[key] == run.replicas.rank()


def _kept(at: int, run: Run, replicas: Mapping[Key, int]) -> list[Job]:
    """The blocks of the granules that lie whole in a run on this rank, as far as this copy computes them."""
    jobs = []
    for index, param in enumerate(run.params):
        lattice, offset = run.lattice(index), run.offsets[index]
        low, high = (min(max(edge - offset, 0), param.numel()) for edge in (run.start, run.stop))
        for granule in lattice.cut(low, high).whole if high > low else ():
            if not _is_ours(run, (run.names[index], granule), replicas):
                continue
            jobs += _jobs(at, run, index, granule, lattice.granule(granule)[0] + offset - run.start)
    return jobs


def _crossings(at: int, run: Run, owners: Mapping[Key, int], replicas: Mapping[Key, int]) -> list[Crossing]:
    """The granules of a run that rank edges cut, on every rank of this copy, with their owners."""
    found = []
    for index, (name, offset) in enumerate(zip(run.names, run.offsets, strict=True)):
        lattice = run.lattice(index)
        for granule in run.boundary(index):
            if not _is_ours(run, (name, granule), replicas):
                continue
            start, stop = (offset + edge for edge in lattice.granule(granule))
            found.append(Crossing(at, index, granule, start, stop, run.shard_size, owners[name, granule]))
    return found
