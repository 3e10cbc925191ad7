"""Tokenizers of all served models, each loaded once however many engines serve it. Not here: what one does."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor as ThreadExecutor

from router.model import Model
from router.text.tokenizer import Tokenizer

LoadTokenizer = Callable[[str, int], Tokenizer]


class Tokenizers:
    """Kept by the model's fingerprint.

    Args:
        load: makes the tokenizer of a model source and a vocabulary size; slow.
        threads: where it runs.
        max_kept: models; the one that was asked for longest ago goes first.
    """

    def __init__(self, load: LoadTokenizer, threads: ThreadExecutor, max_kept: int) -> None:
        self._load = load
        self._threads = threads
        self._max_kept = max_kept
        self._by_fingerprint: dict[str, asyncio.Future[Tokenizer]] = {}

    async def of(self, model: Model) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            Exception: whatever the loading raises; the next call loads again.
        """
        future = self._by_fingerprint.pop(model.fingerprint, None)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, self._load, model.source, model.vocabulary_size)
        self._by_fingerprint[model.fingerprint] = future
        while len(self._by_fingerprint) > self._max_kept:
            del self._by_fingerprint[next(iter(self._by_fingerprint))]
        try:
            return await asyncio.shield(future)  # others may wait for it
        except Exception:
            if self._by_fingerprint.get(model.fingerprint) is future:
                del self._by_fingerprint[model.fingerprint]
            raise
