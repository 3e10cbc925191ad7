"""The demo model's tokenizer, converted once and kept, is the same tokenizer the second time."""

import pytest
from transformers import AutoTokenizer

from octavo.conversion_cache import conversion_of
from octavo.model_source import resolve_model
from router.request import Chat, ChatMessage
from router.text import tokenizer as module

VOCABULARY_SIZE = 49152
TEXTS = ["", " ", "Hello world", "👩‍👩‍👧 naïve 東京", "<|im_start|>user\nhi<|im_end|>", "a\r\n\tb  c", "\x00\ufffd"]


@pytest.mark.long
def test_a_kept_tokenizer_is_the_converted_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name, options = resolve_model("demo").pretrained_arguments()
    converted = AutoTokenizer.from_pretrained(name, **options)
    first = module.Tokenizer(converted, VOCABULARY_SIZE)
    conversion_of(resolve_model("demo"), "tokenizer").keep(converted.save_pretrained)

    def refuse_gguf(name, **options):
        assert "gguf_file" not in options, "the file was converted again"
        return AutoTokenizer.from_pretrained(name, **options)

    monkeypatch.setattr(module, "AutoTokenizer", type("Loader", (), {"from_pretrained": staticmethod(refuse_gguf)}))
    second = module.load_tokenizer("demo", VOCABULARY_SIZE)
    for text in TEXTS:
        for add_special_tokens in (False, True):
            ids = first.encode(text, add_special_tokens=add_special_tokens)
            assert second.encode(text, add_special_tokens=add_special_tokens) == ids
            for skip in (False, True):
                decoded = first.decode(ids, skip_special_tokens=skip)
                assert second.decode(ids, skip_special_tokens=skip) == decoded
    chat = Chat((ChatMessage("user", "What is the capital of France?"),), True)
    assert second.render_chat(chat, 256) == first.render_chat(chat, 256)
