"""The report: one HTML file about one run or several, that needs no network and no other file.

    python -m vescale.report runs/a runs/b --out report.html

Curves are inline SVG, drawn here: loss over steps, tokens and time, learning rates, gradient norms, throughput, memory,
loads of experts; the plan's buffers to scale; and the record.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vescale.tracking import read_metrics

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH, HEIGHT, LEFT, BELOW, ABOVE, RIGHT = 560, 300, 64, 34, 26, 20  # pixels of a chart and its margins
POINTS = 2000  # of a curve; more cannot be seen and would make the file large
SMOOTH = 50  # stretches whose running mean is drawn over a curve of more than four times as many points
TITLES = {
    "loss": "training loss",
    "validation_loss": "validation loss",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "memory_gib": "peak memory, GiB",
    "mfu": "model FLOP utilisation",
    "tflops_per_device": "TFLOP/s of a device",
    "data_wait": "share of the time waiting for data",
}
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:24px auto;max-width:1180px;color:#1f2937;padding:0 16px}
h1{font-size:22px}
h3{font-size:14px;margin:10px 0 2px}h2{font-size:17px;margin:28px 0 8px;border-bottom:1px solid #e5e7eb}
figure{display:inline-block;margin:0 8px 12px 0}svg text{font:11px system-ui,sans-serif;fill:#4b5563}
.chart{background:#fff;border:1px solid #e5e7eb;border-radius:6px}
table{border-collapse:collapse}td,th{padding:2px 14px 2px 0;text-align:left;vertical-align:top}
th{color:#6b7280;font-weight:600}code{font:12px ui-monospace,monospace;word-break:break-all}
.key{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:6px}
details{margin:6px 0}summary{cursor:pointer}
"""


class Run(NamedTuple):
    """What a run has left in its folder."""

    name: str
    rows: list[dict[str, Any]]
    record: dict[str, Any]
    plan: list[dict[str, Any]]


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    colour: str
    points: list[tuple[float, float]]


