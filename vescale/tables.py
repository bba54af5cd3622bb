"""Tables: the figures of a plan as a reader sees them. No number is made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vescale.advice import readable


def show(figures: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints every section.

    Args:
        figures: What ``vescale.plan.figures`` returns.
        console: Where to; the standard output when left out, at least 120 columns wide.
    """
    console = console or Console(width=max(Console().width, 120), highlight=False)
    for name, section in _SECTIONS.items():
        if name in figures:
            console.print(f"\n[bold]{name.capitalize()}[/bold]")
            for block in section(figures[name]):
                console.print(block)


def _model(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"{section['parameters']:,} parameters, {section['active_parameters']:,} active, "
        f"{section['flops_per_token']:.4g} FLOPs per token at {section['seq_len']:,} tokens "
        f"({section['convention']})"
    )
    ranks = section["ranks"]
    yield (
        f"{ranks:,} rank{'s' * (ranks != 1)}, {section['units']} units of fully_shard, padding "
        f"{section['padding']:.2%}; {readable(section['bytes_cut'])} lie in blocks that an edge between ranks cuts"
    )
    groups = section["optimizer"].items()
    rows = [(name, group["rule"], group["parameters"], f"{group['elements']:,}") for name, group in groups]
    yield _table(("group", "rule", "parameters", "elements"), rows)


def _memory(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"rank {section['rank']:,} holds the most; {readable(section['available'])} of {readable(section['device'])} "
        f"to use, {readable(section['reserve'])} in reserve; configured: ZeRO {section['stage']}, "
        f"checkpointing {section['configured']}"
    )
    yield from _stages(section["stages"])
    yield from _parts(section)
    yield _table(("optimizer state", "bytes"), [(kind, f"{n:,}") for kind, n in section["optimizer_state"].items()])
    batch = section["batch"]
    rows = [
        (word, readable(peak), *_micro(batch[word], batch["global_tokens"]))
        for word, peak in section["checkpointing"].items()
    ]
    yield _table(("checkpointing", "peak as configured", "micro-batch that fits", "accumulation", "peak of it"), rows)


def _stages(stages: Mapping[str, Any]) -> Iterable[Any]:
    rows = [
        (stage, readable(s["textbook_states"]), readable(s["peak"]), s["moment"], _fits(s["fits"], s["margin"]))
        for stage, s in stages.items()
    ]
    yield _table(("ZeRO", "Adam's states", "peak of this run", "at", "fits"), rows)
    yield _note(
        "Adam's states: the textbook's 16 bytes a parameter (bf16 weights and gradients, float32 master and two "
        "moments), shared out as the stage says; peak: every live tensor, with this run's optimizer and dtypes"
    )


def _parts(section: Mapping[str, Any]) -> Iterable[Any]:
    parts, most = section["stages"][str(section["stage"])]["parts"], section["most"]
    rows = [(what, readable(parts.get(what, 0)), readable(nbytes)) for what, nbytes in most.items()]
    yield _table((f"ZeRO {section['stage']}", "at the peak", "most at any moment"), rows)
    yield _note(
        "gathered units: whole parameters of the layers at work; gradients in flight: whole, until the reduce-scatter; "
        "gradients: this rank's shards of the sum; blocks of the optimizer: what its step holds beside them"
    )


def _micro(fit: Mapping[str, Any] | None, tokens: int) -> tuple[str, ...]:
    if fit is None:
        return "none fits", "", ""
    size = fit["micro_batch"]
    sequences = f"{size} sequence{'s' * (size != 1)}"
    return sequences, f"x {fit['accumulation']} for {tokens:,} tokens", readable(fit["peak"])


def _fits(fits: bool, margin: float) -> str:
    return f"yes, {readable(margin)} free" if fits else f"no, {readable(-margin)} short"


def _communication(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"{section['nodes']:,} {section['machine']} nodes, rings at {section['bandwidth'] / 1e9:,.0f} GB/s; bytes of "
        "whole buffers, per step"
    )
    rows = [
        (line["what"], line["collective"], f"{line['calls']:,}", readable(line["nbytes"]), _time(line["seconds"]))
        for line in section["lines"]
    ]
    yield _table(("what", "collective", "calls", "bytes", "time"), rows)
    yield (
        f"compute {_time(section['compute_seconds'])}, communication {_time(section['seconds'])}: "
        f"{_time(section['hidden_seconds'])} hidden, {_time(section['exposed_seconds'])} exposed "
        f"({section['exposed']:.1%} of the step; {section['exposed_without_overlap']:.1%} if nothing overlapped)"
    )
    yield (
        f"step {_time(section['step_seconds'])}, {section['tokens_per_second']:,.0f} tokens/s, "
        f"{section['model_flop_utilisation']:.1%} model FLOP utilisation"
    )


