"""Which engine takes a request, and what the router believes to be cached where."""

from hypothesis import given
from hypothesis import strategies as st

from router.placement import FREE_LEAD, Candidate, ranked
from router.prefixes import MAX_KEYED_TOKENS, PrefixIndex, prefix_keys


def candidate(cached: int = 0, live: int = 0, can_begin: bool = True, last_turn: int = 0) -> Candidate:
    return Candidate(cached, live, can_begin, last_turn)


def test_the_longest_prefix_goes_before_the_least_load() -> None:
    assert ranked([candidate(cached=16, live=0), candidate(cached=32, live=3), candidate()]) == [1, 0, 2]


def test_of_equal_prefixes_the_least_load_goes_first_and_then_the_turn() -> None:
    assert ranked([candidate(cached=16, live=2), candidate(cached=16, live=1)]) == [1, 0]
    assert ranked([candidate(live=1, last_turn=7), candidate(live=1, last_turn=3)]) == [1, 0]
    assert ranked([candidate(), candidate()]) == [0, 1], "of all equal the first in the configuration"


def test_a_prefix_is_worth_no_waiting_while_another_engine_could_begin() -> None:
    assert ranked([candidate(cached=64, can_begin=False), candidate()]) == [1, 0]
    both_full = [candidate(cached=64, live=9, can_begin=False), candidate(live=9, can_begin=False)]
    assert ranked(both_full) == [0, 1], "where all would wait, it counts again"


def test_a_prefix_draws_no_crowd() -> None:
    """All share one prompt's beginning: the other engine gets its share of them, and then has the prefix too."""
    assert ranked([candidate(cached=64, live=FREE_LEAD), candidate()]) == [0, 1]
    assert ranked([candidate(cached=64, live=FREE_LEAD + 1), candidate()]) == [1, 0]
    assert ranked([candidate(cached=64, live=20 + FREE_LEAD), candidate(live=10)]) == [0, 1]
    assert ranked([candidate(cached=64, live=21 + FREE_LEAD), candidate(live=10)]) == [1, 0]


@given(
    st.lists(st.builds(Candidate, st.integers(0, 64), st.integers(0, 40), st.booleans(), st.integers(0, 9)), min_size=1)
)
def test_every_engine_is_ranked_once_and_the_first_is_never_beaten(candidates: list[Candidate]) -> None:
    order = ranked(candidates)
    assert sorted(order) == list(range(len(candidates)))
    best = candidates[order[0]]
    begin = [candidate for candidate in candidates if candidate.can_begin]
    assert best.can_begin or not begin
    for other in candidates:
        if other.num_live <= best.num_live and other.num_cached_tokens > best.num_cached_tokens:
            assert (best.can_begin, other.can_begin) == (True, False), "better in everything, and not chosen"


# ------------------------------------------------------------------------------------------------------------ prefixes


def test_keys_are_of_full_blocks_that_a_later_prompt_can_find() -> None:
    """At least one token is always computed, so the last one is in no block."""
    assert [len(prefix_keys(None, range(length), 4)) for length in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    assert prefix_keys(None, range(9), 4)[:1] == prefix_keys(None, range(5), 4)


def test_what_must_differ_differs_in_every_block() -> None:
    """Another salt, another token at the front, another size: no block is shared."""
    plain = prefix_keys(None, range(17), 4)
    for other in (
        prefix_keys("", range(17), 4),
        prefix_keys("a", range(17), 4),
        prefix_keys(None, [99, *range(1, 17)], 4),
        prefix_keys(None, range(17), 8),
    ):
        assert not set(plain) & set(other)


def test_a_prompt_is_looked_at_only_so_far() -> None:
    assert len(prefix_keys(None, range(3 * MAX_KEYED_TOKENS), 16)) == MAX_KEYED_TOKENS // 16


def test_the_index_counts_leading_blocks() -> None:
    index = PrefixIndex(100)
    index.add(prefix_keys(None, [1] * 17, 4))
    assert index.num_matching(prefix_keys(None, [1] * 17, 4)) == 4
    assert index.num_matching(prefix_keys(None, [1] * 8 + [2] * 9, 4)) == 2
    assert index.num_matching(prefix_keys("salt", [1] * 17, 4)) == 0


def test_the_index_is_bounded_and_forgets_the_tail_of_what_is_oldest() -> None:
    index = PrefixIndex(6)
    old, new = prefix_keys(None, [1] * 17, 4), prefix_keys(None, [2] * 17, 4)
    index.add(old)
    index.add(new)
    assert len(index) == 6
    assert (index.num_matching(old), index.num_matching(new)) == (2, 4)
    index.add(old)
    assert (index.num_matching(old), index.num_matching(new)) == (4, 2)


@given(st.lists(st.lists(st.integers(0, 1), max_size=24), max_size=20), st.lists(st.integers(0, 1), max_size=24))
def test_without_eviction_the_index_knows_the_longest_shared_prefix(sent: list[list[int]], asked: list[int]) -> None:
    index = PrefixIndex(10_000)
    for prompt in sent:
        index.add(prefix_keys(None, prompt, 2))

    def shared(prompt: list[int]) -> int:
        pairs = zip(prompt[:-1], asked[:-1], strict=False)
        same = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        return (min(len(prompt), len(asked)) - 1 if same is None else same) // 2 if prompt and asked else 0

    assert index.num_matching(prefix_keys(None, asked, 2)) == max([0, *map(shared, sent)])
