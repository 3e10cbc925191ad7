"""A trace of requests runs through a memory policy, iteration by iteration.

Here belongs the trace and the clock. Not here: what a request takes (memory_policies), tables and plots (paper_memory).
"""

import random
from collections import deque
from dataclasses import dataclass

from benchmarks.memory_policies import MAX_TOKENS, Paged, Policy, Request, Shares

WARM_UP = 0.2  # of the trace, before anything is counted


@dataclass(frozen=True)
class Workload:
    """Lengths are log-normal with these means (tokens) and spreads (sigma of the logarithm), arrivals Poisson."""

    name: str
    mean_prompt: float
    sigma_prompt: float
    mean_output: float
    sigma_output: float
    rate_per_s: float


# Means and rates are the paper's (section 6.1 and figure 13). It gives no spreads: docs/memory.md says where these
# come from.
SHAREGPT = Workload("ShareGPT-shaped", 161.31, 1.0, 337.99, 1.0, 2.0)
ALPACA = Workload("Alpaca-shaped", 19.31, 1.0, 58.45, 1.0, 30.0)


def lengths(rng: random.Random, mean: float, sigma: float, limit: int, count: int) -> list[int]:
    """`count` lengths in 1..limit; after the cut at the limit their mean is `mean`."""
    drawn = [rng.lognormvariate(0.0, sigma) for _ in range(count)]

    def cut(scale: float) -> list[int]:
        return [min(max(round(each * scale), 1), limit) for each in drawn]

    low, high = 0.0, 100.0 * mean
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(cut(middle)) < mean * count else (low, middle)
    return cut(high)


def trace(workload: Workload, seconds: float, seed: int, num_answers: int = 1) -> list[Request]:
    """Requests in the order of their arrival."""
    rng = random.Random(seed)
    arrivals = [rng.expovariate(workload.rate_per_s)]
    while arrivals[-1] < seconds:
        arrivals.append(arrivals[-1] + rng.expovariate(workload.rate_per_s))
    prompts = lengths(rng, workload.mean_prompt, workload.sigma_prompt, MAX_TOKENS // 2, len(arrivals))
    outputs = lengths(rng, workload.mean_output, workload.sigma_output, MAX_TOKENS // 2, len(arrivals))
    return [Request(*each, num_answers) for each in zip(arrivals, prompts, outputs, strict=True)]


@dataclass(frozen=True)
class IterationTime:
    """How long one iteration takes: OPT-13B in fp16 on an A100 with 40 GB, by its data sheet.

    26 GB of weights and 0.8 MB of KV a token at 1,555 GB/s; 26 GFLOP a token of a prompt at half of 312 TFLOP/s; and
    what the host takes, an assumption: 10 ms, and 0.5 ms for each sequence.
    """

    weights_s: float = 26e9 / 1555e9
    kv_token_s: float = 819_200 / 1555e9
    prompt_token_s: float = 26e9 / 156e12
    host_s: float = 0.010
    host_sequence_s: float = 0.0005

    def seconds(self, num_prompt: int, num_sequences: int, num_kv_tokens: int) -> float:
        host = self.host_s + self.host_sequence_s * num_sequences
        return self.weights_s + self.kv_token_s * num_kv_tokens + self.prompt_token_s * num_prompt + host


@dataclass
class Result:
    """Means over the time that was counted."""

    shares: Shares
    batched_requests: float
    saved_by_sharing: float
    preemptions: int
    finished: int
    seconds: float


class _Mean:
    """Sums over time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.sums = [0.0] * 6

    def add(self, seconds: float, *values: float) -> None:
        self.seconds += seconds
        self.sums = [total + seconds * value for total, value in zip(self.sums, values, strict=True)]

    def of(self, index: int) -> float:
        return self.sums[index] / self.seconds if self.seconds else 0.0


def simulate(requests: list[Request], policy: Policy, time_of: IterationTime) -> Result:
    """First come, first served; who finds no room for its next token while it runs makes the newest wait again.

    As in the router, nobody is admitted after that until a request has ended (docs/decisions/0033). Counted is the time
    from the warm-up to the last arrival: afterwards the memory only empties.
    """
    waiting, running = deque(requests), list[Request]()
    now, end, mean = 0.0, requests[-1].arrival_s, _Mean()
    preemptions, finished, is_closed = 0, 0, False
    while now < end:
        num_prompt = 0
        for request in list(running):
            while request in running and not policy.grow(request):
                _preempt(running.pop(), policy, waiting)
                preemptions, is_closed = preemptions + 1, True
        is_closed = is_closed and bool(running)
        while not is_closed and waiting and waiting[0].arrival_s <= now and policy.admit(waiting[0]):
            running.append(waiting.popleft())
            num_prompt += running[-1].num_held
        if not running:
            now = max(now, waiting[0].arrival_s) if waiting else end
            continue
        shares = policy.shares(running)
        num_sequences = sum(request.num_answers for request in running)
        num_kv_tokens = sum(request.num_held * request.num_answers for request in running)
        took = time_of.seconds(num_prompt, num_sequences, num_kv_tokens)
        if now >= WARM_UP * end:
            saved = policy.saved_by_sharing() if isinstance(policy, Paged) else 0.0
            parts = (shares.token_states, shares.reservation, shares.internal, shares.external)
            mean.add(took, *parts, len(running), saved)
        now += took
        for request in list(running):
            request.num_generated += 1
            if request.num_generated >= request.num_output:
                running.remove(request)
                policy.release(request)
                finished, is_closed = finished + 1, False
    counted = Shares(*(mean.of(index) for index in range(4)))
    return Result(counted, mean.of(4), mean.of(5), preemptions, finished, mean.seconds)


def _preempt(request: Request, policy: Policy, waiting: "deque[Request]") -> None:
    """It computes again what it holds; several answers, which share no more than a prompt, begin again."""
    policy.release(request)
    if request.num_answers > 1:
        request.num_generated = 0
    waiting.appendleft(request)
