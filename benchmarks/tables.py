"""Puts the figures of `results/` into docs/performance.md, between markers; nothing there is written by hand.

python -m benchmarks.tables
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results_file import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def bench_table(document: dict[str, Any]) -> str:
    """What each load gave."""
    lines = [
        "| weights | load | output tok/s | first token p50 / p99, ms | between tokens p50 / p99, ms |",
        "|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        first = f"{row['first_token_p50_ms']:.0f} / {row['first_token_p99_ms']:.0f}"
        between = f"{row['between_tokens_p50_ms']:.1f} / {row['between_tokens_p99_ms']:.1f}"
        lines.append(
            f"| {row['configuration']} | {row['load']} | {row['output_tokens_per_s']:.1f} | {first} | {between} |"
        )
    return "\n".join([*lines, "", _seen(document)])


def steps_table(document: dict[str, Any]) -> str:
    """Where the time of a step goes."""
    parts, processes = ("plan", "execute", "deliver"), ("client", "router", "executor", "cache_service")
    names = [*(f"{part}" for part in parts), *(process.replace("_", " ") for process in processes)]
    lines = [
        f"| weights | load | steps | step, ms | {' | '.join(names)} | router + cache service of all three |",
        "|---" * (len(names) + 5) + "|",
    ]
    for row in document["rows"]:
        wall, cpu = row["part_ms_per_step"], row["cpu_ms_per_step"]
        times = " | ".join(
            [*(f"{wall.get(part, 0):.2f}" for part in parts), *(f"{cpu.get(name, 0):.2f}" for name in processes)]
        )
        services = sum(cpu.get(name, 0) for name in ("router", "cache_service"))
        lines.append(
            f"| {row['configuration']} | {row['load']} | {row['steps']} | {row['wall_ms_per_step']:.1f} | {times} | "
            f"{services / (services + cpu.get('executor', 0)):.1%} |"
        )
    return "\n".join(lines)


def peers_table(document: dict[str, Any]) -> str:
    """Medians and ratios."""
    lines = [
        "| streams | | output tok/s | ratio | first token p50, ms | ratio | between tokens p50 / p99, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        ratios = row["ratios"]
        between = f"{row['between_tokens_p50_ms']:.1f} / {row['between_tokens_p99_ms']:.1f}"
        lines.append(
            f"| {row['streams']} | {row['who']} | {row['output_tokens_per_s']:.1f} | {ratios['output']:.2f} | "
            f"{row['first_token_p50_ms']:.0f} | {ratios['first_token']:.2f} | {between} |"
        )
    return "\n".join([*lines, "", f"Medians of {document['runs']} runs in turn. {_seen(document)}"])


def quality_table(document: dict[str, Any]) -> str:
    """What int8 costs."""
    return "\n".join(
        [
            "| tokens | windows of | perplexity, float32 | int8 | change | mean KL | same best token |",
            "|---|---|---|---|---|---|---|",
            f"| {document['tokens']} | {document['window']} | {document['perplexity_fp32']:.3f} | "
            f"{document['perplexity_int8']:.3f} | {document['perplexity_change_percent']:+.2f} % | "
            f"{document['mean_kl']:.4f} | {document['same_best_token_percent']:.1f} % |",
        ]
    )


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "bench": ("bench", bench_table),
    "steps": ("bench", steps_table),
    "peers": ("bench_peers", peers_table),
    "int8 quality": ("int8_quality", quality_table),
}


def updated(page: str) -> str:
    """The page with every table renewed whose figures are there."""
    for name, (result, render) in TABLES.items():
        path = RESULTS / f"{result}.json"
        if not path.is_file():
            continue
        table = render(json.loads(path.read_text()))
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, count = pattern.subn(lambda _, text=f"{begin}\n{table}\n\n{end}": text, page)  # type: ignore[misc]
        assert count == 1, f"{PAGE} has {count} places for the table {name!r}"
    return page


def _seen(document: dict[str, Any]) -> str:
    machine = document["machine"]
    load = machine["load_average"][0]
    return (
        f"Seen on {document['day']}, {machine['cpus']} processors of an {machine['processor']}, load average "
        f"{load:.1f} at the end, by `{document['command']}`."
    )


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
