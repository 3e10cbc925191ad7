"""From a checked request to the engine that serves it, and back out of it.

A request is reserved at the idlest engine of its model at once, so that its id and the bound of the queue hold before
anything is tokenized. When its prompt is known it goes to the engine that `placement` prefers, and while it waits there
and that engine is lost, to another. Not here: the preference itself, engines and their connections (fleet, link).
"""

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from octavo.errors import OctavoError
from router import admission, placement, refusals
from router.backend import Backend
from router.fleet import Fleet
from router.live import LiveRequest
from router.placement import Candidate
from router.prefixes import PrefixIndex, PrefixKey, prefix_keys
from router.request import CheckedRequest, RequestSpec
from router.tenants.accounts import over_limit
from router.tenants.tenant import Tenant

QUEUE_RETRY_S = 1.0

log = logging.getLogger(__name__)

Keys = Mapping[int, Sequence[PrefixKey]]  # of a prompt, by block size


@dataclass(slots=True, eq=False)
class Ticket:
    """A live request and the engine that has it now."""

    live: LiveRequest
    backend: Backend


class Dispatcher:
    """Every request goes through here; ids of a tenant are unique over all engines."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefixes: dict[Hashable, PrefixIndex] = {}  # by pool
        self._tickets: dict[LiveRequest, Ticket] = {}
        self._num_turns = 0
        self._last_turns: dict[str, int] = {}  # by engine
        fleet.on_change = self._relocate_all

    def engines_for(self, model_name: str) -> list[Backend]:
        """Engines that take requests for a model now, at least one; where their weights differ, those of the idlest.

        Raises:
            OctavoError: as `Fleet.ready_backends_for`.
        """
        ready = self._fleet.ready_backends_for(model_name)
        idlest = min(ready, key=lambda backend: len(backend.engine.roster))
        return [backend for backend in ready if backend.model.fingerprint == idlest.model.fingerprint]

    def check_queue_share(self, backends: list[Backend], tenant: Tenant) -> None:
        """Raises OctavoError, RESOURCE_EXHAUSTED, where a tenant has all the places in queues that it may have."""
        if tenant.max_queue_share >= 1:
            return
        engines = [backend.engine for backend in backends]
        places = sum(engine.limits.max_queued_requests for engine in engines)
        allowed = math.ceil(tenant.max_queue_share * places)
        queued = sum(engine.roster.num_queued_of(tenant.name) for engine in engines)
        if queued >= allowed + sum(engine.roster.num_free_slots for engine in engines):
            what = f"{queued} of its requests wait, and {allowed} may, of {places}"
            raise over_limit("max_queue_share", what, tenant.max_queue_share, QUEUE_RETRY_S)

    def reserve(self, backends: list[Backend], checked: CheckedRequest) -> Ticket:
        """Take a place in the queue of the idlest engine. A live request of the same id and body is superseded.

        Args:
            backends: of `engines_for`.

        Raises:
            OctavoError: ALREADY_EXISTS for an id that lives with another body; as `Engine.reserve`.
        """
        self._supersede(checked, backends[0].model.name)
        wide = [backend for backend in backends if _is_wide_enough(backend, checked)]
        backend = self._rank(wide or backends, checked, {})[0]
        ticket = Ticket(backend.engine.reserve(checked), backend)
        self._tickets[ticket.live] = ticket
        return ticket

    async def start(self, ticket: Ticket) -> None:
        """Tokenize the prompt, choose the engine, and queue the request there.

        Raises:
            OctavoError: FAILED_PRECONDITION when it can never fit; INVALID_ARGUMENT from the chat template, or as
                `Backend.start`.
        """
        prompt_ids = await ticket.backend.encode_prompt(ticket.live.checked.prompt)
        if not ticket.live.is_ended:
            spec = self._place(ticket, prompt_ids)
            await ticket.backend.start(ticket.live, spec)
            if ticket.backend not in self._fleet.ready_backends:
                self._relocate(ticket)

    def cancel(self, request_id: str, tenant: str = "") -> bool:
        """End a request in order. False: no live one of the tenant has this id."""
        return any(backend.engine.cancel(request_id, tenant) for backend in self._fleet.backends)

    def leave(self, ticket: Ticket) -> None:
        """The client is gone, or has its answer."""
        ticket.backend.engine.leave(ticket.live)
        del self._tickets[ticket.live]

    def _supersede(self, checked: CheckedRequest, model_name: str) -> None:
        request_id = checked.request_id
        for backend in self._fleet.backends:
            older = backend.engine.roster.find(request_id, checked.tenant)
            if older is None:
                continue
            if backend.model.name != model_name or not older.checked.is_same_body(checked):
                raise refusals.id_is_live(request_id)
            backend.engine.fail(older, refusals.superseded(request_id))

    def _place(self, ticket: Ticket, prompt_ids: tuple[int, ...]) -> RequestSpec:
        """Move the request to the best engine that it fits. Raises what the best one says where it fits none."""
        checked = ticket.live.checked
        backends = self._choices(ticket)
        keys = self._keys(checked, prompt_ids, backends)
        refusal: OctavoError | None = None
        for backend in self._rank(backends, checked, keys, ticket):
            try:
                spec = admission.fit(checked, prompt_ids, backend.model)
            except OctavoError as error:
                refusal = refusal or error
                continue
            self._move(ticket, backend)
            self._index(backend).add(keys.get(backend.model.block_size, ()))
            return spec
        assert refusal is not None, "there is always an engine"
        raise refusal

    def _relocate_all(self) -> None:
        """What waits at an engine that is lost need not wait for it."""
        ready = self._fleet.ready_backends
        for ticket in list(self._tickets.values()):
            if ticket.backend not in ready:
                self._relocate_or_fail(ticket)

    def _relocate_or_fail(self, ticket: Ticket) -> None:
        """What goes wrong with one request is no matter of the engine that is lost, or that came."""
        try:
            self._relocate(ticket)
        except Exception:
            log.exception(
                "request %s: a fault of the router, a defect to report; it ends alone", ticket.live.request_id
            )
            self._fleet.observers.on_fault(ticket.backend.name)
            ticket.backend.engine.fail(ticket.live, refusals.router_fault())

    def _relocate(self, ticket: Ticket) -> None:
        live = ticket.live
        if not live.is_submitted or live.has_begun or live.is_ended or not self._others(ticket):
            return
        try:
            live.refit(self._place(ticket, live.spec.prompt_ids))
        except OctavoError as error:
            log.info("request %s waits for %s: %s", live.request_id, ticket.backend.name, error.message)

    def _choices(self, ticket: Ticket) -> list[Backend]:
        """Engines that could take it; where its own is lost, that one only if there is no other."""
        others = self._others(ticket)
        return others if others and ticket.backend not in self._fleet.ready_backends else [ticket.backend, *others]

    def _others(self, ticket: Ticket) -> list[Backend]:
        """Other engines of the same weights that take requests now and have room."""
        current, checked = ticket.backend, ticket.live.checked
        return [
            backend
            for backend in self._fleet.ready_backends
            if backend is not current
            and backend.model.fingerprint == current.model.fingerprint
            and backend.model.name == current.model.name
            and backend.engine.has_room
            and _is_wide_enough(backend, checked)
        ]

    def _move(self, ticket: Ticket, backend: Backend) -> None:
        self._num_turns += 1
        self._last_turns[backend.name] = self._num_turns
        if backend is not ticket.backend:
            ticket.backend.engine.hand_over(ticket.live)
            backend.engine.adopt(ticket.live)
            ticket.backend = backend

    def _rank(
        self, backends: list[Backend], checked: CheckedRequest, keys: Keys, ticket: Ticket | None = None
    ) -> list[Backend]:
        """The best first; the request of a ticket does not count for the engine that has it."""
        candidates = [
            Candidate(
                num_cached_tokens=self._num_cached_tokens(backend, keys),
                num_live=len(backend.engine.roster) - (ticket is not None and backend is ticket.backend),
                can_begin=backend.engine.can_begin(checked.sampling.num_choices),
                last_turn=self._last_turns.get(backend.name, 0),
            )
            for backend in backends
        ]
        return [backends[index] for index in placement.ranked(candidates)]

    # -------------------------------------------------------------------------------------------------------- prefixes

    def _keys(self, checked: CheckedRequest, prompt_ids: tuple[int, ...], backends: list[Backend]) -> Keys:
        """None where there is nothing to choose, or where the cache is not to be used."""
        if len(self._fleet.links) == 1 or checked.bypass_cache:
            return {}
        sizes = {backend.model.block_size for backend in backends}
        return {size: prefix_keys(checked.scope, prompt_ids, size) for size in sizes}

    def _num_cached_tokens(self, backend: Backend, keys: Keys) -> int:
        size = backend.model.block_size
        return size * self._index(backend).num_matching(keys.get(size, ()))

    def _index(self, backend: Backend) -> PrefixIndex:
        if backend.pool not in self._prefixes:
            pools = {other.pool for other in self._fleet.backends}
            self._prefixes = {pool: index for pool, index in self._prefixes.items() if pool in pools}
            self._prefixes[backend.pool] = PrefixIndex(backend.model.num_usable_blocks)
        return self._prefixes[backend.pool]


def _is_wide_enough(backend: Backend, checked: CheckedRequest) -> bool:
    return backend.engine.limits.max_running_requests >= checked.sampling.num_choices
