"""Options of the executor. Light on purpose: the launcher and the command line import it without torch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Weights = Literal["fp32", "bf16", "fp16", "int8"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
Attention = Literal["auto", "cpu", "torch", "triton", "triton-interpret"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ExecutorConfig(BaseModel):
    """Run one model on one device, in steps that routers plan, on KV blocks that the cache service owns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    listen: str = Field("127.0.0.1:7702", description="address of ExecutorService: host:port or unix:/path")
    metrics_listen: str = Field("127.0.0.1:9702", description="address of /metrics: host:port; empty: none")
    reflection: bool = Field(True, description="serve gRPC reflection")
    log_level: LogLevel = Field("info", description="least severe records to log")
    log_format: Literal["console", "json"] = Field("console", description="form of a log line: for people, or JSON")
    otel_traces: bool = Field(
        False, description="send OpenTelemetry traces of requests, as the variables OTEL_* say; needs octavo[otel]"
    )
    drain_accept_window_s: float = Field(0.5, ge=0, description="seconds that calls are still accepted after SIGTERM")
    drain_grace_s: float = Field(30.0, ge=0, description="seconds that live sessions may take to end after SIGTERM")
    health_listen: str = Field(
        "", description="address that answers for health alone, without TLS; for probes: host:port or unix:/path"
    )
    internal_tls_certificate: str = Field(
        "", description="PEM file with this process's certificate, for routers and the cache service; empty: no TLS"
    )
    internal_tls_key: str = Field("", description="PEM file with the private key of that certificate")
    internal_tls_ca: str = Field(
        "", description="PEM file with the CA that the other side's certificate must come from"
    )
    internal_tls_server_name: str = Field(
        "", description="name that the cache service's certificate must be for; empty: the host of the address"
    )

    executor_id: str = Field("executor-0", min_length=1, description="name of this executor; a successor keeps it")
    cache_service: str = Field("127.0.0.1:7701", description="address of the cache service: host:port or unix:/path")
    register_timeout_s: float = Field(
        300.0, gt=0, description="seconds to wait for the cache service at start before giving up"
    )
    session_timeout_s: float = Field(
        30.0, ge=0, description="seconds that a session is kept for a router that is no longer connected"
    )

    model: str = Field("demo", min_length=1, description="a folder, a .gguf file, a hub id, or demo")
    model_name: str = Field("", description="name that clients ask for; empty: the model's own")
    weights: Weights = Field(
        "fp32", description="number format of the linear layers; int8 quantizes what is loaded as fp32, see executor.md"
    )
    device: str = Field(
        "cpu",
        pattern=r"^(cpu|cuda(:\d{1,3})?)$",
        description="device that holds the weights and the KV blocks: cpu, or cuda:N; cuda is cuda:0",
    )
    attention: Attention = Field(
        "auto",
        description="attention back end: cpu, compiled at first use; torch; triton, on a GPU; triton-interpret, its "
        "kernels on a CPU, slow; auto: the fastest there is, which the log says",
    )
    threads: int = Field(0, ge=0, description="threads of one operator; 0: one per processor that this process may use")
    verify_model: bool = Field(
        True, description="compare the paged model with its plain form on a few tokens before serving"
    )

    rewrite_model: bool = Field(
        True, description="run the layers as one call of the kernels that attention cpu has, where the model allows it"
    )

    block_size: int = Field(16, ge=1, le=1024, description="tokens per KV block")
    kv_dtype: KvDtype = Field(
        "auto",
        description="number format of the KV blocks; auto: that of the weights; int8 and float8_e4m3fn "
        "have a scale per token and head, the latter is for attention triton alone",
    )
    kv_memory_mib: int = Field(512, ge=1, description="MiB of KV blocks to ask the cache service for")
    max_context_tokens: int = Field(0, ge=0, description="longest sequence in tokens; 0: as long as the model allows")
    max_rows: int = Field(64, ge=1, le=65536, description="sequences that one session may hold at a time")
    max_graph_rows: int = Field(
        256, ge=0, le=4096, description="on a GPU, decode steps of up to so many rows run as CUDA graphs; 0: none do"
    )
    max_tokens_per_step: int = Field(2048, ge=1, description="tokens that one step may compute over all its rows")

    @field_validator("device")
    @classmethod
    def _number_device(cls, device: str) -> str:
        return "cuda:0" if device == "cuda" else device

    @model_validator(mode="after")
    def _int8_can_be_had(self) -> "ExecutorConfig":
        """What never gives int8 is refused here; where the machine or the model is in the way, the log warns."""
        ways = {"device": self.device == "cpu", "attention": self.attention in ("auto", "cpu")}
        ways["rewrite_model"] = self.rewrite_model
        if self.weights == "int8" and not all(ways.values()):
            wrong = next(name for name, allows in ways.items() if not allows)
            raise ValueError(
                f"weights int8 cannot be had with {wrong} {getattr(self, wrong)}: it needs device cpu, attention cpu "
                f"or auto, and rewrite_model; choose those, or weights fp32, bf16 or fp16"
            )
        return self

    @model_validator(mode="after")
    def _fp8_can_be_had(self) -> "ExecutorConfig":
        """fp8 is Triton's alone; every other KV format is everyone's."""
        is_triton = self.attention.startswith("triton") or (self.attention == "auto" and self.device != "cpu")
        if self.kv_dtype == "float8_e4m3fn" and not is_triton:
            raise ValueError(
                f"kv_dtype float8_e4m3fn cannot be had with attention {self.attention} on device {self.device}: it "
                f"needs attention triton or triton-interpret; choose that, or kv_dtype int8, which every one takes"
            )
        return self