def _optimizer(section: Mapping[str, Any]) -> Iterable[Any]:
    yield f"reading and writing parameters, gradients and state once: {_time(section['elementwise_seconds'])}"
    if "ways" not in section:
        yield "no rule works on whole blocks: nothing moves in the step"
        return
    yield (
        f"{section['blocks_kept']:,} blocks lie whole on a rank, {section['blocks_cut']:,} are cut; the busiest rank "
        f"computes {section['balance']:.2f} x the mean (the largest block alone is {section['largest_block']:.2f})"
    )
    most = readable(section["bytes_moved_worst_rank"])
    yield f"{readable(section['bytes_moved'])} moved in the world, {most} sent by the busiest rank"
    rows = [
        (
            way["way"],
            readable(way["bytes_per_rank"]),
            _time(way["network_seconds"]),
            _time(way["compute_seconds"]),
            readable(way["extra_bytes"]),
            way["note"],
        )
        for way in section["ways"]
    ]
    yield _table(("way to whole blocks", "sent by a rank", "network", "compute", "more memory", ""), rows)
    yield _note(
        "block: what one update needs whole, a matrix for Muon; its owner is the rank that computes it. Network and "
        "compute: of the busiest rank, in a step"
    )


def _pipeline(section: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    rows = [
        (row["name"], row["stages"], row["micro_batches"], f"{row['bubble']:.1%}", f"{row['kept']:g}")
        for row in section
    ]
    yield _table(("schedule", "stages", "micro-batches", "bubble", "micro-batches held"), rows)


def _advice(section: Mapping[str, Any]) -> Iterable[Any]:
    yield section["conclusion"]
    for number, advice in enumerate(section["decisions"], start=1):
        yield f"{number}. {advice['text']}"


def _assumptions(section: Sequence[str]) -> Iterable[Any]:
    for line in section:
        yield f"- {line}"


def _unequal(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"shards in the ratio of the ranks' capacities: padding {section['padding']:.2%}, "
        f"{section['bytes_cut']:,} bytes of blocks are cut; fully_shard does not build such a plan yet"
    )
    total = sum(section["elements"])
    rows: dict[int, tuple[Any, ...]] = {}
    for capacity, elements in zip(section["capacity"], section["elements"], strict=True):
        ranks = rows.get(capacity, (0,))[0] + 1
        rows[capacity] = (ranks, capacity, f"{elements:,}", f"{elements / total:.2%}")
    yield _table(("ranks", "capacity of each", "elements of each", "share of each"), rows.values())


def _simulation(section: Mapping[str, Any]) -> Iterable[Any]:
    yield f"rank {section['rank']:,}, {section['micro_batches']} micro-batches, {section['allocations']:,} allocations"
    rows = [
        (what.replace("_", " "), f"{section[what]['plan']:,}", f"{section[what]['seen']:,}", _agrees(section[what]))
        for what in ("parameters", "optimizer_state", "peak")
    ]
    calls = section["collectives"]
    for plan, seen in zip(calls["plan"], calls["seen"], strict=False):
        rows.append((plan["collective"], _calls(plan), _calls(seen), _agrees({"agrees": plan == seen})))
    yield _table(("bytes", "plan", "seen", ""), rows)
    yield f"collectives {_agrees(calls)}"


def _calls(row: Mapping[str, Any]) -> str:
    return f"{row['count']:,} x {row['bytes']:,}"


def _agrees(row: Mapping[str, Any]) -> str:
    return "agree" if row["agrees"] else "DIFFER"


def _note(text: str) -> Padding:
    """What the words above mean."""
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def _time(seconds: float) -> str:
    """Seconds as a reader wants them."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 or name in ("", "at", "fits", "collective") else "right")
    for row in rows:
        table.add_row(*map(str, row))
    return table


_SECTIONS: dict[str, Any] = {
    "model": _model,
    "memory": _memory,
    "communication": _communication,
    "optimizer": _optimizer,
    "pipeline": _pipeline,
    "advice": _advice,
    "unequal ranks": _unequal,
    "simulation": _simulation,
    "assumptions": _assumptions,
}
