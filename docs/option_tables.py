"""Writes the tables of options into docs/operations.md from the configs themselves; `make docs` runs it.

With --check it writes nothing and fails when the tables are not what the configs say.
"""

import sys
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cache_service.config import CacheServiceConfig
from executor.config import ExecutorConfig
from octavo.chat import ChatConfig
from octavo.demo import DemoConfig
from octavo.generate import GenerateConfig
from octavo.launch_config import EngineConfig, ServeConfig
from octavo.rollout_command import RolloutConfig
from octavo.settings_sources import option_of
from octavo.stats import StatsConfig
from octavo.token_command import TokenConfig
from octavo.top import TopConfig
from router.config import RouterConfig

PAGE = Path(__file__).parent / "operations.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"

TABLES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("octavo serve", "serve", ServeConfig),
    ("octavo demo, besides those of octavo serve", "serve", DemoConfig),
    ("octavo engine", "engine", EngineConfig),
    ("octavo router", "router", RouterConfig),
    ("octavo executor", "executor", ExecutorConfig),
    ("octavo cache-service", "cache_service", CacheServiceConfig),
    ("octavo generate", "generate", GenerateConfig),
    ("octavo chat", "chat", ChatConfig),
    ("octavo stats", "stats", StatsConfig),
    ("octavo top", "top", TopConfig),
    ("octavo token", "token", TokenConfig),
    ("octavo rollout", "rollout", RolloutConfig),
)


def render() -> str:
    """All tables as Markdown."""
    return "\n".join(_table(title, section, model) for title, section, model in TABLES)


def updated(page: str) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


def _table(title: str, section: str, model: type[BaseModel]) -> str:
    inherited = ServeConfig.model_fields if model is DemoConfig else {}
    rows = [
        f"| `{_name(name, info)}` | {_default(info)} | {info.description} |"
        for name, info in model.model_fields.items()
        if not _is_section(info) and (name not in inherited or info.description != inherited[name].description)
    ]
    heading = f"### {title}\n\nTable `[{section}]`, variables `OCTAVO_{section.upper()}_*`.\n\n"
    return heading + "| option | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _name(name: str, info: FieldInfo) -> str:
    is_positional = any(getattr(meta, "__name__", "") == "_CliPositionalArg" for meta in info.metadata)
    return name.upper() if is_positional else option_of(name) if len(name) > 1 else f"-{name}"


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if isinstance(info.default, bool):
        return "on" if info.default else "off"
    return "" if info.default in (None, "", ()) else f"`{info.default}`"


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def main() -> int:
    page = PAGE.read_text("utf-8")
    if "--check" in sys.argv[1:]:
        if page != updated(page):
            sys.stderr.write("docs/operations.md: its options are not those of the configs; run make docs\n")
            return 1
        return 0
    PAGE.write_text(updated(page), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
