"""A step over a slow link: how much communication is left uncovered, for FSDP2 and for fully_shard.

    sudo python tests/bench/overlap.py [--json FILE] [--svg FILE]

Needs root: it makes two network namespaces, joins them by a veth pair that ``tc ... tbf`` slows to 1 Gbit/s, and runs a
rank in each. Measured alternately: compute alone, the collectives alone, and the step. Exposed communication is the
step less compute. The timeline shows one step of each system on rank 0: above, what the process group carries; below,
when the computing thread waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp import Alone, Shape, batch, ours, peer, step, timed
from report import Row, arguments, publish, row
from torch.distributed.fsdp import MixedPrecisionPolicy

SHAPE = Shape(ranks=2, tokens=1024, width=512)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
SPACES, LINKS, HOSTS = ("vescale0", "vescale1"), ("vescale-a", "vescale-b"), ("10.77.0.1", "10.77.0.2")
RATE = "1gbit"
CARRIES = ("gloo:",)
WAITS = ("vescale.wait", "FSDP::all_gather_copy_out", "FSDP::post_backward_reduce", "c10d::")


def link() -> None:
    """Two namespaces and a slow wire between them."""
    for space in SPACES:
        _run("ip", "netns", "add", space)
    _run("ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1])
    for space, name, host in zip(SPACES, LINKS, HOSTS, strict=True):
        _run("ip", "link", "set", name, "netns", space)
        inside = ("ip", "netns", "exec", space)
        _run(*inside, "ip", "addr", "add", f"{host}/24", "dev", name)
        _run(*inside, "ip", "link", "set", name, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(
            *inside, "tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"
        )


def unlink() -> None:
    """Takes the namespaces down, and the wire with them."""
    for space in SPACES:
        subprocess.run(("ip", "netns", "del", space), check=False, stderr=subprocess.DEVNULL)  # there may be none


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def work(rank: int, pairs: int, file: Path) -> None:
    """One rank; rank 0 leaves samples and timelines in ``file``."""
    os.environ.update(GLOO_SOCKET_IFNAME=LINKS[rank])
    torch.set_num_threads(1)
    # By file, since a store at an address asks a name server, which no namespace has, and waits a minute for it.
    dist.init_process_group("gloo", init_method=f"file://{file}.store", rank=rank, world_size=2)
    alone, tokens = Alone(SHAPE, POLICY), batch(SHAPE)
    systems = {
        "fsdp2": peer(SHAPE, POLICY, calls=False, async_op=False, experts_dim=0),
        "fsdp2, async gathers": peer(SHAPE, POLICY, calls=False, async_op=True, experts_dim=0),
        "ours": ours(SHAPE, POLICY, in_backward=False),
        "ours, in backward": ours(SHAPE, POLICY, in_backward=True),
    }
    calls: dict[str, Any] = {key: lambda s=system: step(s, tokens) for key, system in systems.items()}
    calls |= {"compute alone": alone.compute, "collectives alone": alone.calls}
    samples: dict[str, list[float]] = {key: [] for key in calls}
    for pair in range(pairs + 2):
        for key in calls if pair % 2 else reversed(calls):
            elapsed = timed(calls[key])
            if pair >= 2:
                samples[key].append(elapsed)
    lines = {key: timeline(calls[key]) for key in systems}
    if rank == 0:
        file.write_text(json.dumps({"samples": samples, "timelines": lines}))
    dist.barrier()
    dist.destroy_process_group()


def timeline(call: Any) -> list[tuple[str, float, float]]:
    """(kind, start, stop) in milliseconds of one call; kind is "carries" or "waits"."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = list(profile.events())
    origin = min(event.time_range.start for event in events)
    found = []
    for event in events:
        kind = "carries" if event.name.startswith(CARRIES) else "waits" if event.name.startswith(WAITS) else ""
        if kind:
            found.append((kind, (event.time_range.start - origin) / 1e3, (event.time_range.end - origin) / 1e3))
    return found


def draw(timelines: dict[str, list[tuple[str, float, float]]], medians: dict[str, float], file: Path) -> None:
    """Writes the timelines as an SVG."""
    longest = max(stop for line in timelines.values() for _, _, stop in line)
    left, width, height = 170, 900, 58
    colours = {"carries": ("#4477aa", 0), "waits": ("#cc6677", 18)}
    parts = []
    for at, (key, line) in enumerate(timelines.items()):
        top = 24 + at * height
        parts.append(f'<text x="4" y="{top + 14}">{key}</text><text x="4" y="{top + 30}">{medians[key]:.0f} ms</text>')
        for kind, start, stop in line:
            colour, down = colours[kind]
            x, w = left + start / longest * width, max((stop - start) / longest * width, 0.5)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + down}" width="{w:.1f}" height="14" fill="{colour}" opacity="0.6"/>'
            )
    title = "blue: the process group carries; red: the computing thread waits"
    size = f'width="{left + width + 10}" height="{30 + height * len(timelines)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    sheet = f'<rect width="100%" height="100%" fill="white"/><text x="4" y="14">{title}</text>'
    file.write_text(f"{head}{sheet}{''.join(parts)}</svg>\n")


def rows(samples: dict[str, list[float]]) -> list[Row]:
    """Steps, and what of them is uncovered communication."""
    compute = samples["compute alone"]
    best = min(("fsdp2", "fsdp2, async gathers"), key=lambda key: statistics.median(samples[key]))

    def exposed(key: str) -> list[float]:
        return [a - b for a, b in zip(samples[key], compute, strict=True)]

    made = [row(f"{key}", "ms", samples[key]) for key in samples]
    for mine in ("ours", "ours, in backward"):
        made.append(row(f"step, {mine} / {best}", "ms", samples[mine], samples[best]))
        made.append(row(f"exposed communication, {mine} / {best}", "ms", exposed(mine), exposed(best)))
    return made


def main() -> None:
    """Makes the link, starts a rank at each end, takes it down."""
    parser = arguments("A step over a slow link.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--svg", type=Path, help="also draw the timelines there")
    parser.add_argument("--rank", type=int, help="run this rank; the bench starts itself with it")
    parser.add_argument("--file", type=Path, default=Path("/tmp/vescale_overlap.json"))
    options = parser.parse_args()
    if options.rank is not None:
        return work(options.rank, options.pairs, options.file)
    if os.geteuid() != 0:
        sys.exit("overlap.py makes network namespaces and needs root: sudo python tests/bench/overlap.py")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the link is taken down then too
    unlink()
    Path(f"{options.file}.store").unlink(missing_ok=True)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        link()
        command = (sys.executable, __file__, "--pairs", str(options.pairs), "--file", str(options.file))
        ranks = [
            subprocess.Popen(("ip", "netns", "exec", space, *command, "--rank", str(rank)))
            for rank, space in enumerate(SPACES)
        ]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
    finally:
        for rank in ranks:
            rank.kill()
        unlink()
    found = json.loads(options.file.read_text())
    table = rows(found["samples"])
    publish(f"fully_shard against FSDP2 over {RATE}", table, options.json)
    if options.svg:
        draw(found["timelines"], {line.name: line.ours for line in table}, options.svg)


if __name__ == "__main__":
    main()
