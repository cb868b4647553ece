from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minillm.training.plot import POINTS, Curve, buckets, loss_svg, ticks
from minillm.training.record import LogRow

SVG = "{http://www.w3.org/2000/svg}"
LOG = [LogRow(i, i * 1000, i * 0.1, 8 / i**0.3) for i in range(1, 1001)]


def test_picture_is_xml_that_says_what_it_shows():
    root = ElementTree.fromstring(loss_svg("Loss of <x>", [Curve("A", "nats", LOG), Curve("B", "KL & TV", LOG[:10])]))
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == "Loss of <x>"
    assert root.findtext(f"{SVG}desc").startswith("A: 1.01 nats after 1.0 million tokens; B: ")
    lines = root.findall(f"{SVG}polyline")
    assert len(lines) == 2 and all(len(line.get("points").split()) <= POINTS for line in lines)


def test_line_goes_down_where_the_loss_does_and_stays_inside():
    root = ElementTree.fromstring(loss_svg("Loss", [Curve("A", "nats", LOG)]))
    points = [tuple(map(float, p.split(","))) for p in root.find(f"{SVG}polyline").get("points").split()]
    assert points == sorted(points), "to the right, and downwards, as the loss falls"
    assert all(0 < x < 980 and 0 < y < 426 for x, y in points)


def test_same_log_gives_the_same_bytes():
    assert loss_svg("Loss", [Curve("A", "nats", LOG)]) == loss_svg("Loss", [Curve("A", "nats", list(LOG))])


def test_buckets_keep_mean_and_range():
    log = [LogRow(i + 1, 1_000_000 * (i + 1), 0.0, float(i % 2)) for i in range(2 * POINTS)]
    found = buckets(Curve("A", "nats", log))
    assert len(found) == POINTS
    assert {(b.low, b.mean, b.high) for b in found} == {(0.0, 0.5, 1.0)}
    assert found[-1].tokens == 2 * POINTS


def test_points_of_a_run_with_rows_of_several_lengths_are_whole_cycles():
    log = [LogRow(i + 1, i + 1, 0.0, float(i % 6)) for i in range(5 * POINTS + 3)]
    found = buckets(Curve("A", "nats", log, cycle=6))
    assert {b.mean for b in found} == {2.5} and found[-1].tokens * 1e6 == pytest.approx(len(log))
    assert buckets(Curve("A", "nats", log[:4], cycle=6))[0].mean == 1.5


def test_steps_outside_the_logged_cycles_are_in_no_point():
    """A GPU logs one cycle in ten, and the step after which it saves its state, here the fourth of some cycle."""
    logged = [step for step in range(1, 6001) if (step - 1) // 6 % 10 == 0 or step % 200 == 4]
    log = [LogRow(step, step, 0.0, float((step - 1) % 6)) for step in logged]
    assert len(log) > 600
    assert {b.mean for b in buckets(Curve("A", "nats", log, cycle=6))} == {2.5}


def test_a_branch_fills_its_panel():
    """Its first tokens are those of the run that it branched from."""
    log = [LogRow(i, 75_000_000 + i * 1000, 0.0, 2.0 - i / 1000) for i in range(1, 501)]
    root = ElementTree.fromstring(loss_svg("Loss", [Curve("A", "nats", LOG), Curve("B", "nats", log)]))
    first, second = (
        [float(point.split(",")[0]) for point in line.get("points").split()] for line in root.findall(f"{SVG}polyline")
    )
    assert second[-1] - second[0] == pytest.approx(first[-1] - first[0], rel=0.02)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(0, 10, [0, 2, 4, 6, 8, 10]), (2.9, 4.2, [3, 3.5, 4]), (0, 0.3, [0, 0.1, 0.2, 0.3])]
)
def test_ticks_are_round_and_inside(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
