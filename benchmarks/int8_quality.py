"""What int8 costs in quality: perplexity, and the divergence of next-token distributions, against float32.

The text is Python's own reference manual as `pydoc_data.topics` brings it, cut into windows. Both run through the
rewritten model, whose float32 logits are proved against the modeling code's when it is loaded.

    python -m benchmarks.int8_quality --tokens 20480
"""

import argparse
import json
import math
import pydoc_data.topics
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    token_ids = text_tokens(arguments.model, arguments.tokens)
    exact, coded = (
        load(ExecutorConfig(model=arguments.model, weights=weights, threads=arguments.threads))  # type: ignore[arg-type]
        for weights in ("fp32", "int8")
    )
    assert coded.weights == "int8", "the model does not run in int8 here"
    losses, divergences, agree = [[], []], [], []
    for window in token_ids.split(arguments.window):
        p, q = log_probabilities(exact, window), log_probabilities(coded, window)
        for own, into in zip((p, q), losses, strict=True):
            into.append(-own.gather(1, window[1:, None])[:, 0])
        divergences.append((p.exp() * (p - q)).sum(dim=-1))
        agree.append(p.argmax(dim=-1) == q.argmax(dim=-1))
    perplexities = [math.exp(torch.cat(each).double().mean()) for each in losses]
    result = {
        "tokens": arguments.tokens,
        "window": arguments.window,
        "perplexity_fp32": round(perplexities[0], 4),
        "perplexity_int8": round(perplexities[1], 4),
        "perplexity_change_percent": round((perplexities[1] / perplexities[0] - 1) * 100, 3),
        "mean_kl": round(float(torch.cat(divergences).double().mean()), 5),
        "same_best_token_percent": round(float(torch.cat(agree).double().mean()) * 100, 2),
    }
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
