"""Lesson 03: the counts are those of real tensors and real loops, and pooling equal heads loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minillm.cache.paged import PagedKVCache
from minillm.errors import CheckpointError
from minillm.models.causal import CausalAttention
from minillm.models.config import ModelConfig
from minillm.models.decoder import Decoder
from minillm.models.loading import load_model, save_llama
from minillm.teaching.check_function import check_function
from minillm.teaching.exercises.l02_kv_cache import LLAMA_2_70B, kv_bytes_per_token
from minillm.teaching.exercises.l03_roofline import (
    arithmetic_intensity,
    attainable,
    attention_intensity,
    mbu,
    mean_pool_heads,
    requests_that_fit,
)
from minillm.teaching.registry import find
from minillm.teaching.roofline_parts import (
    attention_only,
    checkpoint,
    compiled_steps,
    decode_step,
    first_head,
    kv_bytes,
    linear_shapes,
    operations,
    prefill,
    repeat_heads,
    time_linears,
    time_whole_steps,
    weight_bytes,
    weights_per_row,
    with_kv_heads,
)
from minillm.training.recipes import TARGET
from minillm.viz.charts.roofline import Roof
from tests.models.hf_checkpoints import make

POSITIVE = st.floats(1e-3, 1e15)
SMALL = st.integers(1, 6)


def test_counted_bytes_are_those_the_engine_allocates():
    cache = PagedKVCache(TARGET, 5, 16, torch.float32, torch.device("cpu"))
    assert kv_bytes(TARGET, 5 * 16, 1, 4) == cache.num_bytes
    assert kv_bytes(TARGET, 16, 5, 4) == cache.num_bytes


def test_llama_2_70b_figures_of_the_lesson():
    assert kv_bytes(LLAMA_2_70B, 4096, 1, 2) == 1.25 * 2**30
    assert kv_bytes(LLAMA_2_70B, 4096, 64, 2) == 80 * 2**30
    assert kv_bytes(LLAMA_2_70B, 1, 1, 2) == kv_bytes_per_token(LLAMA_2_70B, 2)
    full = replace(LLAMA_2_70B, num_kv_heads=LLAMA_2_70B.num_heads)
    assert round(kv_bytes(full, 4096, 1, 2) / 1e9, 1) == 10.7


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 9), st.integers(1, 9))
def test_requests_that_fit_do_fit_and_one_more_would_not(memory: int, weights: int, per_token: int, tokens: int):
    count = requests_that_fit(memory, weights, per_token, tokens)
    assert count == 0 or weights + count * per_token * tokens <= memory
    assert weights + (count + 1) * per_token * tokens > memory


def test_the_engines_pool_holds_as_many_requests_as_are_counted():
    cache = PagedKVCache(TARGET, 64, 16, torch.float32, torch.device("cpu"))
    assert requests_that_fit(cache.num_bytes, 0, kv_bytes(TARGET, 1), 256) == 64 * 16 // 256


@given(rows=SMALL, fan_in=SMALL, fan_out=SMALL, width=st.sampled_from([1, 2, 4]))
def test_intensity_of_a_linear_layer_is_what_loops_count(rows: int, fan_in: int, fan_out: int, width: int):
    operations, touched = 0, set()
    for r in range(rows):
        for o in range(fan_out):
            touched.add(("y", r, o))
            for i in range(fan_in):
                touched |= {("x", r, i), ("w", o, i)}
                operations += 2
    assert arithmetic_intensity(rows, fan_in, fan_out, width) == pytest.approx(operations / (len(touched) * width))


@given(rows=st.integers(1, 10_000), fan_in=st.integers(1, 8192), fan_out=st.integers(1, 8192))
def test_more_rows_never_lower_the_intensity_and_two_limits_hold(rows: int, fan_in: int, fan_out: int):
    value = arithmetic_intensity(rows, fan_in, fan_out, 2)
    assert value <= arithmetic_intensity(rows + 1, fan_in, fan_out, 2)
    assert value < 2 * rows / 2
    assert value < 2 / 2 * fan_in * fan_out / (fan_in + fan_out)


@given(kv_heads=st.integers(1, 3), group=st.integers(1, 4), new=st.integers(1, 3), context=st.integers(1, 5))
def test_intensity_of_attention_is_what_loops_count_for_any_context(kv_heads: int, group: int, new: int, context: int):
    width, operations, fetched = 3, 0, set()
    for head in range(kv_heads * group):
        for _ in range(new):
            for key in range(context):
                for channel in range(width):
                    fetched |= {(which, head // group, key, channel) for which in ("k", "v")}
                    operations += 4  # one multiplication and one addition for the score, and for the value
    assert attention_intensity(kv_heads * group, kv_heads, new, 4) == pytest.approx(operations / (4 * len(fetched)))


@given(intensity=POSITIVE, rate=POSITIVE, bandwidth=POSITIVE)
def test_roof_never_exceeds_a_limit_always_reaches_one_and_is_the_one_drawn(
    intensity: float, rate: float, bandwidth: float
):
    value = attainable(intensity, rate, bandwidth)
    assert value in (rate, intensity * bandwidth)
    assert value <= rate and value <= intensity * bandwidth
    assert value == Roof("m", bandwidth, rate).attainable(intensity)


def test_a_step_at_full_bandwidth_has_an_mbu_of_one_and_a_batch_shares_weights_only():
    assert mbu(600.0, 50.0, 8, (600 + 8 * 50) / 20.0, 20.0) == 1.0
    alone, together = (mbu(600.0, 50.0, batch, 1.0, 1.0) for batch in (1, 8))
    assert together - alone == 7 * 50


@given(groups=st.integers(1, 3), members=st.integers(1, 4), width=st.sampled_from([2, 4]), seed=st.integers(0, 99))
def test_pooled_rows_are_the_means_of_the_same_channel(groups: int, members: int, width: int, seed: int):
    weight = torch.randn(groups * members * width, 5, generator=torch.Generator().manual_seed(seed))
    pooled = mean_pool_heads(weight, groups * members, groups)
    assert pooled.shape == (groups * width, 5)
    for group in range(groups):
        for channel in range(width):
            rows = [(group * members + member) * width + channel for member in range(members)]
            torch.testing.assert_close(pooled[group * width + channel], sum(weight[r] for r in rows) / members)


@pytest.fixture
def grouped() -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50,
        hidden_size=24,
        intermediate_size=48,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=4,
        max_position_embeddings=32,
    )
    model = Decoder(config).requires_grad_(False)
    for weights in model.parameters():
        weights.copy_(weights.half())  # so that a mean of equal numbers is exactly that number
    return model


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    return model.logits(model(torch.arange(12), torch.arange(12), CausalAttention(12)))


def test_repeated_heads_are_the_same_model_and_pool_back_to_the_last_bit(grouped: Decoder):
    mha = with_kv_heads(grouped, 6, repeat_heads)
    torch.testing.assert_close(logits(mha), logits(grouped), rtol=1e-5, atol=1e-5)
    back = with_kv_heads(mha, 2, mean_pool_heads)
    assert all(torch.equal(a, b) for a, b in zip(grouped.parameters(), back.parameters(), strict=True))


def test_heads_that_differ_do_not_pool_without_loss(grouped: Decoder):
    pooled = with_kv_heads(grouped, 1, mean_pool_heads)
    assert (logits(pooled) - logits(grouped)).abs().max() > 1e-2
    assert kv_bytes(pooled.config, 1, 1, 4) * 2 == kv_bytes(grouped.config, 1, 1, 4)


def test_fewer_kv_heads_in_the_config_alone_are_refused(grouped: Decoder, tmp_path):
    save_llama(with_kv_heads(grouped, 6, repeat_heads), tmp_path, torch.float32)
    stored = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, "num_key_value_heads": 2}))
    with pytest.raises(CheckpointError, match=r"k_proj.weight \[24, 24\] \(should be \[8, 24\]\)"):
        load_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "change", [lambda pooled: pooled.flip(1), lambda pooled: pooled.mean(1, True).expand_as(pooled)]
)
def test_the_columns_of_a_projection_keep_their_places(change):
    assert not check_function("l03.mean_pool_heads", lambda *given: change(mean_pool_heads(*given))).passed


def test_counterexample_of_pooling_is_short_enough_to_redo_by_hand():
    report = str(
        check_function(find("l03.mean_pool_heads"), lambda weight, num_heads, num_kv_heads: weight[: len(weight) // 2])
    )
    assert "4 heads of width 2 become 2" in report
    assert len(report) < 1100


# ------------------------------------------------------------------------------------------------ what the lesson times


def test_what_is_timed_runs_the_engines_code_once_per_call(grouped: Decoder, monkeypatch):
    monkeypatch.setattr("minillm.teaching.roofline_parts.COLD_BYTES", 1e5)
    monkeypatch.setattr("minillm.teaching.roofline_parts.BLOCK_SIZE", 4)
    assert set(time_linears(grouped, (1, 5))) == {1, 5}
    assert sum(a * b for a, b in linear_shapes(grouped)) == weights_per_row(grouped)
    assert decode_step(grouped, 3, 9)().shape == (3, grouped.config.vocab_size)
    assert prefill(grouped, 9)().shape == (1, grouped.config.vocab_size)
    assert [out.shape for out in attention_only(grouped, 3, 9)()] == [(3, 6, 4)] * 2


def test_operations_are_two_per_weight_and_row_and_four_per_pair_head_and_channel(grouped: Decoder):
    assert operations(grouped, 1, 0, 0) == 2 * weights_per_row(grouped)
    assert operations(grouped, 0, 1, 0) == 4 * 2 * 6 * 4
    assert operations(grouped, 0, 0, 1) == 2 * 50 * 24


def test_the_compiled_step_is_the_same_step_or_says_why_there_is_none(grouped: Decoder, tmp_path):
    save_llama(grouped, tmp_path, torch.float32)
    reason = compiled_steps(str(tmp_path), 16)
    assert isinstance(reason, str) and "multiples of" in reason
    steps = compiled_steps("minicoder", 16)
    assert steps.decode().shape == steps.prefill().shape
    assert steps.weight_bytes == pytest.approx(weight_bytes(load_model("minicoder", torch.float32)) / 2, rel=0.01)


def test_whole_steps_are_timed_with_what_they_must_do_and_read(grouped: Decoder, tmp_path, monkeypatch):
    def run_once(runs: dict[int, Callable[[], object]]) -> dict[int, list[float]]:
        return {number: [float(len(run()) > 0)] for number, run in runs.items()}

    monkeypatch.setattr("minillm.teaching.roofline_parts.time_in_turn", run_once)
    save_llama(grouped, tmp_path, torch.float32)
    steps, reason = time_whole_steps(grouped, str(tmp_path), [(1, 4), (3, 8)], 16)
    assert "multiples of" in reason
    assert [(step.kind, step.batch, step.context) for step in steps] == [
        ("decode step, plain", 1, 4),
        ("decode step, plain", 3, 8),
        ("prefill, plain", 1, 16),
    ]
    assert [step.num_bytes - weight_bytes(grouped) for step in steps] == [
        kv_bytes(grouped.config, n) for n in (4, 24, 16)
    ]
    assert [step.operations for step in steps] == [
        operations(grouped, 1, 4, 1),
        operations(grouped, 3, 24, 3),
        operations(grouped, 16, 16 * 17 // 2, 1),
    ]
    compiled, reason = time_whole_steps(grouped, "minicoder", [], 16)
    assert [step.kind for step in compiled] == ["decode step, compiled", "prefill, plain", "prefill, compiled"]
    assert not reason and compiled[0].weight_bytes == compiled[2].weight_bytes > compiled[1].weight_bytes


def test_no_cell_of_the_lesson_takes_a_name_away_that_another_one_reads():
    """A cell that measures is run again, after all others."""
    source = Path(__file__).parents[2] / "solutions" / "03_roofline.py"
    assert not re.findall(r"^\w.* = None\b", source.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("case", ["llama", "mistral, window", "qwen2", "qwen3", "smollm3"])
def test_a_model_with_other_kv_heads_stays_in_its_family(tmp_path, case):
    """So the lesson's conversions run on every checkpoint that MINILLM_MODEL may name."""
    folder = make(case, tmp_path / "original").folder
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"the weights in another format")
    (folder / "tokenizer.json").touch()
    model = load_model(str(folder), torch.float32, "cpu")
    converted = with_kv_heads(model, 1, first_head)
    written = checkpoint(converted, str(folder), tmp_path / "converted")
    again = load_model(str(written), torch.float32, "cpu")
    assert replace(again.config, dtype="") == replace(converted.config, dtype="")
    assert {file.name for file in written.iterdir()} - {"generation_config.json"} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert again.config.num_kv_heads == 1 and again.config.qk_norm == (case == "qwen3")
    for mine, theirs in zip(again.parameters(), converted.parameters(), strict=True):
        assert torch.equal(mine, theirs)
