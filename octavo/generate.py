"""`octavo generate`: ask a running server and print its answer as it comes. A small program on `octavo.Client`."""

import dataclasses
import json
import sys
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import CliPositionalArg

from octavo.client import DEFAULT_ADDRESS, Client, GenerationStream
from octavo.errors import Code, OctavoError
from octavo.options import FIELD_PATHS
from octavo.settings import load_settings

_INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended


class GenerateConfig(BaseModel):
    """Ask a running server. The prompt is the argument, or standard input."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: CliPositionalArg[str | None] = Field(None, description="what to ask; left out or '-': standard input")

    address: str = Field(DEFAULT_ADDRESS, description="router: host:port, dns:///name:port or unix:/path")
    timeout_s: float | None = Field(None, gt=0, description="seconds until the call fails")
    retries: int = Field(4, ge=0, le=4, description="times that a refused call is sent again")
    raw: bool = Field(False, description="continue the prompt as it is, instead of answering it as a chat message")
    system: str | None = Field(None, description="system message before the prompt; chat only")
    json_output: bool = Field(False, description="print the whole answer as one JSON object when it is complete")
    verbose: bool = Field(False, description="print token counts and times to standard error at the end")

    model: str | None = Field(None, description="which model, where several are served")
    max_tokens: int | None = Field(None, description="tokens to generate at most")
    min_tokens: int | None = Field(None, description="tokens before which nothing but max-tokens ends the answer")
    temperature: float | None = Field(None, description="0 is greedy")
    top_p: float | None = Field(None, description="keep the likeliest tokens up to this probability")
    top_k: int | None = Field(None, description="keep as many of the likeliest tokens")
    min_p: float | None = Field(None, description="keep tokens at least this likely, relative to the likeliest")
    seed: int | None = Field(None, description="the same seed gives the same answer")
    n: int | None = Field(None, description="answers; more than one needs --json-output")
    stop: tuple[str, ...] = Field((), description="text that ends the answer; may be given several times")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-sequence token")
    priority: int | None = Field(None, description="higher is served first")
    time_limit_s: float | None = Field(None, gt=0, description="seconds after which the answer ends as it is")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 when the server refused, 2 for bad usage."""
    config = load_settings(GenerateConfig, section="generate", program="octavo generate", argv=argv)
    prompt = sys.stdin.read() if config.prompt in (None, "-") else config.prompt
    try:
        with Client(config.address, timeout_s=config.timeout_s, retries=config.retries) as client:
            options = request_options(config)
            with client.stream(_prompt(config, prompt or ""), **options) as stream:
                _print_answer(stream, config)
    except OctavoError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def request_options(config: GenerateConfig) -> Any:
    """The options of the request that were set."""
    values = config.model_dump(exclude_none=True, include=set(FIELD_PATHS))
    return {name: value for name, value in values.items() if value != ()}


def _prompt(config: GenerateConfig, text: str) -> Any:
    if config.raw:
        return text
    system = [{"role": "system", "content": config.system}] if config.system else []
    return [*system, {"role": "user", "content": text}]


def _print_answer(stream: GenerationStream, config: GenerateConfig) -> None:
    if not config.json_output:
        for text in stream.texts():
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
    answer = stream.result()
    if config.json_output:
        sys.stdout.write(json.dumps(dataclasses.asdict(answer), ensure_ascii=False, indent=2) + "\n")
    if config.verbose:
        usage, timing = answer.usage, answer.timing
        sys.stderr.write(
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.generated_tokens} generated; "
            f"first after {timing.first_token_s:.3f} s, then {timing.decode_s:.3f} s; "
            f"{answer.finish_reason}; seed {answer.effective_seed}\n"
        )


def _fail(error: OctavoError) -> int:
    hint = "; is the server running (octavo serve)?" if error.code is Code.UNAVAILABLE else ""
    sys.stderr.write(f"octavo generate: {error.code.name}: {error.message}{hint}\n")
    return 1
