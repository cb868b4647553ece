"""Lesson 16: its references are what the engine does, its workshop counts what it says, likely mistakes are named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm import LLM, SamplingParams
from minillm.errors import EngineDeadError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.parallel.split import config_of_rank, piece_of, possible_sizes
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l16_beyond_one_machine import (
    all_reduce_seconds,
    column_parallel,
    heads_of_rank,
    route,
    row_parallel,
)
from minillm.teaching.workshop import l16_broken as broken
from minillm.teaching.workshop import l16_replicas as replicas
from minillm.teaching.workshop import l16_vllm, l16_wire
from minillm.teaching.workshop.l12_costs import Machine, Shape
from minillm.teaching.workshop.l16_cluster import Cluster, Link, one_shot_seconds
from minillm.trace import Trace
from tests.conftest import TinyPair

ROOT = Path(__file__).parents[2]
CONFIG = ModelConfig(96, 32, 96, 1, 12, 4, 4, 64)


# --------------------------------------------------------------------------------------------------------- references


@given(size=st.sampled_from([1, 2, 3, 4]), tokens=st.integers(1, 3))
def test_columns_then_rows_are_the_whole_product(size: int, tokens: int) -> None:
    draw = torch.Generator().manual_seed(size)
    x, up, down = (torch.randn(*shape, generator=draw) for shape in ((tokens, 5), (12, 5), (7, 12)))
    b, c = torch.randn(12, generator=draw), torch.randn(7, generator=draw)
    parts = [column_parallel(x, up, b, rank, size) for rank in range(size)]
    torch.testing.assert_close(torch.cat(parts, 1), x @ up.T + b)
    torch.testing.assert_close(row_parallel(parts, down, c), (x @ up.T + b) @ down.T + c)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 6, 12])
@pytest.mark.parametrize("size", range(1, 13))
def test_heads_are_those_of_the_engine(kv_heads: int, size: int) -> None:
    config = replace(CONFIG, num_kv_heads=kv_heads, intermediate_size=27720)  # divisible by all sizes
    for rank in range(size):
        found = heads_of_rank(12, kv_heads, rank, size)
        assert (found is not None) == (size in possible_sizes(config))
        if found is not None:
            heads, kv = found
            width, own = config.head_dim, config_of_rank(config, size)
            assert len(heads) == own.num_heads and len(kv) == own.num_kv_heads
            for name, numbers in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
                rows = piece_of(f"model.layers.0.self_attn.{name}.weight", config, rank, size).rows
                assert rows == range(numbers.start * width, numbers.stop * width)
            assert all(kv_heads * head // 12 in kv for head in heads)


@given(size=st.integers(2, 6), chunk=st.integers(1, 5), latency=st.floats(0, 9), bandwidth=st.floats(0.5, 99))
def test_a_ring_takes_as_long_as_its_steps(size: int, chunk: int, latency: float, bandwidth: float) -> None:
    """The ring itself, step by step, on lists."""
    ranks = [[[float(10 * rank + c)] * chunk for c in range(size)] for rank in range(size)]
    seconds = 0.0
    for step in range(2 * (size - 1)):
        sent = [(rank, (rank - step) % size, ranks[rank][(rank - step) % size]) for rank in range(size)]
        for rank, c, numbers in sent:
            to = ranks[(rank + 1) % size]
            adds = step < size - 1
            to[c] = [a + b for a, b in zip(to[c], numbers, strict=True)] if adds else list(numbers)
        seconds += latency + chunk / bandwidth
    total = [[float(sum(10 * rank + c for rank in range(size)))] * chunk for c in range(size)]
    assert ranks == [total] * size
    assert all_reduce_seconds(size * chunk, size, bandwidth, latency) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "answer", "cause"),
    [
        ("column_parallel", lambda x, w, b, rank, size: x @ w.T + b, "returns the whole product"),
        ("column_parallel", lambda x, w, b, rank, size: x.repeat(1, 9), "of the outputs"),
        ("row_parallel", lambda parts, w, b: row_parallel(parts, w, 2 * b), ""),
        ("heads_of_rank", lambda h, kv, rank, size: (range(1), range(0)), "needs a query head"),
        ("heads_of_rank", lambda h, kv, rank, size: (range(h + 1), range(kv)), "there are query heads"),
        ("heads_of_rank", lambda h, kv, rank, size: [1, 2], "two ranges"),
        ("heads_of_rank", lambda h, kv, rank, size: None, "can be split"),
        ("all_reduce_seconds", lambda n, size, b, latency: 3 * n / b, "times that"),
        ("all_reduce_seconds", lambda n, size, b, latency: "long", "a number"),
        ("route", lambda blocks, cached, queued: len(cached), "number of a replica"),
        ("route", lambda blocks, cached, queued: len(cached) - 1, "replica"),
    ],
)
def test_likely_wrong_answers_are_named(name: str, answer, cause: str) -> None:
    result = check_function(f"l16.{name}", answer)
    assert not result.passed and cause in str(result), str(result)


def test_sums_that_are_wrong_are_not_said_to_be_of_several_ranks() -> None:
    """A part added twice is another mistake than a product over the inputs of several ranks."""

    def first_part_twice(parts, weight, bias):
        width = parts[0].shape[1]
        partial = [part @ weight[:, r * width : (r + 1) * width].T for r, part in enumerate(parts)]
        return sum(partial, partial[0]) + bias

    result = check_function("l16.row_parallel", first_part_twice)
    assert not result.passed and "several ranks" not in str(result)


# ------------------------------------------------------------------------------------------------------- the workshop


def test_an_all_reduce_between_two_processes_is_timed_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('this is the learner's')")
    monkeypatch.chdir(tmp_path)
    sizes = [4, 64, 4096]
    taken = l16_wire.measured_seconds(sizes, rounds=3)
    assert len(taken) == 3 and min(taken) > 0
    latency, bandwidth = l16_wire.latency_and_bandwidth([4, 100, 300], [2e-4, 1e-3, 3e-3])
    assert latency == 1e-4 and bandwidth == pytest.approx(200 / 2e-3)


def test_an_other_process_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l16_wire, "__name__", "no_such_module")
    with pytest.raises(EngineDeadError, match="the other process has ended with status 1"):
        l16_wire.measured_seconds([4])


def test_free_processors_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l16_wire.psutil, "cpu_percent", lambda seconds, percpu: [100.0, 50.0, 0.0])
    monkeypatch.setattr(l16_wire.os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert l16_wire.free_processors() == 0.5


@pytest.fixture(scope="module")
def engines(tiny: TinyPair) -> list[LLM]:
    return [LLM(str(tiny.target), block_size=4, num_kv_blocks=24, enforce_eager=True, device="cpu") for _ in range(2)]


def test_what_caches_have_is_counted_and_no_token_changes(engines: list[LLM]) -> None:
    texts = [[10 * i + j for j in range(8)] for i in range(1, 5)]
    prompts = [[*texts[i % 3 and i % 4], 7, 8 + i] for i in range(16)]
    turns = replicas.serve(engines, prompts, replicas.round_robin())
    mine = replicas.serve(engines, prompts, route)
    assert turns.num_prompt == mine.num_prompt == sum(map(len, prompts))
    assert turns.replicas == [0, 1] * 8 and turns.busiest == 0.5
    assert mine.num_cached > turns.num_cached > 0
    greedy = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    plain = [engines[0].generate({"prompt_token_ids": p}, greedy, use_tqdm=False)[0].outputs[0] for p in prompts]
    assert sorted(mine.token_ids) == sorted(turns.token_ids) == sorted(out.token_ids for out in plain)


def test_a_router_forgets_what_a_replica_has_no_room_for(engines: list[LLM]) -> None:
    seen: list[list[set[int]]] = []

    def watching(blocks: list[int], cached: list[set[int]], queued: list[int]) -> int:
        seen.append(cached)
        return 0

    prompts = [[i] * 24 for i in range(1, 9)]  # six blocks each, of which only 24 fit
    replicas.serve(engines, prompts, watching)
    assert [len(cached[0]) for cached in seen] == [0, 6, 12, 18, 24, 24, 24, 24]
    assert (
        set(replicas.blocks_of(prompts[0], 4)) & seen[4][0] and not set(replicas.blocks_of(prompts[0], 4)) & seen[5][0]
    )


def test_hot_requests_are_about_the_first_document(engines: list[LLM]) -> None:
    texts = replicas.documents(engines[0], 3, 10)
    assert [len(text) for text in texts] == [10] * 3 and texts[0] != texts[1]
    prompts = replicas.requests(engines[0], texts, 40, hot=1.0)
    assert all(prompt[:10] == texts[0] for prompt in prompts) and len({tuple(p) for p in prompts}) == 40
    assert prompts == replicas.requests(engines[0], texts, 40, hot=1.0)


def test_a_step_of_a_cluster_reads_or_computes_and_then_exchanges() -> None:
    shape, gpu = Shape(1e3, 2e3, 5.0, 1.0), Machine(4e3, 1e3, 4e3)
    cluster = Cluster(4, gpu, Link("wire", 100.0, 0.25), shape, 3, 10.0, 40.0, all_reduce_seconds)
    assert cluster.step_seconds(4, 1) == 2.0  # reads 2000 bytes; computing takes 0.5 s
    assert cluster.step_seconds(16, 1) == 2.0 and cluster.step_seconds(32, 1) == 4.0
    all_reduce = min(all_reduce_seconds(40.0, 4, 100.0, 0.25), one_shot_seconds(40.0, 4, 100.0, 0.25))
    all_gather = 0.25 + 3 * 40.0 / 100.0  # a quarter of the bytes of four tokens, to three other ranks
    assert cluster.step_seconds(4, 4) == 0.5 + 7 * all_reduce + all_gather
    assert cluster.tokens_per_second(4, 1) == 2.0
    assert one_shot_seconds(9.0, 1, 1.0, 1.0) == 0.0
    assert cluster.cache_tokens(1) == (4 * 4000 - 4 * 2000) / 5 and cluster.cache_tokens(4) == (16000 - 2000) / 5


@pytest.mark.parametrize(
    "answer",
    [
        lambda x, w, b, rank, size: torch.nn.functional.linear(x, w.chunk(size)[rank], b.chunk(size)[rank]),
        lambda x, w, b, rank, size: torch.einsum("ti,oi->to", x, w.chunk(size)[rank]) + b.chunk(size)[rank],
        lambda x, w, b, rank, size: torch.nn.functional.linear(
            input=x, weight=w.chunk(size)[rank], bias=b.chunk(size)[rank]
        ),
        lambda x, w, b, rank, size: torch.addmm(b.chunk(size)[rank], x, w.T.contiguous().chunk(size, 1)[rank]),
        lambda x, w, b, rank, size: torch.addmm(input=b.chunk(size)[rank], mat1=x, mat2=w.chunk(size)[rank].T),
        lambda x, w, b, rank, size: b.chunk(size)[rank].addmm(mat1=x, mat2=w.chunk(size)[rank].T),
        lambda x, w, b, rank, size: torch.inner(x, w.chunk(size)[rank]) + b.chunk(size)[rank],
        lambda x, w, b, rank, size: (
            torch.cat((x, torch.ones(len(x), 1)), 1) @ torch.cat((w, b[:, None]), 1).chunk(size)[rank].T
        ),
    ],
)
def test_other_split_products_pass(answer) -> None:
    assert check_function("l16.column_parallel", answer).passed


@pytest.mark.parametrize(
    "product",
    [
        torch.inner,
        lambda x, w: torch.linalg.matmul(x, w.T),
        lambda x, w: torch.linalg.multi_dot([x, w.T]),
        lambda x, w: torch.linalg.vecdot(x[:, None], w),
        lambda x, w: torch.zeros(len(x), len(w)).addmm_(x, w.T),
        lambda x, w: w.T.__rmatmul__(x),
        lambda x, w: torch.stack([x @ row for row in w], 1),
        lambda x, w: torch.cat([x @ part.T for part in w.split(1)], 1),
    ],
)
def test_products_with_the_whole_matrix_are_not_split(product) -> None:
    answer = lambda x, w, b, rank, size: (product(x, w) + b).chunk(size, 1)[rank]  # noqa: E731
    assert not check_function("l16.column_parallel", answer).passed


@pytest.mark.parametrize("hand_over", [Tensor.numpy, np.asarray, np.from_dlpack])
def test_a_product_of_numpy_is_refused(hand_over) -> None:
    """The check sees PyTorch's operations only."""

    def column(x: Tensor, w: Tensor, b: Tensor, rank: int, size: int) -> Tensor:
        return (torch.from_numpy(hand_over(x) @ hand_over(w).T) + b).chunk(size, 1)[rank]

    def row(parts: Sequence[Tensor], w: Tensor, b: Tensor) -> Tensor:
        return torch.from_numpy(hand_over(torch.cat(list(parts), 1)) @ hand_over(w).T) + b

    for name, answer in (("l16.column_parallel", column), ("l16.row_parallel", row)):
        result = check_function(name, answer)
        assert not result.passed and "compute with torch, not with NumPy" in result.counterexample.got


