"""Options of the router. Only names, defaults and ranges; pydantic is all that this module may import."""

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineAddress(BaseModel):
    """One engine: an executor, and the cache service that owns its blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,64}$", description="in metrics and logs; empty: engine-<place>")
    cache_service: str = Field(min_length=1, description="address of its cache service")
    executor: str = Field(min_length=1, description="address of its executor")
    spare_executors: tuple[str, ...] = Field((), description="addresses of executors that may take its place")
    wanted_spares: int = Field(-1, ge=-1, description="how many of those should be ready; -1: all")

    @property
    def num_wanted_spares(self) -> int:
        return len(self.spare_executors) if self.wanted_spares < 0 else self.wanted_spares


class RouterConfig(BaseModel):
    """Serve the public gRPC API: admission, continuous batching, tokenizing and streaming."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field("127.0.0.1:7700", description="address of the public API: host:port or unix:/path")
    metrics_listen: str = Field("127.0.0.1:9700", description="address of /metrics: host:port; empty: none")
    reflection: bool = Field(True, description="serve gRPC reflection")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["console", "json"] = Field("console", description="form of a log line: for people, or JSON")
    otel_traces: bool = Field(
        False, description="send OpenTelemetry traces of requests, as the variables OTEL_* say; needs octavo[otel]"
    )
    drain_accept_window_s: float = Field(
        2.0, ge=0, description="seconds that new calls are still taken after health says NOT_SERVING"
    )
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live requests may go on after that")

    tls_certificate: str = Field("", description="PEM file with the public API's certificate chain; empty: no TLS")
    tls_key: str = Field("", description="PEM file with the private key of that certificate")
    tls_client_ca: str = Field(
        "", description="PEM file with the CA that clients' certificates must come from; empty: clients need none"
    )
    health_listen: str = Field(
        "", description="address that answers for health alone, without TLS; for probes: host:port or unix:/path"
    )
    internal_tls_certificate: str = Field(
        "", description="PEM file with this process's certificate, for executors and cache services; empty: no TLS"
    )
    internal_tls_key: str = Field("", description="PEM file with the private key of that certificate")
    internal_tls_ca: str = Field(
        "", description="PEM file with the CA that the other side's certificate must come from"
    )
    internal_tls_server_name: str = Field(
        "", description="name that their certificates must be for; empty: the host of the address"
    )

    tenants_file: str = Field(
        "", description="TOML file of tenants and the hashes of their tokens; empty: nobody has to say who they are"
    )
    default_tenant: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]{0,64}$", description="whose requests all are where there is no tenants_file"
    )
    allow_plaintext_tokens: bool = Field(
        False, description="take tokens without TLS from other machines, where something else protects them"
    )
    max_tenant_labels: int = Field(100, ge=0, description="tenants that metrics tell apart; all others are one")

    cache_service: str = Field("127.0.0.1:7701", description="address of the cache service")
    executor: str = Field("127.0.0.1:7702", description="address of the executor")
    spare_executors: tuple[str, ...] = Field(
        (),
        description="addresses of executors that are attached to the same cache service and loaded, and take the "
        "executor's place when it is known dead or wants to end; not all need to be there",
    )
    wanted_spares: int = Field(
        -1,
        ge=-1,
        description="how many of those should be ready, for metrics and alerts: fewer where some are for "
        "roll-outs alone; -1: all",
    )
    engines: tuple[EngineAddress, ...] = Field(
        (), description="several engines instead of those two addresses: tables of name, cache_service, executor"
    )
    router_id: str = Field("", description="stable name of this router; empty: made of host name and address")
    lease_ttl_s: float = Field(10.0, gt=0, description="seconds after which the cache service forgets a silent router")
    recovery_grace_s: float = Field(
        300.0,
        ge=0,
        description="seconds that running requests wait for a lost executor or cache service before they fail",
    )

    max_queued_requests: int = Field(256, ge=0, description="requests that may wait for a place; more are refused")
    max_running_requests: int = Field(
        64, ge=1, description="answers that are generated at once, n of a request each, at most the executor's rows"
    )
    max_tokens_per_step: int = Field(
        512, ge=1, description="token budget of a step, prefill and decode together, at most the executor's"
    )
    max_prefill_tokens_beside_decodes: int = Field(
        128,
        ge=1,
        description="most tokens of prompts in a step that also decodes, whose streams wait for all of it; more is for "
        "executors that compute a long step as fast as a short one: GPUs",
    )
    max_steps_in_flight: int = Field(2, ge=1, le=2, description="steps sent before the result of the first is there")
    poison_limit: int = Field(
        2, ge=1, description="executors that must die while a request runs alone in them until it is failed"
    )
    slack_blocks: int = Field(2, ge=0, description="KV blocks asked for beyond the tokens there are")

    max_choices: int = Field(16, ge=1, description="answers to one request: the largest n and best_of")
    max_stop_strings: int = Field(16, ge=0, description="stop strings of a request")
    max_stop_string_bytes: int = Field(256, ge=1, description="length of a stop string in UTF-8")
    max_stop_token_ids: int = Field(64, ge=0, description="stop token ids of a request")
    tokenizer_threads: int = Field(2, ge=1, description="threads that tokenize and render chats")
    trace_file: str = Field(
        "", description="where the last steps are written as a Chrome trace when the router ends; empty: nowhere"
    )
    trace_steps: int = Field(10_000, ge=1, le=1_000_000, description="steps that the trace keeps")
    max_concurrent_calls: int = Field(
        1024, ge=1, description="calls of any kind at a time; more are refused before anything of them is read"
    )
    max_message_mib: int = Field(4, ge=1, le=32, description="MiB of one message of a client")
    keepalive_s: float = Field(30.0, gt=0, description="seconds of silence after which a client's connection is probed")

    @property
    def fleet(self) -> tuple[EngineAddress, ...]:
        """Every engine, each with a name: `engines`, or the one of `cache_service` and `executor`."""
        engines = self.engines or (
            EngineAddress(
                cache_service=self.cache_service,
                executor=self.executor,
                spare_executors=self.spare_executors,
                wanted_spares=self.wanted_spares,
            ),
        )
        return tuple(
            engine.model_copy(update={"name": engine.name or f"engine-{place}"}) for place, engine in enumerate(engines)
        )

    @model_validator(mode="after")
    def _check_engines(self) -> "RouterConfig":
        if self.engines and self.model_fields_set & {"cache_service", "executor", "spare_executors", "wanted_spares"}:
            raise ValueError("engines are given beside cache_service or executor; give the one or the others")
        for what, values in (
            ("name", [engine.name for engine in self.fleet]),
            ("executor", [each for engine in self.fleet for each in (engine.executor, *engine.spare_executors)]),
        ):
            twice = [value for value, count in Counter(values).items() if count > 1]
            if twice:
                raise ValueError(f"engines: two have the {what} {twice[0]}; each needs its own")
        for engine in self.fleet:
            if engine.num_wanted_spares > len(engine.spare_executors):
                known = len(engine.spare_executors)
                raise ValueError(f"wanted_spares is {engine.num_wanted_spares}; spare_executors names {known}")
        return self
