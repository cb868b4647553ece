"""An answer with too few entries: each missing one is counted and crossed, in the picture and in text."""

from __future__ import annotations

from minillm.teaching.draw import as_html, as_text


def test_missing_entries_are_counted_and_crossed() -> None:
    html = as_html([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]])
    assert "1 of 6 cells differ" in html and html.count("<path") == html.count("stroke-dasharray") == 1
    rows = as_html([[1, 2, 3], [4, 5, 6]], [[1, 2, 9]])
    assert "4 of 6 cells differ" in rows and rows.count("<path") == 4 and rows.count("stroke-dasharray") == 3


def test_missing_entries_are_crossed_in_text() -> None:
    assert as_text([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]]).splitlines() == [
        "expected    got (✗ differs)",
        "1 2 3       1 2 3",
        "4 5 6       4 5 ✗",
    ]
    assert as_text([[7], [8]], [[7]]).splitlines()[-1] == "8           ✗"


def test_entries_that_are_too_many_are_crossed_as_before() -> None:
    html = as_html([[1, 2]], [[1, 2, 3]])
    assert "1 of 3 cells differ" in html and "stroke-dasharray" not in html
