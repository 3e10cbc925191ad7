"""Token ids to text, one at a time, without ever showing half a character.

Each new token is decoded together with the few before it, because decoders look back (a leading space, bytes of one
character over several tokens). These few are always the last that gave whole characters, so that none is cut in two.
A trailing replacement character may be the beginning of a character, so it is held until the next tokens decide. Not
here: stop strings.

    context (text already out)    pending (not out yet)
    [.............. ids .........][...... ids ........]
"""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"
# A character has at most 4 bytes: three of them, each decoded alone, are the longest tail that can still heal.
MAX_HELD_CHARS = 3
# Of the prompt, the first context: enough to hold a whole character before a split one.
CONTEXT_TOKENS = 6
# Only a run of bytes that never make a character gets as long; it is then split, so that a token's cost is bounded.
MAX_PENDING_TOKENS = 32


class Detokenizer:
    """Text of a growing answer.

    Args:
        decode: ids to text, as the tokenizer does it.
        prompt_ids: the end of the prompt is the first context.
        can_split_prompt: whether the prompt may end inside a character, which only ids given by a client can; the
            answer then shows the whole character once it is complete.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], *, can_split_prompt: bool) -> None:
        self._decode = decode
        self._context = list(prompt_ids[-CONTEXT_TOKENS:])
        self._pending: list[int] = []
        shown = decode(self._context) if self._context else ""
        self._shown = without_held(shown) if can_split_prompt else shown  # text of the context
        self._num_out = 0  # characters of the pending text that are out

    def push(self, token_id: int) -> str:
        """Text that this token makes certain; often of this token alone, sometimes empty, sometimes of several."""
        self._pending.append(token_id)
        text = self._pending_text()
        certain = without_held(text)
        out = certain[self._num_out :]
        self._num_out = max(self._num_out, len(certain))
        if out and len(certain) == len(text):
            self._advance(len(self._pending))
        elif len(self._pending) > MAX_PENDING_TOKENS:
            out += self._split(text)
        return out

    def flush(self) -> str:
        """No more tokens come: what is held now stays as the tokenizer shows it."""
        out = self._pending_text()[self._num_out :] if self._pending else ""
        self._advance(len(self._pending))
        return out

    def _split(self, text: str) -> str:
        """Let go of the pending tokens but for a few, at a place between characters."""
        for num_kept in range(4, 8):
            first = self._decode(self._pending[:-num_kept])
            if first + self._decode(self._pending[-num_kept:]) == text:
                out = text[self._num_out : len(first)]
                num_out = max(0, self._num_out - len(first))
                self._advance(len(self._pending) - num_kept)
                self._num_out = num_out
                return out
        return self.flush()

    def _pending_text(self) -> str:
        whole = self._decode(self._context + self._pending)
        if whole.startswith(self._shown):
            return whole[len(self._shown) :]
        # Some decoders show a run of bytes anew when one of them turns out wrong; what is out stays out.
        return self._decode(self._pending)

    def _advance(self, num_tokens: int) -> None:
        done, self._pending = self._pending[:num_tokens], self._pending[num_tokens:]
        text = self._decode(done) if done else ""
        # The first character of an answer may have begun in the prompt.
        self._context = self._context + done if text.startswith(REPLACEMENT) else done
        self._context = self._context[-MAX_PENDING_TOKENS:]
        self._shown = self._decode(self._context) if self._context else ""
        self._num_out = 0


def without_held(text: str) -> str:
    """The text without a tail that later tokens may turn into a character."""
    stripped = text.rstrip(REPLACEMENT)
    num_held = min(len(text) - len(stripped), MAX_HELD_CHARS)
    return text[: len(text) - num_held]
