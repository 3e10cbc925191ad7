"""Several engines and models behind one router: who gets a request, and what a vanished engine does to the others."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.errors import Code
from octavo.rpc import error_of_call
from octavo.v1 import inference_pb2
from router.config import EngineAddress
from router.tenants.tenant import NOBODY
from tests.fakes import FakeExecutor, counting, saying
from tests.fleets import FleetStack, running_engine, running_fleet
from tests.stacks import request, until

SHORT = {"max_tokens": 3, "ignore_eos": True}
LONG = {"max_tokens": 120, "ignore_eos": True}
TWINS: dict[str, dict[str, Any]] = {"left": {}, "right": {}}
MODELS = {
    "left": {"model_name": "small", "script": saying("small")},
    "right": {"model_name": "large", "script": saying("large"), "fingerprint": "a" * 64},
}


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of_call(caught.value)


def counts(fleet: FleetStack) -> dict[str, int]:
    return {name: engine.num_prompts for name, engine in fleet.engines.items()}


# -------------------------------------------------------------------------------------------------------------- models


async def test_each_request_goes_to_the_engine_of_its_model(source: str) -> None:
    async with running_fleet(source, MODELS) as fleet:
        for model in ("small", "large", "large", "small"):
            answer = await fleet.generate(model=model)
            assert (answer.model, answer.choices[0].text) == (model, model)
        events = await fleet.stream(model="large")
        assert events[0].started.model == "large"
        assert counts(fleet) == {"left": 2, "right": 3}
        tokens = await fleet.stub.Tokenize(inference_pb2.TokenizeRequest(model="large", text="ab"))
        assert list(tokens.token_ids) == [97, 98]
        await fleet.settle()


async def test_a_model_must_be_named_where_there_are_several(source: str) -> None:
    """NOT_FOUND names those that are served, for no name and for an unknown one, in every call that takes one."""
    async with running_fleet(source, MODELS) as fleet:
        for model in ("", "medium"):
            for call in (
                fleet.generate(model=model),
                fleet.stub.Tokenize(inference_pb2.TokenizeRequest(model=model, text="ab")),
                fleet.stub.Detokenize(inference_pb2.DetokenizeRequest(model=model, token_ids=[97])),
            ):
                error = await refused(call)
                assert (error.code, error.reason) == (Code.NOT_FOUND, "MODEL_NOT_FOUND")
                assert error.metadata == {"served": "large,small"}
        assert fleet.metric("octavo_admission_rejections_total", reason="model_not_found") == 2


async def test_an_engine_that_was_never_reached_may_have_the_model(source: str) -> None:
    """While the router does not know what it serves, an unknown name is no error of the client: try again."""
    nowhere = EngineAddress(name="later", cache_service="127.0.0.1:1", executor="127.0.0.1:1")
    async with running_fleet(source, {"left": {}}, elsewhere=(nowhere,)) as fleet:
        error = await refused(fleet.generate(model="medium"))
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_EXECUTOR", 1.0)
        assert "'later'" in error.message
        assert (await fleet.generate(stopping=SHORT)).model == "scripted", "what is served is served"
        info = await fleet.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        connecting = inference_pb2.EngineInfo(name="later", state=inference_pb2.ENGINE_STATE_CONNECTING)
        assert info.engines[1] == connecting


async def test_models_engines_and_load_are_told_of_all(source: str) -> None:
    engines = {**MODELS, "spare": {**MODELS["right"], "num_blocks": 32}}
    async with running_fleet(source, engines) as fleet:
        models = (await fleet.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(model.name, list(model.engines)) for model in models] == [
            ("small", ["left"]),
            ("large", ["right", "spare"]),
        ]
        info = await fleet.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert [(engine.name, engine.model) for engine in info.engines] == [
            ("left", "small"),
            ("right", "large"),
            ("spare", "large"),
        ]
        assert {engine.state for engine in info.engines} == {inference_pb2.ENGINE_STATE_SERVING}
        assert all(engine.router_epoch for engine in info.engines)
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(fleet.generate(f"{i}?", model="large", stopping=SHORT)) for i in range(2)]
        assert await until(lambda: fleet.metric("octavo_num_requests_running", model_name="large") == 2)
        load = await fleet.stub.GetLoad(inference_pb2.GetLoadRequest())
        assert [(model.name, model.running_requests) for model in load.models] == [("small", 0), ("large", 2)]
        by_engine = [(engine.name, engine.model, engine.running_requests) for engine in load.engines]
        assert by_engine == [("left", "small", 0), ("right", "large", 1), ("spare", "large", 1)]
        right, spare = load.engines[1].kv_cache_usage_ratio, load.engines[2].kv_cache_usage_ratio
        assert load.models[1].kv_cache_usage_ratio == pytest.approx((63 * right + 31 * spare) / (63 + 31))
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.set()
        await asyncio.gather(*calls)
        await fleet.settle()


async def test_metrics_are_labelled_by_the_configured_name(source: str) -> None:
    """A name outlives restarts; an address does not."""
    async with running_fleet(source, MODELS) as fleet:
        await fleet.generate(model="large", stopping=SHORT)
        for name, count in (("left", 0), ("right", 3)):
            assert fleet.metric("octavo_generation_tokens_total", engine=name) == count
        assert fleet.metric("octavo_generation_tokens_total", engine="right", model_name="large") == 3
        assert fleet.metric("octavo_request_success_total", engine="right") == 1


# ----------------------------------------------------------------------------------------------------- prefix and load


async def test_a_prompt_goes_where_its_beginning_is_cached(source: str) -> None:
    """Whichever engine it is, whatever the other has to do in between."""
    async with running_fleet(source, TWINS) as fleet:
        prompts = {letter: letter * 24 for letter in "abcd"}
        homes = {}
        for letter, prompt in prompts.items():
            before = counts(fleet)
            await fleet.generate(prompt + "?", stopping=SHORT)
            homes[letter] = next(name for name, count in counts(fleet).items() if count > before[name])
        assert sorted(homes.values()) == ["left", "left", "right", "right"], "idle engines take turns"
        for letter, prompt in reversed(prompts.items()):
            before = counts(fleet)
            answer = await fleet.generate(f"{prompt} and more?", stopping=SHORT)
            assert answer.usage.cached_tokens == 24
            assert counts(fleet)[homes[letter]] == before[homes[letter]] + 1
        await fleet.settle()


async def test_another_salt_finds_nothing_and_a_bypass_leaves_nothing(source: str) -> None:
    async with running_fleet(source, TWINS) as fleet:
        for place in range(4):
            await fleet.generate("a" * 24, stopping=SHORT, cache={"salt": str(place)})
        assert counts(fleet) == {"left": 2, "right": 2}
        for _ in range(4):
            await fleet.generate("b" * 24, stopping=SHORT, cache={"bypass": True})
        assert counts(fleet) == {"left": 4, "right": 4}


async def test_without_a_prefix_the_least_loaded_engine_takes_it(source: str) -> None:
    async with running_fleet(source, TWINS) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(fleet.generate(f"{place}" * 9, stopping=SHORT)) for place in range(10)]
        assert await until(lambda: fleet.metric("octavo_num_requests_running") == 10)
        for name in fleet.engines:
            assert fleet.metric("octavo_num_requests_running", engine=name) == 5
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.set()
        await asyncio.gather(*calls)
        await fleet.settle()


async def test_a_request_waits_nowhere_while_another_engine_could_begin_it(source: str) -> None:
    """Two rows on each engine, and all four requests have the prefix of one: it is worth no waiting."""
    async with running_fleet(source, {"left": {"max_rows": 2}, "right": {"max_rows": 2}}) as fleet:
        await fleet.generate("a" * 24, stopping=SHORT)
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = []
        for place in range(4):
            calls.append(asyncio.create_task(fleet.generate("a" * 24 + f"{place}?", stopping=SHORT)))
            assert await until(lambda count=place + 1: fleet.metric("octavo_num_requests_running") == count)
        for name in fleet.engines:
            assert fleet.metric("octavo_num_requests_running", engine=name) == 2
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.set()
        await asyncio.gather(*calls)
        await fleet.settle()


async def test_what_one_engine_can_never_hold_goes_to_one_that_can(source: str) -> None:
    """Pools of two sizes: a long request fits one of them alone, whatever is cached in the other; n likewise."""
    sizes = {"left": {"num_blocks": 8, "max_rows": 2}, "right": {}}
    async with running_fleet(source, sizes) as fleet:
        for _ in range(3):
            answer = await fleet.generate("a" * 24, stopping={"max_tokens": 40, "ignore_eos": True})
            assert answer.usage.generated_tokens == 40
            assert len((await fleet.generate("b?", sampling={"n": 3}, stopping=SHORT)).choices) == 3
        assert counts(fleet)["left"] == 0
        error = await refused(fleet.generate("a" * 24, stopping={"max_tokens": 900}))
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NEVER_FITS")
        await fleet.settle()


# ----------------------------------------------------------------------------------------------------------------- ids


async def test_an_id_is_unique_over_all_engines(source: str) -> None:
    """Another body is refused, an equal one supersedes, and Cancel finds it wherever it runs."""
    async with running_fleet(source, MODELS) as fleet:
        fields: dict[str, Any] = {"request_id": "one", "model": "large", "stopping": LONG}
        fleet.engines["right"].executor.hooks.is_open.clear()
        first = asyncio.create_task(fleet.generate(**fields))
        assert await until(lambda: fleet.metric("octavo_num_requests_running") == 1)
        error = await refused(fleet.generate(**(fields | {"model": "small"})))
        assert (error.code, error.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_LIVE")
        second = asyncio.create_task(fleet.generate(**fields))
        error = await refused(first)
        assert (error.code, error.reason) == (Code.ABORTED, "SUPERSEDED")
        cancelled = await fleet.stub.Cancel(inference_pb2.CancelRequest(request_id="one"))
        assert cancelled.was_live
        fleet.engines["right"].executor.hooks.is_open.set()
        assert (await second).choices[0].finish_reason == inference_pb2.FINISH_REASON_CANCELLED
        assert not (await fleet.stub.Cancel(inference_pb2.CancelRequest(request_id="one"))).was_live
        await fleet.settle()


async def test_ids_move_between_twins(source: str) -> None:
    """The same request again, by id, on twins: the older call is superseded wherever placement put it."""
    async with running_fleet(source, TWINS) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = []
        for count in range(4):
            calls.append(asyncio.create_task(fleet.generate("a" * 9, request_id="one", stopping=SHORT)))
            assert await until(lambda: fleet.router.fleet.num_live == 1 and fleet.metric("octavo_num_requests_running"))
            assert await until(lambda ended=count: sum(call.done() for call in calls) == ended)
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(result, grpc.aio.AioRpcError) for result in results] == [True, True, True, False]
        await fleet.settle()


# -------------------------------------------------------------------------------------------------- vanish, and return


async def health(fleet: FleetStack) -> Any:
    stub = health_pb2_grpc.HealthStub(fleet.channel)
    request = health_pb2.HealthCheckRequest(service="octavo.v1.InferenceService")
    return (await stub.Check(request)).status


def waiting_and_running(fleet: FleetStack) -> tuple[float, float]:
    return fleet.metric("octavo_num_requests_waiting"), fleet.metric("octavo_num_requests_running")


async def slow(_: Any) -> None:
    await asyncio.sleep(0.003)


async def test_an_engine_that_vanishes_is_skipped_and_taken_up_again(source: str) -> None:
    """Streams of the other engine go on undisturbed; its own go on when it is back."""
    async with running_fleet(source, TWINS) as fleet:
        whole = {prompt: (await fleet.generate(prompt, stopping=LONG)).choices[0].text for prompt in ("a?", "b?")}
        for engine in fleet.engines.values():
            engine.executor.hooks.before_step = slow
        calls = {prompt: asyncio.create_task(fleet.generate(prompt, stopping=LONG)) for prompt in whole}
        for name in fleet.engines:
            assert await until(lambda name=name: fleet.metric("octavo_generation_tokens_total", engine=name) > 120 + 10)
        left = fleet.engines["left"]
        await left.vanish()
        assert await until(lambda: not fleet.is_up("left"))
        assert await health(fleet) == health_pb2.HealthCheckResponse.SERVING
        for place in range(4):
            await fleet.generate(f"{place}?", stopping=SHORT)
        done, _ = await asyncio.wait(calls.values(), return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1, "the stream of the other engine ends, this one's waits"
        before = counts(fleet)
        await left.come_back()
        assert await until(lambda: fleet.is_up("left"))
        for prompt, call in calls.items():
            assert (await call).choices[0].text == whole[prompt]
        for place in range(4):
            await fleet.generate(f"{place}!", stopping=SHORT)
        assert counts(fleet)["left"] > 1, "it takes requests again"
        assert counts(fleet)["right"] < before["right"] + 4
        await fleet.settle()


async def test_a_model_whose_only_engine_vanished_is_unavailable_and_others_serve(source: str) -> None:
    async with running_fleet(source, MODELS) as fleet:
        await fleet.engines["right"].vanish()
        assert await until(lambda: not fleet.is_up("right"))
        error = await refused(fleet.generate(model="large"))
        assert (error.code, error.reason, error.retry_after_s) == (Code.UNAVAILABLE, "NO_EXECUTOR", 1.0)
        assert (await refused(fleet.generate())).reason == "MODEL_NOT_FOUND", "it is still one of two"
        assert (await fleet.generate(model="small")).choices[0].text == "small"
        assert await health(fleet) == health_pb2.HealthCheckResponse.SERVING
        await fleet.engines["left"].vanish()
        assert await until(lambda: not fleet.is_up("left"))
        assert await health(fleet) == health_pb2.HealthCheckResponse.NOT_SERVING
        await fleet.engines["right"].come_back()
        assert await until(lambda: fleet.is_up("right"))
        assert await health(fleet) == health_pb2.HealthCheckResponse.SERVING
        assert (await fleet.generate(model="large")).choices[0].text == "large"


async def test_a_request_in_preparation_moves_away_from_an_engine_that_vanishes(source: str) -> None:
    """Its prompt is tokenized while its engine goes: it is queued at the other one."""
    async with running_fleet(source, TWINS) as fleet:
        dispatcher = fleet.router._servicer._dispatcher
        backends = dispatcher.engines_for("scripted")
        message = request("a" * 9, kind=inference_pb2.GenerateRequest, stopping=SHORT)
        ticket = fleet.router._servicer._reserve(message, _NoDeadline(), NOBODY)
        name = ticket.backend.name
        await fleet.engines[name].vanish()
        assert await until(lambda: not fleet.is_up(name))
        await dispatcher.start(ticket)
        assert ticket.backend is next(backend for backend in backends if backend.name != name)
        events = [event async for event in ticket.live.stream]
        assert type(events[-1]).__name__ == "Completed"
        dispatcher.leave(ticket)


class _NoDeadline:
    def time_remaining(self) -> None:
        return None


async def test_what_waits_at_a_lost_engine_goes_to_another(source: str) -> None:
    """One row on each engine; who has begun waits for its engine, who has not goes to the other."""
    config = {"recovery_grace_s": 0.5}
    async with running_fleet(source, {"left": {"max_rows": 1}, "right": {"max_rows": 1}}, config=config) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(fleet.generate(f"{place}" * 9, stopping=SHORT)) for place in range(6)]
        assert await until(lambda: waiting_and_running(fleet) == (4, 2))
        for name in fleet.engines:
            assert fleet.metric("octavo_num_requests_waiting", engine=name) == 2
        await fleet.engines["left"].vanish()
        assert await until(lambda: fleet.metric("octavo_num_requests_waiting", engine="right") == 4)
        fleet.engines["right"].executor.hooks.is_open.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [error_of_call(result) for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert [(error.code, error.reason) for error in failed] == [(Code.UNAVAILABLE, "ENGINE_LOST")]
        assert counts(fleet)["right"] == 5


async def test_all_engines_lost_and_one_back_it_takes_what_waited_for_the_other(source: str) -> None:
    async with running_fleet(source, {"left": {"max_rows": 1}, "right": {"max_rows": 1}}) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        calls = [asyncio.create_task(fleet.generate(f"{place}" * 9, stopping=SHORT)) for place in range(4)]
        assert await until(lambda: waiting_and_running(fleet) == (2, 2))
        for engine in fleet.engines.values():
            await engine.vanish()
        assert await until(lambda: not fleet.router.fleet.is_ready)
        await fleet.engines["right"].come_back()
        assert await until(lambda: sum(call.done() for call in calls) == 3)
        [bound] = [call for call in calls if not call.done()]
        await fleet.engines["left"].come_back()
        assert (await bound).usage.generated_tokens == 3
        assert (counts(fleet)["right"], counts(fleet)["left"]) == (3, 1)
        await fleet.settle()


async def test_one_that_waits_for_blocks_moves_too_and_leaves_none_behind(source: str) -> None:
    """Its allocation is under way, or refused again and again: no block of it stays at the engine that was lost."""
    engines = {"left": {"num_blocks": 32}, "right": {"num_blocks": 32}}
    async with running_fleet(source, engines) as fleet:
        for engine in fleet.engines.values():
            engine.executor.hooks.is_open.clear()
        stopping = {"max_tokens": 20, "ignore_eos": True}
        calls = [asyncio.create_task(fleet.generate(f"{place}" * 70, stopping=stopping)) for place in range(4)]
        assert await until(lambda: waiting_and_running(fleet) == (2, 2))
        await fleet.engines["left"].vanish()
        assert await until(lambda: fleet.metric("octavo_num_requests_waiting", engine="right") == 2)
        await fleet.engines["left"].come_back()
        fleet.engines["right"].executor.hooks.is_open.set()
        for call in calls:
            assert (await call).usage.generated_tokens == 20
        await fleet.settle()


async def test_executors_of_one_pool_share_what_is_cached(source: str) -> None:
    """Two engines on one cache service and memory: a prompt is cached for both, so the idler one takes it."""
    async with running_engine(source) as first:
        arena = first.executor.arena
        second = FakeExecutor(counting, source, first.cache_address, executor_id="second", arena=arena)
        await second.start()
        pool = EngineAddress(name="other", cache_service=first.cache_address, executor=second.address)
        mine = EngineAddress(name="mine", cache_service=first.cache_address, executor=first.executor.address)
        async with running_fleet(source, {}, elsewhere=(mine, pool)) as fleet:
            assert await until(lambda: fleet.is_up("mine") and fleet.is_up("other"))
            for place in range(4):
                answer = await fleet.generate("a" * 24, stopping=SHORT)
                assert answer.usage.cached_tokens == (20 if place else 0)
            for name in ("mine", "other"):
                assert fleet.metric("octavo_request_success_total", engine=name) == 2
            assert await until(first.is_settled)
            [load] = (await fleet.stub.GetLoad(inference_pb2.GetLoadRequest())).models
            assert load.kv_cache_usage_ratio == 0
        await second.stop()
