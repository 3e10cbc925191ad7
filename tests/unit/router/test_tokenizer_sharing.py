"""The tokenizer between threads, and with texts that nobody should send."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import Code, OctavoError
from router.request import Chat, ChatMessage
from router.text.tokenizer import Tokenizer


def test_sixteen_threads_share_one_fast_tokenizer(tokenizer: Tokenizer) -> None:
    """Field failure 39: the wrapper's truncation and padding made concurrent calls fail with "Already borrowed"."""
    texts = [f"thread {number} says ünïcode 😀 " * (number + 1) for number in range(16)]
    start = threading.Barrier(16)

    def work(text: str) -> bool:
        start.wait()
        return all(
            tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
            and tokenizer.render_chat(Chat((ChatMessage("user", text),), True), 256).startswith("<user>thread")
            for _ in range(50)
        )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, texts))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tokenizer: Tokenizer) -> None:
    """Field failure 36: a huge prompt; the error has its size and nothing of it."""
    with pytest.raises(OctavoError) as caught:
        tokenizer.check_text_length("secret" * 1_000_000, 256)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert "6000000 characters" in caught.value.message
    assert "secret" not in caught.value.message


def test_a_template_that_refuses_a_chat_names_the_field_and_not_the_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(OctavoError) as caught:
        tokenizer.render_chat(Chat((ChatMessage("robot", "my secret"),), True), 256)
    assert caught.value.violations[0].field == "chat.messages"
    assert "no robots" in caught.value.message
    assert "secret" not in caught.value.message


def test_a_chat_without_generation_prompt_continues_its_last_turn(tokenizer: Tokenizer) -> None:
    turns = (ChatMessage("user", "hi"), ChatMessage("assistant", "well"))
    assert tokenizer.render_chat(Chat(turns, True), 256) == "<user>hi<assistant>well<assistant>"
    assert tokenizer.render_chat(Chat(turns, False), 256) == "<user>hi<assistant>well"
