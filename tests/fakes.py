"""A scripted executor and a byte-level tokenizer: a whole stack without a model.

The executor speaks the real session protocol over a real gRPC server and registers at a real cache service. Its arena
is a dictionary that remembers, for each written place of each block, which history was computed there, so every step
proves that the blocks it reads hold exactly the row's own history.
"""

import asyncio
import os
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.errors import Code, OctavoError
from octavo.rpc import ServerParts, error_of_call, open_channel, start_server
from octavo.tls import TlsSource
from octavo.v1 import cache_pb2, cache_pb2_grpc, executor_pb2, executor_pb2_grpc

BLOCK_SIZE = 4
EOS = 256
VOCABULARY_SIZE = 260
FINGERPRINT = "f" * 64
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Candidates for the next token of a history, the best first.
Script = Callable[[tuple[int, ...]], Sequence[int]]
Places = dict[tuple[int, int], int | None]  # (block, place in it) -> hash of the history up to there


def counting(history: tuple[int, ...]) -> Sequence[int]:
    """Every token follows from the one before, and never ends: the default script."""
    return ((history[-1] * 7 + len(history)) % 90 + 33, 33)


def saying(text: str | bytes, then: int = EOS) -> Script:
    """The answer to any prompt that ends in "?": this text byte by byte, then `then`."""
    answer = list(text.encode() if isinstance(text, str) else text)
    return telling(answer, then)


def telling(token_ids: Sequence[int], then: int = EOS) -> Script:
    """The answer to any prompt that ends in "?": these ids, then `then` for ever."""

    def script(history: tuple[int, ...]) -> Sequence[int]:
        num_said = len(history) - 1 - max(index for index, token in enumerate(history) if token == ord("?"))
        best = token_ids[num_said] if num_said < len(token_ids) else then
        return (best, ord("_"), ord("-"))

    return script


def draw(candidates: Sequence[int], seed: int, choice: int, position: int) -> int:
    """One of the candidates: a pure function, as the real noise is."""
    return candidates[zlib.crc32(f"{seed} {choice} {position}".encode()) % len(candidates)]


def likely(history: Sequence[int]) -> list[tuple[int, float]]:
    """The best next tokens of a history for a search, with scores that float32 holds: twelve letters, and now and then
    an end. Scores are a pure function of the history, and no two of them are equal."""
    dice = zlib.crc32(repr(tuple(history)).encode())
    scores = {97 + (dice + index) % 12: -(1 + index + (dice >> index) % 8 / 16) / 4 for index in range(12)}
    if dice % 5 == 0:
        scores[EOS] = -0.21875
    return sorted(scores.items(), key=lambda each: (-each[1], each[0]))


# ------------------------------------------------------------------------------------------------------------ tokenizer


def save_byte_tokenizer(folder: Path) -> Path:
    """A tokenizer whose id b is the byte b, with <eos> and three tokens of many bytes, and a chat template."""
    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def _byte_alphabet() -> list[str]:
    """Byte -> the character that byte-level tokenizers write for it (the table of GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}
    return [table[byte] for byte in range(256)]


# ------------------------------------------------------------------------------------------------------------- executor


@dataclass
class _Row:
    """A row as the executor keeps it."""

    tokens: list[int]
    num_computed: int
    block_ids: list[int]
    sampling: executor_pb2.RowSampling
    num_samples: int = 1


class StepRefusedError(Exception):
    """Raise it from a hook to answer StepFailed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass
class Hooks:
    """What a test can do to an executor. All may be changed at any time."""

    before_step: Callable[[executor_pb2.Step], Awaitable[None]] | None = None
    fail_rows: Callable[[_Row], bool] = lambda row: False
    breaks_next: bool = False  # the session ends instead of running its next step
    is_open: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: steps wait
    is_draining: asyncio.Event = field(default_factory=asyncio.Event)  # set: it wants to end

    def __post_init__(self) -> None:
        self.is_open.set()