def load(folder: Path) -> Run:
    """Returns the run in ``folder``.

    Raises:
        ValueError: If it has no metrics.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{folder} has no metrics.jsonl: it is no folder of a run")
    rows = [{key: value for key, value in row.items() if _is_number(value)} for row in read_metrics(path)]
    record, plan = _json(folder / "record.json"), _json(folder / "plan.json")
    drawn = [segment for segment in plan if _is_segment(segment)] if isinstance(plan, list) else []
    return Run(folder.absolute().name or str(folder), rows, record if isinstance(record, dict) else {}, drawn)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_segment(value: Any) -> bool:
    return isinstance(value, dict) and {"name", "shard_size", "num_ranks", "tensors"} <= value.keys()


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None


def load_all(folders: Sequence[Path]) -> list[Run]:
    """Returns several runs; those in folders of one name are told apart by their whole paths.

    Raises:
        ValueError: As ``load``.
    """
    runs = [load(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        run if names.count(run.name) == 1 else run._replace(name=str(folder))
        for run, folder in zip(runs, folders, strict=True)
    ]


# --- curves ---


def curves(runs: Sequence[Run], key: str, *, over: str) -> list[Curve]:
    """Returns the curve of a metric for every run that has it, against ``step``, ``tokens`` or ``hours``."""
    found = []
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        points = [(x, float(row[key])) for row, x in zip(run.rows, _places(run.rows, over), strict=True) if key in row]
        points = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        if points:
            found.append(Curve(run.name, colour, thinned(points)))
    return found


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _places(rows: Sequence[Mapping[str, Any]], over: str) -> Iterator[float]:
    """Where each row lies on the axis; hours are the steps' own seconds, added up."""
    hours, step = 0.0, 0
    for row in rows:
        if "step_seconds" in row:
            hours += row["step_seconds"] * (row["step"] - step) / 3600
            step = row["step"]
        yield hours if over == "hours" else float(row[over])


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most ``POINTS`` of the points, the lowest and the highest of every stretch, in order."""
    if len(points) <= POINTS:
        return points
    width = -(-2 * len(points) // POINTS)
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        kept += sorted({min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])})
    return kept


class Frame(NamedTuple):
    """The part of the plane that a chart shows."""

    x0: float
    x1: float
    y0: float
    y1: float

    @classmethod
    def around(cls, found: Sequence[Curve]) -> Frame:
        """Returns the smallest that holds all points."""
        xs, ys = ([point[i] for curve in found for point in curve.points] for i in (0, 1))
        return cls(*_span(xs), *_span(ys))

    def place(self, x: float, y: float) -> str:
        """Returns where a point lies in the picture, "x,y" in pixels from its upper left corner."""
        right = LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)
        down = ABOVE + (self.y1 - y) / (self.y1 - self.y0) * (HEIGHT - ABOVE - BELOW)
        return f"{right:.1f},{down:.1f}"

    def axes(self, across: str) -> Iterator[str]:
        """Yields the ticks, and the name of the horizontal axis."""
        for tick in ticks(self.y0, self.y1):
            y = self.place(self.x0, tick).partition(",")[2]
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" stroke="#f3f4f6"/>'
            yield f'<text x="{LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">{_short(tick)}</text>'
        for tick in ticks(self.x0, self.x1):
            x = self.place(tick, self.y0).partition(",")[0]
            yield f'<text x="{x}" y="{HEIGHT - BELOW + 15}" text-anchor="middle">{_short(tick)}</text>'
        yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{html.escape(across)}</text>'


def chart(title: str, found: Sequence[Curve], *, across: str, smooth: bool = True) -> str:
    """Returns an SVG of curves over one axis, long ones under their running mean; nothing when there is none."""
    if not found:
        return ""
    frame = Frame.around(found)
    noisy = [curve for curve in found if smooth and len(curve.points) > 4 * SMOOTH]
    parts = [f'<text x="{LEFT}" y="16" font-weight="600">{html.escape(title)}</text>', *frame.axes(across)]
    for curve in found:
        faint = {"width": 1.0, "opacity": 0.25} if curve in noisy else {"width": 1.5, "opacity": 1.0}
        parts.append(_line(curve, curve.points, frame.place, **faint))
        if len(curve.points) == 1:  # a line of one point shows nothing
            x, y = frame.place(*curve.points[0]).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{curve.colour}"/>')
    parts += [_line(curve, smoothed(curve.points), frame.place, width=1.5, opacity=1.0) for curve in noisy]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<figure><svg class="chart" {size} role="img">{"".join(parts)}</svg></figure>'


def _line(
    curve: Curve,
    points: Sequence[tuple[float, float]],
    place: Callable[[float, float], str],
    *,
    width: float,
    opacity: float,
) -> str:
    shape = f'fill="none" stroke="{curve.colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
    through = " ".join(place(x, y) for x, y in points)
    return f'<polyline points="{through}" {shape}><title>{html.escape(curve.name)}</title></polyline>'


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the mean of the points around each, over a fiftieth of the curve."""
    half, sums = max(1, len(points) // SMOOTH // 2), [0.0, *itertools.accumulate(y for _, y in points)]
    spans = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    return [(x, (sums[b] - sums[a]) / (b - a)) for (x, _), (a, b) in zip(points, spans, strict=True)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - abs(low) * 0.1 - 0.5, high + abs(high) * 0.1 + 0.5)


def ticks(low: float, high: float) -> list[float]:
    """Returns four to eight round numbers in ``[low, high]``."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    step *= max(factor for factor in (1, 2, 5) if step * factor <= (high - low) / 3.5)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


# --- the buffer and the record ---


def buffers(plan: Sequence[Mapping[str, Any]], *, most: int = 6) -> str:
    """Returns the segments of a plan to scale: a box for each tensor, a line for each rank's edge, padding left white.

    Args:
        plan: ``name``, ``shard_size``, ``num_ranks`` and ``tensors`` [name, start, stop] of each segment.
        most: Segments that are drawn; the others are counted.
    """
    parts = []
    for segment in plan[:most]:
        numel = segment["shard_size"] * segment["num_ranks"]
        scale, boxes = 1100 / numel, []
        for i, (name, start, stop) in enumerate(segment["tensors"]):
            fill = ("#bfdbfe", "#bbf7d0", "#fde68a", "#fbcfe8")[i % 4]
            span = f'x="{start * scale:.2f}" width="{max((stop - start) * scale, 0.2):.2f}"'
            whole = f"{html.escape(name)}: elements {start:,} to {stop:,}"
            boxes.append(f'<rect {span} y="2" height="32" fill="{fill}"><title>{whole}</title></rect>')
            short = ".".join(name.split(".")[-2:])
            if (stop - start) * scale > 6.5 * len(short):  # pixels that it takes
                boxes.append(f'<text x="{start * scale + 4:.2f}" y="22">{html.escape(short)}</text>')
        for rank in range(segment["num_ranks"] + 1):
            x = rank * segment["shard_size"] * scale
            boxes.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="36" stroke="#111827" stroke-width="0.8"/>')
        used = sum(stop - start for _, start, stop in segment["tensors"])
        said = f"{segment['name']}: {segment['num_ranks']} x {segment['shard_size']:,}, {1 - used / numel:.2%} padding"
        picture = f'<svg class="plan" width="100%" viewBox="0 0 1100 36">{"".join(boxes)}</svg>'
        parts.append(f"<div><small>{html.escape(said)}</small>{picture}</div>")
    if len(plan) > most:
        parts.append(f"<small>and {len(plan) - most} more segments</small>")
    return "".join(parts)


def _record(run: Run) -> str:
    facts = {key: value for key, value in run.record.items() if key not in ("config", "tensors")}
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td><code>{html.escape(json.dumps(value))}</code></td></tr>"
        for key, value in facts.items()
    )
    config = html.escape(json.dumps(run.record.get("config", {}), indent=1))
    more = f"<details><summary>configuration</summary><pre><code>{config}</code></pre></details>"
    return f"<details open><summary>{html.escape(run.name)}</summary><table>{rows}</table>{more}</details>"


def _summary(runs: Sequence[Run]) -> str:
    columns = ("step", "tokens", "loss", "validation_loss", "tokens_per_second", "memory_gib")
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in ("run", *columns))
    lines = []
    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        last: dict[str, Any] = {}
        for row in run.rows:
            last |= row
        cells = "".join(f"<td>{_short(float(last[c])) if c in last else ''}</td>" for c in columns)
        key = f'<span class="key" style="background:{colour}"></span>{html.escape(run.name)}'
        lines.append(f"<tr><td>{key}</td>{cells}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def page(runs: Sequence[Run]) -> str:
    """Returns the whole HTML."""
    keys = dict.fromkeys(key for run in runs for row in run.rows for key in row if key not in ("step", "tokens"))
    loss = [chart(TITLES[key], curves(runs, key, over=over), across=over)
            for key in ("loss", "validation_loss") for over in ("step", "tokens", "hours")]  # fmt: skip
    rates = [key for key in keys if key.startswith("lr/")]
    rest = [key for key in keys if key not in ("loss", "validation_loss", "step_seconds", *rates)]
    draw = [
        ("Loss", "".join(loss)),
        (
            "Learning rates",
            "".join(chart(key, curves(runs, key, over="step"), across="step", smooth=False) for key in rates),
        ),
        ("Steps", "".join(chart(TITLES.get(k, k), curves(runs, k, over="step"), across="step") for k in rest)),
        (
            "The plan's buffers, to scale",
            "".join(f"<h3>{html.escape(run.name)}</h3>{buffers(run.plan)}" for run in runs if run.plan),
        ),
        ("Record", "".join(_record(run) for run in runs)),
    ]
    body = "".join(f"<h2>{title}</h2>{part}" for title, part in draw if part)
    title = html.escape(", ".join(run.name for run in runs))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f"{head}<h1>{title}</h1>{_summary(runs)}{body}</html>\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 2 for input that was refused with one line."""
    parser = argparse.ArgumentParser(prog="python -m vescale.report", description="Draws runs into one HTML file.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of the first run")
    options = parser.parse_args(argv)
    out = options.out or options.runs[0] / "report.html"
    try:
        out.write_text(page(load_all(options.runs)))
    except (ValueError, OSError) as problem:
        print(f"vescale.report: {' '.join(str(problem).split())}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
