"""How `octavo top` draws a picture: with rich, as wide as the terminal. Not here: where its numbers come from (top)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from octavo.top import Picture

BAR_CELLS = 60
STATE_COLORS = {"used": "blue", "fenced": "yellow", "cached": "green", "free": "bright_black", "reserved": "black"}
MAX_TENANTS = 12
_SPARKS = "▁▂▃▄▅▆▇█"


def draw(picture: "Picture", tokens_per_s: Sequence[float]) -> RenderableType:
    """The whole screen.

    Args:
        tokens_per_s: generated, of each reading so far, the newest last.
    """
    parts = [
        Panel(_requests(picture, tokens_per_s), title="requests", title_align="left", box=box.ROUNDED),
        Panel(_blocks(picture), title="KV blocks", title_align="left", box=box.ROUNDED),
    ]
    if picture.now.executors:
        parts.append(Panel(_executors(picture), title="executors", title_align="left", box=box.ROUNDED))
    tenants = picture.tenants()
    if tenants:
        parts.append(Panel(_tenants(tenants), title="tenants", title_align="left", box=box.ROUNDED))
    away = [Text(f"the {process} does not answer: {why}", style="red") for process, why in picture.now.away.items()]
    return Group(*parts, *away)


def _requests(picture: "Picture", tokens_per_s: Sequence[float]) -> RenderableType:
    now = picture.now
    table = _pairs(
        ("running", _count(now.total("router", "octavo_num_requests_running"))),
        ("waiting", _count(now.total("router", "octavo_num_requests_waiting"))),
        ("tokens/s", _number(picture.rate("router", "octavo_generation_tokens_total"))),
        ("prompt/s", _number(picture.rate("router", "octavo_prompt_tokens_total"))),
        ("ended/s", _number(picture.rate("router", "octavo_request_success_total"))),
        ("preempted", _count(now.total("router", "octavo_num_preemptions_total"))),
        ("executors", _count(now.total("cache service", "octavo_kv_executors"))),
        ("restarts", _count(now.total("cache service", "octavo_executor_restarts_total"))),
    )
    return Group(table, Text(spark(tokens_per_s), style="blue"))


def _blocks(picture: "Picture") -> RenderableType:
    counts = picture.blocks()
    if not counts:
        return Text("unknown", style="red")
    now, cache = picture.now, "cache service"
    queried = now.total(cache, "octavo_prefix_cache_queries_total")
    hit = now.total(cache, "octavo_prefix_cache_hits_total")
    recent = picture.ratio(cache, "octavo_prefix_cache_hits_total", "octavo_prefix_cache_queries_total")
    legend = Text.assemble(
        *((f"■ {state} {counts[state]:,}   ", color) for state, color in STATE_COLORS.items() if state in counts)
    )
    table = _pairs(
        ("hits", _percent(hit / queried if queried and hit is not None else None)),
        ("hits lately", _percent(recent)),
        ("sequences", _count(now.total(cache, "octavo_kv_sequences"))),
        ("leases", _count(now.total(cache, "octavo_kv_leases"))),
        ("evicted/s", _number(picture.rate(cache, "octavo_kv_blocks_evicted_total"))),
        ("handed out/s", _number(picture.rate(cache, "octavo_kv_blocks_allocated_total"))),
    )
    return Group(bar(counts), legend, table)


def _executors(picture: "Picture") -> RenderableType:
    """One that has no session waits: a spare, or of an engine without a router."""
    table = Table(box=None, pad_edge=False)
    table.add_column("executor")
    table.add_column("")
    for name in ("rows", "steps/s", "mean step", "tokens/s"):
        table.add_column(name, justify="right")
    step = "octavo_step_time_seconds"
    for name in picture.now.executors:
        table.add_row(
            name,
            "serving" if picture.now.total(name, "octavo_executor_sessions") else "idle",
            _count(picture.now.total(name, "octavo_executor_rows")),
            _number(picture.rate(name, step + "_count")),
            _milliseconds(picture.ratio(name, step + "_sum", step + "_count")),
            _number(picture.rate(name, "octavo_iteration_tokens_sum")),
        )
    return table


def _tenants(tenants: dict[str, dict[str, float]]) -> RenderableType:
    table = Table(box=None, pad_edge=False)
    table.add_column("tenant")
    for name in ("in use", "cached", "tokens/s"):
        table.add_column(name, justify="right")
    for name, about in list(tenants.items())[:MAX_TENANTS]:
        values = (about.get("in_use"), about.get("cached"))
        table.add_row(name or "(none)", *map(_count, values), _number(about.get("tokens_per_s")))
    if len(tenants) > MAX_TENANTS:
        table.add_row(f"and {len(tenants) - MAX_TENANTS} more", "", "", "")
    return table


def bar(counts: dict[str, int]) -> Text:
    """Cells by state, in proportion; a state that has blocks has a cell."""
    total = sum(counts.values())
    text = Text()
    for state, color in STATE_COLORS.items():
        count = counts.get(state, 0)
        text.append("█" * (max(1, round(BAR_CELLS * count / total)) if count else 0), style=color)
    return text


def spark(values: Sequence[float]) -> str:
    """A character for each value, the highest of them full."""
    top = max(values, default=0.0)
    return "".join(_SPARKS[round(value / top * (len(_SPARKS) - 1))] if top else _SPARKS[0] for value in values)


def _pairs(*pairs: tuple[str, str]) -> Table:
    """Names and values, four beside each other."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for start in range(0, len(pairs), 4):
        cells = (
            Text.assemble((f"{name} ", "bright_black"), value, no_wrap=True) for name, value in pairs[start : start + 4]
        )
        table.add_row(*cells)
    return table


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "?" if value is None else f"{1000 * value:.1f} ms"
