"""The command that plans: `python -m vescale.plan recipe=llama70b_muon world_size=64 device_memory=80GB machine=h100`.

It composes a run as `vescale.train` does and says what that run needs: memory, communication, the optimizer's step,
what to change. No weight is allocated and no rank is started, so a laptop plans for ten thousand ranks in seconds.
Every figure is in `figures`, a plain dictionary, printed as JSON or as tables; what is assumed is listed with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vescale.machine import Machine, parse_bytes
from vescale.resolve import Refused, resolve
from vescale.train import points, prepare

if TYPE_CHECKING:
    from vescale.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The keys that `recipes/plan.yaml` adds to a run's.

    Args:
        machine: To plan for.
        device_memory: Of one device, ``80GB`` or ``80GiB``; None: the machine's.
        reserve: Fraction of it that is kept free: the driver's context, NCCL's buffers, fragmentation.
        format: "table" or "json".
        simulate: Run the library's own code for one rank on a fake process group, and compare.
        rank: Of the simulation.
        capacity: Memory of each rank in any unit, where they differ; None: all the same.

    Raises:
        ValueError: If a field is out of range; all of them are named.
    """

    machine: Machine
    device_memory: str | float | None = None
    reserve: float = 0.08
    format: Literal["table", "json"] = "table"
    simulate: bool = False
    rank: int = 0
    capacity: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.reserve < 1:
            problems.append(f"reserve: expected a fraction in [0, 1), got {self.reserve}")
        if self.device_memory is not None:
            parse_bytes(self.device_memory)
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return parse_bytes(self.machine.memory if self.device_memory is None else self.device_memory)

    @property
    def available(self) -> int:
        """Bytes of a device that the run may use."""
        return round(self.memory * (1 - self.reserve))


def figures(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything the command prints, as plain values; bytes, seconds and FLOPs.

    Args:
        config: As ``compose`` gives it for `plan`.

    Raises:
        ValueError: What is wrong with the input.
        NotImplementedError: If the run asks for what is not built.
    """
    from vescale.comparison import compare
    from vescale.forecast import Forecast

    asked, trainer, world = _asked(config)
    if not 0 <= asked.rank < world:
        raise ValueError(f"rank: expected a number in [0, {world}), got {asked.rank}")
    forecast = Forecast(trainer, world, machine=asked.machine, memory=asked.memory, available=asked.available)
    found = forecast.sections()
    if asked.simulate:
        found["simulation"] = compare(forecast, _asked(config)[1], rank=asked.rank)
    if asked.capacity is not None:
        found["unequal ranks"] = _uneven(_asked(config)[1], world, asked.capacity)
    return found


def _uneven(trainer: Trainer, world: int, capacity: Sequence[int]) -> dict[str, Any]:
    from vescale.uneven import uneven

    if len(capacity) != world:
        raise ValueError(f"capacity: expected one for each of {world} ranks, got {len(capacity)}")
    return uneven(trainer, capacity)


def _asked(config: Mapping[str, Any]) -> tuple[PlanConfig, Trainer, int]:
    """The plan's own keys, the run, and the number of ranks."""
    from vescale.mesh import world_size

    own = PlanConfig.__dataclass_fields__
    asked = resolve({"_target_": "vescale.plan.PlanConfig", **{key: config[key] for key in own if key in config}})
    run = {key: value for key, value in config.items() if key not in own}
    trainer = prepare({**run, "dry_run": True})
    return asked, trainer, int(run.get("world_size") or world_size())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for input that was refused with one line."""
    try:
        found = points(sys.argv[1:] if argv is None else argv, command="plan")
        if len(found) > 1:
            raise ValueError(f"expected one configuration, got {len(found)}: -m is for python -m vescale.train")
        for point in found:  # none: Hydra printed what was asked for
            try:
                known = figures(point.config)
            except Refused as problem:
                raise problem.at_the_source(point.follows) from None
            if point.config["format"] == "json":
                print(json.dumps(known, indent=1))
            else:
                from vescale.tables import show

                show(known)
    except (ValueError, OSError, NotImplementedError) as problem:
        print("vescale.plan:", " ".join(str(problem).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