@dataclass
class FakeExecutor:
    """A process of an executor; a second one with the same arena is its replacement."""

    script: Script
    tokenizer_source: str
    cache_address: str
    num_blocks: int = 64
    max_context_tokens: int = 256
    max_rows: int = 16
    max_tokens_per_step: int = 64
    max_steps_in_flight: int = 2
    listen: str = "127.0.0.1:0"
    eos_token_ids: tuple[int, ...] = (EOS,)
    executor_id: str = "fake"
    pid: int = field(default_factory=os.getpid)
    model_name: str = "scripted"
    fingerprint: str = FINGERPRINT
    tls: TlsSource | None = None
    draws: bool = False  # whether rows with a temperature draw among the candidates
    arena: Places = field(default_factory=dict)
    hooks: Hooks = field(default_factory=Hooks)
    steps: list[executor_pb2.Step] = field(default_factory=list)  # that were applied
    rows: dict[int, _Row] = field(default_factory=dict)
    epoch: int = 0
    _num_sessions: int = 0
    _server: ServerParts | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        """Register at the cache service and listen."""
        self._channel = open_channel(self.cache_address, self.tls)
        self._cache = cache_pb2_grpc.BlockManagerServiceStub(self._channel)
        layer = cache_pb2.LayerGeometry(num_kv_heads=1, k_head_dim=64, v_head_dim=64)
        block_bytes = 2 * 64 * 4 * BLOCK_SIZE
        response = await self._cache.RegisterExecutor(
            cache_pb2.RegisterExecutorRequest(
                executor_id=self.executor_id,
                pid=self.pid,
                arena_id="cpu",
                model_fingerprint=self.fingerprint,
                geometry=cache_pb2.KvGeometry(block_size=BLOCK_SIZE, dtype="float32", layers=[layer]),
                kv_bytes=self.num_blocks * block_bytes,
            )
        )
        assert response.arena.num_blocks == self.num_blocks, response.arena
        self.epoch = response.executor_epoch
        servicer = _ExecutorServicer(self)
        self._server = await start_server(
            self.listen,
            [
                (
                    "octavo.v1.ExecutorService",
                    lambda server: executor_pb2_grpc.add_ExecutorServiceServicer_to_server(servicer, server),
                )
            ],
            tls=self.tls,
        )

    async def stop(self) -> None:
        """The process is gone, in the middle of whatever it did."""
        self.hooks.is_open.set()
        if self._server is not None:
            await self._server.server.stop(0)
        await self._channel.close()

    def info(self) -> executor_pb2.GetExecutorInfoResponse:
        return executor_pb2.GetExecutorInfoResponse(
            executor_id=self.executor_id,
            executor_epoch=self.epoch,
            model=executor_pb2.ModelDescription(
                name=self.model_name,
                source=self.tokenizer_source,
                revision="1",
                fingerprint=self.fingerprint,
                architecture="ScriptedForCausalLM",
                vocabulary_size=VOCABULARY_SIZE,
                max_context_tokens=self.max_context_tokens,
                eos_token_ids=self.eos_token_ids,
            ),
            arena_id="cpu",
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            kv_dtype="float32",
            device="cpu",
            attention="scripted",
            weights_dtype="none",
            max_rows=self.max_rows,
            max_tokens_per_step=self.max_tokens_per_step,
            max_steps_in_flight=self.max_steps_in_flight,
            draining=self.hooks.is_draining.is_set(),
        )

    async def session(self, requests: AsyncIterator[executor_pb2.SessionRequest]) -> AsyncIterator[Any]:
        """One session from Open to its end."""
        opened = (await anext(requests)).open
        self._num_sessions += 1
        key = cache_pb2.SessionKey(
            executor_id=self.executor_id, executor_epoch=self.epoch, session_id=self._num_sessions
        )
        request = cache_pb2.OpenSessionRequest(
            session=key, client_id=opened.router_id, client_epoch=opened.router_epoch, takeover=opened.takeover
        )
        try:
            await self._cache.OpenSession(request)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from error
        self.rows.clear()
        response = executor_pb2.Opened(executor_epoch=self.epoch, session_id=key.session_id)
        yield executor_pb2.SessionResponse(opened=response)
        try:
            async for response in self._run_steps(requests):
                yield response
        finally:
            self.rows.clear()
            await asyncio.shield(self._cache.CloseSession(cache_pb2.CloseSessionRequest(session=key)))

    async def _run_steps(self, requests: AsyncIterator[executor_pb2.SessionRequest]) -> AsyncIterator[Any]:
        """As the real one: a step is read while the one before it computes, and begins right behind it."""
        incoming: asyncio.Queue[executor_pb2.SessionRequest | None] = asyncio.Queue()
        outcomes: asyncio.Queue[executor_pb2.SessionResponse | OctavoError | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_pour(requests, incoming)), asyncio.create_task(self._work(incoming, outcomes))]
        tasks.append(asyncio.create_task(self._tell_draining(outcomes)))
        try:
            while (outcome := await outcomes.get()) is not None:
                if isinstance(outcome, OctavoError):
                    raise outcome
                yield outcome
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _tell_draining(self, outcomes: asyncio.Queue) -> None:
        await self.hooks.is_draining.wait()
        outcomes.put_nowait(executor_pb2.SessionResponse(draining=executor_pb2.Draining()))

    async def _work(self, incoming: asyncio.Queue, outcomes: asyncio.Queue) -> None:
        last_applied = 0
        try:
            while (request := await incoming.get()) is not None and request.WhichOneof("message") != "close":
                if request.WhichOneof("message") != "step":
                    continue
                response = await self._run_step(request.step, last_applied)
                if response.WhichOneof("message") == "result":
                    last_applied = request.step.step_id
                outcomes.put_nowait(response)
        except OctavoError as error:
            outcomes.put_nowait(error)
        except Exception as error:
            outcomes.put_nowait(OctavoError(Code.INTERNAL, "PROTOCOL_BROKEN", repr(error)))
            raise
        finally:
            outcomes.put_nowait(None)

    async def _run_step(self, step: executor_pb2.Step, last_applied: int) -> executor_pb2.SessionResponse:
        if step.step_id != last_applied + 1:
            return executor_pb2.SessionResponse(gap=executor_pb2.StepGap(last_applied_step=last_applied))
        if self.hooks.breaks_next:
            self.hooks.breaks_next = False
            raise OctavoError(Code.UNAVAILABLE, "BROKEN", "the test broke this session")
        began = time.time()
        try:
            await self.hooks.is_open.wait()
            if self.hooks.before_step is not None:
                await self.hooks.before_step(step)
        except StepRefusedError as error:
            failed = executor_pb2.StepFailed(step_id=step.step_id, reason=error.reason, message=error.message)
            return executor_pb2.SessionResponse(failed=failed)
        self.steps.append(step)
        result = self._apply(step)
        result.began_unix_microseconds = round(began * 1e6)
        result.execute_microseconds = round((time.time() - began) * 1e6)
        return executor_pb2.SessionResponse(result=result)

    # ------------------------------------------------------------------------------------------------------- one step

    def _apply(self, step: executor_pb2.Step) -> executor_pb2.StepResult:
        for slot in step.retired_slots:
            del self.rows[slot]
        for start in step.started_rows:
            assert start.slot not in self.rows, f"slot {start.slot} holds a row"
            assert start.num_computed_tokens < len(start.token_ids), "nothing to compute"
            tables = list(start.tables[0].block_ids)
            row = _Row(list(start.token_ids), start.num_computed_tokens, tables, start.sampling)
            row.num_samples = max(1, start.sampling.num_samples)
            self.rows[start.slot] = row
        for slot, token_id in zip(step.appended_slots, step.appended_token_ids, strict=True):
            row = self.rows[slot]
            assert row.sampling.num_candidates, "a row that samples for itself"
            assert row.num_computed == len(row.tokens), "a row that is not computed whole"
            row.tokens.append(token_id)
        for extension in step.extensions:
            new_blocks = iter(extension.block_ids)
            for slot, count in zip(extension.slots, extension.counts, strict=True):
                self.rows[slot].block_ids += [next(new_blocks) for _ in range(count)]
        self._copy(step)
        self._check_writes(step)
        result = executor_pb2.StepResult(step_id=step.step_id)
        assert sum(step.num_tokens) <= self.max_tokens_per_step, "over the budget"
        assert len(set(step.slots)) == len(step.slots), "a row runs twice"
        for index, slot in enumerate(step.slots):
            row = self.rows[slot]
            assert step.start_positions[index] == row.num_computed, "a row starts where it is not"
            first = row.num_computed
            self._compute(row, step.num_tokens[index])
            asked = row.sampling
            for position in range(first + 1, row.num_computed + 1):
                if asked.prompt_logprobs_from <= position < asked.prompt_logprobs_until:
                    _add_logprob(result.prompt_logprobs, index, row, position, row.tokens[position])
            if self.hooks.fail_rows(row):
                result.num_sampled.append(0)
                result.failures.add(row=index, reason="LOGITS_NOT_FINITE", message="logits are not finite")
                continue
            if asked.num_candidates:
                self._answer_candidates(result, index, row)
                continue
            sampled = self._sample(row)
            result.num_sampled.append(len(sampled))
            result.token_ids.extend(sampled)
            if asked.logprobs:
                for token in sampled:
                    _add_logprob(result.sampled_logprobs, index, row, len(row.tokens) - 1, token)
        return result

    def _copy(self, step: executor_pb2.Step) -> None:
        """All sources are read before any target is written."""
        pairs = list(zip(step.copy_sources, step.copy_targets, strict=True))
        content = [[self.arena.get((source, place)) for place in range(BLOCK_SIZE)] for source, _ in pairs]
        for (_, target), found in zip(pairs, content, strict=True):
            for place in range(BLOCK_SIZE):
                self.arena[target, place] = found[place]

    def _check_writes(self, step: executor_pb2.Step) -> None:
        written: set[int] = set()
        for slot, start, count in zip(step.slots, step.start_positions, step.num_tokens, strict=True):
            places = range(start // BLOCK_SIZE, (start + count - 1) // BLOCK_SIZE + 1)
            blocks = {self.rows[slot].block_ids[place] for place in places}
            assert not written & blocks, "two rows write into one block"
            written |= blocks

    def _compute(self, row: _Row, num_tokens: int) -> None:
        """Write places, after proof that all places before hold this very history."""
        end = row.num_computed + num_tokens
        assert row.num_computed < end <= len(row.tokens), "tokens that are not there"
        assert end <= len(row.block_ids) * BLOCK_SIZE, "no block for a token"
        assert 0 not in row.block_ids, "the reserved block is in a table"
        for position in range(row.num_computed):
            found = self.arena.get(self._place(row, position))
            assert found == _history_hash(row.tokens[: position + 1]), f"foreign or unwritten KV at {position}"
        for position in range(row.num_computed, end):
            self.arena[self._place(row, position)] = _history_hash(row.tokens[: position + 1])
        row.num_computed = end

    def _answer_candidates(self, result: executor_pb2.StepResult, index: int, row: _Row) -> None:
        result.num_sampled.append(0)
        if row.num_computed < len(row.tokens):
            return
        asked = row.sampling
        is_suppressing = len(row.tokens) < asked.suppress_until
        out = set(asked.suppressed_token_ids) if is_suppressing else set()
        best = [each for each in likely(row.tokens) if each[0] not in out][: asked.num_candidates]
        result.candidates.rows.append(index)
        result.candidates.counts.append(len(best))
        result.candidates.token_ids.extend(token for token, _ in best)
        result.candidates.scores.extend(score for _, score in best)
        if asked.logprobs:
            for token, _ in best:
                _add_logprob(result.sampled_logprobs, index, row, len(row.tokens), token)

    def _sample(self, row: _Row) -> list[int]:
        if row.num_computed < len(row.tokens):
            return []
        is_suppressing = len(row.tokens) < row.sampling.suppress_until
        suppressed = set(row.sampling.suppressed_token_ids) if is_suppressing else set()
        candidates = [token for token in self.script(tuple(row.tokens)) if token not in suppressed]
        first = row.sampling.choice_index
        sampled = [self._draw(candidates, row, choice) for choice in range(first, first + row.num_samples)]
        row.tokens.append(sampled[0])
        row.num_samples = 1
        return sampled

    def _draw(self, candidates: Sequence[int], row: _Row, choice: int) -> int:
        """The best, or, where the test wants draws, any candidate: by seed, choice and position alone."""
        if not (self.draws and row.sampling.temperature):
            return candidates[0]
        return draw(candidates, row.sampling.seed, choice, len(row.tokens))

    @staticmethod
    def _place(row: _Row, position: int) -> tuple[int, int]:
        return row.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE


async def _pour(source: AsyncIterator[Any], target: asyncio.Queue) -> None:
    """All items, then None."""
    try:
        async for item in source:
            target.put_nowait(item)
    finally:
        target.put_nowait(None)


def fake_logprob(token_id: int, position: int) -> float:
    """What a scripted executor says of a token of a sequence: exact in float32."""
    return -token_id / 256 - position


def _add_logprob(packed: executor_pb2.Logprobs, index: int, row: _Row, position: int, token_id: int) -> None:
    num_top = row.sampling.num_top_logprobs
    packed.rows.append(index)
    packed.token_ids.append(token_id)
    packed.logprobs.append(fake_logprob(token_id, position))
    packed.ranks.append(1 + token_id % 7)
    packed.num_top.append(num_top)
    packed.top_token_ids.extend(range(num_top))
    packed.top_logprobs.extend(fake_logprob(other, position) for other in range(num_top))


def _history_hash(tokens: Sequence[int]) -> int:
    return hash(tuple(tokens))


class _ExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """The gRPC edge of a `FakeExecutor`."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._executor = executor

    async def GetExecutorInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return self._executor.info()

    async def Session(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async for response in self._executor.session(aiter(request_iterator)):
            yield response
