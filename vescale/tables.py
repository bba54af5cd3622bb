"""Tables: the figures of a plan as a reader sees them. No number is made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from vescale.advice import gb


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
        f"{ranks:,} rank{'s' * (ranks != 1)}, {section['units']} units, padding {section['padding']:.2%}, "
        f"{section['bytes_cut']:,} bytes of blocks are cut"
    )
    rows = [(name, group["rule"], group["parameters"], f"{group['elements']:,}") for name, group in _items(section)]
    yield _table(("group", "rule", "parameters", "elements"), rows)


def _items(section: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return section["optimizer"].items()


def _memory(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"rank {section['rank']:,} holds the most; {gb(section['available'])} of {gb(section['device'])} to use, "
        f"{gb(section['reserve'])} in reserve; configured: ZeRO {section['stage']}, "
        f"checkpointing {section['configured']}"
    )
    stages = section["stages"]
    rows = [
        (stage, gb(s["textbook_states"]), gb(s["peak"]), s["moment"], _fits(s["fits"], s["margin"]))
        for stage, s in stages.items()
    ]
    yield _table(("ZeRO", "textbook states", "peak", "at", "fits"), rows)
    parts, most = stages[str(section["stage"])]["parts"], section["most"]
    yield _table(
        (f"ZeRO {section['stage']}", "at the peak", "most at any moment"),
        [(what, gb(parts.get(what, 0)), gb(nbytes)) for what, nbytes in most.items()],
    )
    yield _table(("optimizer state", "bytes"), [(kind, f"{n:,}") for kind, n in section["optimizer_state"].items()])
    batch = section["batch"]
    rows = [
        (word, gb(peak), *_micro(batch[word], batch["global_tokens"]))
        for word, peak in section["checkpointing"].items()
    ]
    yield _table(("checkpointing", "peak as configured", "micro-batch that fits", "accumulation", "peak of it"), rows)


def _micro(fit: Mapping[str, Any] | None, tokens: int) -> tuple[str, ...]:
    if fit is None:
        return "none fits", "", ""
    return f"{fit['micro_batch']} sequences", f"x {fit['accumulation']} for {tokens:,} tokens", gb(fit["peak"])


def _fits(fits: bool, margin: float) -> str:
    return f"yes, {gb(margin)} free" if fits else f"no, {gb(-margin)} short"


def _communication(section: Mapping[str, Any]) -> Iterable[Any]:
    yield (
        f"{section['nodes']:,} {section['machine']} nodes, rings at {section['bandwidth'] / 1e9:,.0f} GB/s; bytes of "
        "whole buffers, per step"
    )
    rows = [
        (line["what"], line["collective"], f"{line['calls']:,}", gb(line["nbytes"]), _time(line["seconds"]))
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
    yield f"element-wise passes {_time(section['elementwise_seconds'])}"
    if "ways" not in section:
        yield "no rule works on whole blocks: nothing moves in the step"
        return
    yield (
        f"{section['blocks_kept']:,} blocks kept, {section['blocks_cut']:,} cut; busiest rank {section['balance']:.2f} "
        f"x the mean (one block alone is {section['largest_block']:.2f})"
    )
    most = gb(section["bytes_moved_worst_rank"])
    yield f"{gb(section['bytes_moved'])} moved in the world, {most} sent by the busiest rank"
    rows = [
        (
            way["way"],
            gb(way["bytes_per_rank"]),
            _time(way["network_seconds"]),
            _time(way["compute_seconds"]),
            gb(way["extra_bytes"]),
            way["note"],
        )
        for way in section["ways"]
    ]
    yield _table(("way", "sent by a rank", "network", "compute", "more memory", ""), rows)


def _pipeline(section: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    rows = [
        (row["name"], row["stages"], row["micro_batches"], f"{row['bubble']:.1%}", f"{row['kept']:g}")
        for row in section
    ]
    yield _table(("schedule", "stages", "micro-batches", "bubble", "activations kept"), rows)


def _advice(section: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    for number, advice in enumerate(section, start=1):
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
