"""What the executor's registry says after steps."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from executor.metrics import ExecutorMetrics, MeteredRunner, StateCollector
from executor.step import MODEL_ERROR, StepError
from tests.executor_cases import ScriptedRunner, process, row, scripted_session, step


def test_steps_are_counted_once_and_gauges_follow_the_state():
    registry, runner = CollectorRegistry(), ScriptedRunner()
    session = scripted_session(MeteredRunner(runner, ExecutorMetrics(registry, "m")))  # type: ignore[arg-type]
    registry.register(StateCollector({"executor": "e", "attention": "torch"}, lambda: 1, lambda: session.num_rows))
    first = step(1, [(0, 0, 3)], started_rows=(row(0, [1, 2, 3], [1]),))
    process(session, first)
    process(session, first)  # the stored result: no second step
    runner.error = StepError(MODEL_ERROR, "broken")
    process(session, step(2, [(0, 3, 1)]))
    assert registry.get_sample_value("octavo_iteration_tokens_sum", {"model_name": "m"}) == 3
    assert registry.get_sample_value("octavo_iteration_tokens_count", {"model_name": "m"}) == 1
    part = {"model_name": "m", "part": "execute"}
    assert registry.get_sample_value("octavo_step_time_seconds_sum", part) == pytest.approx(7e-6)
    failed = {"model_name": "m", "reason": MODEL_ERROR}
    assert registry.get_sample_value("octavo_steps_failed_total", failed) == 1
    assert registry.get_sample_value("octavo_executor_rows") == 1
    assert b'octavo_executor_info{attention="torch",executor="e"} 1.0' in generate_latest(registry)
