"""What is right: `transformers` `generate` in fp32, greedy, one request at a time, without anything of Octavo.

A token that differs from the oracle's is excused only where the oracle itself was in doubt: where its two best logits
lie closer than `MAX_EXCUSED_GAP`. Answers are compared up to such a place, and the places are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

MAX_EXCUSED_GAP = 1e-3


@dataclass(frozen=True)
class OracleAnswer:
    """Greedy tokens, and per token the gap between the best and the second-best logit."""

    token_ids: list[int]
    top2_gaps: list[float]


class Oracle:
    """Greedy answers of one model, remembered by prompt, so that a grid of variants pays for each only once."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.eval()
        self._answers: dict[tuple[tuple[int, ...], int], OracleAnswer] = {}
        self._judgements: dict[tuple[int, ...], OracleAnswer] = {}

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> OracleAnswer:
        """Exactly `num_tokens` tokens after `prompt`; the end-of-sequence token does not end it."""
        key = (tuple(prompt), num_tokens)
        if key not in self._answers:
            self._answers[key] = self._generate(key[0], num_tokens)
        return self._answers[key]

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> OracleAnswer:
        """The token that is best after `prompt` and each beginning of `answer`, from one pass over both.

        An answer that says just these tokens is the one of `greedy`, token by token, at the price of a prefill.
        """
        key = (*prompt, *answer)
        if key not in self._judgements:
            self._judgements[key] = self._judge(key, len(answer))
        return self._judgements[key]

    @torch.inference_mode()
    def _judge(self, ids: tuple[int, ...], num_tokens: int) -> OracleAnswer:
        logits = self._model(torch.tensor([ids[:-1]]), logits_to_keep=num_tokens).logits[0]  # [num_tokens, vocabulary]
        top2 = logits.topk(2).values
        return OracleAnswer(logits.argmax(-1).tolist(), (top2[:, 0] - top2[:, 1]).tolist())

    @torch.inference_mode()
    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> OracleAnswer:
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        top2 = torch.stack([step[0].topk(2).values for step in output.logits])  # [num_tokens, 2]
        return OracleAnswer(output.sequences[0, len(prompt) :].tolist(), (top2[:, 0] - top2[:, 1]).tolist())


@dataclass
class Comparison:
    """A tally over many answers."""

    answers: int = 0
    tokens: int = 0
    excused: int = 0

    def check(self, answer: Sequence[int], right: OracleAnswer, what: str) -> None:
        """Compare one answer with the oracle's.

        Raises:
            AssertionError: a token differs where the oracle was not in doubt, or the lengths differ.
        """
        assert len(answer) == len(right.token_ids), (
            f"{what}: {len(answer)} tokens, the oracle has {len(right.token_ids)}"
        )
        self.answers += 1
        for i, (ours, theirs) in enumerate(zip(answer, right.token_ids, strict=True)):
            if ours != theirs:
                gap = right.top2_gaps[i]
                assert gap < MAX_EXCUSED_GAP, (
                    f"{what}: token {i} is {ours}, the oracle says {theirs} (its gap: {gap:.2e})"
                )
                self.excused += 1
                return
            self.tokens += 1
