"""`octavo demo`: serve a small real model, let it answer one question, say how to call it, and go on serving."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import Field, model_validator

from octavo.async_client import AsyncClient
from octavo.launch_config import ServeConfig
from octavo.launch_plan import connect_address
from octavo.launcher import run_serve
from octavo.settings import load_settings

QUESTION = "What is the capital of France?"
_ANSWER_TIMEOUT_S = 120.0
_MAX_TOKENS = 128

_HOW_TO_CALL = """
It goes on serving until Ctrl-C. Call it

  from a shell     octavo generate "Why is the sky blue?"{address_option}
  from Python      import octavo
                   with octavo.Client("{address}") as client:
                       print(client.chat("Why is the sky blue?").text)
  with grpcurl     grpcurl -plaintext -d '{{"chat": {{"messages": [{{"role": "user", "content": "Hello!"}}]}}}}' \\
                       {address} octavo.v1.InferenceService/GenerateStream

Metrics            {metrics}
"""


class DemoConfig(ServeConfig):
    """Serve a small real model, let it answer a question, and go on serving until Ctrl-C."""

    model: str | None = Field("demo", description="what to serve, as octavo serve takes it")
    question: str = Field(QUESTION, description="what to ask when it is ready")

    @model_validator(mode="after")
    def _check_is_open(self) -> "DemoConfig":
        if self.router.tls_certificate or self.router.tenants_file:
            raise ValueError("the demo asks its question without TLS and without a token; use octavo serve")
        return self

    @classmethod
    def _shared(cls, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The router is quiet unless told otherwise: its lines would stand between those of the answer."""
        quiet = {"log_level": "warning"} if section == "router" else {}
        return {**quiet, **super()._shared(section, values)}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    config = load_settings(DemoConfig, section="serve", program="octavo demo", argv=argv)
    address = connect_address(config.router.listen)

    async def on_ready(say: Callable[[str], None]) -> None:
        say(f"ready; asking: {config.question}")
        await _ask(address, config.question)
        how = _HOW_TO_CALL.format(address=address, address_option=_address_option(config), metrics=_metrics(config))
        print(how, flush=True)  # bare, to be copied from

    return run_serve(config, on_ready)


async def _ask(address: str, question: str) -> None:
    print(f"\n  {question}\n\n  ", end="", flush=True)
    async with AsyncClient(address, timeout_s=_ANSWER_TIMEOUT_S) as client:
        stream = client.stream_chat(question, temperature=0, max_tokens=_MAX_TOKENS)
        async for text in stream.texts():
            print(text.replace("\n", "\n  "), end="", flush=True)
    print("\n", flush=True)


def _address_option(config: DemoConfig) -> str:
    default = type(config.router).model_fields["listen"].default
    return "" if config.router.listen == default else f" --address {connect_address(config.router.listen)}"


def _metrics(config: DemoConfig) -> str:
    addresses = {name: getattr(config, name).metrics_listen for name in ("router", "executor", "cache_service")}
    lines = [f"http://{address}/metrics  ({name.replace('_', ' ')})" for name, address in addresses.items() if address]
    return f"\n{' ' * 19}".join(lines)
