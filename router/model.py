"""What the router must know of the served model and its pool: numbers only, told by the executor."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """A model as an executor serves it.

    Attributes:
        source: what the tokenizer is loaded from.
        num_blocks: of the pool, the reserved block 0 included.
        max_rows: slots of a session.
    """

    name: str
    source: str
    revision: str
    fingerprint: str
    architecture: str
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    arena_id: str
    block_size: int
    num_blocks: int
    kv_dtype: str
    weights_dtype: str
    attention: str
    device: str
    max_rows: int
    max_tokens_per_step: int
    max_steps_in_flight: int

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold: all but the reserved one."""
        return self.num_blocks - 1

    def can_go_on_for(self, other: "Model") -> bool:
        """Whether what runs on `other` can run on this one: KV and tables are good for it, and no limit is lower."""
        mine = (self.fingerprint, self.arena_id, self.block_size, self.num_blocks, self.kv_dtype)
        is_same_pool = mine == (
            *(other.fingerprint, other.arena_id, other.block_size, other.num_blocks, other.kv_dtype),
        )
        return is_same_pool and all(
            here >= there
            for here, there in (
                (self.max_context_tokens, other.max_context_tokens),
                (self.max_rows, other.max_rows),
                (self.max_tokens_per_step, other.max_tokens_per_step),
                (self.max_steps_in_flight, other.max_steps_in_flight),
            )
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """An executor as it describes itself.

    Attributes:
        is_draining: it wants to end, and takes no new sessions.
    """

    executor_id: str
    model: Model
    is_draining: bool = False


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens`."""
    return -(-num_tokens // block_size)
