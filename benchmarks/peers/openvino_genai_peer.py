"""OpenVINO GenAI's continuous batching in this process: measures one load per line of standard input.

It runs in an environment of its own, so it imports nothing of Octavo. A line of input is JSON: `prompts` (lists of
token ids, all asked for at once) and `generate` (tokens of each answer). A line of output is JSON with what the load
gave. The first line of output says that the model is loaded.

    python openvino_genai_peer.py MODEL.gguf < loads.jsonl
"""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def load_pipeline(model: str) -> Any:
    """As its documentation has it for serving; the prefix cache is off, as it is for Octavo's own loads."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4  # GiB
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = 64, 2048
    scheduler.enable_prefix_caching = False
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU")


def measure(pipeline: Any, first_id: int, prompts: list[list[int]], generate: int) -> dict[str, Any]:
    """Run one load to its end; times are seen between steps, as a server in front of it would see them."""
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = generate, True, False
    began, cpu = time.perf_counter(), time.process_time()
    handles = [
        pipeline.add_request(first_id + index, ov.Tensor(np.array([prompt], dtype=np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    firsts: list[float] = [0.0] * len(handles)
    lasts, counts, gaps, steps = [0.0] * len(handles), [0] * len(handles), [], 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now, steps = time.perf_counter() - began, steps + 1
        for index, handle in enumerate(handles):
            while handle.can_read():
                counts[index] += sum(len(output.generated_ids) for output in handle.read().values())
                if lasts[index]:
                    gaps.append(now - lasts[index])
                else:
                    firsts[index] = now
                lasts[index] = now
    wall = time.perf_counter() - began
    assert counts == [generate] * len(prompts), counts
    return {
        "wall_s": wall,
        "cpu_s": time.process_time() - cpu,
        "steps": steps,
        "firsts_s": firsts,
        "gaps_s": gaps,
    }


def main() -> None:
    began = time.perf_counter()
    pipeline = load_pipeline(sys.argv[1])
    print(json.dumps({"version": genai.__version__, "load_s": time.perf_counter() - began}), flush=True)
    first_id = 0
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(pipeline, first_id, asked["prompts"], asked["generate"])), flush=True)
        first_id += len(asked["prompts"])


if __name__ == "__main__":
    main()
