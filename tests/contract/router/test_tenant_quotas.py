"""A tenant's share of the KV blocks: what runs of it never holds more, and nobody else waits or gives way for it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.tokens import hash_of, metadata_of
from octavo.v1 import inference_pb2
from router.admission import quota_blocks
from router.engine import Engine
from router.live import Choice
from tests.contract.router.test_beams import check
from tests.contract.router.test_beams import expected as expected_search
from tests.fakes import counting
from tests.stacks import Stack, request, running_stack, until

TOKENS = {"flood": "octavo_token-of-the-flood", "quiet": "octavo_token-of-the-quiet"}


@asynccontextmanager
async def stack_of(source: str, folder: Path, share: float, **options: Any) -> AsyncIterator[Stack]:
    """Blocks of 4 tokens; `flood` may have a share of them, `quiet` all."""
    limits = {"flood": f"max_kv_share = {share}", "quiet": ""}
    file = folder / "tenants.toml"
    file.write_text(
        "".join(
            f'[[tenants]]\nname = "{name}"\ntokens = [{{ sha256 = "{hash_of(token)}" }}]\n{limits[name]}\n'
            for name, token in TOKENS.items()
        )
    )
    config = {"tenants_file": str(file), **options.pop("config", {})}
    async with running_stack(source, config=config, **options) as stack:
        yield stack


def watch(engine: Engine) -> list[int]:
    """What the flood's tables name, each block once, after every turn. None is ever above the quota."""
    seen = [0]
    turn = engine.turn

    def watched(now: float) -> None:
        turn(now)
        held = {block for choice in of_flood(engine) for block in choice.block_ids}
        seen.append(len(held))
        assert (
            len(held) <= quota_blocks(next(iter(of_flood(engine))).checked.max_kv_share, engine.model) if held else True
        )

    engine.turn = watched  # type: ignore[method-assign]
    return seen


def of_flood(engine: Engine) -> list[Choice]:
    return [choice for choice in engine.roster.running.values() if choice.checked.tenant == "flood"]


def expected(prompt: str, num_tokens: int) -> list[int]:
    """What the default script answers, alone."""
    history: list[int] = list(prompt.encode())
    for _ in range(num_tokens):
        history.append(counting(tuple(history))[0])
    return history[len(prompt.encode()) :]


async def answer(stack: Stack, tenant: str, prompt: str, num_tokens: int, **fields: Any) -> Any:
    """Each answer must be that of the script alone."""
    message = request(prompt, stopping={"max_tokens": num_tokens, "ignore_eos": True}, **fields)
    response = await stack.stub.Generate(message, metadata=metadata_of(TOKENS[tenant]), timeout=60)
    assert list(response.choices[0].token_ids) == expected(prompt, num_tokens), prompt
    return response


async def test_a_flood_stays_within_its_share_and_nobody_waits_behind_it(source: str, tmp_path: Path) -> None:
    """Of 80 blocks the flood has 20, and two of its eight requests need 22; the quiet tenant calls last."""
    config = {"max_running_requests": 16}
    async with stack_of(source, tmp_path, 0.25, num_blocks=81, max_context_tokens=100, config=config) as stack:
        held = watch(stack.engine)
        ended: list[str] = []

        async def one(tenant: str, prompt: str, num_tokens: int) -> None:
            await answer(stack, tenant, prompt, num_tokens)
            ended.append(tenant)

        flood = [asyncio.create_task(one("flood", letter * 8, 36)) for letter in "abcdefgh"]
        assert await until(lambda: len(of_flood(stack.engine)) > 1 and bool(stack.engine.roster.waiting))
        await asyncio.gather(*(one("quiet", letter * 40, 20) for letter in "xyz"))
        assert ended.count("flood") <= 4, "the quiet tenant's were served beside the first of the flood"
        await asyncio.gather(*flood)
        assert 16 <= max(held) <= 20
        assert stack.metric("octavo_num_preemptions_total", cause="quota") > 0
        assert stack.metric("octavo_num_preemptions_total", cause="pool") == 0
        await stack.settle()


async def test_a_share_is_kept_where_the_rest_is_idle_and_all_end_in_order(source: str, tmp_path: Path) -> None:
    """A quota is hard: it is kept with the rest of the pool idle, and all requests still end, in order."""
    async with stack_of(source, tmp_path, 0.3, num_blocks=41, max_context_tokens=100) as stack:
        held, ended = watch(stack.engine), []

        async def one(name: str) -> None:
            await answer(stack, "flood", name * 8, 40)
            ended.append(name)

        tasks = []
        for name in "abcd":
            tasks.append(asyncio.create_task(one(name)))
            assert await until(lambda: len(stack.engine.roster) == len(tasks))
        await asyncio.gather(*tasks)
        assert ended == list("abcd")
        assert max(held) == 12
        await stack.settle()


