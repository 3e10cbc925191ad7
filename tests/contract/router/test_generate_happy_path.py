"""The whole way of a request over gRPC: scripted executor, real cache service, real router."""

from octavo.v1 import inference_pb2
from tests.fakes import saying
from tests.stacks import running_stack

Reason = inference_pb2.FinishReason


async def test_unary_answer(source: str) -> None:
    async with running_stack(source, saying("Paris.")) as stack:
        response = await stack.generate("capital of France?", request_id="one")
        assert response.request_id == "one"
        assert response.model == "scripted"
        choice = response.choices[0]
        assert choice.text == "Paris."
        assert choice.finish_reason == Reason.FINISH_REASON_EOS
        assert list(choice.token_ids) == [*b"Paris.", 256]
        assert response.usage.prompt_tokens == 18
        assert response.usage.generated_tokens == 7
        assert response.timing.first_token_seconds > 0
        await stack.settle()


async def test_stream_equals_unary(source: str) -> None:
    async with running_stack(source, saying("Paris, of course.")) as stack:
        unary = await stack.generate("where?", stopping={"max_tokens": 9})
        events = await stack.stream("where?", stopping={"max_tokens": 9})
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-2:] == ["finished", "completed"]
        assert set(kinds[1:-2]) == {"delta"}
        deltas = [event.delta for event in events if event.WhichOneof("event") == "delta"]
        assert "".join(delta.text for delta in deltas) == unary.choices[0].text == "Paris, of"
        assert [token for delta in deltas for token in delta.token_ids] == list(unary.choices[0].token_ids)
        offset = 0
        for delta in deltas:
            assert delta.token_offset == offset
            offset += len(delta.token_ids)
        assert events[-2].finished.reason == Reason.FINISH_REASON_MAX_TOKENS
        assert events[-1].completed.usage.generated_tokens == 9
        await stack.settle()
