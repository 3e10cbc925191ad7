"""What int8 costs in quality: perplexity, and the divergence of next-token distributions, against float32.

The text is Python's own reference manual as `pydoc_data.topics` brings it, cut into windows. All run through the
rewritten model, whose float32 logits are proved against the modeling code's when it is loaded. KV is written and read
as in serving: every key that a token sees went through a block.

    python -m benchmarks.int8_quality --tokens 20480
    python -m benchmarks.int8_quality --variants fp32:bfloat16 int8:float32
"""

import argparse
import json
import math
import pydoc_data.topics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from executor.arena import private_arena
from executor.batch import pack_batch
from executor.config import ExecutorConfig
from executor.ids import StepId
from executor.loading import LoadedModel, load
from executor.slots import SlotTable
from executor.step import BlockTable, RowSampling, RowStart, Step
from octavo.conversion_cache import conversion_of
from octavo.model_source import resolve_model


def text_tokens(model: str, count: int) -> Tensor:
    """[count] int64"""
    source = resolve_model(model)
    name, options = source.pretrained_arguments()
    conversion = conversion_of(source, "tokenizer")
    if conversion is not None and conversion.is_there:
        name, options = str(conversion.folder), {}
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    text = "\n\n".join(pydoc_data.topics.topics[topic] for topic in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) >= count, f"the text has {len(ids)} tokens"
    return torch.tensor(ids[:count])


def log_probabilities(loaded: LoadedModel, token_ids: Tensor) -> Tensor:
    """[num_tokens, vocabulary_size] float32, of the token behind each."""
    size, count = loaded.geometry.block_size, len(token_ids)
    arena = private_arena(loaded.geometry, 2 + count // size)
    blocks = np.arange(1, 2 + count // size)
    table = SlotTable(1)
    scored = RowSampling(logprobs=False, prompt_logprobs_from=1, prompt_logprobs_until=count)
    start = RowStart(0, 0, token_ids.numpy(), 0, (BlockTable(0, blocks),), scored)
    table.apply(Step(StepId(1), started_rows=(start,)))
    batch = pack_batch(table, np.array([0]), np.array([0]), np.array([count]), size)
    logits = loaded.model.forward(batch, loaded.attention.prepare(batch.attention, arena.views))
    return logits[1:].log_softmax(dim=-1)  # behind the sampled row: the scored tokens, from the second on


@dataclass
class Variant:
    """A number format of weights and one of KV, and how far its answers are from the exact ones."""

    weights: str
    kv: str
    loaded: LoadedModel
    losses: list[Tensor] = field(default_factory=list)  # of each window: [num_tokens] nats
    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)

    def add(self, ids: Tensor, exact: Tensor) -> None:
        """A window's token ids and the exact log-probabilities behind each."""
        own = log_probabilities(self.loaded, ids)
        self.losses.append(-own.gather(1, ids[1:, None])[:, 0])
        self.divergences.append((exact.exp() * (exact - own)).sum(dim=-1))
        self.agreements.append(exact.argmax(dim=-1) == own.argmax(dim=-1))

    def result(self, exact_perplexity: float) -> dict[str, Any]:
        perplexity = math.exp(mean(self.losses))
        return {
            "weights": self.weights,
            "kv": self.kv,
            "perplexity": round(perplexity, 4),
            "perplexity_change_percent": round((perplexity / exact_perplexity - 1) * 100, 3),
            "mean_kl": round(mean(self.divergences), 5),
            "same_best_token_percent": round(mean(self.agreements) * 100, 2),
        }


def mean(parts: list[Tensor]) -> float:
    return float(torch.cat(parts).double().mean())


def load_variant(name: str, model: str, threads: int) -> Variant:
    """name: weights:KV, as the options of the executor have them."""
    weights, _, kv = name.partition(":")
    config = {"model": model, "weights": weights, "kv_dtype": kv, "threads": threads}
    loaded = load(ExecutorConfig.model_validate(config))
    assert (loaded.weights == "int8") == (weights == "int8"), "the model does not run in int8 here"
    return Variant(weights, kv, loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", nargs="+", default=["int8:bfloat16", "int8:int8", "fp32:int8"], metavar="W:KV")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    token_ids = text_tokens(arguments.model, arguments.tokens)
    names = ["fp32:float32", *arguments.variants]
    exact, *others = (load_variant(name, arguments.model, arguments.threads) for name in names)
    for window in token_ids.split(arguments.window):
        probabilities = log_probabilities(exact.loaded, window)
        exact.losses.append(-probabilities.gather(1, window[1:, None])[:, 0])
        for variant in others:
            variant.add(window, probabilities)
    perplexity = math.exp(mean(exact.losses))
    result = {
        "tokens": arguments.tokens,
        "window": arguments.window,
        "perplexity_fp32": round(perplexity, 4),
        "rows": [variant.result(perplexity) for variant in others],
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
