"""What the commands that ask a running server for answers have in common: the options of a request.

Not here: how the server is reached (`octavo.connection_config`), what values a request may have (the server says that),
nor how a command shows the answer.
"""

from typing import Any

from pydantic import Field

from octavo.connection_config import ConnectionConfig
from octavo.errors import Code, OctavoError
from octavo.options import FIELD_PATHS
from octavo.results import Generation

INTERRUPTED = 130  # the exit code by which a shell reports a program that Ctrl-C ended


class RequestConfig(ConnectionConfig):
    """Where to ask, and how the answer is to be made; what is None is left to the server."""

    system: str | None = Field(None, description="system message before the prompt; chat only")
    verbose: bool = Field(False, description="print token counts and times to standard error at the end")

    model: str | None = Field(None, description="which model, where several are served")
    max_tokens: int | None = Field(None, description="tokens to generate at most")
    min_tokens: int | None = Field(None, description="tokens before which nothing but max-tokens ends the answer")
    temperature: float | None = Field(None, description="0 is greedy")
    top_p: float | None = Field(None, description="keep the likeliest tokens up to this probability")
    top_k: int | None = Field(None, description="keep as many of the likeliest tokens")
    min_p: float | None = Field(None, description="keep tokens at least this likely, relative to the likeliest")
    seed: int | None = Field(None, description="the same seed gives the same answer")
    stop: tuple[str, ...] = Field((), description="text that ends the answer; may be given several times")
    ignore_eos: bool | None = Field(None, description="go on after the end-of-sequence token")
    priority: int | None = Field(None, description="higher is served first")
    time_limit_s: float | None = Field(None, gt=0, description="seconds after which the answer ends as it is")


def request_options(config: RequestConfig) -> Any:
    """The options of the request that were set."""
    values = config.model_dump(exclude_none=True, include=set(FIELD_PATHS))
    return {name: value for name, value in values.items() if value != ()}


def describe_usage(answer: Generation) -> str:
    """Token counts and times of an answer, in a line."""
    usage, timing = answer.usage, answer.timing
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.generated_tokens} generated; "
        f"first after {timing.first_token_s:.3f} s, then {timing.decode_s:.3f} s; "
        f"{answer.finish_reason}; seed {answer.effective_seed}"
    )


def describe_refusal(error: OctavoError) -> str:
    """What a failed call says to a person, in a line."""
    hint = "; is the server running (octavo serve)?" if error.code is Code.UNAVAILABLE else ""
    return f"{error.code.name}: {error.message}{hint}"
