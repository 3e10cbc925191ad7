"""Twenty real prompts of 1 to 600 tokens, at the lengths where blocks of 16 begin, end and overflow."""

from pathlib import Path
from typing import Any

_LICENCE = (Path(__file__).parents[1] / "LICENSE").read_text()

# (text, number of its tokens that make the prompt)
_CUTS: list[tuple[str, int]] = [
    ("The", 1),
    ("Hello there", 2),
    ("Once upon a time", 4),
    ("The capital of France is the city of", 8),
    ("Here is a list of the planets of the solar system, beginning with the one closest to the sun:", 15),
    ("def fibonacci(n: int) -> int:\n    '''Return the n-th Fibonacci number.'''\n    if n < 2:\n", 16),
    ("To make a good cup of tea you first have to boil the water, then warm the pot, and then", 17),
    ("Question: Why is the sky blue?\nAnswer: Light from the sun is scattered by the air, and short waves are", 24),
    ("1 + 1 = 2\n2 + 2 = 4\n3 + 3 = 6\n4 + 4 = 8\n5 + 5 =", 31),
    ("The quick brown fox jumps over the lazy dog. The lazy dog sleeps in the sun. The fox runs on. " * 3, 32),
    ("Dear Sir or Madam, I am writing to you about the letter of the twelfth of March that he received. " * 2, 33),
    ("SELECT name, COUNT(*) FROM visits WHERE day > '2020-01-01' GROUP BY name ORDER BY 2 DESC;\n" * 2, 47),
    (
        "Le chat est sur la table, et le chien dort sous la table. Die Katze liegt auf dem Tisch. " * 3,
        48,
    ),
    ("In 1815 the mountain Tambora erupted. The year after it was called the year without a summer. " * 4, 64),
    ("A library lends books; a reader returns them late, and pays a small fine for every day. " * 6, 100),
    (_LICENCE, 129),
    (_LICENCE[2000:], 192),
    (_LICENCE[4000:], 255),
    (_LICENCE[5500:], 400),
    (_LICENCE[1000:], 600),
]


def real_prompts(tokenizer: Any) -> list[list[int]]:
    """The prompts as token ids. `tokenizer` is a `transformers` tokenizer.

    Raises:
        AssertionError: a text has fewer tokens than its cut, as another tokenizer might make of it.
    """
    prompts = [tokenizer.encode(text, add_special_tokens=False)[:length] for text, length in _CUTS]
    short = [(len(ids), length) for ids, (_, length) in zip(prompts, _CUTS, strict=True) if len(ids) < length]
    assert not short, f"too few tokens (have, need): {short}"
    return prompts
