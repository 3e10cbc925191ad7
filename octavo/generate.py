"""`octavo generate`: ask a running server and print its answer as it comes. A small program on `octavo.Client`."""

import dataclasses
import json
import sys
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from octavo.client import GenerationStream
from octavo.connection_config import connect
from octavo.errors import OctavoError
from octavo.request_config import (
    INTERRUPTED,
    RequestConfig,
    describe_refusal,
    describe_usage,
    request_options,
)
from octavo.settings import load_settings


class GenerateConfig(RequestConfig):
    """Ask a running server. The prompt is the argument, or standard input."""

    prompt: CliPositionalArg[str | None] = Field(None, description="what to ask; left out or '-': standard input")
    raw: bool = Field(False, description="continue the prompt as it is, instead of answering it as a chat message")
    json_output: bool = Field(False, description="print the whole answer as one JSON object when it is complete")
    n: int | None = Field(None, description="answers; more than one needs --json-output")
    beam_width: int | None = Field(None, description="search with as many beams for the likeliest answers")
    length_penalty: float | None = Field(None, description="of the search: above 0 favours long answers, below 0 short")
    early_stopping: bool | None = Field(None, description="end the search as soon as beam-width answers are finished")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 when the server refused, 2 for bad usage."""
    config = load_settings(GenerateConfig, section="generate", program="octavo generate", argv=argv)
    prompt = sys.stdin.read() if config.prompt in (None, "-") else config.prompt
    try:
        with connect(config, "octavo generate") as client:
            options = request_options(config)
            with client.stream(_prompt(config, prompt or ""), **options) as stream:
                _print_answer(stream, config)
    except OctavoError as error:
        sys.stderr.write(f"octavo generate: {describe_refusal(error)}\n")
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


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
        sys.stderr.write(describe_usage(answer) + "\n")
