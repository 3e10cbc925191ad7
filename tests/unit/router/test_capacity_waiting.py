"""Waiting for blocks: when it is tried again, and that waiting costs no time of the processor."""

from octavo.errors import Code, OctavoError
from router.capacity import RETRY_BLOCKS_S, Capacity
from router.engine import Engine, EngineLimits
from router.ids import SessionKey
from router.metrics import RouterMetrics
from router.model import Model
from router.outbox import Allocated, Allocation, Outbox
from router.raw import RawRequest
from router.request import FinishReason, RequestSpec
from router.text.answer import AnswerText
from router.text.detokenizer import Detokenizer
from router.text.stop import StopScanner
from router.validation import RequestLimits, validate

MODEL = Model("m", "", "", "f", "a", 260, 256, frozenset({256}), "cpu", 4, 10, "float32", "", "", "cpu", 4, 64, 2)
LIMITS = EngineLimits(8, 4, 64, 1, 0)
NO_BLOCKS = Allocated(error=OctavoError(Code.RESOURCE_EXHAUSTED, "NO_BLOCKS", "none"))


def submit(engine: Engine, request_id: str) -> None:
    raw = RawRequest(request_id=request_id, token_ids=(1, 2, 3), max_tokens=4)
    checked = validate(raw, MODEL, RequestLimits(4, 16, 4), "unused")
    detokenizer = Detokenizer(lambda ids: "x" * len(ids), (1, 2, 3), can_split_prompt=True)
    answer = AnswerText(detokenizer, StopScanner((), include_stop=False), min_tokens=0)
    engine.submit(engine.reserve(checked), RequestSpec(checked, (1, 2, 3), 4, FinishReason.MAX_TOKENS), [answer])


def refuse_all(engine: Engine, outbox: Outbox) -> list[Allocation]:
    batch = outbox.take() or []
    for allocation in batch:
        assert isinstance(allocation, Allocation)
        engine.on_allocated(allocation, NO_BLOCKS)
    return batch  # type: ignore[return-value]


async def test_who_was_refused_is_tried_alone_after_a_while_and_nobody_spins() -> None:
    now = 100.0
    outbox = Outbox()
    engine = Engine(MODEL, LIMITS, outbox, RouterMetrics(lambda: ()).of("engine", "m"), clock=lambda: now)
    engine.attach(SessionKey("e", 1, 1), lambda step: None)
    capacity: Capacity = engine._capacity
    submit(engine, "one")
    submit(engine, "two")
    engine.turn(now)
    assert len(refuse_all(engine, outbox)) == 2
    engine.turn(now)
    assert outbox.take() is None
    assert capacity.next_retry_after(now) == now + RETRY_BLOCKS_S
    now += RETRY_BLOCKS_S
    engine.turn(now)
    assert capacity.next_retry_after(now) is None, "an attempt is on its way: its answer wakes the engine"
    assert len(refuse_all(engine, outbox)) == 1, "the first in the queue alone"
    engine.cancel("one")
    engine.cancel("two")
    now += RETRY_BLOCKS_S
    engine.turn(now)
    assert capacity.next_retry_after(now) is None, "nobody waits any more"
