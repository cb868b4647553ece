"""Requests that begin alike have names that differ."""

from __future__ import annotations

from minillm.viz import CachePagesView
from minillm.viz.draw.request_labels import distinct_names
from tests.trace.traces import sharing
from tests.viz.pictures import found, text_of


def test_prompts_that_begin_alike_are_named_by_where_they_differ():
    shared = "class Inventory: def __init__(self): "
    assert distinct_names([shared + "self.a = 1", shared + "self.b = 2", "import os"]) == [
        "…a = 1",
        "…b = 2",
        "import os",
    ]


def test_equal_prompts_are_numbered():
    assert distinct_names(["x = 1", "y", "x = 1"]) == ["#1 x = 1", "y", "#2 x = 1"]


def test_six_requests_of_one_beginning_have_six_names_in_the_picture():
    rows = [text_of(row) for row in found(CachePagesView(sharing()).to_svg(step=3), "request")]
    assert len({row[1:14] for row in rows}) == len(rows)


def test_a_prompt_that_begins_another_one_has_a_name() -> None:
    first = "class Inventory:\n    def add"
    assert distinct_names([first, first + "(self, item):", first + "  "]) == [
        "#1 class Inventory:⏎ def add",
        "…(self, item):",
        "#2 class Inventory:⏎ def add",
    ]


def test_prompts_that_differ_behind_a_long_beginning_are_named_by_where_they_differ() -> None:
    shared = "You are a careful programmer.\n" * 1000
    assert distinct_names([shared + "def a", shared + "def b"]) == ["…a", "…b"]
