"""Clients under chaos: each asks one request after another, and knows what an undisturbed run answers.

An answer is judged by its tokens, text, ends and counts. A client that has a deadline, leaves, or cancels may see that
instead, behind a beginning of the answer; nobody may see anything else.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from octavo import AsyncClient
from octavo.errors import Code, OctavoError
from octavo.results import Delta, FinishReason, Generation

# How a client ends its call, and how many of a hundred do.
BEHAVIOURS = {"reads": 82, "has a deadline": 6, "leaves": 6, "cancels": 6}
VOCABULARY = range(5, 261)


def requests_of(seed: int, count: int) -> list[dict[str, Any]]:
    """Mixed requests: greedy and sampled, with and without a seed, long and short prompts, several answers, penalties,
    an echoed prompt, stop strings, with and without the cache."""
    dice = random.Random(seed)
    requests = []
    for index in range(count):
        length = dice.choice((3, 17, 40, 120))
        request: dict[str, Any] = {"prompt": [1, *(dice.choice(VOCABULARY) for _ in range(length))]}
        request |= {"max_tokens": dice.choice((20, 60, 150)), "ignore_eos": True, "temperature": 0.0}
        if index % 3 == 1:
            request |= {"temperature": 0.8, "seed": index, "top_k": 20}
        if index % 5 == 2:
            request |= {"n": 2, "temperature": 0.7}  # its seed follows from the id
        if index % 7 == 3:
            request["presence_penalty"] = 0.5
        if index % 6 == 4:
            request |= {"stop": [chr(dice.randrange(97, 123)), "never to be seen"], "min_tokens": 10}
        request |= {"echo": index % 8 == 5, "bypass_cache": index % 4 == 0}
        requests.append(request)
    return requests


@dataclass
class Score:
    """What came of it; `waits_s`: the longest wait for a token since the last blow, of each stream that it struck."""

    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_calls: int = 0
    waits_s: dict[int, float] = field(default_factory=dict)
    blow_at: float | None = None

    def begin_blow(self) -> None:
        self.waits_s, self.blow_at = {}, asyncio.get_running_loop().time()


class Crowd:
    """Clients of one server.

    Args:
        seed: of everything that they do.
    """

    def __init__(self, client: AsyncClient, seed: int, num_requests: int, timeout_s: float) -> None:
        self.score = Score()
        self._client = client
        self._seed = seed
        self._timeout_s = timeout_s
        self._requests = requests_of(seed, num_requests)
        self._expected: list[Generation] = []

    async def learn(self) -> None:
        """What an undisturbed run answers."""
        for which in range(len(self._requests)):
            prompt, options = self._options(which)
            self._expected.append(await self._client.generate(prompt, timeout_s=self._timeout_s, **options))

    async def ask_for_ever(self, number: int, is_over: asyncio.Event) -> None:
        """One request after another, until it is over; the last is read to its end."""
        dice = random.Random(f"{self._seed} {number}")
        while not is_over.is_set():
            which = dice.randrange(len(self._requests))
            behaviour = dice.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
            try:
                await self._ask(which, behaviour, number, dice)
            except Exception as error:
                self.score.wrong.append(f"request {which}, which {behaviour}: {error!r}")

    def _options(self, which: int) -> tuple[Any, dict[str, Any]]:
        options = dict(self._requests[which])
        return options.pop("prompt"), options

    async def _ask(self, which: int, behaviour: str, number: int, dice: random.Random) -> None:
        prompt, options = self._options(which)
        # Without a seed the answer is that of the id; a stream has one request at a time, but others may ask the same.
        options.setdefault("seed", self._expected[which].effective_seed)
        options["request_id"] = f"{which}-{number}-{dice.getrandbits(60):x}"
        timeout_s = dice.uniform(0.05, 3.0) if behaviour == "has a deadline" else self._timeout_s
        num_deltas = dice.randint(1, 20)
        shown: dict[int, list[int]] = {}
        began = last = asyncio.get_running_loop().time()
        stream = self._client.stream(prompt, timeout_s=timeout_s, **options)
        try:
            async for event in stream:
                if not isinstance(event, Delta):
                    continue
                last = self._measure(number, began, last)
                shown.setdefault(event.index, []).extend(event.token_ids)
                num_deltas -= 1
                if not num_deltas and behaviour == "cancels":
                    await self._client.cancel(stream.request_id, timeout_s=self._timeout_s)
                if not num_deltas and behaviour == "leaves":
                    break
        except OctavoError as error:
            self._judge_error(which, behaviour, error, shown)
        else:
            ended = behaviour == "leaves" and num_deltas <= 0
            self._judge_part(which, "left", shown) if ended else self._judge(which, behaviour, await stream.result())
        finally:
            self.score.num_calls += stream.num_calls
            await stream.close()

    def _measure(self, number: int, began: float, last: float) -> float:
        """A token came: how long since the one before it, or since the blow, if that struck this request. The time."""
        score, now = self.score, asyncio.get_running_loop().time()
        if score.blow_at is not None and began < score.blow_at:
            score.waits_s[number] = max(now - max(last, score.blow_at), score.waits_s.get(number, 0.0))
        return now

    def _judge_error(self, which: int, behaviour: str, error: OctavoError, shown: dict[int, list[int]]) -> None:
        if (behaviour, error.code) == ("has a deadline", Code.DEADLINE_EXCEEDED):
            self._judge_part(which, "deadline", shown)
        elif (behaviour, error.code) == ("cancels", Code.CANCELLED):  # cancelled, and then its call was lost
            self._judge_part(which, "cancelled", shown)
        else:
            self.score.wrong.append(f"request {which}, which {behaviour}, was lost: {error!r}")

    def _judge_part(self, which: int, ending: str, shown: dict[int, list[int]]) -> None:
        for choice in self._expected[which].choices:
            found = shown.get(choice.index, [])
            if tuple(found) != choice.token_ids[: len(found)]:
                self.score.wrong.append(f"request {which}, {ending}: {found} instead of {choice.token_ids}")
        self.score.endings[ending] += 1

    def _judge(self, which: int, behaviour: str, answer: Generation) -> None:
        expected = self._expected[which]
        is_cancelled = {choice.finish_reason for choice in answer.choices} == {FinishReason.CANCELLED}
        if is_cancelled and behaviour == "cancels":
            self._judge_part(which, "cancelled", {choice.index: list(choice.token_ids) for choice in answer.choices})
        elif answer.choices != expected.choices:
            self.score.wrong.append(f"request {which} differs: {answer.choices} instead of {expected.choices}")
        elif answer.usage.generated_tokens != expected.usage.generated_tokens:
            self.score.wrong.append(f"request {which}: {answer.usage} instead of {expected.usage}")
        else:
            self.score.endings["whole"] += 1
