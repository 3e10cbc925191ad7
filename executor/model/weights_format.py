"""Number formats by the names that options have, and by those that torch has."""

from collections.abc import Mapping
from types import MappingProxyType

from executor.config import ExecutorConfig, Weights

INT8 = "int8"
_LOADED_AS: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", INT8: "float32"}
)


def loaded_as(weights: Weights) -> str:
    """The format that a model's weights are loaded in; int8 comes after that."""
    return _LOADED_AS[weights]


def kv_dtype_of(config: ExecutorConfig) -> str:
    """Of the KV blocks. Who takes int8 weights wants what that saves here too (decision 55 has what it costs)."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return INT8 if config.weights == INT8 else loaded_as(config.weights)
