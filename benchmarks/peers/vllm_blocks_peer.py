"""vLLM's KVCacheManager, in this process, on the trace of `block_trace`. Needs vLLM alone.

python vllm_blocks_peer.py < rounds.jsonl
"""

from array import array
from collections.abc import Callable
from typing import Any

import block_trace
import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_SIZE = block_trace.BLOCK_SIZE


class Manager:
    """As vLLM's scheduler calls it; the hash is the default one of its configuration."""

    hashes_in_look_up = False

    def __init__(self, num_blocks: int, hasher: Callable[[Request], Any]) -> None:
        layer = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        group = KVCacheGroupSpec(["layer"], layer)
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])
        sizes = {"scheduler_block_size": BLOCK_SIZE, "hash_block_size": BLOCK_SIZE}
        self._manager = KVCacheManager(config, max_model_len=131_072, enable_caching=True, **sizes)
        self._hasher = hasher

    def native(self, tokens: "array[int]") -> list[int]:
        return tokens.tolist()

    def admit(self, number: int, prompt: list[int]) -> Request:
        request = self._request(number, prompt)
        computed, num_computed = self._manager.get_computed_blocks(request)[:2]
        allocated = self._manager.allocate_slots(request, len(prompt) - num_computed, num_computed, computed)
        assert allocated is not None
        request.num_computed_tokens = len(prompt)
        return request

    def grow(self, request: Request, tokens: list[int]) -> None:
        """A step a token, as it runs."""
        for token in tokens:
            request.append_output_token_ids(token)
            assert self._manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1

    def release(self, request: Request) -> None:
        self._manager.free(request)

    def hash(self, prompt: list[int]) -> Request:
        """Made with the request."""
        return self._request(0, prompt)

    def look_up(self, number: int, prompt: list[int], keys: Request) -> int:
        return int(self._manager.get_computed_blocks(keys)[1])

    def _request(self, number: int, prompt: list[int]) -> Request:
        return Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=block_trace.ANSWER_TOKENS),
            pooling_params=None,
            block_hasher=self._hasher,
        )


def main() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    block_trace.serve(vllm.__version__, lambda num_blocks: Manager(num_blocks, hasher))


if __name__ == "__main__":
    main()
