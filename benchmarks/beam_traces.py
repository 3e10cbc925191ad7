"""Which beam continues which, step by step, in real beam searches of the demo model: what memory policies replay.

    python -m benchmarks.beam_traces

The plain search: at each step the `width` best of all continuations by the sum of their log-probabilities. The end of
text is never taken, so that each search is as long as asked: how long answers are is the workload's to say.
"""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.results_file import write
from octavo.model_source import resolve_model

WIDTHS = (2, 4, 6)
PROMPTS = (
    "Give three tips for staying healthy.",
    "What are the three primary colors?",
    "Describe the structure of an atom.",
    "Write a short story in which a character has to make an important decision.",
    "Explain why the sky looks blue during the day.",
    "Rewrite the following sentence in the past tense: She walks to the market.",
    "List five animals that live in the desert.",
    "What is the difference between a virus and a bacterium?",
)


@torch.inference_mode()
def search(model: Any, prompts: Any, width: int, num_steps: int, end_id: int) -> list[list[list[int]]]:
    """For each prompt and each step behind the first, which beam each of the beams continues.

    Args:
        prompts: of the tokenizer, padded on the left: ids and mask, [num_prompts, num_tokens].
    """
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    output = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    scores, tokens = _log_probabilities(output, end_id).topk(width)  # [num_prompts, width]
    rows = torch.arange(len(ids))
    cache, chosen = output.past_key_values, rows.repeat_interleave(width)
    mask, positions = mask[chosen], positions[chosen, -1:]
    parents: list[list[list[int]]] = [[] for _ in rows]
    for _ in range(num_steps - 1):
        cache.reorder_cache(chosen)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        positions = positions + 1
        output = model(
            tokens.reshape(-1, 1), attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        totals = (scores.reshape(-1, 1) + _log_probabilities(output, end_id)).reshape(len(ids), -1)
        scores, flat = totals.topk(width)
        places, tokens = flat // model.config.vocab_size, flat % model.config.vocab_size
        chosen = (places + width * rows[:, None]).flatten()
        for search_parents, step in zip(parents, places.tolist(), strict=True):
            search_parents.append(step)
    return parents


def _log_probabilities(output: Any, end_id: int) -> "torch.Tensor":
    """[num_rows, vocabulary_size]; the end of text is impossible."""
    logits = output.logits[:, -1].float()
    logits[:, end_id] = -torch.inf
    return torch.log_softmax(logits, dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--steps", type=int, default=64, help="tokens of each search")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = resolve_model(arguments.model)
    name, options = source.pretrained_arguments()
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options).eval()
    prompts = tokenizer([f"{prompt}\n" for prompt in PROMPTS], return_tensors="pt", padding=True, padding_side="left")
    traces: dict[str, list[str]] = {}
    for width in WIDTHS:
        found = search(model, prompts, width, arguments.steps, tokenizer.eos_token_id)
        traces[str(width)] = [" ".join("".join(map(str, step)) for step in parents) for parents in found]
        print(width, *traces[str(width)], sep="\n", flush=True)
    content = {"model": source.name, "steps": arguments.steps, "prompts": len(PROMPTS), "parents": traces}
    print(write("beam_traces", "benchmarks.beam_traces", content))


if __name__ == "__main__":
    main()
