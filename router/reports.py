"""What is told of a request when it ends: to the observer, and in its one line of the log. Not here: what ends it."""

import logging
from dataclasses import asdict

from octavo.logs import fields
from router.live import LiveRequest
from router.observer import Observer

log = logging.getLogger(__name__)


def report_end(observer: Observer, live: LiveRequest, outcome: str, now: float) -> None:
    """A request ended; `outcome` as in `Observer.on_ended`. `now` in the engine's clock (seconds)."""
    usage, timing = live.usage(), live.timing(now)
    observer.on_ended(outcome, usage, timing, now - live.times.arrived)
    about = {"request_id": live.request_id, "tenant": live.checked.tenant, "outcome": outcome}
    log.info(
        "request %s: %s, %s, %s, %d preemptions",
        *(live.request_id, outcome, usage, timing, live.num_preemptions),
        extra=fields(**about, **asdict(usage), **asdict(timing), preemptions=live.num_preemptions),
    )
