"""Puts the figures of `results/` into the docs, between markers; nothing there is written by hand.

python -m benchmarks.tables
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory_tables import (
    block_sizes_table,
    eviction_table,
    operations_table,
    policies_table,
    sharing_table,
)
from benchmarks.peer_tables import managers_table, peers_table
from benchmarks.results_file import RESULTS

DOCS = Path(__file__).parents[1] / "docs"


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


def quality_table(document: dict[str, Any]) -> str:
    """What int8 costs."""
    lines = [
        f"{document['tokens']} tokens in windows of {document['window']}; perplexity in float32: "
        f"{document['perplexity_fp32']:.3f}.",
        "",
        "| weights | KV | perplexity | change | mean KL | same best token |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['weights']} | {row['kv']} | {row['perplexity']:.3f} | {row['perplexity_change_percent']:+.2f} % | "
            f"{row['mean_kl']:.4f} | {row['same_best_token_percent']:.1f} % |"
        )
    return "\n".join(lines)


def kills_table(document: dict[str, Any]) -> str:
    """What a death costs clients. Of acknowledged steps nothing may be computed again, and no request may be lost."""
    lines = [
        "| killed | kills x streams | longest wait for a token, p50 s | max s | ready again after, p50 s "
        "| tokens of acknowledged steps computed again | of steps in flight | answers | lost or other |",
        "|---" * 9 + "|",
    ]
    for row in document["rows"]:
        again = row.get("recomputed_acknowledged_tokens")
        if again is None:
            again = row.get("recomputed_tokens")
        in_flight = row.get("recomputed_in_flight_tokens")
        cells = [
            row["process"],
            f"{row['kills']} x {row['streams']}",
            *(f"{row[name]:.2f}" if name in row else "-" for name in ("wait_p50_s", "wait_max_s", "ready_p50_s")),
            "all" if again is None else str(again),
            "with them" if in_flight is None else str(in_flight),
            str(row.get("answers", "-")),
            str(row["lost"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _seen(document)])


def _seen(document: dict[str, Any]) -> str:
    machine = document["machine"]
    load = machine["load_average"][0]
    return (
        f"Seen on {document['day']}, {machine['cpus']} processors of an {machine['processor']}, load average "
        f"{load:.1f} at the end, by `{document['command']}`."
    )


def _with_sight(render: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    """The table, its last line continued by when and where that was seen."""
    return lambda document: f"{render(document)} {_seen(document)}"


# Table -> page, result, and how it is written.
TABLES: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "bench": ("performance.md", "bench", bench_table),
    "steps": ("performance.md", "bench", steps_table),
    "peers": ("performance.md", "bench_peers", _with_sight(peers_table)),
    "int8 quality": ("performance.md", "int8_quality", quality_table),
    "kills": ("failures.md", "kills", kills_table),
    "vLLM's kills": ("failures.md", "vllm_kills", kills_table),
    "memory": ("memory.md", "paper_memory", policies_table),
    "block sizes": ("memory.md", "paper_memory", block_sizes_table),
    "sharing": ("memory.md", "paper_memory", sharing_table),
    "block manager": ("cache.md", "block_manager", operations_table),
    "managers": ("cache.md", "block_manager_peers", _with_sight(managers_table)),
    "eviction": ("cache.md", "eviction", eviction_table),
}


def updated(page: str, name_of_page: str) -> str:
    """The page with every table of it renewed whose figures are there."""
    for name, (place, result, render) in TABLES.items():
        path = RESULTS / f"{result}.json"
        if place != name_of_page or not path.is_file():
            continue
        table = render(json.loads(path.read_text()))
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, count = pattern.subn(lambda _, text=f"{begin}\n{table}\n\n{end}": text, page)  # type: ignore[misc]
        assert count == 1, f"{name_of_page} has {count} places for the table {name!r}"
    return page


def main() -> None:
    """Renew all of them."""
    for name in sorted({place for place, _, _ in TABLES.values()}):
        page = DOCS / name
        page.write_text(updated(page.read_text(), name))


if __name__ == "__main__":
    main()
