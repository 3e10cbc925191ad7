"""Authentication and tenants over the wire: who is let in, what tenants share, and what each may have."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.async_client import AsyncClient
from octavo.errors import Code, OctavoError
from octavo.rpc import PUSHBACK_KEY, error_of_call
from octavo.tokens import hash_of, metadata_of
from octavo.v1 import inference_pb2
from tests.stacks import Stack, request, running_stack, until

PROMPT = "a prompt that is longer than a block"
SHORT = {"max_tokens": 3}
TOKENS = {name: f"octavo_token-of-{name}" for name in ("acme", "other", "left", "right", "late", "gone")}


def tenants(**limits: str) -> str:
    more = {"left": 'prefix_group = "pair"', "right": 'prefix_group = "pair"', "gone": "disabled = true", **limits}
    expires = {"late": ", expires = 2020-01-01T00:00:00Z"}
    return "".join(
        f'[[tenants]]\nname = "{name}"\ntokens = [{{ sha256 = "{hash_of(token)}"{expires.get(name, "")} }}]\n'
        f"{more.get(name, '')}\n"
        for name, token in TOKENS.items()
    )


@asynccontextmanager
async def stack_of(
    source: str, folder: Path, *, config: dict[str, Any] | None = None, **limits: str
) -> AsyncIterator[Stack]:
    file = folder / "tenants.toml"
    file.write_text(tenants(**limits))
    async with running_stack(source, config={"tenants_file": str(file), **(config or {})}) as stack:
        yield stack


async def generate(stack: Stack, name: str, prompt: str = PROMPT, **fields: Any) -> inference_pb2.GenerateResponse:
    message = request(prompt, **{"stopping": SHORT, **fields})
    return await stack.stub.Generate(message, metadata=metadata_of(TOKENS[name]), timeout=30)


async def refusal(call: Any) -> OctavoError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_of_call(raised.value)


async def test_the_message_of_a_stranger_is_not_received(source: str, tmp_path: Path):
    """One that is too long tells: gRPC refuses it when it is received, and only then."""
    async with stack_of(source, tmp_path, config={"max_message_mib": 1}) as stack:
        long = request("x" * (2 << 20))
        known = await refusal(stack.stub.Generate(long, metadata=metadata_of(TOKENS["acme"]), timeout=30))
        assert known.code is Code.RESOURCE_EXHAUSTED
        for metadata in ((), metadata_of("octavo_wrong")):
            unknown = await refusal(stack.stub.Generate(long, metadata=metadata, timeout=30))
            assert unknown.code is Code.UNAUTHENTICATED


async def test_nobody_unknown_is_let_in_by_any_method(source: str, tmp_path: Path):
    async with stack_of(source, tmp_path) as stack:
        wrong = {
            "TOKEN_MISSING": ((), (("authorization", "Basic YTpi"),), (("authorization", "Bearer "),)),
            "TOKEN_INVALID": (metadata_of("octavo_wrong"), metadata_of(TOKENS["late"])),
        }
        both = (*metadata_of(TOKENS["acme"]), *metadata_of(TOKENS["other"]))
        calls = {name: getattr(stack.stub, name) for name in vars(stack.stub)}
        assert len(calls) == 8
        said: dict[str, set[str]] = {}
        for reason, metadatas in {**wrong, "TOKEN_MISSING": (*wrong["TOKEN_MISSING"], both)}.items():
            for metadata in metadatas:
                for name, call in calls.items():
                    kind = getattr(inference_pb2, f"{name}Request")
                    made = call(kind(), metadata=metadata, timeout=30)
                    error = await refusal(made.read() if name == "GenerateStream" else made)
                    assert (error.code, error.reason) == (Code.UNAUTHENTICATED, reason), name
                    said.setdefault(reason, set()).add(repr(error))
        assert [len(texts) for texts in said.values()] == [1, 1], "whatever is wrong with it, the same is said"
        assert (await refusal(generate(stack, "gone"))).code is Code.PERMISSION_DENIED
        assert stack.metric("octavo_authentication_failures_total", reason="token_invalid") == 16
        assert stack.metric("octavo_grpc_requests_total", method="Cancel", grpc_code="UNAUTHENTICATED") == 6
        health = health_pb2_grpc.HealthStub(stack.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status == 1
        async with AsyncClient(f"127.0.0.1:{stack.router.port}", token=TOKENS["acme"]) as client:
            assert (await client.generate("hi?", max_tokens=2)).usage.generated_tokens == 2
            assert len(await client.models()) == 1
            stream = client.stream("hi?", max_tokens=2)
            assert [text async for text in stream.texts()]
        await stack.settle()


async def test_tenants_never_find_each_others_prefixes(source: str, tmp_path: Path):
    async with stack_of(source, tmp_path) as stack:
        cached = [
            (name, (await generate(stack, name)).usage.cached_tokens) for name in ("acme", "other", "acme", "other")
        ]
        assert [count > 0 for _, count in cached] == [False, False, True, True], cached
        assert not (await generate(stack, "left")).usage.cached_tokens
        assert (await generate(stack, "right")).usage.cached_tokens  # of the same group
        assert not (await generate(stack, "right", cache={"salt": "s"})).usage.cached_tokens
        await stack.settle()


async def test_a_default_tenant_is_everybody(source: str):
    async with running_stack(source, config={"default_tenant": "house"}) as stack:
        assert not (await stack.generate(PROMPT, stopping=SHORT)).usage.cached_tokens
        assert (await stack.generate(PROMPT, stopping=SHORT)).usage.cached_tokens
        assert stack.metric("octavo_tenant_requests_total", tenant="house") == 2


async def test_ids_are_those_of_a_tenant(source: str, tmp_path: Path):
    """The same id lives twice, with other bodies; nobody can end, or learn of, the request of another tenant."""
    async with stack_of(source, tmp_path) as stack:
        stack.executor.hooks.is_open.clear()
        calls = {
            name: asyncio.create_task(generate(stack, name, f"{name}?", request_id="same", stopping={"max_tokens": 9}))
            for name in ("acme", "other")
        }
        assert await until(lambda: len(stack.engine.roster) == 2)
        cancel = inference_pb2.CancelRequest(request_id="same")
        for name, was_live in (("left", False), ("acme", True), ("acme", False)):
            response = await stack.stub.Cancel(cancel, metadata=metadata_of(TOKENS[name]), timeout=30)
            assert response == inference_pb2.CancelResponse(was_live=was_live), "of another's id as of one unknown"
        stack.executor.hooks.is_open.set()
        assert (await calls["acme"]).choices[0].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        assert (await calls["other"]).usage.generated_tokens == 9
        await stack.settle()


async def test_a_tenant_at_its_limit_waits_while_another_is_served(source: str, tmp_path: Path):
    async with stack_of(source, tmp_path, acme="max_requests_in_flight = 1") as stack:
        stack.executor.hooks.is_open.clear()
        first = asyncio.create_task(generate(stack, "acme"))
        assert await until(lambda: len(stack.engine.roster) == 1)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stack, "acme")
        error = error_of_call(raised.value)
        assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TENANT_LIMIT")
        assert error.metadata == {"limit": "max_requests_in_flight", "allowed": "1"}
        assert error.retry_after_s == 1
        assert raised.value.trailing_metadata()[PUSHBACK_KEY] == "1000"
        tokenize = inference_pb2.TokenizeRequest(text="hi")
        metadata = metadata_of(TOKENS["acme"])
        assert (await refusal(stack.stub.Tokenize(tokenize, metadata=metadata, timeout=30))).reason == "TENANT_LIMIT"
        assert stack.metric("octavo_tenant_requests_in_flight", tenant="acme") == 1
        assert stack.metric("octavo_tenant_refusals_total", tenant="acme", limit="max_requests_in_flight") == 2
        other = asyncio.create_task(generate(stack, "other"))
        assert await until(lambda: len(stack.engine.roster) == 2)
        stack.executor.hooks.is_open.set()
        await asyncio.gather(first, other)
        await generate(stack, "acme")
        assert stack.metric("octavo_tenant_requests_in_flight") == 0
        await stack.settle()


async def test_tokens_a_minute_count_prompts_and_answers(source: str, tmp_path: Path):
    async with stack_of(source, tmp_path, acme="tokens_per_minute = 20") as stack:
        usage = (await generate(stack, "acme")).usage
        assert usage.prompt_tokens + usage.generated_tokens > 20
        error = await refusal(generate(stack, "acme"))
        assert (error.reason, error.metadata["limit"]) == ("TENANT_LIMIT", "tokens_per_minute")
        assert 0 < error.retry_after_s <= 60
        await generate(stack, "other")
        for kind, count in (("prompt", usage.prompt_tokens), ("generated", usage.generated_tokens)):
            assert stack.metric("octavo_tenant_tokens_total", tenant="acme", kind=kind) == count
        await stack.settle()


async def test_nobody_fills_the_queue_for_all(source: str, tmp_path: Path):
    queue = {"max_running_requests": 1, "max_queued_requests": 4}
    async with stack_of(source, tmp_path, config=queue, acme="max_queue_share = 0.5") as stack:
        stack.executor.hooks.is_open.clear()
        running = [asyncio.create_task(generate(stack, "other"))]
        assert await until(lambda: stack.engine.roster.num_running == 1)
        running += [asyncio.create_task(generate(stack, "acme", request_id=str(place))) for place in range(2)]
        assert await until(lambda: stack.engine.roster.num_queued == 2)
        error = await refusal(generate(stack, "acme"))
        assert (error.reason, error.metadata) == ("TENANT_LIMIT", {"limit": "max_queue_share", "allowed": "0.5"})
        running += [asyncio.create_task(generate(stack, "left"))]
        assert await until(lambda: stack.engine.roster.num_queued == 3)
        stack.executor.hooks.is_open.set()
        await asyncio.gather(*running)
        await stack.settle()


async def test_a_model_that_a_tenant_may_not_use(source: str, tmp_path: Path):
    async with stack_of(source, tmp_path, acme='models = ["another"]') as stack:
        error = await refusal(generate(stack, "acme"))
        assert (error.code, error.reason) == (Code.PERMISSION_DENIED, "MODEL_NOT_ALLOWED")
        metadata = metadata_of(TOKENS["acme"])
        listed = await stack.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata, timeout=30)
        assert not listed.models
        tokenize = inference_pb2.TokenizeRequest(text="hi")
        assert (await refusal(stack.stub.Tokenize(tokenize, metadata=metadata, timeout=30))).code is error.code
        await generate(stack, "other")


async def test_a_changed_file_holds_without_a_restart(source: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("router.tenants.watch.LOOK_INTERVAL_S", 0.01)
    async with stack_of(source, tmp_path) as stack:
        await generate(stack, "acme")
        (tmp_path / "tenants.toml").write_text("broken")
        assert await until(lambda: stack.metric("octavo_tenants_reloads_total", outcome="failed") == 1)
        assert stack.metric("octavo_tenants_file_good") == 0
        await generate(stack, "acme")
        (tmp_path / "tenants.toml").write_text(tenants(acme="disabled = true"))
        assert await until(lambda: stack.metric("octavo_tenants_reloads_total", outcome="ok") == 1)
        assert (await refusal(generate(stack, "acme"))).code is Code.PERMISSION_DENIED
        assert stack.metric("octavo_tenants_file_good") == 1


async def test_neither_token_nor_prompt_gets_into_a_log(source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """At the level of debugging, for calls that succeed, are refused, fail, and are left."""
    secret, answer_of = "confidential-words-of-a-user", "robot"
    with caplog.at_level(logging.DEBUG):
        async with stack_of(source, tmp_path, other="max_requests_in_flight = 1") as stack:
            await generate(stack, "acme", f"{secret}?")
            chat = {"messages": [{"role": "user", "content": secret}, {"role": answer_of, "content": secret}]}
            failing = [
                {"prompt": secret * 100},
                {"chat": chat},
                {"prompt": secret, "stopping": {"max_tokens": 10_000}},
                {"prompt": secret, "sampling": {"temperature": -1}},
                {"prompt": secret, "stopping": {"stop": [secret * 100]}},
                {"prompt": secret, "constraint": {"regex": f"({secret}"}},
                {"prompt": secret, "constraint": {"json_schema": f'{{"{secret}'}},
            ]
            for fields in failing:
                error = await refusal(generate(stack, "acme", **fields))
                assert error.code in (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION)
            for name in ("late", "gone"):
                await refusal(generate(stack, name, secret))
            await refusal(stack.stub.Generate(request(secret), metadata=metadata_of("octavo_wrong-token"), timeout=30))
            stack.executor.hooks.fail_rows = lambda row: True
            await refusal(generate(stack, "acme", f"{secret}!"))
            stack.executor.hooks.fail_rows = lambda row: False
            stack.executor.hooks.is_open.clear()
            left = asyncio.create_task(generate(stack, "acme", f"{secret}..."))
            assert await until(lambda: len(stack.engine.roster) == 1)
            left.cancel()
            stack.executor.hooks.is_open.set()
            await stack.settle()
    assert caplog.records
    logged = caplog.text + "".join(repr(vars(record)) for record in caplog.records)
    assert secret not in logged
    assert "wrong-token" not in logged
    for token in TOKENS.values():
        assert token not in logged
        assert hash_of(token) not in logged