@pytest.mark.parametrize(
    ("num_tokens", "fields"), [(34, {}), (14, {"sampling": {"n": 4}}), (None, {"prompt": "x" * 41})]
)
async def test_what_never_fits_the_share_is_refused_with_the_numbers(
    source: str, tmp_path: Path, num_tokens: int | None, fields: dict[str, Any]
) -> None:
    """10 blocks of 40 hold 40 tokens; a prompt of 8 shares its two among four answers of 2 more each."""
    async with stack_of(source, tmp_path, 0.25, num_blocks=41, max_context_tokens=100) as stack:
        message = request(**{"prompt": "x" * 8, "stopping": {"max_tokens": num_tokens}, **fields})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.Generate(message, metadata=metadata_of(TOKENS["flood"]), timeout=30)
        error = error_of_call(caught.value)
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
        assert (error.metadata["quota_blocks"], error.metadata["usable_blocks"]) == ("10", "40")
        assert "share of the pool, 10 blocks" in error.message
        await stack.stub.Generate(message, metadata=metadata_of(TOKENS["quiet"]), timeout=30)
        await stack.settle()


async def test_an_open_end_is_where_the_share_ends(source: str, tmp_path: Path) -> None:
    async with stack_of(source, tmp_path, 0.25, num_blocks=41, max_context_tokens=100) as stack:
        message = request("x" * 8, stopping={"ignore_eos": True})
        response = await stack.stub.Generate(message, metadata=metadata_of(TOKENS["flood"]), timeout=30)
        assert response.usage.generated_tokens == 33
        assert response.choices[0].finish_reason == inference_pb2.FINISH_REASON_CONTEXT_LENGTH
        await stack.settle()


@pytest.mark.parametrize(("seed", "max_steps_in_flight"), [(0, 2), (1, 1), (2, 2)])
async def test_random_mixes_within_a_share_all_finish(
    source: str, tmp_path: Path, seed: int, max_steps_in_flight: int
) -> None:
    """Several answers, shared prompts, priorities and two tenants, in a pool that is too small for them as well."""
    draw = random.Random(seed)
    config = {"max_tokens_per_step": draw.randint(2, 9), "max_steps_in_flight": max_steps_in_flight}
    async with stack_of(source, tmp_path, 0.6, num_blocks=16, max_context_tokens=60, config=config) as stack:
        held = watch(stack.engine)
        for _ in range(3):
            jobs = []
            for _ in range(draw.randint(3, 7)):
                num_prompt, n = draw.randint(1, 16), draw.choice([1, 1, 2, 3])
                num_tokens = draw.randint(1, 24 // n)
                if num_prompt // 4 + n * ((num_prompt % 4 + num_tokens + 2) // 4) > 9:
                    n = 1
                fields = {"sampling": {"n": n}, "priority": draw.randint(0, 1)}
                prompt = "".join(draw.choice("ab") for _ in range(num_prompt))
                jobs.append(answer(stack, draw.choice(["flood", "flood", "quiet"]), prompt, num_tokens, **fields))
            async with asyncio.timeout(60):
                await asyncio.gather(*jobs)
        assert max(held) <= 9
        stats = await stack.settle()
        assert not stats.violations


async def test_a_share_that_changes_is_no_other_request(source: str, tmp_path: Path, monkeypatch) -> None:
    """The same request sent again after the file changed goes on with its id; what comes new has the new share."""
    monkeypatch.setattr("router.tenants.watch.LOOK_INTERVAL_S", 0.01)
    async with stack_of(source, tmp_path, 0.25, num_blocks=41, max_context_tokens=100) as stack:
        stack.executor.hooks.is_open.clear()
        first = asyncio.create_task(answer(stack, "flood", "same?", 9, request_id="one"))
        assert await until(lambda: len(stack.engine.roster) == 1)
        file = tmp_path / "tenants.toml"
        file.write_text(file.read_text().replace("max_kv_share = 0.25", "max_kv_share = 0.5"))
        assert await until(lambda: stack.metric("octavo_tenants_reloads_total", outcome="ok") == 1)
        second = asyncio.create_task(answer(stack, "flood", "same?", 9, request_id="one"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first
        assert error_of_call(caught.value).reason == "SUPERSEDED"
        stack.executor.hooks.is_open.set()
        await second
        await answer(stack, "flood", "x" * 8, 60)
        await stack.settle()


async def searched(stack: Stack, prompt: str, num_tokens: int) -> None:
    """Three beams of the flood; its answers are those of the search alone."""
    sampling = {"n": 2, "beam": {"width": 3}}
    message = request(prompt, sampling=sampling, stopping={"max_tokens": num_tokens, "ignore_eos": True})
    response = await stack.stub.Generate(message, metadata=metadata_of(TOKENS["flood"]), timeout=60)
    check(response, expected_search(prompt, 3, num_tokens, ends=frozenset()), 2, prompt, num_tokens)


async def test_searches_stay_within_a_share(source: str, tmp_path: Path) -> None:
    """One alone fills it to the last block; several give way as wholes, and the quiet tenant's requests never."""
    config = {"max_running_requests": 16}
    async with stack_of(source, tmp_path, 0.5, num_blocks=2 * (2 + 3 * 5) + 1, config=config) as stack:
        held = watch(stack.engine)
        await searched(stack, "nine long", 20)
        assert stack.metric("octavo_num_preemptions_total") == 0
        calls = [searched(stack, f"request {index}", 18) for index in range(3)]
        await asyncio.gather(*calls, *(answer(stack, "quiet", letter * 8, 20) for letter in "xy"))
        assert max(held) <= 17
        assert stack.metric("octavo_num_preemptions_total", cause="quota") > 0
        assert stack.metric("octavo_num_preemptions_total", cause="pool") == 0
        await stack.settle()
