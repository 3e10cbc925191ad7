"""The dashboard of tenants: who uses how much, who is held back, who is not let in."""

from helm.dashboards.panels import BY_NAMESPACE, CHOICE_OF_NAMESPACE, CHOICE_OF_TENANT, Panel, Query, Row, stacked

UID, TITLE = "octavo-tenants", "Octavo tenants"
DESCRIPTION = "What each tenant uses, which limits hold it back, and who is not let in."
CHOICES = (CHOICE_OF_NAMESPACE, CHOICE_OF_TENANT)

_RATE = "[$__rate_interval]"
_BY_TENANT = f'{BY_NAMESPACE}, tenant=~"$tenant"'


def _rate(metric: str, by: str, selector: str = _BY_TENANT) -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}{_RATE}))"


def _tokens(kinds: str, by: str = "tenant") -> str:
    return _rate("octavo_tenant_tokens_total", by, f'{_BY_TENANT}, kind=~"{kinds}"')


_USE = Row(
    "Use",
    [
        stacked("Calls", "reqps", _rate("octavo_tenant_requests_total", "tenant"), "{{tenant}}"),
        stacked(
            "Calls now", "short", f"sum by (tenant) (octavo_tenant_requests_in_flight{{{_BY_TENANT}}})", "{{tenant}}"
        ),
        stacked(
            "Tokens a minute",
            "short",
            f"60 * {_tokens('prompt|generated')}",
            "{{tenant}}",
            "Prompt and generated, of ended requests: what tokens_per_minute limits.",
        ),
    ],
)

_SHARES = Row(
    "Prompts",
    [
        Panel(
            "Share of prompt tokens found in the cache",
            "percentunit",
            [
                Query(f"{_tokens('cached')} / {_tokens('prompt')}", "{{tenant}}"),
            ],
            "Of a tenant's own prefixes, and those of its prefix group.",
            maximum=1,
        ),
        stacked(
            "Blocks of the KV cache",
            "short",
            f"sum by (tenant, state) (octavo_kv_tenant_blocks{{{_BY_TENANT}}})",
            "{{tenant}} {{state}}",
            "Cached ones go first from the tenant that has most blocks for its weight. A prefix group is group:NAME.",
        ),
        Panel(
            "Tokens by kind",
            "short",
            [Query(_tokens(".*", by="kind"), "{{kind}}")],
            "A second; cached is a part of prompt.",
        ),
    ],
)

_LIMITS = Row(
    "Limits",
    [
        stacked(
            "Calls over a limit",
            "reqps",
            _rate("octavo_tenant_refusals_total", "tenant, limit"),
            "{{tenant}} {{limit}}",
            "They get RESOURCE_EXHAUSTED, with when to come back.",
        ),
        stacked(
            "Calls that were not let in",
            "reqps",
            _rate("octavo_authentication_failures_total", "reason", BY_NAMESPACE),
            "{{reason}}",
        ),
        stacked(
            "Changes of the tenants file",
            "short",
            f"sum by (outcome) (increase(octavo_tenants_reloads_total{{{BY_NAMESPACE}}}[1h]))",
            "{{outcome}}",
            "Within an hour, over all routers.",
        ),
        Panel(
            "Tenants file that can be used",
            "short",
            [Query(f"min(octavo_tenants_file_good{{{BY_NAMESPACE}}})", "all routers")],
            "0: some router's file has changed and cannot be used; the tenants of before stay.",
            maximum=1,
        ),
    ],
)

ROWS = (_USE, _SHARES, _LIMITS)
