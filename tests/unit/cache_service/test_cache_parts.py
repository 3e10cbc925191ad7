"""The small parts: fences, id ranges, geometry, expiry, processes, metrics, configuration."""

import asyncio
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import pytest
from prometheus_client import generate_latest
from pydantic import ValidationError

from cache_service.block import BlockId
from cache_service.config import CacheServiceConfig
from cache_service.expiry import Expiry
from cache_service.fence import END_OF_SESSION, FenceBook, SessionKey, SessionStep
from cache_service.geometry import KvGeometry, LayerGeometry, check_geometry, count_blocks, lay_out
from cache_service.id_ranges import IdRanges
from cache_service.metrics import make_registry
from cache_service.process import UnseenProcess, WatchedProcess, watch_process
from octavo.errors import Code, OctavoError
from tests.property.cache_service.cache_drivers import TTL_S, InProcessDriver
from tests.property.cache_service.cache_router import ScriptedRouter


@pytest.fixture
def waiting() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that does nothing until it is ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


ONE, TWO = SessionKey("e", 1, 1), SessionKey("e", 1, 2)


def test_a_fence_stands_until_every_step_it_waits_for_has_ended() -> None:
    book = FenceBook()
    book.open_session(ONE)
    book.open_session(TWO)
    steps = book.outstanding([SessionStep(ONE, 3), SessionStep(TWO, 5), SessionStep(SessionKey("e", 1, 9), 1)])
    assert len(steps) == 2, "a session that is not open runs no step"
    book.raise_fence([BlockId(1)], steps)
    assert book.acknowledge(ONE, 2) == []
    assert book.acknowledge(ONE, 3) == []
    assert book.violations() == []
    assert [fence.blocks for fence in book.acknowledge(TWO, 9)] == [(1,)]
    assert book.outstanding([SessionStep(TWO, 9)]) == []
    assert book.standing() == []


def test_an_abandoned_fence_falls_with_its_session_alone() -> None:
    book = FenceBook()
    book.open_session(ONE)
    book.raise_fence([BlockId(1)], [SessionStep(ONE, END_OF_SESSION)])
    assert book.acknowledge(ONE, END_OF_SESSION - 1) == []
    assert len(book.close_session(ONE)) == 1
    assert book.close_session(ONE) == []


def test_id_ranges_hold_what_a_set_holds_in_less_space() -> None:
    random_ids = random.Random(0)
    ranges, plain = IdRanges(), set()
    for _ in range(2000):
        value = random_ids.randrange(300)
        assert (value in ranges) == (value in plain)
        ranges.add(value)
        plain.add(value)
    assert {value for value in range(310) if value in ranges} == plain
    counting = IdRanges()
    for value in range(1, 10_000):
        counting.add(value)
    assert counting.num_ranges == 1


@pytest.mark.parametrize(("dtype", "scaled"), [("float32", False), ("bfloat16", False), ("int8", True)])
def test_tensors_of_a_block_are_aligned_and_do_not_overlap(dtype: str, scaled: bool) -> None:
    geometry = KvGeometry(16, dtype, (LayerGeometry(3, 40, 64), LayerGeometry(1, 128, 72)))
    check_geometry(geometry)
    layout = lay_out(geometry)
    spans = []
    for shape, layer in zip(geometry.layers, layout.layers, strict=True):
        assert (layer.k_scale is not None) == (layer.v_scale is not None) == scaled
        for tensor in filter(None, (layer.k, layer.v, layer.k_scale, layer.v_scale)):
            assert tensor.offset % 256 == 0
            spans.append((tensor.offset, tensor.offset + shape.num_kv_heads * tensor.head_stride))
        assert layer.v.token_stride == shape.v_head_dim * layer.v.element_stride
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= layout.block_bytes
    assert layout.block_bytes % 256 == 0
    assert count_blocks(layout, 10 * layout.block_bytes - 1) == 9


def test_bad_geometries_name_every_bad_field() -> None:
    with pytest.raises(OctavoError) as error:
        check_geometry(KvGeometry(0, "float64", (LayerGeometry(0, 1, 1), LayerGeometry(1, 1, 1 << 20))))
    assert error.value.code is Code.INVALID_ARGUMENT
    assert [violation.field for violation in error.value.violations] == [
        "geometry.block_size",
        "geometry.dtype",
        "geometry.layers[0].num_kv_heads",
        "geometry.layers[1].v_head_dim",
    ]
    with pytest.raises(OctavoError) as error:
        count_blocks(lay_out(KvGeometry(4, "float32", (LayerGeometry(1, 8, 8),))), 256)
    assert error.value.violations[0].field == "kv_bytes"


def test_a_standstill_of_this_process_ends_no_lease(caplog: pytest.LogCaptureFixture) -> None:
    """A stopped cache service that wakes has heard nobody; that is not their silence."""
    driver = InProcessDriver()
    driver.open_lease("router")
    start = driver.clock.now_s
    expiry = Expiry(driver.service, 0.5, start)
    expiry.look(start + 0.5)
    expiry.look(start + 100.0)
    assert driver.service.num_leases == 1
    now = start + 100.0
    while now < start + 100.0 + TTL_S:
        now += 0.5
        expiry.look(now)
    assert driver.service.num_leases == 0


