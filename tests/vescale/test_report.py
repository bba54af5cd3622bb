"""The report is one well-formed page with a curve for every number, and reaches for nothing outside itself."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest

from vescale import report

PLAN = [{"name": "<root>", "shard_size": 64, "num_ranks": 2, "tensors": [["a", 0, 48], ["b", 64, 89], ["c", 96, 120]]}]


def _run(folder: Path, *, worse: float = 0.0) -> Path:
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for step in range(1, 31):
        speeds = {"tokens_per_second": 1000.0, "memory_gib": 0.5, "step_seconds": 36.0, "data_wait": 0.01}
        row = {"step": step, "tokens": step * 64, "loss": 5 / step + worse, "grad_norm": 1.0, "lr/rest": 0.1, **speeds}
        rows.append(row | {"experts/load": 1.2})
        if step % 10 == 0:
            rows.append({"step": step, "tokens": step * 64, "validation_loss": 6 / step + worse})
    rows.append({"step": 31, "tokens": 31 * 64, "loss": "NaN", "grad_norm": "Infinity"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "record.json").write_text(
        json.dumps({"weights": "ab12", "config": {"name": "<x>"}, "tensors": {"t": "1"}})
    )
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return folder


def _svgs(page: str, kind: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(rf'<svg class="{kind}".*?</svg>', page, flags=re.S)]


class Reaching(HTMLParser):
    """Notes what a browser would fetch, or run: such tags, attributes and styles."""

    FETCHES: ClassVar = ("script", "link", "img", "image", "iframe", "object", "embed", "video", "audio", "source")
    FETCHES += ("track", "base", "use", "form", "a")
    NAMES: ClassVar = ("src", "href", "xlink:href", "srcset", "data", "action", "formaction", "poster", "background")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.inside = tag
        self.found += [tag] * (tag in self.FETCHES)
        for name, value in attrs:
            if name in self.NAMES or name.startswith("on") or re.search(r"url\(|//", value or ""):
                self.found.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        if self.inside == "style" and re.search(r"@import|url\(|//", data):
            self.found.append(data)


def _reaches_for(page: str) -> list[str]:
    parser = Reaching()
    parser.feed(page)
    parser.close()
    return parser.found


@pytest.mark.parametrize(
    "part",
    ['<img src="x">', "<style>a{b:url(x)}</style>", '<p style="b:url(x)">', '<g onload="x">', '<use href="#a"/>'],
)
def test_the_check_below_sees_what_a_browser_would_fetch(part: str) -> None:
    assert _reaches_for(f"<p>{part}</p>") and not _reaches_for("<p>https://a.b is text</p>")


def test_a_page_of_two_runs_has_every_curve_of_both(tmp_path: Path, capsys: Any) -> None:
    folders = [_run(tmp_path / "a & b"), _run(tmp_path / "c", worse=1.0)]
    assert report.main([*map(str, folders), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    charts = {svg[0].text: svg for svg in _svgs(page, "chart")}
    wanted = {"training loss", "validation loss", "gradient norm", "tokens per second", "peak memory, GiB", "lr/rest"}
    assert wanted | {"experts/load", "share of the time waiting for data"} <= charts.keys()
    assert len(_svgs(page, "chart")) == 3 + 3 + 1 + 5  # losses over steps, tokens and hours
    for svg in charts.values():
        assert len(svg.findall("polyline")) == 2
    assert _reaches_for(page) == []
    assert "a &amp; b" in page and "ab12" in page and "&lt;x&gt;" in page and "&lt;root&gt;" in page


def test_curves_lie_inside_their_chart_and_leave_out_what_is_no_number(tmp_path: Path) -> None:
    run = report.load(_run(tmp_path / "a"))
    (curve,) = report.curves([run], "loss", over="hours")
    assert len(curve.points) == 30 and curve.points[-1] == pytest.approx((30 * 36 / 3600, 5 / 30))
    svg = ElementTree.fromstring(re.findall("<svg.*</svg>", report.chart("t", [curve], across="hours"))[0])
    points = [tuple(map(float, point.split(","))) for point in svg.find("polyline").get("points").split()]  # type: ignore[union-attr]
    assert all(0 <= x <= report.WIDTH and 0 <= y <= report.HEIGHT for x, y in points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert points[0][1] == report.ABOVE and points[-1][1] == report.HEIGHT - report.BELOW  # it falls


def test_the_buffer_is_drawn_to_scale() -> None:
    svg = ElementTree.fromstring(re.findall("<svg.*</svg>", report.buffers(PLAN))[0])
    boxes = [(float(box.get("x")), float(box.get("width"))) for box in svg.findall("rect")]  # type: ignore[arg-type]
    scale = 1100 / 128
    assert boxes == [pytest.approx((a * scale, (b - a) * scale), abs=0.01) for a, b in ((0, 48), (64, 89), (96, 120))]
    edges = [float(line.get("x1")) for line in svg.findall("line")]  # type: ignore[arg-type]
    assert edges == pytest.approx([0, 550, 1100])
    assert "24.22% padding" in report.buffers(PLAN)


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(50_000)]
    points[31_234] = (31_234.0, 40.0)
    kept = report.thinned(points)
    assert len(kept) <= report.POINTS + 2 and (31_234.0, 40.0) in kept and kept == sorted(kept)


def test_a_noisy_curve_has_its_running_mean_drawn_over_it() -> None:
    points = [(float(i), (-1.0) ** i) for i in range(1001)]
    chart = report.chart("t", [report.Curve("a", "red", points)], across="step")
    raw, mean = ElementTree.fromstring(re.findall("<svg.*</svg>", chart)[0]).findall("polyline")
    assert (raw.get("stroke-opacity"), mean.get("stroke-opacity")) == ("0.25", "1.0")
    assert all(
        abs(y) <= 1 / 11 + 1e-9 for _, y in report.smoothed(points)
    )  # ten points to either side, or at an end one
    assert report.smoothed([(float(i), 2.0 * i) for i in range(1001)])[500] == (500.0, 1000.0)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.3, 2.31), (0, 7e9), (-5, 3), (1e-8, 9e-8)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = report.ticks(low, high)
    assert 3 <= len(found) <= 9 and low - 1e-12 <= found[0] and found[-1] <= high * (1 + 1e-9)


def test_a_folder_of_no_run_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "has no metrics.jsonl: it is no folder of a run" in capsys.readouterr().err


def test_what_is_damaged_is_left_out_and_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    good, odd, empty = (tmp_path / name / "run" for name in ("a", "b", "c"))
    for folder in (good, odd, empty):
        folder.parent.mkdir()
    _run(good)
    odd.mkdir()
    row = {"step": 1, "tokens": 64, "loss": 2.5, "note": "x", "none": None, "yes": True, "list": [1], "mfu": "NaN"}
    (odd / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "tok')
    (odd / "record.json").write_text("[1]")
    (odd / "plan.json").write_text('[{"name": 3}, 4]')
    empty.mkdir()
    (empty / "metrics.jsonl").touch()  # of a run that has only begun
    out = tmp_path / "r.html"
    assert report.main([str(good), str(odd), str(empty), "--out", str(out)]) == 0
    page = out.read_text()
    assert all(f">{folder}</td>" in page for folder in (good, odd, empty)) and _reaches_for(page) == []
    assert report.main([str(empty), "--out", str(out)]) == 0
