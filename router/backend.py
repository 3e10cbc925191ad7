"""One engine with the tokenizer of its model: the way of a request from its prompt's ids into the queue.

Not here: gRPC, which engine a request goes to (dispatch), and the connections that keep the engine fed (link).
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor as ThreadExecutor
from dataclasses import replace
from typing import TypeVar

from router import admission
from router.clients.compiler import ConstraintCompiler
from router.engine import Engine
from router.live import LiveRequest
from router.model import Model
from router.request import Chat, Prompt, RequestSpec
from router.sampling import check_leaves_a_token
from router.text.answer import AnswerText
from router.text.detokenizer import Detokenizer, without_held
from router.text.stop import StopScanner
from router.text.tokenizer import Tokenizer

T = TypeVar("T")


class Backend:
    """An engine as requests come to it.

    Args:
        name: of the engine, as configured.
        threads: where tokenizing and rendering run, so that a long prompt stalls nobody's stream.
        pool: tells its KV blocks from those of other engines; those that share a pool share what is cached.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        engine: Engine,
        tokenizer: Tokenizer,
        threads: ThreadExecutor,
        pool: Hashable = None,
    ) -> None:
        self.name = name
        self.model = model
        self.engine = engine
        self.tokenizer = tokenizer
        self.pool = pool
        self._threads = threads
        self._compiler = ConstraintCompiler(tokenizer.definition, model.vocabulary_size, model.eos_token_ids)

    async def close(self) -> None:
        """End what runs beside it. Requests must have ended."""
        await self._compiler.close()

    async def start(self, live: LiveRequest, spec: RequestSpec) -> None:
        """Queue a reserved request whose prompt fits.

        Raises:
            OctavoError: INVALID_ARGUMENT for a constraint that cannot be followed, or when no token would be left to
                generate.
        """
        spec = await self._with_texts(spec)
        check_leaves_a_token(live.checked, spec.banned, self.model)
        self.engine.submit(live, spec, [self._answer_text(spec) for _ in live.choices])

    async def encode_prompt(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a prompt, as Generate sees it.

        Raises:
            OctavoError: FAILED_PRECONDITION when it is too long for any answer, INVALID_ARGUMENT from the template.
        """
        if not isinstance(prompt, str | Chat):
            admission.check_prompt_length(len(prompt), self.model)
            return tuple(prompt)
        return await self._in_thread(lambda: self._encode(prompt, add_special_tokens))

    async def decode(self, token_ids: tuple[int, ...], *, skip_special_tokens: bool) -> str:
        """Text of ids."""
        return await self._in_thread(lambda: self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def _encode(self, prompt: str | Chat, add_special_tokens: bool) -> tuple[int, ...]:
        # A template writes its special tokens itself.
        is_chat = isinstance(prompt, Chat)
        text = self.tokenizer.render_chat(prompt, self.model.max_context_tokens) if isinstance(prompt, Chat) else prompt
        self.tokenizer.check_text_length(text, self.model.max_context_tokens)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens and not is_chat)

    async def _with_texts(self, spec: RequestSpec) -> RequestSpec:
        """Fill in what takes the tokenizer or a grammar's compiler; most requests ask nothing of them."""
        checked = spec.checked
        if checked.constraint is not None:
            resumed = [token_ids for _, token_ids in checked.resume]
            spec = replace(spec, grammar=await self._compiler.grammar_of(checked.constraint, resumed))
        if not (checked.output.echo or checked.sampling.bad_words):
            return spec
        return await self._in_thread(
            lambda: replace(
                spec,
                banned=self._banned(checked.sampling.bad_words),
                echo_text=self._echo_text(spec),
            )
        )

    def _banned(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word as it is and behind a space: in a sentence they are often others."""
        texts = [text for word in words for text in (word, f" {word}")]
        sequences = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))

    def _echo_text(self, spec: RequestSpec) -> str:
        if not spec.checked.output.echo:
            return ""
        skips = spec.checked.output.skip_special_tokens
        text = self.tokenizer.decode(spec.prompt_ids, skip_special_tokens=skips)
        return without_held(text) if _is_ids(spec.checked.prompt) else text

    def _answer_text(self, spec: RequestSpec) -> AnswerText:
        checked = spec.checked

        def decode(token_ids) -> str:
            return self.tokenizer.decode(token_ids, skip_special_tokens=checked.output.skip_special_tokens)

        detokenizer = Detokenizer(decode, spec.prompt_ids, can_split_prompt=_is_ids(checked.prompt))
        stopping = checked.stopping
        scanner = StopScanner(stopping.stop, include_stop=stopping.include_stop)
        return AnswerText(detokenizer, scanner, min_tokens=stopping.min_tokens)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _is_ids(prompt: Prompt) -> bool:
    """Ids of a client's own; only such a prompt can end inside a character."""
    return not isinstance(prompt, str | Chat)
