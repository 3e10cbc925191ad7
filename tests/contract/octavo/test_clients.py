"""One suite over both clients, against a small server of the public API that does what the test says."""

import asyncio
import inspect
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

import octavo
from octavo.client_channel import target_of
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.options import FIELD_PATHS, GenerateOptions
from octavo.results import (
    Completed,
    Delta,
    EngineInfo,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    TokenLogprob,
    TopLogprob,
)
from octavo.retry import RetryPolicy
from octavo.rpc import PUSHBACK_KEY, status_of
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc

SERVICE = "octavo.v1.InferenceService"
PIECES = ("Par", "is", ".")
LOGPROBS = [
    pb.TokenLogprob(token_id=i, logprob=-0.5 * i, rank=i, top=[pb.TopLogprob(token_id=9, logprob=-0.25)])
    for i in (1, 2, 3)
]


class FakeServer(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every prompt with "Paris."; fails first as often as `failures` says."""

    def __init__(self) -> None:
        self.requests: list = []
        self.arrival_times_s: list[float] = []
        self.failures: deque[OctavoError] = deque()
        self.breaks: deque[tuple[int, OctavoError]] = deque()  # of the next streams: after as many events
        self.hang = threading.Event()  # clear: calls hang until their client leaves
        self.hang.set()
        self.client_left = threading.Event()

    def _arrive(self, request, context) -> None:
        self.requests.append(request)
        self.arrival_times_s.append(time.monotonic())
        context.add_callback(self.client_left.set)
        if self.failures:
            _abort(context, self.failures.popleft())
        while not self.hang.wait(0.01):
            if self.client_left.is_set():
                return

    def GenerateStream(self, request, context):
        self._arrive(request, context)
        num_events, error = self.breaks.popleft() if self.breaks else (99, None)
        for place, event in enumerate(self._events(request)):
            if place == num_events:
                _abort(context, error)
            yield pb.GenerateStreamResponse(**event)

    @staticmethod
    def _events(request):
        had = len(request.resume[0].token_ids) if request.resume else 0
        yield {
            "started": pb.Started(
                request_id=request.request_id,
                model="m",
                prompt_tokens=5,
                cached_tokens=5 if had else 4,
                effective_seed=7,
            )
        }
        for first, end in () if had else ((0, 2), (2, 3)):
            yield {"prompt_logprobs": pb.PromptLogprobs(token_offset=1 + first, logprobs=LOGPROBS[first:end])}
        for offset, piece in list(enumerate(PIECES))[had:]:
            logprobs = LOGPROBS[offset : offset + 1]
            yield {"delta": pb.Delta(token_offset=offset, text=piece, token_ids=[offset + 1], logprobs=logprobs)}
        yield {"finished": pb.Finished(reason=pb.FINISH_REASON_EOS)}
        yield {
            "completed": pb.Completed(
                usage=pb.Usage(prompt_tokens=5, cached_tokens=5 if had else 4, generated_tokens=3, resumed_tokens=had),
                timing=pb.Timing(queue_seconds=0.5, prefill_seconds=1, first_token_seconds=1.5, decode_seconds=2),
            )
        }

    def Cancel(self, request, context):
        return pb.CancelResponse(was_live=request.request_id == "live")

    def Tokenize(self, request, context):
        self.requests.append(request)
        return pb.TokenizeResponse(token_ids=[10, 11])

    def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text="-".join(map(str, request.token_ids)))

    def ListModels(self, request, context):
        return pb.ListModelsResponse(models=[pb.Model(name="m", vocabulary_size=9, block_size=16, num_blocks=8)])

    def GetServerInfo(self, request, context):
        engine = pb.EngineInfo(name="left", model="m", state=pb.ENGINE_STATE_SERVING, router_epoch=3)
        limits = pb.Limits(max_stop_strings=4, max_top_logprobs=20)
        return pb.GetServerInfoResponse(version="1", router_id="r", engines=[engine], limits=limits)

    def GetLoad(self, request, context):
        return pb.GetLoadResponse(models=[pb.ModelLoad(name="m", running_requests=2, kv_cache_usage_ratio=0.5)])


def _abort(context, error: OctavoError) -> None:
    wire = rpc_status.to_status(status_of(error))
    trailers = list(wire.trailing_metadata)
    if error.retry_after_s is not None:
        trailers.append((PUSHBACK_KEY, str(int(error.retry_after_s * 1000))))
    context.set_trailing_metadata(trailers)
    context.abort(wire.code, wire.details)


class Blocking:
    """An AsyncClient as if it were a Client: each call runs the loop until it is done."""

    def __init__(self, *args, **options) -> None:
        self._runner = asyncio.Runner()
        self._inner = self._runner.run(self._make(*args, **options))

    @staticmethod
    async def _make(*args, **options):
        return octavo.AsyncClient(*args, **options)

    def __getattr__(self, name):
        attribute = getattr(self._inner, name)

        def call(*args, **options):
            async def run():
                result = attribute(*args, **options)
                return await result if inspect.isawaitable(result) else BlockingStream(self._runner, result)

            return self._runner.run(run())

        return call

    def close(self) -> None:
        self._runner.run(self._inner.close())
        self._runner.close()


class BlockingStream:
    """`close` may come from another thread, as that of a `Client`."""

    def __init__(self, runner, inner) -> None:
        self._runner, self._inner = runner, inner
        self.request_id = inner.request_id

    def __iter__(self):
        return self._drain(self._inner)

    def texts(self):
        return self._drain(self._inner.texts())

    def _drain(self, source):
        iterator = aiter(source)

        async def step():
            return await anext(iterator, None)

        while (item := self._runner.run(step())) is not None:
            yield item

    def result(self):
        return self._runner.run(self._inner.result())

    def close(self) -> None:
        loop = self._runner.get_loop()
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(self._inner.close(), loop)
        else:
            self._runner.run(self._inner.close())


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def health_servicer():
    servicer = health.HealthServicer()
    servicer.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    return servicer


@pytest.fixture
def address(fake, health_servicer):
    server = grpc.server(ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    fake.hang.set()
    server.stop(None).wait()


@pytest.fixture(params=["sync", "async"])
def make_client(request, address):
    made = []

    def make(**options):
        kind = octavo.Client if request.param == "sync" else Blocking
        made.append(kind(address, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_answer_is_plain_data(make_client, fake):
    answer = make_client().generate("What is the capital of France?", request_id="a")
    assert (answer.request_id, answer.text, answer.finish_reason) == ("a", "Paris.", FinishReason.EOS)
    assert answer.choices[0].token_ids == (1, 2, 3)
    assert (answer.usage.cached_tokens, answer.timing.first_token_s, answer.effective_seed) == (4, 1.5, 7)
    assert fake.requests[0].text == "What is the capital of France?"
    assert answer.prompt_logprobs == answer.choices[0].logprobs
    assert answer.prompt_logprobs[1] == TokenLogprob(2, -1.0, 2, (TopLogprob(9, -0.25),))


def test_stream_gives_the_events_of_the_same_answer(make_client):
    client = make_client()
    stream = client.stream("x", request_id="a")
    events = list(stream)
    kinds = [Started, PromptLogprobs, PromptLogprobs, Delta, Delta, Delta, Finished, Completed]
    assert [type(event) for event in events] == kinds
    assert stream.result() == client.generate("x", request_id="a")
    assert "".join(client.stream("x").texts()) == "Paris."


def test_prompt_forms_travel_as_what_they_are(make_client, fake):
    client = make_client()
    client.generate([1, 2])
    client.generate([])
    client.generate([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], add_generation_prompt=False)
    client.chat("u")
    list(client.stream_chat("u"))
    ids, empty, chat, plain, streamed = fake.requests
    assert list(ids.token_ids.ids) == [1, 2]
    assert empty.WhichOneof("prompt") == "token_ids"
    assert [message.role for message in chat.chat.messages] == ["system", "user"]
    assert chat.chat.HasField("add_generation_prompt")
    assert MessageToDict(plain.chat) == MessageToDict(streamed.chat) == {"messages": [{"role": "user", "content": "u"}]}


SAMPLES = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("top_k", "seed", "n", "best_of", "beam_width", "top_logprobs"), 3),
    **dict.fromkeys(("max_tokens", "min_tokens", "priority"), 3),
    **dict.fromkeys(("include_stop", "ignore_eos", "logprobs", "prompt_logprobs", "echo", "bypass_cache"), False),
    **dict.fromkeys(("skip_special_tokens", "token_ids", "add_generation_prompt"), False),
    **dict.fromkeys(("request_id", "model", "adapter", "cache_salt", "json_schema", "regex", "grammar"), "a"),
    "choice": ["a", "b"],
    **{name: [1, 2] for name in ("allowed_token_ids", "stop_token_ids")},
    **dict.fromkeys(("repetition_penalty", "length_penalty"), 0.5),
    "early_stopping": False,
    "logit_bias": {4: 0.5},
    "bad_words": ["a"],
    "stop": ["a", "b"],
    "time_limit_s": 1.5,
}


def test_every_option_reaches_its_field(make_client, fake):
    assert set(SAMPLES) == set(FIELD_PATHS) == set(GenerateOptions.__annotations__)
    client = make_client()
    for name, value in SAMPLES.items():
        client.generate([{"role": "user", "content": "u"}], **{name: value})
        sent = MessageToDict(fake.requests[-1], preserving_proto_field_name=True)
        for part in FIELD_PATHS[name].split("."):
            sent = sent[part]  # a KeyError: the option did not arrive, or an unset field looks like a zero
        expected = {"time_limit_s": "1.500s", "token_ids": True, "logit_bias": {"4": 0.5}, "seed": "3"}.get(name, value)
        assert sent == ([str(item) for item in value] if name.endswith("token_ids") and value else expected), name


def test_one_stop_string_is_not_a_list_of_letters(make_client, fake):
    make_client().generate("x", stop="end")
    assert list(fake.requests[0].stopping.stop) == ["end"]


def test_option_that_does_not_exist_is_a_type_error(make_client):
    with pytest.raises(TypeError, match="temprature"):
        make_client().generate("x", temprature=1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"top_k": 2**40}, "sampling.top_k"),
        ({"stop": [3]}, "stopping.stop"),
        ({"temperature": "hot"}, "sampling.temperature"),
    ],
)
def test_value_that_a_field_cannot_hold_is_refused_by_name(make_client, fake, options, field):
    with pytest.raises(OctavoError) as refused:
        make_client().generate("x", **options)
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.violations[0].field == field
    assert not fake.requests


@pytest.mark.parametrize("method", ["generate", "stream"])
def test_error_carries_code_reason_and_violations(make_client, fake, method):
    fake.failures.append(invalid_argument(FieldViolation("sampling.top_p", "must be in (0, 1], got 2")))
    client = make_client()
    with pytest.raises(OctavoError) as refused:
        client.generate("x") if method == "generate" else list(client.stream("x"))
    assert (refused.value.code, refused.value.reason) == (Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.value.violations == (FieldViolation("sampling.top_p", "must be in (0, 1], got 2"),)
    assert len(fake.requests) == 1  # not sent again


@pytest.mark.parametrize("method", ["generate", "stream"])
@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED])
def test_refused_call_is_sent_again_under_the_same_id(make_client, fake, method, code):
    fake.failures.extend([OctavoError(code, "BUSY", "later", retry_after_s=0.01)] * 2)
    client = make_client()
    answer = client.generate("x") if method == "generate" else client.stream("x").result()
    assert answer.text == "Paris."
    assert len(fake.requests) == 3
    assert len({request.request_id for request in fake.requests}) == 1
    assert fake.requests[0].request_id


def test_server_says_when_to_try_again(make_client, fake):
    fake.failures.append(OctavoError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "later", retry_after_s=0.6))
    make_client().generate("x")
    first, second = fake.arrival_times_s
    assert 0.55 <= second - first < 5


def test_refusal_is_the_error_when_tries_are_used_up(make_client, fake):
    fake.failures.extend([OctavoError(Code.UNAVAILABLE, "DRAINING", "draining", retry_after_s=0.2)] * 9)
    with pytest.raises(OctavoError) as refused:
        make_client(retry=RetryPolicy(refused_for_s=0.3)).generate("x")
    assert (refused.value.reason, refused.value.retry_after_s) == ("DRAINING", 0.2)
    assert len(fake.requests) == 2


LOST = OctavoError(Code.UNAVAILABLE, "ENGINE_LOST", "lost", retry_after_s=0.01)


@pytest.mark.parametrize("broken_at", range(8))
def test_a_stream_that_breaks_goes_on_with_what_is_missing(make_client, fake, broken_at):
    """Twice, the second time as soon as something new came. The caller sees the events of one unbroken call."""
    client = make_client()
    whole = list(client.stream("x", request_id="a"))
    fake.breaks.extend([(broken_at, LOST), (2, LOST)])
    stream = client.stream("x", request_id="a")
    assert list(stream) == whole
    assert stream.result() == client.generate("x", request_id="a")
    num_had = max(0, min(broken_at - 3, 3))
    first, second = fake.requests[1:3]
    assert [list(resume.token_ids) for resume in second.resume] == ([[1, 2, 3][:num_had]] if num_had else [])
    assert first.request_id == second.request_id


def test_without_a_policy_a_broken_stream_ends(make_client, fake):
    fake.breaks.append((4, LOST))
    events = []
    with pytest.raises(OctavoError, match="lost"):
        events.extend(make_client(retry=None).stream("x"))
    assert [type(event) for event in events] == [Started, PromptLogprobs, PromptLogprobs, Delta]
    assert len(fake.requests) == 1


def test_a_stream_that_breaks_again_and_again_ends_when_nothing_new_comes(make_client, fake):
    """Each new token begins the time anew; here there is none."""
    fake.breaks.extend([(4, LOST), *[(1, LOST)] * 40])
    with pytest.raises(OctavoError, match="lost"):
        list(make_client(retry=RetryPolicy(broken_for_s=0.1)).stream("x"))
    assert 2 < len(fake.requests) < 20


def test_one_deadline_bounds_all_attempts(make_client, fake):
    fake.breaks.extend([(4, LOST), *[(1, OctavoError(Code.UNAVAILABLE, "NO_EXECUTOR", "x", retry_after_s=0.2))] * 40])
    began_s = time.monotonic()
    with pytest.raises(OctavoError) as late:
        list(make_client().stream("x", timeout_s=0.5))
    assert late.value.code is Code.DEADLINE_EXCEEDED
    assert 0.4 < time.monotonic() - began_s < 5


@pytest.mark.parametrize("code", [Code.CANCELLED, Code.INTERNAL, Code.ABORTED, Code.DEADLINE_EXCEEDED])
def test_what_another_call_cannot_mend_is_not_sent_again(make_client, fake, code):
    """Field failure 17, too: what somebody ended must not come back to life."""
    fake.breaks.append((4, OctavoError(code, "SAID_SO", "no")))
    with pytest.raises(OctavoError, match="no") as refused:
        list(make_client().stream("x"))
    assert refused.value.code is code
    assert len(fake.requests) == 1


def test_leaving_a_stream_in_a_pause_ends_it(make_client, fake):
    fake.breaks.append((4, OctavoError(Code.UNAVAILABLE, "DRAINING", "later", retry_after_s=30.0)))
    stream = make_client().stream("x")
    events = iter(stream)
    for _ in range(4):
        next(events)
    closer = threading.Timer(0.2, stream.close)
    closer.start()
    with pytest.raises(OctavoError) as left:
        next(events)
    assert left.value.code is Code.CANCELLED
    assert len(fake.requests) == 1


def test_an_answer_that_would_go_on_as_another_is_an_error(make_client, fake, monkeypatch):
    """A router with another model, say, took over."""
    fake.breaks.append((4, LOST))
    events = fake._events

    def changed(request):
        for event in events(request):
            if request.resume and "started" in event:
                event["started"].prompt_tokens = 6
            yield event

    monkeypatch.setattr(fake, "_events", changed)
    with pytest.raises(OctavoError) as changed_answer:
        list(make_client().stream("x"))
    assert changed_answer.value.reason == "ANSWER_CHANGED"


@pytest.mark.parametrize(("client_options", "call_options"), [({"timeout_s": 0.2}, {}), ({}, {"timeout_s": 0.2})])
def test_deadline(make_client, fake, client_options, call_options):
    fake.hang.clear()
    with pytest.raises(OctavoError) as late:
        make_client(**client_options).generate("x", **call_options)
    assert late.value.code is Code.DEADLINE_EXCEEDED


def test_leaving_a_stream_ends_the_request(make_client, fake):
    """Field failure 17: a client that leaves must not go on costing tokens."""
    fake.hang.clear()
    stream = make_client().stream("x")
    deadline_s = time.monotonic() + 5
    while not fake.requests and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not fake.client_left.is_set()
    stream.close()
    assert fake.client_left.wait(5)


def test_server_that_says_not_serving_gets_no_calls(make_client, fake, health_servicer):
    health_servicer.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    with pytest.raises(OctavoError) as refused:
        make_client(retry=None).generate("x")
    assert refused.value.code is Code.UNAVAILABLE
    assert not fake.requests


def test_text_and_server_calls(make_client, fake):
    client = make_client()
    assert client.tokenize("x", add_special_tokens=False) == [10, 11]
    assert fake.requests[-1].HasField("add_special_tokens")
    assert client.tokenize([{"role": "user", "content": "u"}]) == [10, 11]
    assert fake.requests[-1].chat.messages[0].content == "u"
    assert client.detokenize([3, 4]) == "3-4"
    assert (client.cancel("live"), client.cancel("gone")) == (True, False)
    assert (client.models()[0].name, client.models()[0].block_size) == ("m", 16)
    info = client.server_info()
    assert info.engines == (EngineInfo("left", "m", "serving", 3),)
    assert (info.limits.max_stop_strings, info.limits.max_top_logprobs) == (4, 20)
    assert client.load()[0].kv_cache_usage_ratio == 0.5


def test_nobody_there_is_an_error_that_says_where():
    with (
        octavo.Client("127.0.0.1:1", retry=None) as client,
        pytest.raises(OctavoError, match=r"127\.0\.0\.1:1") as refused,
    ):
        client.generate("x")
    assert refused.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("localhost:7700", "dns:///localhost:7700"),
        ("[::1]:7700", "dns:///[::1]:7700"),
        ("dns:///octavo:7700", "dns:///octavo:7700"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("xds:///octavo", "xds:///octavo"),
    ],
)
def test_bare_addresses_are_resolved_by_name(address, target):
    assert target_of(address) == target
