"""Field failure 20: characters over several tokens. Byte tokens are the worst case of every tokenizer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from router.text.detokenizer import MAX_PENDING_TOKENS, Decode, Detokenizer
from router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
FAMILY = "👨‍👩‍👧‍👦"


def byte_level(token_ids: Sequence[int]) -> str:
    """What a byte-level tokenizer decodes: id b is the byte b."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def make_byte_fallback() -> Decode:
    """A decoder in the manner of SentencePiece: ids 0-255 are <0xNN>, then words; one bad byte spoils its whole run."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁b": 258}
    tokenizer = RustTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return lambda token_ids: tokenizer.decode(list(token_ids))


byte_fallback = make_byte_fallback()
both = pytest.mark.parametrize("decode", [byte_level, byte_fallback])


def detokenize(decode: Decode, token_ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(decode, prompt, can_split_prompt=True)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@both
@pytest.mark.parametrize("text", ["😀", FAMILY, "漢字かな", "né e", "a😀b", "😀😀"])
def test_whole_characters_only(decode: Decode, text: str) -> None:
    pieces = detokenize(decode, text.encode())
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@both
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_an_answer_that_ends_inside_a_character_shows_that_at_its_end_alone(decode: Decode, num_bytes: int) -> None:
    pieces = detokenize(decode, "😀".encode()[:num_bytes])
    assert set(pieces[:-1]) == {""}
    assert set(pieces[-1]) == {REPLACEMENT}


@both
def test_a_lone_invalid_byte_is_shown_once_it_cannot_heal(decode: Decode) -> None:
    pieces = detokenize(decode, [*b"a", 0x80, *b"bc"] if decode is byte_level else [257, 0x80, 257, 257])
    assert "".join(pieces) in (f"a{REPLACEMENT}bc", f"a{REPLACEMENT}aa")
    assert pieces[1] == ""


@both
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_a_prompt_that_ends_inside_a_character_gets_it_whole(decode: Decode, num_bytes: int) -> None:
    emoji = "😀".encode()
    word = b"h" if decode is byte_level else [257]
    prompt = [*word, *emoji[:num_bytes]]
    pieces = detokenize(decode, [*emoji[num_bytes:], *b"x"], prompt)
    assert "".join(pieces) == "😀x"


def test_a_text_prompt_never_leaks_into_the_answer() -> None:
    detokenizer = Detokenizer(byte_level, [*b"odd ", *REPLACEMENT.encode()], can_split_prompt=False)
    assert detokenizer.push(ord("x")) == "x"


def test_a_leading_space_is_kept_in_the_middle_of_a_text() -> None:
    assert "".join(detokenize(byte_fallback, [258, 258, 256, 257], prompt=[257])) == " b b a"


def test_an_invalid_byte_behind_a_character_does_not_take_it_back() -> None:
    emoji = list("😀".encode())
    pieces = detokenize(byte_fallback, [*emoji, 0xFF, *emoji, 257])
    text = "".join(pieces)
    assert text.startswith("😀")
    assert text.endswith("a")


def test_a_long_run_of_invalid_bytes_costs_a_bounded_amount_per_token() -> None:
    lengths: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return byte_level(token_ids)

    pieces = detokenize(decode, [0x80] * 500 + [*"😀".encode()])
    assert "".join(pieces) == REPLACEMENT * 500 + "😀"
    assert max(lengths) <= 2 * MAX_PENDING_TOKENS + 1


@given(st.binary(max_size=60), st.binary(max_size=5))
def test_any_bytes_make_valid_text_that_equals_the_whole(answer: bytes, prompt: bytes) -> None:
    pieces = detokenize(byte_level, answer, prompt)
    text = "".join(pieces)
    text.encode()  # valid: no lone surrogates
    if not byte_level(prompt).endswith(REPLACEMENT):
        assert text == byte_level(answer)


@given(st.text(max_size=12), st.integers(0, 40))
def test_no_replacement_character_that_a_later_token_would_have_fixed(text: str, cut: int) -> None:
    token_ids = list(text.encode())[:cut]
    *pieces, last = detokenize(byte_level, token_ids)
    assert text.startswith("".join(pieces)) or REPLACEMENT in text
    assert "".join(pieces) + last == byte_level(token_ids)


def test_skipped_special_tokens_leave_no_trace(tokenizer: Tokenizer) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    assert "".join(detokenize(decode, [*b"a", 256, *b"b", 256, 257])) == "ab"
