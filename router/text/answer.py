"""The text of one answer: tokens in, text that may be sent out. Joins detokenizer and stop strings."""

from router.text.detokenizer import Detokenizer
from router.text.stop import StopScanner


class AnswerText:
    """Text of a growing answer, cut at its first stop string."""

    def __init__(self, detokenizer: Detokenizer, scanner: StopScanner, *, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._scanner = scanner
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that was found."""
        return self._scanner.matched

    def push(self, token_id: int) -> str:
        """Text that this token releases."""
        self._num_tokens += 1
        return self._scanner.push(self._detokenizer.push(token_id), is_armed=self._is_armed)

    def finish(self) -> str:
        """The rest, when no more tokens come; nothing after a stop string."""
        if self.matched_stop is not None:
            return ""
        rest = self._scanner.push(self._detokenizer.flush(), is_armed=self._is_armed)
        return rest + self._scanner.finish()

    @property
    def _is_armed(self) -> bool:
        return self._num_tokens > self._min_tokens
