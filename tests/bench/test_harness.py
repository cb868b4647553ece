"""The harness divides the right numbers, in turn, and tells when outputs differ."""

from __future__ import annotations

import errno
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from minillm.bench import harness
from minillm.bench.harness import Counted, System, compare, median_interval, result, save


class Clock:
    """A clock that moves when a system says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(harness.time, "perf_counter", clock)
    return clock


def system(
    clock: Clock,
    name: str,
    seconds: list[float],
    tokens: list[int],
    order: list[str],
    baseline: str | tuple[str, ...] | None,
):
    """Takes `seconds` in turn (the first is the warm-up) and always gives `tokens`."""
    left = iter(seconds)

    def run() -> list[list[int]]:
        order.append(name)
        clock.now += next(left)
        return [tokens]

    return System(name, run, baseline, lambda: {"note": name})


def test_ratios_are_medians_of_neighbouring_pairs(clock: Clock) -> None:
    order: list[str] = []
    slow = system(clock, "slow", [99.0, 2.0, 4.0, 9.0], [1, 2], order, None)
    fast = system(clock, "fast", [99.0, 1.0, 1.0, 3.0], [1, 2], order, "slow")
    base, row = compare([slow, fast], rounds=3, peak_memory=lambda name: len(name))
    assert order == ["slow", "fast"] * 4
    assert (row.ratio, row.ratio_min, row.ratio_max) == (3.0, 2.0, 4.0)
    assert (base.ratio, base.outputs_equal) == (None, None)
    assert row.outputs_equal is True and row.p50_ms == 500.0 and row.tokens_per_s == 2.0
    assert row.config == {"note": "fast"} and row.peak_memory_bytes == 4


def test_short_runs_get_more_rounds(clock: Clock) -> None:
    order: list[str] = []
    slow = system(clock, "slow", [99.0, *[2.0] * 6], [1], order, None)
    fast = system(clock, "fast", [99.0, *[1.0] * 6], [1], order, "slow")
    compare([slow, fast], rounds=2, seconds=11)
    assert order == ["slow", "fast"] * 7  # the warm-up, and six rounds of 2 s
    order.clear()
    long = system(clock, "long", [99.0, 8.0, 8.0], [1], order, None)
    compare([long], rounds=2, seconds=3)
    assert order == ["long"] * 3


def test_the_first_system_runs_beside_the_others_of_a_round(clock: Clock) -> None:
    """A machine that gets slower: each is compared with the runs of the first just before and just after it."""
    order: list[str] = []
    first = system(clock, "first", [99.0, 2.0, 6.0, 10.0], [1], order, None)
    others = [
        system(clock, name, [99.0, seconds], [1], order, "first")
        for name, seconds in (("a", 4.0), ("b", 2.0), ("c", 4.0))
    ]
    rows = compare([first, *others], rounds=1, first_every=2)
    assert order == ["first", "a", "b", "c", "first", "a", "b", "first", "c", "first"]
    assert [row.ratio for row in rows] == [None, 1.0, 2.0, 2.0]
    assert rows[0].p50_ms == 6000.0


def test_the_interval_of_a_median_has_the_probability_of_the_binomial_distribution() -> None:
    assert median_interval([1.0] * 5) is None  # all above the median or all below it: 2/32
    assert median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)  # 2/64
    assert median_interval([float(i) for i in range(9)]) == (1.0, 7.0)  # 2 · (1 + 9)/512
    assert median_interval([float(i) for i in range(11)]) == (1.0, 9.0)  # with (2, 8): 2 · (1 + 11 + 55)/2048
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval([rng.gauss(5, 1) for _ in range(20)]) or (0, 0)
        hits += low <= 5 <= high
    assert hits > 1870  # 95.9% of 2,000, σ 8.9: a miss has a probability below 1e-6


def test_no_system_gives_no_rows() -> None:
    assert compare([], rounds=1, seconds=2) == []


def test_a_system_has_a_row_for_each_of_its_baselines(clock: Clock) -> None:
    slow = system(clock, "slow", [9.0, 6.0], [1], [], None)
    even = system(clock, "even", [9.0, 4.0], [1], [], "slow")
    fast = system(clock, "fast", [9.0, 2.0], [1], [], ("slow", "even"))
    rows = compare([slow, even, fast], rounds=1)
    assert [(row.system, row.baseline, row.ratio) for row in rows[2:]] == [("fast", "slow", 3.0), ("fast", "even", 2.0)]


def test_different_tokens_are_told_and_speed_is_per_token(clock: Clock) -> None:
    one = system(clock, "one", [1.0, 4.0], [1, 2, 3, 4], [], None)
    other = system(clock, "other", [1.0, 1.0], [1, 9], [], "one")
    row = compare([one, other], rounds=1)[1]
    assert row.outputs_equal is False
    assert row.ratio == 2.0


def test_what_counts_is_what_the_system_says(clock: Clock) -> None:
    """Each run takes 10 seconds and gives 4 tokens; one system says that 3 seconds and 2 tokens of that count."""
    whole = system(clock, "whole", [10.0] * 2, [1, 2, 3, 4], [], None)
    part = replace(system(clock, "part", [10.0] * 2, [1, 2, 3, 9], [], "whole"), counted=lambda: Counted(3.0, 2))
    row = compare([whole, part], rounds=1)[1]
    assert (row.p50_ms, row.ratio) == (1500.0, pytest.approx(2.5 / 1.5))
    assert row.outputs_equal is False and row.same_start == 0.75


def test_a_result_names_its_hardware_and_versions(clock: Clock, tmp_path: Path) -> None:
    rows = compare([system(clock, "one", [1.0, 4.0], [1], [], None)], rounds=1)
    save(result("decode", {"batch": 1}, rows), tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["schema"] == 1 and read["name"] == "decode" and read["config"] == {"batch": 1}
    assert read["hardware"]["cpu"]["name"] and read["versions"]["torch"]
    assert read["rows"][0]["system"] == "one"


def test_each_row_of_a_result_has_a_line(tmp_path: Path) -> None:
    """With a line for each value of a row, results of many rows would be large files."""
    rows = [{"system": f"one\n{i}", "interval": (0.5, 1.5), "config": {"alpha": [0.1, 0.2]}} for i in range(3)]
    outcome = {
        "name": "x",
        "config": {"rounds": 6, "left_out": {"y": 'a\n"b"'}},
        "rows": rows,
        "stages": [{"rows": []}],
    }
    for given in (outcome, {**outcome, "rows": []}, {}):
        save(given, tmp_path / "out.json")
        assert json.loads((tmp_path / "out.json").read_text()) == json.loads(json.dumps(given))
    save(outcome, tmp_path / "out.json")
    lines = [line.strip().removesuffix(",") for line in (tmp_path / "out.json").read_text().splitlines()]
    assert all(json.dumps(row) in lines for row in rows) and '"rounds": 6' in lines


def test_an_earlier_result_stays_whole_until_the_next_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    save({"run": 1}, file)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            save({"run": 2}, file)
    assert caught.value.filename == str(file) and list(tmp_path.iterdir()) == [file]
    assert json.loads(file.read_text()) == {"run": 1}
    save({"run": 3}, file)
    assert json.loads(file.read_text()) == {"run": 3} and list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_is_full_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        save({"run": 1}, Path("/dev/full"))


def test_a_result_is_written_through_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "out.json", tmp_path / "link.json"
    save({"run": 1}, file)
    link.symlink_to(file)
    save({"run": 2}, link)
    assert link.is_symlink() and json.loads(file.read_text()) == {"run": 2}


def test_peak_memory_is_of_a_process_of_its_own() -> None:
    little = harness.peak_memory_of("pass")
    much = harness.peak_memory_of("x = bytearray(80_000_000)")
    assert little is not None and much is not None and 70e6 < much - little < 100e6
    assert harness.peak_memory_of("raise SystemExit(3)") is None
