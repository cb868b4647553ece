"""The trie of contexts against looking at every place, on texts of few letters, where overlaps and ties abound."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm.speculative import suffix_trie
from minillm.speculative.suffix_trie import MAX_MATCHES, SuffixTrie


def matches(tokens: list[int], context: list[int], max_depth: int, most: int) -> tuple[int, list[int]]:
    """The longest match by its definition."""
    for length in range(min(max_depth, len(context)), 0, -1):
        found = [i for i in range(length, len(tokens)) if tokens[i - length : i] == context[-length:]]
        if found:
            return length, found[::-1][:most]
    return 0, []


def nodes(trie: SuffixTrie) -> list[Any]:
    found = [trie._root]
    for node in found:  # grows on the way
        found.extend((node.children or {}).values())
    return found


def interrupted(action: Callable[[], object], at: int, files: tuple[str, ...]) -> bool:
    """Run `action` and raise `KeyboardInterrupt` before the `at`-th line of `files` that it executes.

    False if there are fewer lines.
    """
    left = at

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if Path(frame.f_code.co_filename).name not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


texts = st.integers(1, 3).flatmap(lambda letters: st.lists(st.integers(1, letters), max_size=120))


@settings(max_examples=300)
@given(texts, st.lists(st.integers(1, 3), max_size=9), st.integers(1, 7), st.sampled_from([1, 2, 3, 16]))
def test_the_longest_match_and_its_latest_places_are_found(
    tokens: list[int], other: list[int], max_depth: int, most: int
) -> None:
    """For the text's own end and for another context, with nodes that are split early and late."""
    with patch.object(suffix_trie, "MAX_MATCHES", most):
        trie = SuffixTrie(tokens, max_depth)
        trie.catch_up()
        for context in (tokens, other):
            assert trie.longest_match(context) == matches(tokens, context, max_depth, most)


@settings(max_examples=150)
@given(
    texts, st.integers(1, 8), st.lists(st.integers(1, 3), max_size=9), st.integers(1, 7), st.sampled_from([1, 2, 3, 16])
)
def test_a_text_that_grows_gives_what_the_whole_text_gives(
    text: list[int], step: int, other: list[int], max_depth: int, most: int
) -> None:
    with patch.object(suffix_trie, "MAX_MATCHES", most):
        grown = SuffixTrie([], max_depth)
        for start in range(0, len(text), step):
            grown.tokens.extend(text[start : start + step])
            grown.catch_up()
            for context in (grown.tokens, other):
                assert grown.longest_match(context) == matches(grown.tokens, context, max_depth, most)
        whole = SuffixTrie(text, max_depth)
        whole.catch_up()
        assert len(nodes(grown)) == len(nodes(whole))


def test_a_place_that_parts_others_is_the_latest_of_them() -> None:
    """`1 2` stands before three places after a 5, then before one after a 6; two are remembered."""
    tokens = [5, 1, 2, 9, 5, 1, 2, 9, 5, 1, 2, 9]
    with patch.object(suffix_trie, "MAX_MATCHES", 2):
        trie = SuffixTrie(tokens, 24)
        trie.catch_up()
        assert trie.longest_match([7, 1, 2]) == (2, [11, 7])
        tokens += [6, 1, 2, 8]
        trie.catch_up()
        assert trie.longest_match([7, 1, 2]) == (2, [15, 11])
        assert trie.longest_match([5, 1, 2]) == (3, [11, 7])


def hostile() -> list[int]:
    """Blocks of 23 tokens that come 17 times, each time after another token: nodes are split as deep as they can be."""
    rng, tokens = random.Random(0), []
    for block in range(12):
        letters = [rng.randrange(10_000) for _ in range(23)]
        for copy in range(MAX_MATCHES + 1):
            tokens += [20_000 + 100 * block + copy, *letters]
    return tokens


@pytest.mark.parametrize(
    "tokens, most_nodes",
    [
        (hostile(), 2.0),
        ([random.Random(i).randrange(4096) for i in range(3000)], 2.0),
        ([random.Random(i).randrange(2) for i in range(3000)], 2.0),
        ([7] * 3000, 0.03),
        ([1, 2, 3] * 1000, 0.03),
        ([random.Random(i % 100).randrange(4096) for i in range(3000)], 0.2),
    ],
    ids=["hostile", "random", "two letters", "one letter", "loop of 3", "a text 30 times"],
)
def test_memory_is_bounded_by_the_number_of_tokens(tokens: list[int], most_nodes: float) -> None:
    """Fewer nodes than a suffix automaton may have, far fewer where text repeats; and no node holds many places."""
    trie = SuffixTrie(tokens, 24)
    trie.catch_up()
    assert 1 <= len(nodes(trie)) <= most_nodes * len(tokens) + 1
    for node in nodes(trie):
        assert len(node.places) <= MAX_MATCHES
        assert node.places == sorted(set(node.places))


def test_an_interrupt_anywhere_changes_no_answer() -> None:
    """At every line that entering executes; the next look-up after `catch_up` is right, and so is every later one."""
    rng = random.Random(3)
    start = [rng.randrange(1, 4) for _ in range(16)]
    later = [rng.randrange(1, 4) for _ in range(8)] + [1, 2] * 5
    with patch.object(suffix_trie, "MAX_MATCHES", 2):
        for line in range(1, 10_000):
            trie = SuffixTrie(list(start), 4)
            trie.catch_up()
            trie.tokens.extend(later)
            if not interrupted(trie.catch_up, line, ("suffix_trie.py",)):
                break
            trie.catch_up()
            for context in ([a, b, c] for a in (1, 2, 3) for b in (1, 2, 3) for c in (1, 2, 3)):
                assert trie.longest_match(context) == matches(trie.tokens, context, 4, 2)
        assert 200 < line < 9_999  # so many lines there were
