"""All engines behind this router, and the models that they serve. A single engine is a fleet of one.

Not here: the connections of one engine (link), and which engine a request goes to (dispatch).
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor as ThreadExecutor

from octavo.tls import internal_tls
from router import refusals
from router.backend import Backend
from router.config import RouterConfig
from router.link import Common, Link
from router.observer import Observers
from router.text.tokenizer import load_tokenizer
from router.text.tokenizers import LoadTokenizer, Tokenizers


class Fleet:
    """Links, by what is asked of them.

    Args:
        on_ready: told whenever requests can, or can no longer, be taken by any engine.
        load: makes the tokenizer of a model source.

    Attributes:
        links: in the order of the configuration.
        is_draining: set by whoever ends the router; no new request is taken from then on.
        observers: who counts what happens on each engine.
        on_change: called whenever an engine can, or can no longer, take requests.
    """

    def __init__(
        self,
        config: RouterConfig,
        router_id: str,
        observers: Observers,
        threads: ThreadExecutor,
        on_ready: Callable[[bool], Awaitable[None]],
        load: LoadTokenizer = load_tokenizer,
    ) -> None:
        self.router_id = router_id
        self.is_draining = False
        self.on_change: Callable[[], None] = lambda: None
        self.observers = observers
        self._on_ready = on_ready
        tokenizers = Tokenizers(load, threads, max_kept=len(config.fleet))
        self.tls = internal_tls(config)
        common = Common(config, router_id, observers, tokenizers, threads, self._tell_ready, self.tls)
        self.links = tuple(Link(address, common) for address in config.fleet)

    @property
    def is_ready(self) -> bool:
        """Whether any engine takes requests."""
        return any(link.is_ready for link in self.links)

    @property
    def backends(self) -> list[Backend]:
        """Of all engines that were reached, those that are lost now among them."""
        return [link.backend for link in self.links if link.backend is not None]

    @property
    def ready_backends(self) -> list[Backend]:
        """Of all engines that take requests now."""
        return [link.backend for link in self.links if link.is_ready and link.backend is not None]

    @property
    def num_live(self) -> int:
        """Requests of all engines."""
        return sum(len(backend.engine.roster) for backend in self.backends)

    def start(self) -> None:
        """Begin to connect."""
        for link in self.links:
            link.start()

    async def close(self) -> None:
        """Leave every engine in order."""
        self.is_draining = True
        await asyncio.gather(*(link.close() for link in self.links))

    def backends_for(self, model_name: str) -> list[Backend]:
        """Engines that serve a model, or did so last, those that take requests now first; unset: the only model.

        Raises:
            OctavoError: NOT_FOUND for no model of this name, or none where there are several; UNAVAILABLE where none is
                reached, or one that was never reached may have it.
        """
        served = self._resolve(model_name)
        links = sorted(self.links, key=lambda link: not link.is_ready)
        backends = [link.backend for link in links if link.backend is not None]
        found = [backend for backend in backends if backend.model.name == served]
        if not found:
            raise refusals.not_reached(served)
        return found

    def ready_backends_for(self, model_name: str) -> list[Backend]:
        """Engines that take requests for a model now.

        Raises:
            OctavoError: as `backends_for`; UNAVAILABLE where none does.
        """
        found, ready = self.backends_for(model_name), self.ready_backends
        backends = [backend for backend in found if backend in ready]
        if not backends:
            raise refusals.not_reached(found[0].model.name)
        return backends

    def _resolve(self, model_name: str) -> str:
        served = sorted({link.model.name for link in self.links if link.model is not None})
        if not served:
            raise refusals.nothing_served()
        if not model_name and len(served) == 1:
            return served[0]
        if model_name in served:
            return model_name
        unknown = [link.name for link in self.links if link.model is None]
        raise refusals.may_be_served(served, unknown) if model_name and unknown else refusals.no_such_model(served)

    async def _tell_ready(self) -> None:
        self.on_change()
        await self._on_ready(self.is_ready)
