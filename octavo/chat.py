"""`octavo chat`: a conversation with a running server in the terminal. A small program on `octavo.Client`.

Each turn sends the whole conversation; what earlier turns computed is found in the server's prefix cache.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

from octavo.client import Client, GenerationStream
from octavo.connection_config import connect
from octavo.errors import Code, OctavoError
from octavo.request_config import RequestConfig, describe_refusal, describe_usage, request_options
from octavo.results import FinishReason
from octavo.settings import load_settings

_HELP = """\
/system TEXT   set the system message and begin anew; without a text: no system message
/reset         begin anew
/retry         ask the last question again
/help          these lines
/quit          leave; so does Ctrl-D

A line that ends in \\ goes on in the next one. Ctrl-C ends an answer; what was said of it stays.
"""
_FIRST_LINE, _NEXT_LINE = "> ", "| "

ReadLine = Callable[[str], str]  # shows a prompt, gives a line, raises EOFError


class ChatConfig(RequestConfig):
    """Talk with a running server. /help, once there, lists what can be said besides questions."""


class Conversation:
    """What was said so far; a question counts once it was answered."""

    def __init__(self, system: str | None) -> None:
        self._system = system
        self._turns: list[tuple[str, str]] = []

    def begin_anew(self) -> None:
        """Forget all that was said, but for the system message."""
        self._turns = []

    def set_system(self, text: str) -> None:
        """Another system message, or none where `text` is empty, and a new conversation."""
        self._system = text or None
        self.begin_anew()

    def messages(self, question: str) -> list[dict[str, str]]:
        """The chat that ends in `question`."""
        said = [("system", self._system)] if self._system else []
        for asked, answered in self._turns:
            said += [("user", asked), ("assistant", answered)]
        return [{"role": role, "content": content or ""} for role, content in [*said, ("user", question)]]

    def add(self, question: str, answer: str) -> None:
        """A turn is complete."""
        self._turns.append((question, answer))

    def take_back(self) -> str | None:
        """The last question, as if it had not been asked; None where there is none."""
        return self._turns.pop()[0] if self._turns else None


class Chat:
    """Reads lines, asks, prints, until the end of input.

    Args:
        read: gives the next line of the person.
        out: gets the answers alone.
        notes: gets everything else.
    """

    def __init__(self, client: Client, config: ChatConfig, read: ReadLine, out: TextIO, notes: TextIO) -> None:
        self._client = client
        self._config = config
        self._read = read
        self._out = out
        self._notes = notes
        self._conversation = Conversation(config.system)

    def run(self) -> None:
        """Until `/quit` or the end of input."""
        with contextlib.suppress(EOFError):
            while (text := self._read_entry()) != "/quit":
                if text.startswith("/"):
                    self._obey(text)
                elif text:
                    self._ask(text)

    def _read_entry(self) -> str:
        """What the person says, over as many lines as it takes."""
        lines: list[str] = []
        try:
            while not lines or lines[-1].endswith("\\"):
                lines.append(self._read(_NEXT_LINE if lines else _FIRST_LINE))
        except KeyboardInterrupt:
            self._note("\n(Ctrl-D or /quit leaves)")
            return ""
        return "\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]]).strip()

    def _obey(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        match command:
            case "/help":
                self._note(_HELP.rstrip())
            case "/reset":
                self._conversation.begin_anew()
            case "/system":
                self._conversation.set_system(rest.strip())
            case "/retry":
                question = self._conversation.take_back()
                if question is None:
                    self._note("nothing was asked yet")
                else:
                    self._ask(question)
            case _:
                self._note(f"there is no {command}; /help lists what there is")

    def _ask(self, question: str) -> None:
        try:
            with self._client.stream(self._conversation.messages(question), **request_options(self._config)) as stream:
                answer = self._print(stream)
        except OctavoError as error:
            hint = "; /reset begins anew" if error.code is Code.FAILED_PRECONDITION else ""
            self._note(f"{describe_refusal(error)}{hint}")
            return
        if answer:
            self._conversation.add(question, answer)

    def _print(self, stream: GenerationStream) -> str:
        """Prints the answer as it comes; returns what of it came."""
        pieces: list[str] = []
        try:
            for piece in stream.texts():
                pieces.append(piece)
                self._out.write(piece)
                self._out.flush()
        except KeyboardInterrupt:
            self._out.write("\n")
            return "".join(pieces)
        self._out.write("\n")
        self._out.flush()
        answer = stream.result()
        if answer.finish_reason in (FinishReason.MAX_TOKENS, FinishReason.CONTEXT_LENGTH, FinishReason.TIME_LIMIT):
            self._note(f"[ended by {answer.finish_reason.replace('_', ' ')}]")
        if self._config.verbose:
            self._note(f"[{describe_usage(answer)}]")
        return answer.text

    def _note(self, text: str) -> None:
        self._notes.write(text + "\n")
        self._notes.flush()


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code: 1 when no server answers, 2 for bad usage."""
    config = load_settings(ChatConfig, section="chat", program="octavo chat", argv=argv)
    with connect(config, "octavo chat") as client:
        try:
            models = client.models()
        except OctavoError as error:
            sys.stderr.write(f"octavo chat: {describe_refusal(error)}\n")
            return 1
        if sys.stdin.isatty():
            sys.stderr.write(f"{', '.join(model.name for model in models)}; /help says more\n")
        Chat(client, config, _line_reader(), sys.stdout, sys.stderr).run()
    return 0


def _line_reader() -> ReadLine:
    """`input` at a terminal, with editing and history where Python has readline; bare lines from a pipe."""
    if not sys.stdin.isatty():
        return lambda prompt: _next_line(sys.stdin)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (its import is what turns editing on)
    return input


def _next_line(source: TextIO) -> str:
    line = source.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
