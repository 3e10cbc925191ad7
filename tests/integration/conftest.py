"""Engines that several files share: starting one costs more than most tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.collector import Collector, running_collector
from tests.engines import RunningEngine, running_engine
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that `llama_engine` serves."""
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the processes of `llama_engine` send their traces."""
    with running_collector() as running:
        yield running


@pytest.fixture(scope="session")
def llama_engine(tiny_llama: Path, collector: Collector) -> Iterator[RunningEngine]:
    """Serves it in blocks of 16 tokens with 1 thread, until all tests are done."""
    options = ("--executor.threads=1", "--executor.kv-memory-mib=16", "--otel-traces")
    with running_engine(str(tiny_llama), *options, **collector.variables) as engine:
        yield engine
