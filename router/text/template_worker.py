"""Run as a script: a process that renders chat templates, and that nothing is lost with when the kernel ends it.

A template is a program that came with a model. Jinja's sandbox keeps it from Python's insides, but not from loops
without end or strings without bounds; limits that the kernel holds do: CPU time by a timer whose signal kills, memory
by RLIMIT_AS, no file to write, no process to start. Only the standard library and jinja2 are imported, so it starts in
a tenth of a second. The environment is that of `transformers`, whose templates these are, and a test compares them.

On standard input and output: frames of a length (4 bytes, big endian) and JSON. The first one in has the template and
the limits; each further one is a chat, answered by one frame out.
"""

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import Template, nodes, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct(">I")
TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # behind the message that is to be continued: all from there on is cut off
_MAX_REASON_CHARS = 200


class TooLongError(Exception):
    """The text is longer than any prompt may be."""


class _Generation(Extension):
    """The tags around what an assistant says mean something in training alone."""

    tags = {"generation"}  # noqa: RUF012 (its type is the base class's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    @pass_eval_context
    def _said(self, context: nodes.EvalContext, caller: Any) -> str:
        return caller()


class _Dictionary:
    """`dict`, without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(Namespace):
    """Takes no attribute that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace takes no attribute that begins with an underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> Template:
    """A template with all that those of `transformers` may use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dictionary(),
        namespace=_Namespace,
    )
    return environment.from_string(source)


def render(template: Template, chat: dict[str, Any]) -> str:
    """The prompt of a chat: messages, whether to open a turn of the assistant, special tokens, the longest result."""
    messages, opens_turn = chat["messages"], chat["add_generation_prompt"]
    final = messages[-1]["content"]
    if not opens_turn:
        messages[-1]["content"] = final + TAG
    pieces, num_chars = [], 0
    values = {**chat["special_tokens"], "tools": None, "documents": None}
    for piece in template.generate(messages=messages, add_generation_prompt=opens_turn, **values):
        num_chars += len(piece)
        if num_chars > chat["max_chars"] + len(TAG):
            raise TooLongError
        pieces.append(piece)
    text = "".join(pieces)
    return text if opens_turn else _cut_at_tag(text, final)


def _cut_at_tag(text: str, final: str) -> str:
    place = text.rfind(TAG.strip())
    if place < 0 or final.strip() not in text:
        raise ValueError("it does not keep the last message as it is, so that cannot be continued")
    has_kept_space = text[place : place + len(TAG)] == TAG
    return text[:place] if has_kept_space else text[:place].rstrip()


def answer_to(template: Template, chat: dict[str, Any]) -> dict[str, Any]:
    """What is said of a chat: its text, or why there is none, never with what somebody wrote."""
    contents = [message["content"] for message in chat["messages"]]
    try:
        return {"text": render(template, chat)}
    except TooLongError:
        return {"is_too_long": True}
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error)
        is_quoting = any(content and content in reason for content in contents)
        return {"reason": type(error).__name__ if is_quoting else reason[:_MAX_REASON_CHARS]}


def _read(source: BinaryIO) -> Any:
    """None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(source.read(*LENGTH.unpack(head)))


def _write(target: BinaryIO, message: Any) -> None:
    body = json.dumps(message).encode()
    target.write(LENGTH.pack(len(body)) + body)
    target.flush()


def _set_limits(memory_bytes: int) -> None:
    # RLIMIT_NPROC would count all processes of the user, so one of 0 forbids just new ones.
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, most in limits.items():
        resource.setrlimit(kind, (most, most))


def main() -> None:
    """Until standard input ends, or a limit is reached."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    first = _read(source)
    if first is None:
        return
    _set_limits(first["memory_bytes"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it ends the process, whatever that is doing

    def limited(work: Any, *args: Any) -> Any:
        signal.setitimer(signal.ITIMER_PROF, first["cpu_s"])
        result = work(*args)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result

    try:
        template = limited(compile_template, first["template"])
    except (TemplateError, ValueError, RecursionError) as error:
        problem = {"reason": f"it cannot be compiled: {str(error)[:_MAX_REASON_CHARS]}"}
        while _read(source) is not None:
            _write(target, problem)
        return
    while (chat := _read(source)) is not None:
        _write(target, limited(answer_to, template, chat))


if __name__ == "__main__":
    main()
