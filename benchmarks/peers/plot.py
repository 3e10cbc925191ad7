"""Throughput and latency over concurrency, as an SVG, from the JSON of `bench_peers`. Needs matplotlib alone.

python benchmarks/peers/plot.py benchmarks/results/bench_peers.json docs/throughput.svg
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "octavo"  # the same figures give the same file
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import LogLocator  # noqa: E402

PANELS = (
    ("output_tokens_per_s", "output tokens per second", "linear"),
    ("first_token_p50_ms", "first token, median, ms", "log"),
    ("between_tokens_p50_ms", "between tokens, median, ms", "linear"),
    ("between_tokens_p99_ms", "between tokens, p99, ms", "log"),
)


def main(source: Path, target: Path) -> None:
    document = json.loads(source.read_text())
    names = list(dict.fromkeys(row["who"] for row in document["rows"]))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(13, 3.6), layout="constrained")
    for axis, (key, title, scale) in zip(axes, PANELS, strict=True):
        for name in names:
            rows = [row for row in document["rows"] if row["who"] == name]
            streams = [row["streams"] for row in rows]
            axis.plot(streams, [row[key] for row in rows], marker="o", label=name)
        axis.set(title=title, xlabel="streams", xscale="log", yscale=scale, xticks=streams)
        axis.set_xticks(streams, [str(each) for each in streams])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        if scale == "linear":
            axis.set_ylim(bottom=0)
        else:
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    figure.suptitle("Workload W: 128 tokens in, 128 out, greedy; SmolLM2-135M-Instruct, Q4_1; two cores, no GPU")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
