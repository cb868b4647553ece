"""The search for the fastest tiles: what is tried, and what is passed over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from triton import testing
from triton.errors import TritonError
from triton.runtime.errors import OutOfResources

from minillm.bench.on_gpu.tune_tiles import candidates, measure
from minillm.ops.triton.tiles import ONE_ROW, Tiles


@pytest.mark.parametrize("rows", [1, 2, 40, 500])
def test_candidates_are_few_and_of_every_kind(rows: int) -> None:
    found = list(candidates(rows))
    assert 3 <= len(set(found)) == len(found) < 10 and len({t.n for t in found}) > 1
    if rows == 1:
        assert ONE_ROW in found and {(t.m, t.n * t.k, t.splits) for t in found} == {(1, 4096, 1)}
        return
    assert all(min(t.m, t.n, t.k) >= 16 for t in found)  # which a dot takes
    assert max(t.splits for t in found) == {2: 4, 40: 2, 500: 1}[rows]
    assert {t.warps for t in found} == ({4} if rows == 2 else {4, 8})


def test_measuring_passes_over_tiles_that_do_not_compile_or_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Tiles(1, n, 512) for n in range(1, 11)]
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
    assert measure(run, iter(found)) == (found[1], 1.0, 10)
    assert measure(lambda tiles: -run(tiles), found) == (found[-1], -9.0, 10)
    problems |= dict.fromkeys(found[1:], OutOfResources(2, 1, "shared memory"))
    with pytest.raises(TritonError, match="at 3:4:"):
        measure(run, found)
    problems[found[0]] = OutOfResources(2, 1, "shared memory")
    problems[found[5]] = TritonError("no such instruction")
    with pytest.raises(TritonError, match="no such instruction"):
        measure(run, found)
    problems[found[7]] = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(run, found)
