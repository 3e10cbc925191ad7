"""Two `octavo engine`s of one model behind one router that a file configures; one of them is wounded."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from octavo import AsyncClient
from octavo.results import Delta
from octavo.settings import load_settings
from router.app import Router
from router.config import RouterConfig
from tests.engines import RunningEngine, running_engine

START_S = 240.0
PROMPTS = {name: [1, *range(start, start + 50)] for name, start in (("a", 20), ("b", 120))}
LONG = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def spare_engine(tiny_llama: Path) -> Iterator[RunningEngine]:
    """A second one, on memory of its own."""
    with running_engine(str(tiny_llama), "--executor.threads=1", "--executor.kv-memory-mib=16") as engine:
        yield engine


@asynccontextmanager
async def serving(folder: Path, *engines: RunningEngine) -> AsyncIterator[AsyncClient]:
    """A router of this process, as `octavo router --config FILE` has it, and a client."""
    tables = [
        f'[[router.engines]]\ncache_service = "{engine.cache_service}"\nexecutor = "{engine.executor}"\n'
        for engine in engines
    ]
    path = folder / "router.toml"
    path.write_text('[router]\nlisten = "127.0.0.1:0"\nmetrics_listen = ""\n\n' + "\n".join(tables))
    # An executor takes longer than a minute to start where the machine is busy.
    argv = ["--config", str(path), "--drain-accept-window-s=0", f"--recovery-grace-s={START_S}"]
    router = Router(load_settings(RouterConfig, section="router", program="octavo router", argv=argv))
    await router.start()
    try:
        async with AsyncClient(f"127.0.0.1:{router.port}", timeout_s=300) as client:
            await wait_for(client, *["serving"] * len(engines))
            yield client
        for engine in engines:
            await engine.assert_settled()
    finally:
        await router.close()


async def wait_for(client: AsyncClient, *states: str) -> None:
    """Until the engines are in these states."""
    async with asyncio.timeout(START_S):
        while tuple(engine.state for engine in (await client.server_info()).engines) != states:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def tokens_of(client: AsyncClient, prompt: list[int], begun: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    async for event in client.stream(prompt, **LONG):
        if isinstance(event, Delta):
            tokens += event.token_ids
            if len(tokens) > 20:
                begun.set()
    return tokens


@pytest.mark.long
async def test_streams_of_both_go_on_when_one_loses_its_executor(
    llama_engine: RunningEngine, spare_engine: RunningEngine, tmp_path: Path
) -> None:
    async with serving(tmp_path, llama_engine, spare_engine) as client:
        [model] = await client.models()
        assert model.engines == ("engine-0", "engine-1")
        whole = {}
        for name, prompt in PROMPTS.items():
            whole[name] = list((await client.generate(prompt, **LONG)).choices[0].token_ids)
        for prompt in PROMPTS.values():  # each where it was before: idle engines took turns
            assert (await client.generate(prompt, max_tokens=1)).usage.cached_tokens == 48
        stats = [await engine.stats() for engine in (llama_engine, spare_engine)]
        assert all(one.cached_blocks > 0 for one in stats)

        begun = {name: asyncio.Event() for name in PROMPTS}
        streams = {
            name: asyncio.create_task(tokens_of(client, prompt, begun[name])) for name, prompt in PROMPTS.items()
        }
        for event in begun.values():
            await event.wait()
        os.kill(spare_engine.child("executor"), signal.SIGKILL)
        await wait_for(client, "serving", "connecting")
        assert await streams["a"] == whole["a"]
        assert (await client.generate(PROMPTS["b"], max_tokens=4)).usage.generated_tokens == 4, "the other one serves"
        assert await streams["b"] == whole["b"], "no token is lost, repeated or drawn anew"
        await wait_for(client, "serving", "serving")
