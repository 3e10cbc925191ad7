"""The tables of docs/performance.md and docs/cache.md that have others beside Octavo."""

from typing import Any

OPERATIONS = {  # of block_manager_peers
    "admit": "admit 512 tokens",
    "grow": "grow by 16",
    "release": "release",
    "request": "the whole request",
    "hash long": "hash 50,000 tokens",
    "look up long": "and look them up",
}


def peers_table(document: dict[str, Any]) -> str:
    """Medians, and ratios to each peer."""
    rows = document["rows"]
    peers = list(rows[0]["ratios"])
    against = [f"of {' '.join(peer.split()[:-1])}: output / first token" for peer in peers]
    names = ["streams", "", "output tok/s", "first token p50, ms", "between tokens p50 / p99, ms", *against]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        ratios = [f"{each['output']:.2f} / {each['first_token']:.2f}" for each in map(row["ratios"].get, peers)]
        between = f"{row['between_tokens_p50_ms']:.1f} / {row['between_tokens_p99_ms']:.1f}"
        figures = [f"{row['output_tokens_per_s']:.1f}", f"{row['first_token_p50_ms']:.0f}", between]
        lines.append(f"| {' | '.join([str(row['streams']), row['who'], *figures, *ratios])} |")
    return "\n".join([*lines, "", f"Medians of {document['runs']} runs in turn."])


def managers_table(document: dict[str, Any]) -> str:
    """What the operations of block managers cost, p50 / p99.9 in CPU microseconds, and the ratio of p50 to vLLM's."""
    names = ["manager", "blocks", "prompts in common", *OPERATIONS.values()]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in document["rows"]:
        cells = [row["who"], f"{row['blocks']:,}", f"{row['shared']:.0%}"]
        for name in OPERATIONS:
            times = row["operations"][name]
            ratio = f" ({row['ratios'][name]:.2f})" if row.get("ratios") else ""
            cells.append(f"{_microseconds(times['p50_us'])} / {_microseconds(times['p99.9_us'])}{ratio}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [*lines, "", f"Medians of {document['rounds']} rounds in turn, of {document['requests']:,} requests."]
    )


def _microseconds(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
