"""The options of the cache service, their ranges and defaults. Light: the launcher imports it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

LogLevel = Literal["debug", "info", "warning", "error"]


class CacheServiceConfig(BaseModel):
    """Run the cache service: it owns the KV blocks that executors compute in and routers allocate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field("127.0.0.1:7701", description="address of BlockManagerService: host:port or unix:/path")
    metrics_listen: str = Field("127.0.0.1:9701", description="address of /metrics: host:port; empty: none")
    reflection: bool = Field(True, description="serve gRPC reflection")
    log_level: LogLevel = Field("info", description="least severe records to log")
    log_format: Literal["console", "json"] = Field("console", description="form of a log line: for people, or JSON")
    otel_traces: bool = Field(
        False, description="send OpenTelemetry traces of requests, as the variables OTEL_* say; needs octavo[otel]"
    )
    drain_accept_window_s: float = Field(0.0, ge=0, description="seconds that calls are still accepted after SIGTERM")
    drain_grace_s: float = Field(5.0, ge=0, description="seconds that running calls may take to end after SIGTERM")
    health_listen: str = Field(
        "", description="address that answers for health alone, without TLS; for probes: host:port or unix:/path"
    )
    internal_tls_certificate: str = Field(
        "", description="PEM file with this process's certificate, for calls of routers and executors; empty: no TLS"
    )
    internal_tls_key: str = Field("", description="PEM file with the private key of that certificate")
    internal_tls_ca: str = Field(
        "", description="PEM file with the CA that the other side's certificate must come from"
    )

    eviction: Literal["lru", "reuse"] = Field(
        "lru",
        description="which cached block of a tenant goes first: the least recently used, or the one that was hit least "
        "often, hits growing old",
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="shares of the cache by tenant, against each other, as a JSON object or a table; a prefix group "
        "is group:NAME; a tenant that is not named has 1",
    )
    shared_memory_dir: str = Field("/dev/shm", description="memory file system that arenas are made in")
    default_lease_ttl_s: float = Field(
        30.0, gt=0, description="seconds of silence that end a lease which asks for none"
    )
    min_lease_ttl_s: float = Field(1.0, gt=0, description="least seconds granted to a lease")
    max_lease_ttl_s: float = Field(600.0, gt=0, description="most seconds granted to a lease")
    expiry_interval_s: float = Field(0.5, gt=0, description="seconds between two looks for expired leases")

    @model_validator(mode="after")
    def _check_ttls(self) -> "CacheServiceConfig":
        if not self.min_lease_ttl_s <= self.default_lease_ttl_s <= self.max_lease_ttl_s:
            raise ValueError("min_lease_ttl_s <= default_lease_ttl_s <= max_lease_ttl_s must hold")
        return self
