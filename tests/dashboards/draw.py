"""A dashboard's file, drawn as a picture from a real Prometheus, to be looked at where there is no Grafana.

    python tests/dashboards/draw.py --prometheus http://127.0.0.1:9090 --seconds 300 build/dashboards

Places, titles, units, legends, stacks and thresholds are those of the file. It stands alone: it needs matplotlib, which
Octavo does not. Not here: whether the expressions are right (test_dashboards), a load to look at (scene).
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

FOLDER = Path(__file__).parents[2] / "helm" / "octavo" / "files" / "dashboards"
COLUMNS, CELL_IN, LINE_IN = 24, 0.75, 0.36  # of Grafana's grid, in inches
NUM_POINTS = 150
COLORS = {"green": "#3a8a3f", "yellow": "#c79a00", "red": "#c4162a"}
Series = tuple[str, list[float], list[float]]  # legend, times in s before now, values


class Prometheus:
    """Range queries up to now, with every variable at All.

    Args:
        scrape_s: how often it scrapes; Grafana takes a rate over at least four scrapes.
    """

    def __init__(self, url: str, seconds: float, scrape_s: float) -> None:
        self._url = url
        self._end = time.time()
        self._start, self._step_s = self._end - seconds, max(seconds / NUM_POINTS, scrape_s)
        self._rate_interval = f"{max(self._step_s + scrape_s, 4 * scrape_s):.0f}s"

    def series(self, target: dict[str, Any]) -> list[Series]:
        """What a query of a panel gives."""
        expression = target["expr"].replace("$__rate_interval", self._rate_interval)
        question = {
            "query": re.sub(r"\$(namespace|model|tenant)", ".*", expression),
            "start": self._start,
            "end": self._end,
            "step": self._step_s,
        }
        url = f"{self._url}/api/v1/query_range?{urllib.parse.urlencode(question)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found = json.load(answer)["data"]["result"]
        return [self._one(target, each["metric"], each["values"]) for each in found]

    def _one(self, target: dict[str, Any], labels: dict[str, str], points: Sequence[Any]) -> Series:
        legend = re.sub(r"{{\s*(\w+)\s*}}", lambda name: labels.get(name[1], ""), target["legendFormat"])
        kept = [(at - self._end, float(value)) for at, value in points if value != "NaN"]
        return legend, [at for at, _ in kept], [value for _, value in kept]


def format_value(value: float, unit: str) -> str:
    """As Grafana writes it in this unit."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "s":
        scale, name = next(
            ((scale, name) for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if value >= scale), (1, "s")
        )
        return f"{value / scale:.3g} {name}"
    for scale, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= scale:
            return f"{value / scale:.3g} {name}" + (" req/s" if unit == "reqps" else "")
    return f"{value:.3g}" + (" req/s" if unit == "reqps" else "")


