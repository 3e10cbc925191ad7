"""The tables of docs/memory.md and docs/cache.md, from the figures of paper_memory, eviction and block_manager."""

from typing import Any

from benchmarks.paper_memory import PUBLISHED_BATCHED, PUBLISHED_SAVED, PUBLISHED_TOKEN_STATES

SHARES = ("token_states", "reservation", "internal", "external")


def policies_table(document: dict[str, Any]) -> str:
    """What the memory holds under each policy, beside what the paper says."""
    lines = [
        "| requests | memory | token states % | published | reservation % | internal % | external % "
        "| requests at once | published |",
        "|---" * 9 + "|",
    ]
    for workload, rows in document["policies"].items():
        for policy, row in rows.items():
            published = PUBLISHED_TOKEN_STATES.get(workload, {}).get(policy, "")
            states, *rest = (_percent(row["shares"][each]) for each in SHARES)
            batched = f"{row['batched_requests']:.1f} | {PUBLISHED_BATCHED[workload][policy]:.1f}"
            lines.append(f"| {workload} | {policy} | {states} | {published} | {' | '.join(rest)} | {batched} |")
    return "\n".join(lines)


def block_sizes_table(document: dict[str, Any]) -> str:
    """Paged memory by the size of its blocks."""
    lines = ["| block size | token states % | internal % | free % | requests at once |", "|---|---|---|---|---|"]
    for size, row in document["block_sizes"].items():
        states, internal, free = (_percent(row["shares"][each]) for each in ("token_states", "internal", "external"))
        lines.append(f"| {size} | {states} | {internal} | {free} | {row['batched_requests']:.1f} |")
    return "\n".join(lines)


def sharing_table(document: dict[str, Any]) -> str:
    """Blocks saved by answers of one prompt, sampled or searched."""
    lines = ["| requests | answers | as samples, blocks saved % | published | as beams, blocks saved % | published |"]
    lines.append("|---" * 6 + "|")
    for workload, rows in document["sharing"]["samples"].items():
        for place, num_answers in enumerate(rows):
            cells = [workload, num_answers]
            for kind, by_workload in document["sharing"].items():
                saved = by_workload[workload][num_answers]["saved_by_sharing"]
                cells += [_percent(saved), PUBLISHED_SAVED[kind, workload][place]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def eviction_table(document: dict[str, Any]) -> str:
    """How much of the prompts each policy finds."""
    policies = list(next(iter(next(iter(document["hit_share"].values())).values())))
    lines = [f"| trace | blocks | {' | '.join(f'`{policy}` %' for policy in policies)} |"]
    lines.append("|---" * (2 + len(policies)) + "|")
    for trace, by_size in document["hit_share"].items():
        for size, shares in by_size.items():
            lines.append(f"| {trace} | {size} | {' | '.join(_percent(shares[policy]) for policy in policies)} |")
    return "\n".join(lines)


def operations_table(document: dict[str, Any]) -> str:
    """What the operations of the block manager cost."""
    names = list(dict.fromkeys(name for row in document["rows"] for name in row["operations"]))
    lines = [f"| called | blocks | prompts in common | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for row in document["rows"]:
        times = (row["operations"].get(name) for name in names)
        cells = (f"{each['p50_us']:,.0f} / {each['p99.9_us']:,.0f}" if each else "" for each in times)
        lines.append(f"| {_door(row)} | {row['blocks']:,} | {row['shared']:.0%} | {' | '.join(cells)} |")
    hashing = f"Hashing alone takes {document['hashing_ns_per_token']:.0f} ns of CPU time a token."
    return "\n".join([*lines, "", hashing])


def _door(row: dict[str, Any]) -> str:
    if row["door"] == "in process":
        return "in process"
    clients = "one client" if row["clients"] == 1 else f"{row['clients']} clients at once"
    return f"gRPC, {clients}, {row['requests_per_s']:.0f} requests/s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
