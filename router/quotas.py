"""How many blocks the running requests of a tenant may hold, how many they do, and which of them gives way.

A block that several choices of a tenant share counts once. What is asked for and not answered counts as if no block of
it were shared, so the sum never passes the quota whatever the answer brings. A tenant whose requests hold nothing can
have all of its quota, and what needs more was refused at its admission: so one of its choices always goes on.

Not here: the blocks of all tenants together (admission, cache service), and what is done with the answers (capacity).
"""

from collections.abc import Iterator
from itertools import chain

from router import admission
from router.live import Choice, num_held_blocks
from router.model import Model, blocks_for
from router.roster import Roster
from router.scheduler import UNBOUNDED


class Quotas:
    """Quotas of the tenants of one engine, by what its roster says they hold."""

    def __init__(self, model: Model, roster: Roster) -> None:
        self._model = model
        self._roster = roster
        self._closed: set[str] = set()  # tenants of which nobody is admitted before one of theirs ended
        self._held: dict[str, int] = {}  # blocks by tenant, each once, as counted since the last change

    def room(self, choice: Choice, enough: int) -> int:
        """Blocks that its tenant may ask for besides; where they are enough, perhaps fewer than there are."""
        share = choice.checked.max_kv_share
        if share >= 1:
            return UNBOUNDED
        own = list(self._holders(choice.checked.tenant))
        left = admission.quota_blocks(share, self._model) - sum(each.num_asked_blocks for each in own)
        if left - sum(len(each.block_ids) for each in own) >= enough:
            return enough
        if choice.checked.tenant not in self._held:
            self._held[choice.checked.tenant] = num_held_blocks(own)
        return left - self._held[choice.checked.tenant]

    def recount(self) -> None:
        """Somebody may have got blocks, or given some up, since they were counted."""
        self._held.clear()

    def admits(self, choice: Choice) -> bool:
        """Whether its tenant may have what it needs to begin, and does not first have to end something."""
        if choice.checked.max_kv_share >= 1:
            return True
        if choice.num_steps_in_flight:
            return False  # it gave way, and what it computed last is still to come
        tenant = choice.checked.tenant
        if tenant in self._closed:
            if next(self._holders(tenant), None) is not None:
                return False
            self._closed.discard(tenant)
        needed = blocks_for(len(choice.tokens), self._model.block_size)
        return self.room(choice, needed) >= needed

    def choose_victim(self, tenant: str) -> Choice | None:
        """The newest of the lowest priority of the tenant; nobody when it would be the only one."""
        running = self._roster.running
        victim = admission.choose_victim(each.row for each in running.values() if each.checked.tenant == tenant)
        return running[victim.slot] if victim is not None else None

    def close(self, tenant: str) -> None:
        """One of its choices gave way: were it admitted at once, it would give way again and again."""
        self._closed.add(tenant)

    def reopen(self, tenant: str) -> None:
        """One of its choices ended."""
        self._closed.discard(tenant)

    def clear(self) -> None:
        """Nobody holds a block any more."""
        self._closed.clear()

    def _holders(self, tenant: str) -> Iterator[Choice]:
        """Its choices that have blocks or wait for an answer about some."""
        roster = self._roster
        everybody = chain(roster.running.values(), roster.allocating.values(), roster.forking.values())
        return (choice for choice in everybody if choice.checked.tenant == tenant)
