"""When a failed call is sent again, and what of a broken answer comes out: pure, so on a clock of the test's own."""

import pytest

from octavo.continuation import AnswerShape, Continuation
from octavo.errors import Code, OctavoError
from octavo.messages import generate_request, request_to_send
from octavo.results import Completed, Delta, Finished, FinishReason, Started, Timing, Usage
from octavo.retry import Attempts, RetryPolicy

POLICY = RetryPolicy(refused_for_s=10, broken_for_s=100, first_pause_s=0.25, max_pause_s=2)
GONE = OctavoError(Code.UNAVAILABLE, "UNAVAILABLE", "gone")
STARTED = Started("r", "m", 3, 2, 7)
SHAPE = AnswerShape(echoes=False, is_ranked=False, shows_token_ids=True)


def test_pauses_double_up_to_the_longest_less_a_part_by_chance():
    attempts = Attempts(POLICY, None, 0.0)
    assert [attempts.pause_after(GONE, 0.0, 0.0) for _ in range(5)] == [0.25, 0.5, 1, 2, 2]
    assert attempts.pause_after(GONE, 0.0, 0.9) == pytest.approx(2 * 0.55)


def test_a_server_that_says_when_is_obeyed_and_not_by_all_at_once():
    busy = OctavoError(Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "later", retry_after_s=4.0)
    attempts = Attempts(POLICY, None, 0.0)
    assert attempts.pause_after(busy, 0.0, 0.0) == 4.0
    assert 4.0 < attempts.pause_after(busy, 0.0, 0.9) <= 5.0


def test_the_time_counts_from_the_first_failure_after_the_last_event():
    attempts = Attempts(POLICY, None, 0.0)
    attempts.pause_after(GONE, 50.0, 0.0)  # a long answer in one piece is no failure
    with pytest.raises(OctavoError, match="gone"):
        attempts.pause_after(GONE, 60.0, 0.0)
    attempts.progress()  # begun: from now on the other limit counts
    for now in (70.0, 160.0):
        attempts.pause_after(GONE, now, 0.0)
    with pytest.raises(OctavoError, match="gone"):
        attempts.pause_after(GONE, 170.0, 0.0)


def test_a_pause_ends_at_the_deadline():
    attempts = Attempts(POLICY, 3.0, 100.0)
    assert attempts.timeout_s(101.0) == 2.0
    later = OctavoError(Code.UNAVAILABLE, "DRAINING", "x", retry_after_s=5.0)
    assert attempts.pause_after(later, 101.0, 0.0) == 2.0
    with pytest.raises(OctavoError) as late:
        attempts.timeout_s(103.0)
    assert late.value.code is Code.DEADLINE_EXCEEDED


def test_a_message_that_is_too_large_stays_so():
    too_large = OctavoError(Code.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", "Sent message larger than max (9 vs. 4)")
    with pytest.raises(OctavoError, match="larger"):
        Attempts(POLICY, None, 0.0).pause_after(too_large, 0.0, 0.0)
    too_many = OctavoError(Code.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", "Concurrent RPC limit exceeded!")
    assert Attempts(POLICY, None, 0.0).pause_after(too_many, 0.0, 0.0) == 0.25


@pytest.mark.parametrize(
    "options", [{"refused_for_s": -1}, {"broken_for_s": float("nan")}, {"first_pause_s": 0}, {"max_pause_s": 0.1}]
)
def test_a_policy_that_cannot_be_is_refused(options):
    with pytest.raises(ValueError, match="choose"):
        RetryPolicy(**options)


def test_text_without_a_token_is_shown_with_the_end_or_not_at_all():
    """A call that breaks between the two is resumed behind the last token, and says that text again."""
    answer = Continuation(SHAPE)
    answer.take(STARTED)
    answer.take(Delta(0, 0, "a", (1,)))
    held, end = Delta(0, 1, "\ufffd"), Finished(0, FinishReason.TIME_LIMIT)
    assert answer.take(held) == []
    answer.begin_call()
    assert answer.resume() == {0: [1]}
    assert answer.take(STARTED) == []
    assert answer.take(held) == []
    assert answer.take(end) == [held, end]
    usage, timing = Usage(3, 3, 1), Timing()
    assert answer.take(Completed(usage, timing)) == [Completed(Usage(3, 2, 1), timing)]


def test_an_answer_that_was_cancelled_is_not_taken_up_again():
    answer = Continuation(SHAPE)
    for event in (STARTED, Delta(0, 0, "a", (1,)), Finished(0, FinishReason.CANCELLED)):
        answer.take(event)
    with pytest.raises(OctavoError) as ended:
        answer.begin_call()
    assert ended.value.code is Code.CANCELLED


def test_tokens_that_do_not_go_on_are_an_error():
    answer = Continuation(SHAPE)
    answer.take(STARTED)
    answer.take(Delta(0, 0, "ab", (1, 2)))
    for offset in (0, 1, 3):
        with pytest.raises(OctavoError) as lost:
            answer.take(Delta(0, offset, "c", (3,)))
        assert lost.value.code is Code.DATA_LOSS


def test_what_is_left_of_a_time_limit_goes_with_the_next_call():
    request = generate_request("x", {"time_limit_s": 2.0})
    assert request_to_send(request, {}, 0.0).time_limit == request.time_limit
    assert request_to_send(request, {0: [5]}, 1.5).time_limit.ToMilliseconds() == 500
    assert request_to_send(request, {0: [5]}, 9.0).time_limit.ToMilliseconds() == 1
    assert not request.resume, "the caller's own stays as it is"
