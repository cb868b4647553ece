"""The kernel benchmark covers every op, counts the bytes that are really there, and reads what it says it reads."""

from __future__ import annotations

import itertools
import json
from functools import partial
from typing import Any

import pytest
import torch

from minillm.bench import kernels
from minillm.bench.benchmarks import find, find_table
from minillm.bench.device_clock import CpuClock, TimedFunction, last_cache_bytes, ratios, time_calls_in_turn
from minillm.bench.kernel_attention import Pools, attention_cases
from minillm.bench.kernel_cases import COMPILED, PREFILL, REFERENCE, Case, Implementation, Setting
from minillm.bench.kernel_products import SCHEMES, Weights, _compiled
from minillm.doctor.machine_limits import MachineLimit
from minillm.errors import ConfigError, UnsupportedError
from minillm.models.config import ModelConfig
from minillm.ops.dispatch import OPS

CONFIG = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=256,
)
SETTING = Setting("tiny", CONFIG, "cpu", torch.float32, 2**16, tokens=(1, 5, PREFILL), contexts=(3, 40))
LIMITS = [MachineLimit("copy bandwidth", "cpu", "B/s", 1e9, 1e9, 1e9, 7)]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """All of them, on a model so small that they fit into memory together."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [maker.make() for maker in kernels.makers(SETTING)]


def test_every_op_is_measured_at_every_number_of_tokens(cases: list[Case]) -> None:
    tokens = {(case.op, case.tokens) for case in cases}
    assert {case.op for case in cases} == {"linear", *OPS} == set(kernels.ALL_OPS)
    everywhere = {"linear", "paged_attention", "store_kv", "rms_norm", "add_rms_norm", "rope", "silu_gate", *SCHEMES}
    assert {(op, n) for op in everywhere for n in (1, 5, PREFILL)} <= tokens
    contexts = {(case.kind, case.tokens, case.context) for case in cases if case.op == "paged_attention"}
    assert contexts == set(itertools.product(("", "int8", "int4"), (1, 5, PREFILL), (3, 40)))
    assert len({case.name for case in cases}) == len(cases)


def test_makers_name_the_op_of_their_case(cases: list[Case]) -> None:
    assert [maker.op for maker in kernels.makers(SETTING)] == [case.op for case in cases]


def test_modelled_bytes_are_those_of_the_tensors_that_a_call_reads_and_writes(cases: list[Case]) -> None:
    for case in cases:
        assert case.num_bytes == sum(tensor.nbytes for tensor in case.touched), case.name


def test_bytes_of_the_formats_by_hand(cases: list[Case]) -> None:
    by_name = {case.name: case.num_bytes for case in cases}
    in_out = 4 * (64 + 192)
    assert by_name["linear float32, 1 token (tiny)"] == 4 * 64 * 192 + in_out
    assert by_name["int8_linear, 1 token (tiny)"] == 64 * 192 + 4 * 192 + in_out
    assert by_name["int4_linear, 1 token (tiny)"] == 32 * 192 + 2 * 192 + 192 + in_out  # one group: scale, zero point
    q_out, heads = 2 * 4 * 4 * 32, 2 * 41 * 2
    assert by_name["paged_attention, 1 token after 40 (tiny)"] == heads * 4 * 32 + q_out
    assert by_name["paged_attention int8, 1 token after 40 (tiny)"] == heads * (32 + 2) + q_out
    assert by_name["paged_attention int4, 1 token after 40 (tiny)"] == heads * (16 + 2 + 2) + q_out
    assert by_name["add_rms_norm, 5 tokens (tiny)"] == 4 * 5 * 64 * 4 + 4 * 64


def test_operations_count_what_a_causal_query_sees(cases: list[Case]) -> None:
    by_name = {case.name: case.operations for case in cases}
    assert by_name["paged_attention, 5 tokens after 40 (tiny)"] == 4 * 4 * 32 * (41 + 42 + 43 + 44 + 45)
    assert by_name["linear float32, 5 tokens (tiny)"] == 2 * 5 * 64 * 192
    assert by_name["rope, 5 tokens (tiny)"] is None


def test_every_implementation_gives_what_the_reference_gives(cases: list[Case]) -> None:
    compiled = set()
    with torch.no_grad():
        for case in cases:
            right = case.implementations[REFERENCE].once()
            assert right.double().norm() > 0 or not right.is_floating_point(), case.name  # token 0 is a token
            for name, way in case.implementations.items():
                assert kernels.relative_error(way.once(), right) <= (way.limit or 1e-5), (case.name, name)
            compiled |= {case.op} if COMPILED in case.implementations else set()
    assert compiled == {
        *("linear", "int8_linear", "w8a8_linear", "int4_linear", "paged_attention", "store_kv"),
        *("rms_norm", "rope", "silu_gate", "argmax"),
    }


def test_what_comes_from_memory_is_twice_the_last_cache_or_is_not_called_cold(cases: list[Case]) -> None:
    for case in cases:
        streamed = sum(t.nbytes for t in case.touched[:-2])
        if case.copies > 1:
            assert case.copies * streamed >= 2 * SETTING.cache_bytes, case.name
            assert case.tokens < PREFILL
    assert {case.op for case in cases if case.copies > 1} == {
        *("linear", "int8_linear", "w8a8_linear", "int4_linear", "paged_attention", "tree_attention")
    }
    assert [SETTING.copies(n) for n in (2**18, 2**16, 2**15, 2**15 - 1, 1)] == [2, 2, 4, 5, 1]


def test_each_copy_of_the_weights_is_read_in_its_turn() -> None:
    with torch.no_grad():
        for kind in ("float32", "int8_linear", "w8a8_linear", "int4_linear"):
            weights = Weights(SETTING, kind)
            assert weights.panels is not None and weights.num_copies > 1
            panels, lines, _ = weights.panels
            compiled = _compiled(weights, torch.randn(2, 64))
            assert compiled.loop is not None and compiled.result is not None
            right = compiled.once()
            panels[lines[1, 0] :] = 0  # all copies but the first
            for first, same in ((0, True), (1, False)):
                compiled.loop(1, first, weights.num_copies)
                assert torch.equal(compiled.result(), right) == same
            compiled.loop(weights.num_copies + 1, 0, weights.num_copies)  # once around
            assert torch.equal(compiled.result(), right)


def test_requests_of_a_pool_share_no_block_and_lie_scattered() -> None:
    pools = Pools(SETTING, "int8")
    tables = pools.tables(41, pools.copies(1, 40))
    assert len(tables) > 1 and tables.unique().numel() == tables.numel() and tables.max() < pools.num_blocks
    assert (tables.diff() != 1).any()
    case = next(m.make() for m in attention_cases(SETTING) if m.op == "paged_attention")
    outputs = [case.implementations[REFERENCE].call(copy) for copy in range(2)]  # type: ignore[misc]
    assert not torch.equal(*outputs)
    loop, result = case.implementations[COMPILED].loop, case.implementations[COMPILED].result
    assert loop is not None and result is not None
    for copy in range(2):
        loop(1, copy, case.copies)
        torch.testing.assert_close(result(), outputs[copy])


class Ticks(CpuClock):
    """A clock by which every call takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def seconds(self, run: Any) -> float:
        before = self.now
        run()
        return self.now - before