@pytest.mark.parametrize(
    ("answer", "passes"),
    [
        (
            lambda parts, w, b: (
                torch.stack([p @ c.T for p, c in zip(parts, w.split(parts[0].shape[1], 1), strict=True)]).sum(0) + b
            ),
            1,
        ),
        (lambda parts, w, b: (torch.stack(parts) @ w.unflatten(1, (len(parts), -1)).permute(1, 2, 0)).sum(0) + b, 1),
        (
            lambda parts, w, b: (
                sum(torch.einsum("ai,bi", p, c) for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)) + b
            ),
            1,
        ),
        (
            lambda parts, w, b: (
                sum(torch.einsum("...i,oi->...o", p, c) for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)) + b
            ),
            1,
        ),
        (
            lambda parts, w, b: (
                sum(torch.tensordot(p, c.T, 1) for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)) + b
            ),
            1,
        ),
        (
            lambda parts, w, b: (
                torch.einsum(
                    "p...->...",
                    torch.stack([p @ c.T for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)]),
                )
                + b
            ),
            1,
        ),
        (
            lambda parts, w, b: (
                torch.einsum(
                    "pto->to", torch.stack([p @ c.T for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)])
                )
                + b
            ),
            1,
        ),
        (
            lambda parts, w, b: (
                sum(torch.linalg.multi_dot([p, c.T]) for p, c in zip(parts, w.chunk(len(parts), 1), strict=True)) + b
            ),
            1,
        ),
        (lambda parts, w, b: torch.inner(torch.cat(parts, 1), w) + b, 0),
        (lambda parts, w, b: torch.linalg.multi_dot([torch.cat(parts, 1), w.T]) + b, 0),
        (lambda parts, w, b: torch.linalg.vecdot(torch.cat(parts, 1)[:, None], w) + b, 0),
        (lambda parts, w, b: torch.zeros(len(parts[0]), len(w)).addmm_(torch.cat(parts, 1), w.T) + b, 0),
        (lambda parts, w, b: torch.stack([torch.zeros(len(w)).addmv_(w, x) for x in torch.cat(parts, 1)]) + b, 0),
        (lambda parts, w, b: w.T.__rmatmul__(torch.cat(parts, 1)) + b, 0),
        (lambda parts, w, b: torch.tensordot(torch.cat(parts, 1), w.T, 1) + b, 0),
        (lambda parts, w, b: torch.einsum("...i,oi->...o", torch.cat(parts, 1), w) + b, 0),
        (lambda parts, w, b: torch.nn.functional.linear(torch.cat(parts, 1), w, b), 0),
        (lambda parts, w, b: torch.einsum("ti,oi->to", torch.cat(parts, 1), w) + b, 0),
        (lambda parts, w, b: torch.addmm(b, torch.cat(parts, 1), w.T), 0),
    ],
)
def test_products_of_all_inputs_are_not_split(answer, passes: int) -> None:
    assert check_function("l16.row_parallel", answer).passed == bool(passes)


