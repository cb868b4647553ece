"""Which replica gets a request: the longest prefix, unless it is too busy."""

from __future__ import annotations

import pytest

from minillm.cache.prefix import extend_block_hashes
from minillm.cluster.prefix_table import PrefixTable
from minillm.errors import ConfigError


def hashes(*tokens: int) -> list[bytes]:
    return extend_block_hashes([], tokens, 2)


DOCUMENT = hashes(1, 2, 3, 4, 5, 6)
OTHER = hashes(7, 8, 9, 10, 11, 12)


def table(**limits: float) -> PrefixTable[str]:
    return PrefixTable(**limits)


def test_a_prompt_goes_where_its_prefix_went() -> None:
    routes = table()
    routes.note("b", DOCUMENT)
    assert routes.rank(hashes(1, 2, 3, 4, 99, 99), {"a": 0, "b": 5}) == ["b", "a"]


def test_a_block_counts_only_if_all_before_it_match() -> None:
    routes = table()
    routes.note("a", DOCUMENT)
    assert routes.match("a", hashes(1, 2, 3, 4, 5, 9)) == 2
    assert routes.match("a", hashes(0, 2, 3, 4, 5, 6)) == 0


def test_the_longer_match_wins_and_equal_ones_go_to_the_less_loaded() -> None:
    routes = table()
    routes.note("a", DOCUMENT[:1])
    routes.note("b", DOCUMENT)
    assert routes.rank(DOCUMENT, {"a": 0, "b": 3})[0] == "b"
    routes.note("a", DOCUMENT)
    assert routes.rank(DOCUMENT, {"a": 0, "b": 3})[0] == "a"


def test_without_a_match_the_least_loaded_comes_first() -> None:
    assert table().rank(DOCUMENT, {"a": 2, "b": 1, "c": 3}) == ["b", "a", "c"]
    assert table().rank([], {"a": 2, "b": 1}) == ["b", "a"]
    assert table().rank(DOCUMENT, {}) == []


@pytest.mark.parametrize(("load", "first"), [(4, "a"), (5, "b")])
def test_affinity_is_given_up_when_a_replica_is_too_busy(load: int, first: str) -> None:
    routes = table(max_imbalance=4)
    routes.note("a", DOCUMENT)
    assert routes.rank(DOCUMENT, {"a": load, "b": 0})[0] == first


def test_new_prefixes_are_spread_over_idle_replicas() -> None:
    routes = table()
    for prompt in (DOCUMENT, OTHER):
        routes.note(routes.rank(prompt, {"a": 0, "b": 0})[0], prompt)
    assert (routes.match("a", DOCUMENT), routes.match("b", OTHER)) == (3, 3)


def test_a_short_common_beginning_is_no_reason() -> None:
    routes = table(min_match=0.5)
    routes.note("a", DOCUMENT[:1])
    assert routes.rank(DOCUMENT, {"a": 1, "b": 0})[0] == "b"
    routes.note("a", DOCUMENT[:2])
    assert routes.rank(DOCUMENT, {"a": 1, "b": 0})[0] == "a"


def test_the_least_recently_used_blocks_are_forgotten_from_the_end_of_their_prompt() -> None:
    routes = table(blocks_per_replica=4)
    routes.note("a", DOCUMENT)
    routes.note("a", OTHER[:2])
    assert [routes.match("a", prompt) for prompt in (DOCUMENT, OTHER)] == [2, 2]
    routes.note("a", DOCUMENT[:2])
    routes.note("a", hashes(20, 21))
    assert [routes.match("a", prompt) for prompt in (DOCUMENT, OTHER)] == [2, 1]


def test_a_lost_replica_is_forgotten() -> None:
    routes = table()
    routes.note("a", DOCUMENT)
    routes.keep_only(["b"])
    assert routes.match("a", DOCUMENT) == 0


@pytest.mark.parametrize("limits", [{"max_imbalance": -1}, {"blocks_per_replica": 0}, {"min_match": 1.5}])
def test_a_bad_limit_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        table(**limits)
