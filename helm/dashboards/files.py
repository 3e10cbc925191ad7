"""All dashboards, and the files that they are kept in."""

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from helm.dashboards import kv_cache, overview, tenants
from helm.dashboards.panels import make_dashboard

FOLDER = Path(__file__).parents[1] / "octavo" / "files" / "dashboards"
DASHBOARDS = {"overview.json": overview, "kv-cache.json": kv_cache, "tenants.json": tenants}


def render() -> dict[str, str]:
    """The text of each file by its name."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    texts = {}
    for name, about in DASHBOARDS.items():
        made = make_dashboard(about.UID, about.TITLE, about.DESCRIPTION, about.CHOICES, about.ROWS)
        texts[name] = encoder.encode(made.build()) + "\n"
    return texts
