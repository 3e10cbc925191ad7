"""Stop strings. Field failure 21: wherever a match lies, the cut is the earliest, and nothing of it was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopScanner


def scan(pieces: list[str], stops: list[str], *, include_stop: bool = False) -> tuple[str, str | None]:
    scanner = StopScanner(stops, include_stop=include_stop)
    text = "".join(scanner.push(piece) for piece in pieces)
    return text + scanner.finish(), scanner.matched


def scan_by_character(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The oracle: a reader who looks at the whole text after each character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include_stop else text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "matched"),
    [
        (["say STOP now"], ["STOP"], "say ", "STOP"),
        (["say S", "TO", "P now"], ["STOP"], "say ", "STOP"),
        (["abc"], ["ab", "abc"], "", "ab"),
        (["a", "b", "c"], ["abc", "ab"], "", "ab"),
        (["x ST", "ART"], ["STOP"], "x START", None),
        (["STOP"], ["STOP"], "", "STOP"),
        (["tail ST"], ["STOP"], "tail ST", None),
        (["aab"], ["ab"], "a", "ab"),
        (["xbcd"], ["bcd", "c"], "xb", "c"),
        (["plain"], [], "plain", None),
    ],
)
def test_where_the_text_ends(pieces: list[str], stops: list[str], text: str, matched: str | None) -> None:
    assert scan(pieces, stops) == (text, matched)


def test_held_text_is_not_sent_before_it_is_sure() -> None:
    scanner = StopScanner(["STOP"], include_stop=False)
    assert scanner.push("x ST") == "x "
    assert scanner.push("O") == ""
    assert scanner.push("N") == "STON"


def test_include_stop_keeps_the_match_and_nothing_behind_it() -> None:
    assert scan(["a STOP b"], ["STOP"], include_stop=True) == ("a STOP", "STOP")


def test_a_match_counts_only_where_it_ends_while_armed() -> None:
    """Field failure 22: stop strings before min_tokens are text; one that ends after them is a stop."""
    scanner = StopScanner(["ab"], include_stop=False)
    assert scanner.push("ab", is_armed=False) + scanner.push("a", is_armed=False) == "ab"
    assert scanner.push("b", is_armed=True) == ""
    assert scanner.matched == "ab"


def test_an_old_match_inside_held_text_does_not_count() -> None:
    scanner = StopScanner(["ab", "babc"], include_stop=False)
    assert scanner.push("bab", is_armed=False) == ""
    assert scanner.push("x", is_armed=True) == "babx"
    assert scanner.matched is None


small_text = st.text("ab", max_size=12)
small_stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(small_text, small_stops, st.booleans(), st.data())
def test_the_cut_does_not_depend_on_the_pieces(
    text: str, stops: list[str], include_stop: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert scan(pieces, stops, include_stop=include_stop) == scan_by_character(text, stops, include_stop)