class Page:
    """One dashboard on one figure."""

    def __init__(self, dashboard: dict[str, Any]) -> None:
        self._dashboard = dashboard
        panels = dashboard["panels"]
        self._num_lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
        self._figure: Figure = plt.figure(figsize=(COLUMNS * CELL_IN, self._num_lines * LINE_IN), facecolor="white")

    def draw(self, source: Prometheus) -> list[str]:
        """Everything; returns the titles of the panels without data."""
        empty = []
        for panel in self._dashboard["panels"]:
            left, bottom, width, height = self._box(panel["gridPos"])
            if panel["type"] == "row":
                self._figure.text(left, bottom + height / 4, f"▾ {panel['title']}", fontsize=13, weight="bold")
                continue
            found = [series for target in panel["targets"] for series in source.series(target)]
            if not any(values for _, _, values in found):
                empty.append(panel["title"])
            frame = self._figure.add_axes((left, bottom, width, height), xticks=[], yticks=[])
            frame.set_title(panel["title"], loc="left", fontsize=9, y=1, pad=-12, x=0.01)
            for spine in frame.spines.values():
                spine.set_color("#cccccc")
            (self._number if panel["type"] == "stat" else self._lines)(panel, found, (left, bottom, width, height))
        return empty

    def save(self, file: Path) -> None:
        """As a PNG of few colors, which is small."""
        self._figure.savefig(file, dpi=60)
        plt.close(self._figure)
        with Image.open(file) as picture:
            picture.convert("RGB").quantize(48).save(file, optimize=True)

    def _box(self, place: dict[str, int]) -> tuple[float, float, float, float]:
        """Left, bottom, width, height in parts of the figure, with a gap around."""
        left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        height = place["h"] / self._num_lines
        bottom = 1 - place["y"] / self._num_lines - height
        return left + 0.003, bottom + 0.08 / self._num_lines, width - 0.006, height - 0.16 / self._num_lines

    def _lines(self, panel: dict[str, Any], found: list[Series], box: tuple[float, float, float, float]) -> None:
        about, unit = panel["fieldConfig"]["defaults"], panel["fieldConfig"]["defaults"]["unit"]
        left, bottom, width, height = box
        num_legend_lines = 1 + sum(len(legend) + 6 for legend, _, _ in found) // max(1, int(width * 240))
        legend_height = min(0.45, 0.10 * num_legend_lines + 0.02)
        axes = self._figure.add_axes(
            (left + 0.045, bottom + height * (0.12 + legend_height), width - 0.055, height * (0.73 - legend_height))
        )
        if not found:
            axes.text(0.5, 0.5, "No data", transform=axes.transAxes, ha="center", color="#888888")
        if about.get("custom", {}).get("stacking", {}).get("mode") == "normal":
            _stack(axes, found)
        else:
            for legend, times, values in found:
                axes.plot(times, values, linewidth=1.2, label=legend)
        axes.set_ylim(bottom=about.get("min"), top=about.get("max"))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_value(value, unit)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:.0f} s"))
        axes.tick_params(labelsize=7, length=2)
        axes.grid(color="#eeeeee")
        if found:
            rows = self._figure.legend(
                *axes.get_legend_handles_labels(),
                loc="lower left",
                bbox_to_anchor=(left, bottom),
                fontsize=7,
                frameon=False,
                ncols=max(1, -(-len(found) // num_legend_lines)),
                columnspacing=1,
                handlelength=1,
            )
            rows.set_zorder(5)

    def _number(self, panel: dict[str, Any], found: list[Series], box: tuple[float, float, float, float]) -> None:
        about = panel["fieldConfig"]["defaults"]
        left, bottom, width, height = box
        values = found[0][2] if found else []
        color = "green"
        for step in about["thresholds"]["steps"]:
            if step["value"] is None or (values and values[-1] >= step["value"]):
                color = step["color"]
        text = format_value(values[-1], about["unit"]) if values else about.get("noValue", "No data")
        self._figure.text(
            left + width / 2, bottom + height / 2, text, fontsize=20, color=COLORS[color], ha="center", va="center"
        )
        if values:
            axes = self._figure.add_axes((left, bottom, width, height * 0.3))
            axes.axis("off")
            axes.fill_between(found[0][1], values, color=COLORS[color], alpha=0.3)


def _stack(axes: Any, found: list[Series]) -> None:
    """One on top of the other; a series that has no point at a time counts as 0 there."""
    times = sorted({at for _, series, _ in found for at in series})
    floor = [0.0] * len(times)
    for legend, series, values in found:
        known = dict(zip(series, values, strict=True))
        top = [low + known.get(at, 0.0) for low, at in zip(floor, times, strict=True)]
        [line] = axes.plot(times, top, linewidth=1.2, label=legend)
        axes.fill_between(times, floor, top, alpha=0.25, color=line.get_color())
        floor = top


def main() -> None:
    """Draw every dashboard into a folder, and say which panels have no data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--seconds", type=float, default=300.0, help="that are shown")
    parser.add_argument("--scrape-s", type=float, default=5.0, help="scrape interval of that Prometheus")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    source = Prometheus(options.prometheus, options.seconds, options.scrape_s)
    for file in sorted(FOLDER.glob("*.json")):
        page = Page(json.loads(file.read_text("utf-8")))
        empty = page.draw(source)
        page.save(options.folder / f"{file.stem}.png")
        print(f"{file.stem}: {', '.join(empty) or 'no panel'} without data")


if __name__ == "__main__":
    main()