async def test_the_look_for_expired_leases_survives_an_error(caplog: pytest.LogCaptureFixture) -> None:
    expiry = Expiry(InProcessDriver().service, 0.01, 0.0)
    times = iter([0.01])
    task = asyncio.create_task(expiry.run(lambda: next(times)))  # the second look fails: no time is left
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    assert "a look for expired leases failed" in caplog.text


async def test_a_watched_process_is_dead_when_it_has_ended(waiting: "subprocess.Popen[bytes]") -> None:
    watched, dead = WatchedProcess(waiting.pid), asyncio.Event()
    watched.when_dead(asyncio.get_running_loop(), dead.set)
    assert watched.is_alive()
    waiting.kill()
    await asyncio.wait_for(dead.wait(), 10)
    assert not watched.is_alive(), "not reaped yet, and dead all the same"
    watched.close()
    watched.close()
    waiting.wait()
    with pytest.raises(OctavoError) as error:
        watch_process(waiting.pid)
    assert error.value.violations[0].field == "pid"


def test_a_process_that_cannot_be_seen_counts_as_alive() -> None:
    assert isinstance(watch_process(0), UnseenProcess)
    assert watch_process(0).is_alive()


def test_metrics_are_those_of_the_state_at_the_scrape() -> None:
    """Field failure 34, the manager's part: gauges cannot freeze, they are computed when they are read."""
    logging.disable(logging.WARNING)
    driver = InProcessDriver()
    registry = make_registry(driver.service)
    driver.register("e", 8, 4)
    router = ScriptedRouter(driver)
    router.compute(*range(9))
    sequence_id, _ = router.allocate(*range(9))
    text = generate_latest(registry).decode()
    for line in (
        'octavo_kv_blocks{arena="cpu",state="used"} 3.0',
        'octavo_kv_blocks{arena="cpu",state="reserved"} 1.0',
        'octavo_kv_tenant_blocks{arena="cpu",state="in_use",tenant=""} 3.0',
        'octavo_kv_tenant_blocks{arena="cpu",state="cached",tenant=""} 0.0',
        "octavo_kv_leases 1.0",
        "octavo_kv_executors 1.0",
        'octavo_prefix_cache_queries_total{arena="cpu"} 18.0',
        'octavo_prefix_cache_hits_total{arena="cpu"} 8.0',
        'octavo_kv_block_reuse_gap_seconds_count{arena="cpu"} 2.0',
        'octavo_kv_block_reuse_gap_seconds_bucket{arena="cpu",le="0.001"} 2.0',
    ):
        assert line in text
    assert 'block_size="4"' in text
    router.release(sequence_id)
    driver.advance(TTL_S + 1)
    logging.disable(logging.NOTSET)
    text = generate_latest(registry).decode()
    assert 'octavo_kv_blocks{arena="cpu",state="used"} 0.0' in text
    assert "octavo_kv_leases 0.0" in text


def test_an_executor_that_died_is_told_apart_from_one_that_came_back() -> None:
    driver = InProcessDriver()
    registry = make_registry(driver.service)

    def read() -> tuple[float | None, float | None, float | None]:
        labels = {"executor": "e"}
        return (
            registry.get_sample_value("octavo_executor_up", labels),
            registry.get_sample_value("octavo_executor_restarts_total", labels),
            registry.get_sample_value("octavo_kv_executors"),
        )

    assert read() == (None, None, 0)
    driver.register("e", 8, 4)
    assert read() == (1, 0, 1)
    driver.kill_executor("e")
    assert read() == (None, 0, 0), "nobody misses one without a session: a spare, or the old one of a roll-out"
    epoch = driver.register("e", 8, 4)
    router = ScriptedRouter(driver)
    router.open_session("e", epoch)
    driver.kill_executor("e")
    assert read() == (0, 1, 0)
    driver.register("e", 8, 4)
    assert read() == (1, 2, 1)


def test_options_that_contradict_are_refused() -> None:
    with pytest.raises(ValidationError, match="min_lease_ttl_s"):
        CacheServiceConfig(min_lease_ttl_s=60.0)


@pytest.mark.parametrize(("closes_first", "level"), [(True, "INFO"), (False, "WARNING")])
def test_only_an_executor_that_dies_amid_its_sessions_is_worth_a_warning(
    closes_first: bool, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    driver = InProcessDriver()
    epoch = driver.register("e", 8, 4)
    _, client_epoch = driver.open_lease("r")
    driver.open_session(session := SessionKey("e", epoch, 1), "r", client_epoch)
    if closes_first:
        driver.close_session(session)
    driver.kill_executor("e")
    assert [record.levelname for record in caplog.records if "has ended" in record.message] == [level]
