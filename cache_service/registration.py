"""What an executor asks for when it registers, and whether an arena that is there already can be shared with it.

Not here: who may register (service, registry) and how an arena is made (arena).
"""

from dataclasses import dataclass

from cache_service import refusal
from cache_service.geometry import ArenaDescription, KvGeometry, count_blocks
from octavo.errors import OctavoError


@dataclass(frozen=True, slots=True)
class Registration:
    """What an executor asks for; see `RegisterExecutorRequest` in cache.proto."""

    executor_id: str
    executor_epoch: int
    arena_id: str
    model_fingerprint: str
    geometry: KvGeometry
    kv_bytes: int
    pid: int = 0  # 0: not to be seen from here


def mismatch_of(holds: ArenaDescription, asked: Registration) -> OctavoError | None:
    """Why an arena cannot be shared: blocks of another model or shape. Its size is no reason."""
    if holds.model_fingerprint != asked.model_fingerprint:
        return refusal.geometry_mismatch(holds.arena_id, "model", holds.model_fingerprint, asked.model_fingerprint)
    if holds.geometry != asked.geometry:
        return refusal.geometry_mismatch(holds.arena_id, "geometry", str(holds.geometry), str(asked.geometry))
    return None


def is_size_of(holds: ArenaDescription, asked: Registration) -> bool:
    """Whether an arena of the right shape has as many blocks as are asked for."""
    return holds.num_blocks == count_blocks(holds.layout, asked.kv_bytes)
