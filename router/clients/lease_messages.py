"""What the messages of a lease are made of, as messages of cache.proto. Translation only."""

from collections.abc import Mapping

from octavo.tracing import RequestTag
from octavo.v1 import cache_pb2
from router.ids import SessionKey, StepId
from router.outbox import Commit


def commit_message(commit: Commit) -> cache_pb2.SequenceCommit:
    """To the wire."""
    return cache_pb2.SequenceCommit(
        sequence_id=commit.sequence_id,
        num_computed_tokens=commit.num_computed_tokens,
        token_offset=commit.token_offset,
        token_ids=commit.token_ids,
    )


def session_steps(steps: Mapping[SessionKey, StepId]) -> list[cache_pb2.SessionStep]:
    """To the wire."""
    return [
        cache_pb2.SessionStep(
            session=cache_pb2.SessionKey(
                executor_id=key.executor_id, executor_epoch=key.executor_epoch, session_id=key.session_id
            ),
            step_id=step_id,
        )
        for key, step_id in steps.items()
    ]


def tag_message(tag: RequestTag) -> cache_pb2.RequestTag:
    """To the wire."""
    context = tag.context
    return cache_pb2.RequestTag(
        request_id=tag.request_id, traceparent=context.traceparent, tracestate=context.tracestate
    )
