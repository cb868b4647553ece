"""What a token looks like when whitespace, controls and wide characters must show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.viz.draw.colours import ink_on, owner_letter
from minillm.viz.draw.glyphs import beginning, cells, shorten, visible
from minillm.viz.draw.svg import paragraph


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" for", "·for"),
        ("\n", "⏎"),
        ("\n" + " " * 8 + "if", "⏎·×8if"),
        ("    x", "····x"),
        ("\t", "⇥"),
        ("\x00\x1b\x7f", "␀␛␡"),
        ("a\u202eb", "a\ufffdb"),
        ("\u200bx\u2060y\ufeff\xad\u2028\u2029", "\ufffdx\ufffdy" + 4 * "\ufffd"),
        ("👩\u200d💻", "👩\u200d💻"),
        ("\ud800\uffff\x85", "\ufffd\ufffd\ufffd"),
        ("", ""),
    ],
)
def test_invisible_becomes_visible(text, shown):
    assert visible(text) == shown


def test_wide_characters_take_two_cells_and_marks_none():
    assert (cells("abc"), cells("日本"), cells("e\u0301"), cells("🙂")) == (3, 4, 1, 2)
    assert cells("a\u200b\u2028") == cells(visible("a\u200b\u2028")) == 3, "signs have a width"


def test_shortened_text_says_so_and_never_splits_a_wide_character():
    assert shorten("read_text", 6) == "read_…"
    assert shorten("日本語", 5) == "日本…"
    assert shorten("日本語", 4) == "日…"
    assert shorten("日本語", 6) == "日本語"


@given(st.text(), st.integers(1, 30))
def test_shortened_text_always_fits(text, width):
    assert cells(shorten(visible(text), width)) <= width


def test_letters_go_on_after_z():
    assert [owner_letter(i) for i in (0, 1, 25, 26, 27, 51, 52, 701, 702)] == [
        "A", "B", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA",
    ]  # fmt: skip


def test_letters_are_readable_on_every_owner_colour():
    assert ink_on("#0072B2") == ink_on("#009E73") == "#ffffff"
    assert ink_on("#F0E442") == ink_on("#56B4E9") == ink_on("#E69F00") == "#1f2430"


def test_the_beginning_of_a_text_says_that_there_is_more():
    assert (beginning("for line", 20), beginning("for line", 6)) == ("for·line", "for·l…")
    assert beginning(" " * 1000 + "x", 20) == "·×400…"
    assert beginning("x" * 1000, 20) == "x" * 19 + "…"


def test_lines_become_sentences_and_dots_in_them_stay():
    assert paragraph("One: range(..)\nTwo...\nThree.\nFour") == "One: range(..). Two... Three. Four"
