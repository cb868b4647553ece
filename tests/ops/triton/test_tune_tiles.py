"""The search for the fastest tiles: what is tried, and what is passed over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from triton import testing
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from minillm.bench.on_gpu.tune_tiles import candidates, measure
from minillm.ops.triton.tiles import ONE_ROW, Tiles


def test_candidates_for_one_row_are_not_split() -> None:
    found = list(candidates(1))
    assert len(set(found)) == len(found) > 50 and ONE_ROW in found
    assert {(t.m, t.splits) for t in found} == {(1, 1)}


@pytest.mark.parametrize("rows", [2, 40, 500])
def test_candidates_are_tiles_that_a_dot_takes(rows: int) -> None:
    found = list(candidates(rows))
    assert len(set(found)) == len(found) > 50
    assert all(min(t.m, t.n, t.k) >= 16 for t in found)
    assert {t.splits for t in found} == ({1} if rows == 500 else {1, 2, 4, 8})


def test_measuring_passes_over_tiles_that_do_not_compile_or_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(candidates(1))
    problems = {
        found[0]: TritonError("at 3:4:"),
        found[2]: RuntimeError("PassManager::run failed"),
        found[3]: OutOfResources(2, 1, "shared memory"),
    }

    def do_bench(run: Callable[[], float], return_mode: str) -> float:
        return run()

    def run(tiles: Tiles) -> float:
        if tiles in problems:
            raise problems[tiles]
        return float(found.index(tiles))

    monkeypatch.setattr(testing, "do_bench", do_bench)
    assert measure(run, 1) == (found[1], 1.0)
    found.append(Tiles(16, 256, 512))
    assert measure(lambda tiles: -run(tiles), 1, [found[-1]]) == (found[-1], 1.0 - len(found))
    problems |= dict.fromkeys(found[1:], OutOfResources(2, 1, "shared memory"))
    with pytest.raises(TritonError, match="at 3:4:"):
        measure(run, 1)
    problems[found[0]] = OutOfResources(2, 1, "shared memory")
    problems[found[5]] = TritonError("no such instruction")
    with pytest.raises(TritonError, match="no such instruction"):
        measure(run, 1)
    problems[found[7]] = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(run, 1)
