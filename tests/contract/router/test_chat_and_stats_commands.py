"""`octavo chat` and `octavo stats` against a whole stack, as their users see them."""

import asyncio
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from prometheus_client import generate_latest

import octavo
from cache_service.metrics import make_registry
from octavo.chat import Chat, ChatConfig
from octavo.samples import Samples
from octavo.stats import StatsConfig, kv_cache_of, look, main, render
from tests.fakes import EOS
from tests.stacks import Stack, running_stack, until

ANSWER = b"Yes."
HEADING = b"<assistant>"


class Answering:
    """A script that says `ANSWER` whatever was asked, and remembers the prompts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, history: tuple[int, ...]) -> Sequence[int]:
        text = bytes(token if token < 256 else 0 for token in history)
        num_said = len(text) - text.rindex(HEADING) - len(HEADING)
        if num_said == 0:
            self.prompts.append(text.decode())
        return (ANSWER[num_said] if num_said < len(ANSWER) else EOS, ord("_"))


class Terminal:
    """What a person types, line by line; a `KeyboardInterrupt` among the lines is Ctrl-C."""

    def __init__(self, *lines: str | type[BaseException]) -> None:
        self._lines: Iterator[Any] = iter(lines)
        self.prompts: list[str] = []
        self.out, self.notes = io.StringIO(), io.StringIO()

    def read(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line

    async def talk(self, stack: Stack, **config: Any) -> str:
        """All of it; returns what came out."""
        address = f"127.0.0.1:{stack.router.port}"
        with octavo.Client(address, timeout_s=20) as client:
            chat = Chat(client, ChatConfig(temperature=0, **config), self.read, self.out, self.notes)
            await asyncio.to_thread(chat.run)
        return self.out.getvalue()


@pytest.fixture
def script() -> Answering:
    return Answering()


@pytest.fixture
async def stack(source: str, script: Answering):
    async with running_stack(source, script) as running:
        yield running
        await running.settle()


async def test_each_turn_sends_the_conversation(stack: Stack, script: Answering) -> None:
    terminal = Terminal("hello", "again \\", "and more", "", "/quit", "never")
    assert await terminal.talk(stack, system="be brief") == "Yes.\nYes.\n"
    assert terminal.prompts == ["> ", "> ", "| ", "> ", "> "]
    assert terminal.notes.getvalue() == ""
    first = "<system>be brief<user>hello<assistant>"
    assert script.prompts == [first, f"{first}Yes.<user>again \nand more<assistant>"]


def test_reset_and_system_begin_anew() -> None:
    chat = Chat(None, ChatConfig(system="a"), Terminal().read, io.StringIO(), io.StringIO())  # type: ignore[arg-type]
    conversation = chat._conversation
    conversation.add("one", "two")
    assert [message["content"] for message in conversation.messages("three")] == ["a", "one", "two", "three"]
    chat._obey("/reset")
    assert [message["role"] for message in conversation.messages("three")] == ["system", "user"]
    conversation.add("one", "two")
    chat._obey("/system b")
    assert [message["content"] for message in conversation.messages("three")] == ["b", "three"]
    chat._obey("/system")
    assert conversation.messages("three") == [{"role": "user", "content": "three"}]


async def test_retry_asks_the_last_question_again(stack: Stack, script: Answering) -> None:
    terminal = Terminal("/retry", "hello", "/retry")
    assert await terminal.talk(stack) == "Yes.\nYes.\n"
    assert "nothing was asked yet" in terminal.notes.getvalue()
    assert script.prompts == ["<user>hello<assistant>"] * 2


async def test_what_is_wrong_is_said_and_the_conversation_goes_on(stack: Stack) -> None:
    terminal = Terminal("/nonsense", "x" * 4000, "/help", KeyboardInterrupt, "hello")
    assert await terminal.talk(stack) == "Yes.\n"
    notes = terminal.notes.getvalue()
    assert "there is no /nonsense" in notes
    assert "FAILED_PRECONDITION" in notes
    assert "/reset begins anew" in notes
    assert "/system TEXT" in notes
    assert "Ctrl-D or /quit leaves" in notes


async def test_an_answer_that_was_cut_says_so(stack: Stack) -> None:
    terminal = Terminal("hello")
    assert await terminal.talk(stack, max_tokens=2, verbose=True) == "Ye\n"
    assert "[ended by max tokens]" in terminal.notes.getvalue()
    assert "2 generated" in terminal.notes.getvalue()


async def test_stats_of_a_stack(stack: Stack) -> None:
    stack.executor.hooks.is_open.clear()
    asking = asyncio.create_task(stack.stream("<assistant>"))
    assert await until(lambda: stack.metric("octavo_num_requests_running") == 1)
    config = StatsConfig(address=f"127.0.0.1:{stack.router.port}", cache_service_metrics="127.0.0.1:1")
    found = await asyncio.to_thread(look, config)
    text = render(found)
    assert found["models"][0]["running_requests"] == 1
    assert "1 running, 0 waiting" in text
    assert "engine         engine-0: serving, scripted" in text
    assert "not reachable  cache service: http://127.0.0.1:1/metrics" in text
    stack.executor.hooks.is_open.set()
    await asking


async def test_stats_read_the_cache_services_own_metrics(stack: Stack) -> None:
    for _ in range(2):
        await stack.generate("a prompt of more than one block, <assistant>")
    arena = await stack.settle()  # the last release may be on its way
    text = generate_latest(make_registry(stack.cache_app.service)).decode()
    cache = kv_cache_of(Samples(text))
    assert cache["blocks"]["free"] == arena.free_blocks
    assert sum(cache["blocks"].values()) == arena.total_blocks
    assert cache["prefix_hit_ratio"] == arena.hit_tokens / arena.queried_tokens > 0
    assert (cache["leases"], cache["executors"]) == (1, 1)


def test_stats_of_nobody_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--address", "127.0.0.1:1", "--timeout-s", "2"]) == 1
    assert "octavo stats: UNAVAILABLE" in capsys.readouterr().err


async def test_stats_as_json(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--address", f"127.0.0.1:{stack.router.port}", "--cache-service-metrics="]
    assert await asyncio.to_thread(main, [*arguments, "--json-output"]) == 0
    assert json.loads(capsys.readouterr().out)["router"]["id"] == "router-under-test"
