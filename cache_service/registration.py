"""What an executor asks for when it registers, whether it may, and whether it can share an arena that is there.

Not here: epochs (registry), what ends with an executor (service), and how an arena is made (arena).
"""

from collections.abc import Callable
from dataclasses import dataclass

from cache_service import refusal
from cache_service.geometry import ArenaDescription, KvGeometry, count_blocks
from cache_service.lease import LeaseBook
from cache_service.managed_arena import Arenas
from cache_service.registry import Executor, ExecutorRegistry
from octavo.errors import FieldViolation, OctavoError, invalid_argument


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


class Registrar:
    """Decides about registrations. Part of the service, on its tables.

    Args:
        end_executor: told of one that is found dead.
    """

    def __init__(
        self,
        arenas: Arenas,
        registry: ExecutorRegistry,
        leases: LeaseBook,
        end_executor: Callable[[Executor, float], None],
    ) -> None:
        self._arenas = arenas
        self._registry = registry
        self._leases = leases
        self._end_executor = end_executor

    def begin(self, asked: Registration, now: float) -> Executor | None:
        """Decide whether an executor may register; what it does not share is removed to make room for its arena.

        Returns:
            The live executor if this is the same process again. Otherwise None: if the arena exists now, it is to be
            joined, if not, it is to be made. Registrations do not overlap.

        Raises:
            OctavoError: EXECUTOR_ALIVE, GEOMETRY_MISMATCH, STALE_EPOCH, INVALID_ARGUMENT.
        """
        if not asked.executor_id:
            raise invalid_argument(
                FieldViolation("executor_id", "is empty; a name that tells this executor from others")
            )
        if asked.executor_epoch:
            executor = self._registry.find_alive(asked.executor_id, asked.executor_epoch)
            self._check_same_arena(executor, asked)
            return executor
        earlier = self._registry.find(asked.executor_id)
        if earlier is not None and earlier.is_alive:
            if earlier.process.is_alive():
                return self._same_process(earlier, asked)
            self._end_executor(earlier, now)
        self._make_room(asked)
        return None

    def _same_process(self, alive: Executor, asked: Registration) -> Executor:
        """The living executor, if it is the one that asks: the answer to its first registration was lost."""
        if not asked.pid or asked.pid != alive.pid:
            raise refusal.executor_alive(alive.executor_id, alive.epoch)
        self._check_same_arena(alive, asked)
        return alive

    def _check_same_arena(self, executor: Executor, asked: Registration) -> None:
        if executor.arena_id != asked.arena_id:
            raise invalid_argument(
                FieldViolation("arena_id", f"is {asked.arena_id!r}; this process registered for {executor.arena_id!r}")
            )
        mismatch = mismatch_of(self._arenas.find(asked.arena_id).memory.description, asked)
        if mismatch is not None:
            raise mismatch

    def _make_room(self, asked: Registration) -> None:
        """Remove an arena of another shape, if nobody uses it."""
        if not self._arenas.has(asked.arena_id):
            return
        arena = self._arenas.find(asked.arena_id)
        is_used = arena.manager.num_sequences or self._registry.any_alive_on(asked.arena_id)
        mismatch = mismatch_of(arena.memory.description, asked)
        if mismatch is not None and is_used:
            raise mismatch
        # One of a stack that died whole and was started with another size serves nobody as it is.
        is_leftover = arena.is_inherited and not is_used and not len(self._leases)
        if mismatch is not None or (is_leftover and not is_size_of(arena.memory.description, asked)):
            self._arenas.remove(arena)