@pytest.mark.parametrize("name", list(broken.MISTAKES))
def test_each_broken_split_makes_its_own_mistake(tiny: TinyPair, name: str) -> None:
    ids = [3 + i * i % 90 for i in range(20)]
    [whole] = broken.run_on_ranks(tiny.target, 1, ids, broken.right)
    first, second = broken.run_on_ranks(tiny.target, 2, ids, broken.MISTAKES[name])
    is_right = torch.allclose(first.logits, whole.logits, atol=1e-3)
    assert is_right == (name == "right")
    assert first.agrees(second) == ("not" not in name)
    assert torch.equal(first.logits, second.logits) == ("logits" not in name)


def test_a_script_runs_on_vllm_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "from {module} import LLM\nwith watch(LLM(model)) as trace:\n    seen.append(prompts)\n"
    trace, where = l16_vllm.run_or_recorded(script, "m", ["a"])
    assert "recorded" in where and len(trace) > 100

    class Stopping:
        def __init__(self, llm: object) -> None:
            raise UnsupportedError("another version")

    monkeypatch.setattr(l16_vllm, "find_spec", lambda name: object())
    monkeypatch.setattr(l16_vllm, "of_vllm", Stopping)
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(__import__("sys").modules, "vllm", type("vllm", (), {"LLM": lambda model: model}))
    trace, where = l16_vllm.run_or_recorded(script, "m", ["a"])
    assert "cannot be watched" in where and "recorded" in where and isinstance(trace, Trace)

    def without_gpu(model: str) -> None:
        raise RuntimeError("Failed to infer device type\nand how to find out why")

    monkeypatch.setitem(__import__("sys").modules, "vllm", type("vllm", (), {"LLM": without_gpu}))
    trace, where = l16_vllm.run_or_recorded(script, "m", ["a"])
    assert "did not run (RuntimeError: Failed to infer device type): this is a recorded run" in where
    assert isinstance(trace, Trace)


@pytest.mark.parametrize(
    ("problem", "words"),
    [(RuntimeError("\n  No device.\nMore."), "RuntimeError: No device."), (SystemExit(1), "SystemExit: 1")],
)
def test_whatever_ends_vllm_the_lesson_goes_on_and_says_it(
    monkeypatch: pytest.MonkeyPatch, problem: BaseException, words: str
) -> None:
    def ends(model: str) -> None:
        raise problem

    monkeypatch.setattr(l16_vllm, "find_spec", lambda name: object())
    monkeypatch.setitem(os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setitem(__import__("sys").modules, "vllm", type("vllm", (), {"LLM": ends}))
    trace, where = l16_vllm.run_or_recorded("from {module} import LLM\nLLM(model)\n", "m", ["a"])
    assert f"did not run ({words}): this is a recorded run" in where and isinstance(trace, Trace)


def test_the_recorded_run_is_the_one_that_is_tested() -> None:
    assert l16_vllm.RECORDED.read_bytes() == (ROOT / "tests/trace/vllm/drafted.jsonl").read_bytes()