def test_ways_take_turns_in_runs_of_about_one_length() -> None:
    clock, order = Ticks(), []

    def run(name: str, each: float, count: int) -> None:
        order.append((name, count))
        clock.now += each * count

    ways = [
        TimedFunction("slow", partial(run, "slow", 2e-3)),
        TimedFunction("fast", partial(run, "fast", 1e-4), multiple=3),
    ]
    timings = time_calls_in_turn(clock, ways, rounds=4, seconds=1e-3)
    assert order[-8:] == [("slow", 1), ("fast", 9)] * 4
    assert ratios(timings, "fast", "slow") == pytest.approx([20.0] * 4)
    assert timings["fast"].median == pytest.approx(1e-4) and timings["fast"].calls == 9


def counting_case(errors: float = 0.0) -> tuple[Case, list[tuple[str, int]]]:
    """A case of five copies that tells which were read."""
    read: list[tuple[str, int]] = []

    def call(name: str, add: float, copy: int) -> torch.Tensor:
        read.append((name, copy))
        return torch.ones(4) + add

    def loop(count: int, first: int, copies: int) -> None:
        read.extend(("loop", (first + i) % copies) for i in range(count))

    ways = {
        REFERENCE: Implementation(partial(call, REFERENCE, 0.0)),
        "pytorch": Implementation(partial(call, "pytorch", errors)),
        COMPILED: Implementation(loop=loop, result=lambda: torch.ones(4)),
    }
    return Case("linear", "", "tiny", 1, None, 1000, 2000, 5, ways, (torch.ones(4),)), read


