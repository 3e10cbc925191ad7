"""The served model's tokenizer, safe to share between threads.

The Rust tokenizer is used directly where there is one: its encode and decode change nothing, while the Python wrapper
sets truncation and padding on every call. Other tokenizers are used behind a lock.
"""

import threading
from collections.abc import Sequence

from transformers import AutoTokenizer

from octavo.conversion_cache import conversion_of
from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from octavo.model_source import resolve_model
from router.request import Chat
from router.text.chat import render
from router.text.template_process import TemplateProcesses

TEMPLATE_CPU_S = 2.0  # of the template that came with a model, for one chat


class Tokenizer:
    """Text to ids and back.

    Args:
        pretrained: a tokenizer of `transformers`.
        vocabulary_size: of the model; ids at or above it are refused.
    """

    def __init__(self, pretrained, vocabulary_size: int) -> None:
        self._pretrained = pretrained
        self._lock = threading.Lock()
        self._backend = getattr(pretrained, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self.vocabulary_size = vocabulary_size
        self._longest_token_chars = max(map(len, pretrained.get_vocab()), default=1)
        self._template: TemplateProcesses | None = None
        if pretrained.chat_template:
            tokens = pretrained.special_tokens_map
            self._template = TemplateProcesses(pretrained.get_chat_template(), tokens, TEMPLATE_CPU_S)

    def definition(self) -> str | None:
        """The tokenizer as the tokenizers library writes it, megabytes; None: it is of another kind."""
        return None if self._backend is None else self._backend.to_str()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def check_text_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot fit however it is tokenized, before minutes go into tokenizing it.

        Raises:
            OctavoError: FAILED_PRECONDITION with the numbers.
        """
        most = max_tokens * self._longest_token_chars
        if len(text) > most:
            raise OctavoError(
                Code.FAILED_PRECONDITION,
                "NEVER_FITS",
                f"the prompt of {len(text)} characters can never fit: {max_tokens} tokens hold at most {most}",
                metadata={"prompt_characters": str(len(text)), "max_context_tokens": str(max_tokens)},
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of a text. Slow for a long one: call it off the event loop."""
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        with self._lock:
            return tuple(self._pretrained.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of ids; invalid bytes become U+FFFD."""
        if self._backend is not None:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        with self._lock:
            return self._pretrained.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, chat: Chat, max_tokens: int) -> str:
        """The prompt of a chat by the model's own template; its special tokens are part of the text.

        Raises:
            OctavoError: INVALID_ARGUMENT for `chat`: no template, or the template refuses the messages; as
                `check_text_length`.
        """
        if self._template is None:
            violation = FieldViolation("chat", "this model has no chat template; send text or token_ids")
            raise invalid_argument(violation)
        return render(self._template, chat, max_tokens * self._longest_token_chars)


def load_tokenizer(source: str, vocabulary_size: int) -> Tokenizer:
    """Load the tokenizer that belongs to a model reference. Takes seconds: call it off the event loop.

    Raises:
        OctavoError: the reference names nothing that is here.
        OSError, ValueError: what `transformers` says of broken or missing files.
    """
    found = resolve_model(source)
    name, options = found.pretrained_arguments()
    conversion = conversion_of(found, "tokenizer")
    if conversion is not None and conversion.is_there:
        name, options = str(conversion.folder), {"local_files_only": True}
    pretrained = AutoTokenizer.from_pretrained(name, **options)
    if conversion is not None and not conversion.is_there:
        conversion.keep(pretrained.save_pretrained)
    return Tokenizer(pretrained, vocabulary_size)
