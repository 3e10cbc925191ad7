"""Options of the commands that start several processes: `octavo serve` and `octavo engine`.

Each has the options of the processes it starts as sections. Where a process listens may be chosen; where it connects
follows from that. Not here: what the processes' own options are.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cache_service.config import CacheServiceConfig
from executor.config import ExecutorConfig
from router.config import RouterConfig

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]


class _LaunchConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    log_level: LogLevel = Field("info", description="least severe level logged, of every section that sets none")
    log_format: LogFormat = Field("console", description="form of a log line: for people, or JSON")
    otel_traces: bool = Field(
        False, description="send OpenTelemetry traces of requests, as the variables OTEL_* say; needs octavo[otel]"
    )
    start_timeout_s: float = Field(300.0, gt=0, description="seconds until each process must be ready")
    max_restarts: int = Field(5, ge=0, description="times in five minutes that a dead process is restarted")
    max_restart_pause_s: float = Field(
        10.0, ge=0, description="longest pause before a restart, in seconds: a quarter at first, doubled each time"
    )

    silence_limit_s: float = Field(
        20.0, ge=0, description="seconds without an answer to its health after which a process is killed; 0: never"
    )

    spare_executors: int = Field(
        0,
        ge=0,
        le=16,
        description="executors more, per engine, that are attached and loaded and take the place of one that dies at "
        "once; each holds the weights in memory once more, on a GPU too, and listens further ports above",
    )

    # Options of sections that the launcher sets itself.
    wired: ClassVar[tuple[tuple[str, str], ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _hand_down(cls, values: Any) -> Any:
        """Give the sections what is said once for all; refuse what follows from other options."""
        if not isinstance(values, Mapping):
            return values
        sections = {name: values.get(name, {}) for name, info in cls.model_fields.items() if _is_section(info)}
        for section, name in cls.wired:
            if isinstance(sections[section], Mapping) and name in sections[section]:
                raise ValueError(f"{section}.{name} cannot be set here: it follows from the other processes' options")
        filled = {
            name: {**cls._shared(name, values), **given} if isinstance(given, Mapping) else given
            for name, given in sections.items()
        }
        return {**values, **filled}

    @classmethod
    def _shared(cls, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the options outside of all sections say for this section."""
        shared = {name: values[name] for name in ("log_level", "log_format", "otel_traces") if name in values}
        if section == "executor" and values.get("model") is not None:
            shared["model"] = values["model"]
        if section == "router" and values.get("trace"):
            shared["trace_file"] = values["trace"]
        return shared


def _is_section(info: Any) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


class EngineConfig(_LaunchConfig):
    """Run a cache service and the executors that share its KV blocks, supervised; routers connect from outside."""

    model: str | None = Field(None, description="what the executors run, as --executor.model")
    executors: int = Field(1, ge=1, le=64, description="executors; each listens one port above the one before")
    cache_service: CacheServiceConfig = CacheServiceConfig()
    executor: ExecutorConfig = ExecutorConfig()

    wired = (("executor", "cache_service"), ("executor", "executor_id"))


class ServeConfig(_LaunchConfig):
    """Serve a model: cache service, executor and router, supervised, connected by private Unix sockets."""

    model: str | None = Field(None, description="a folder, a .gguf file, a hub id, or demo; as --executor.model")
    trace: str = Field("", description="file for a Chrome trace of the last steps; as --router.trace-file")
    cache_service: CacheServiceConfig = CacheServiceConfig()
    executor: ExecutorConfig = ExecutorConfig()
    router: RouterConfig = RouterConfig()

    wired = (
        ("executor", "cache_service"),
        ("executor", "executor_id"),
        ("router", "cache_service"),
        ("router", "executor"),
        ("router", "spare_executors"),
        ("router", "wanted_spares"),
        ("router", "engines"),
    )
