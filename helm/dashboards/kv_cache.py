"""The dashboard of the KV blocks: who has them, what the prefix cache gives, what is evicted and missed."""

from helm.dashboards.panels import (
    BY_MODEL,
    BY_NAMESPACE,
    CHOICE_OF_MODEL,
    CHOICE_OF_NAMESPACE,
    Panel,
    Query,
    Row,
    figure,
    quantiles,
    stacked,
)

UID, TITLE = "octavo-kv-cache", "Octavo KV cache"
DESCRIPTION = "KV blocks by state, what the prefix cache gives, and how long blocks live."
CHOICES = (CHOICE_OF_NAMESPACE, CHOICE_OF_MODEL)

_RATE = "[$__rate_interval]"
_OF_ROUTERS = f'{BY_MODEL}, engine!=""'
_IN_USE = f'octavo_kv_blocks{{{BY_NAMESPACE}, state=~"used|fenced"}}'
_USABLE = f'octavo_kv_blocks{{{BY_NAMESPACE}, state!="reserved"}}'
_HITS = f"sum by (model_name) (rate(octavo_prefix_cache_hits_total{{{_OF_ROUTERS}}}{_RATE}))"
_QUERIES = f"sum by (model_name) (rate(octavo_prefix_cache_queries_total{{{_OF_ROUTERS}}}{_RATE}))"


def _rate(metric: str) -> Query:
    return Query(f"sum by (instance) (rate({metric}{{{BY_NAMESPACE}}}{_RATE}))", "{{instance}}")


_NOW = Row(
    "Now",
    [
        figure(
            "Blocks in use",
            "percentunit",
            f"sum({_IN_USE}) / sum({_USABLE})",
            "Cached blocks do not count: they are taken when they are needed.",
            warn_at=0.8,
            alarm_at=0.95,
        ),
        figure(
            "Prompt tokens found",
            "percentunit",
            f"sum(rate(octavo_prefix_cache_hits_total{{{_OF_ROUTERS}}}{_RATE})) / "
            f"sum(rate(octavo_prefix_cache_queries_total{{{_OF_ROUTERS}}}{_RATE}))",
            "Share of prompt tokens that need not be computed.",
        ),
        figure("Leases", "short", f"sum(octavo_kv_leases{{{BY_NAMESPACE}}})", "One for each router and engine."),
        figure("Executors", "short", f"sum(octavo_kv_executors{{{BY_NAMESPACE}}})"),
        figure("Sequences", "short", f"sum(octavo_kv_sequences{{{BY_NAMESPACE}}})", "That hold blocks."),
    ],
    height=4,
)

_BLOCKS = Row(
    "Blocks",
    [
        stacked(
            "Blocks by state",
            "short",
            f"sum by (state) (octavo_kv_blocks{{{BY_NAMESPACE}}})",
            "{{state}}",
            "fenced: given back, but a step in flight may still write them; reserved: for padding.",
        ),
        Panel(
            "In use, by engine",
            "percentunit",
            [Query(f"max by (engine) (octavo_kv_cache_usage_ratio{{{BY_MODEL}}})", "{{engine}}")],
            "As the router with the most counts: a block that requests share counts for each.",
            maximum=1,
        ),
        stacked(
            "Preemptions",
            "short",
            f"sum by (engine) (rate(octavo_num_preemptions_total{{{BY_MODEL}}}{_RATE}))",
            "{{engine}}",
            "A second: requests that had to give up their blocks.",
        ),
    ],
)

_PREFIXES = Row(
    "Prefix cache",
    [
        Panel(
            "Share of prompt tokens found", "percentunit", [Query(f"{_HITS} / {_QUERIES}", "{{model_name}}")], maximum=1
        ),
        Panel(
            "Prompt tokens looked up and found",
            "short",
            [Query(_QUERIES, "looked up {{model_name}}"), Query(_HITS, "found {{model_name}}")],
            "A second; each request once.",
        ),
        Panel(
            "Time to the next hit",
            "s",
            quantiles("octavo_kv_block_reuse_gap_seconds", "arena", BY_NAMESPACE, parts=(0.5, 0.95)),
            "From a cached block's last use to its next.",
        ),
    ],
)

_TURNOVER = Row(
    "Turnover",
    [
        Panel("Blocks handed out", "short", [_rate("octavo_kv_blocks_allocated_total")], "A second."),
        Panel(
            "Blocks evicted",
            "short",
            [_rate("octavo_kv_blocks_evicted_total")],
            "A second: cached content that was given up for new.",
        ),
        Panel("Blocks copied", "short", [_rate("octavo_kv_blocks_copied_total")], "A second: by answers that part."),
    ],
)

_LIVES = Row(
    "How long blocks live",
    [
        Panel(
            "From first use to eviction",
            "s",
            quantiles("octavo_kv_block_lifetime_seconds", "arena", BY_NAMESPACE, parts=(0.5, 0.95)),
        ),
        Panel(
            "Idle before eviction",
            "s",
            quantiles("octavo_kv_block_idle_before_evict_seconds", "arena", BY_NAMESPACE, parts=(0.05, 0.5)),
            "Shorter than the time to the next hit: a larger pool would find more.",
        ),
        Panel(
            "Restarts of executors",
            "short",
            [
                Query(
                    f"sum by (instance, executor) (increase(octavo_executor_restarts_total{{{BY_NAMESPACE}}}[1h]))",
                    "{{instance}} {{executor}}",
                )
            ],
            "Within an hour.",
        ),
    ],
)

ROWS = (_NOW, _BLOCKS, _PREFIXES, _TURNOVER, _LIVES)