def test_cold_runs_read_the_copies_in_turn_whoever_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two ways in a row find what the other has just read."""
    monkeypatch.setattr(kernels, "RUN_S", 1e-5)
    case, read = counting_case()
    rows = kernels.case_rows(case, CpuClock(), LIMITS, 3, set(case.implementations))
    cold = [copy for _, copy in read][[copy for _, copy in read].index(1) - 1 :]
    assert cold == [i % 5 for i in range(len(cold))]
    assert {name for name, copy in read if copy} == {REFERENCE, "pytorch", "loop"}
    assert [row.baseline for row in rows] == [None, rows[0].system, rows[0].system]
    assert all(row.config["copies"] == 5 and "cold_us" in row.config for row in rows)


def test_a_wrong_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "RUN_S", 1e-5)
    for error, equal in ((1e-6, True), (1e-3, False), (float("nan"), False)):
        case, _ = counting_case(error)
        rows = kernels.case_rows(case, CpuClock(), LIMITS, 1, set(case.implementations))
        assert [row.outputs_equal for row in rows] == [None, equal, True]


def test_figures_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "RUN_S", 1e-5)
    case, _ = counting_case()
    for row in kernels.case_rows(case, CpuClock(), LIMITS, 3, set(case.implementations)):
        c = row.config
        assert row.p50_ms == pytest.approx(c["cold_us"] / 1000)
        assert c["cold_gb_per_s"] == pytest.approx(1000 / c["cold_us"] / 1000)
        assert c["cold_of_copy"] == pytest.approx(c["cold_gb_per_s"])  # of 1 GB/s
        assert c["warm_gflop_per_s"] == pytest.approx(2 * c["warm_gb_per_s"])
        assert row.ratio_min is None or row.ratio_min <= row.ratio <= row.ratio_max


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark on the tiny shapes, with limits that cost nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "_setting", lambda name, device: SETTING)
    monkeypatch.setattr(kernels, "_shapes", lambda shape: ["tiny"])
    monkeypatch.setattr(kernels, "machine_limits_of", lambda device: LIMITS)
    monkeypatch.setattr(kernels, "RUN_S", 1e-5)


@pytest.mark.usefixtures("small")
def test_the_result_is_json_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    before = torch.get_num_threads()
    outcome = find("kernels")(ops=["rms_norm", "linear", "paged_attention"], rounds=2)
    assert torch.get_num_threads() == before and outcome["config"]["threads"] == 1
    assert json.loads(json.dumps(outcome))["rows"] == outcome["rows"]
    assert {row["config"]["op"] for row in outcome["rows"]} == {"rms_norm", "linear", "paged_attention"}
    assert all(row["outputs_equal"] is not False for row in outcome["rows"])
    table = find_table("kernels")
    assert table is not None
    Console(width=170).print(table(outcome))
    printed = capsys.readouterr().out
    assert "paged_attention int4, 256 tokens after 40 (tiny)" in printed and "of copy" in printed


@pytest.mark.usefixtures("small")
def test_only_the_implementations_asked_for_run_beside_the_reference() -> None:
    outcome = find("kernels")(systems=["compiled"], ops=["linear"], rounds=1)
    assert {row["config"]["implementation"] for row in outcome["rows"]} == {"reference", "compiled"}


def test_what_it_does_not_know_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no op 'atention'"):
        kernels.run(ops=["atention"])
    with pytest.raises(ConfigError, match=r"shape '70b' is not available; there are: minicoder, 0\.4b"):
        kernels.run(shape="70b")
    with pytest.raises(ConfigError, match="no system 'cuda'"):
        kernels.run(systems=["cuda"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match="interpreted kernel's time means nothing"):
        kernels.run()


def test_the_last_cache_is_known_or_guessed() -> None:
    assert 2**18 <= last_cache_bytes("cpu") <= 2**31
