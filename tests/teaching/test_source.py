"""Planting a mistake by an edit of the reference, and showing the reference as a hint."""

from __future__ import annotations

import pytest

from minillm.errors import LessonError
from minillm.teaching.source import body_of, edited, wrong_versions

LIMIT = 10


def clamped(number: int) -> int:
    """At most LIMIT."""
    if number > LIMIT:
        return LIMIT
    return number


def test_an_edit_is_the_reference_but_for_what_it_replaces():
    off_by_one = edited(clamped, ("> LIMIT", "> LIMIT + 1"))
    assert [clamped(n) for n in (9, 10, 11, 12)] == [9, 10, 10, 10]
    assert [off_by_one(n) for n in (9, 10, 11, 12)] == [9, 10, 11, 10]


def test_several_edits_are_made_one_after_the_other():
    assert edited(clamped, ("> LIMIT", "> 3"), ("return LIMIT", "return 3"))(7) == 3


@pytest.mark.parametrize("old", ["no such text", "number"])
def test_an_edit_that_finds_nothing_or_too_much_is_refused(old: str):
    with pytest.raises(LessonError, match=r"clamped: .* occurs \d+ times"):
        edited(clamped, (old, "x"))


def test_the_body_is_what_a_learner_would_write():
    assert body_of(clamped) == "\nif number > LIMIT:\n    return LIMIT\nreturn number"


def test_a_table_of_slips_plants_one_mistake_each():
    [early, late] = wrong_versions(clamped, {"stops early": ("> LIMIT", "> 5"), "stops late": ("> LIMIT", "> 50")})
    assert (early.description, early.function(7), late.function(11)) == ("stops early", 10, 11)
